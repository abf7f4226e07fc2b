"""What the tests of potential maps share: made molecules, a job, and the definition in float64.

The definition writes every periodic image out and adds up every pair: it shares nothing with kernels or audit.
"""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest

from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.run import RunOptions, plan_job, run_job
from pipeline.workloads import JobSpec, workloads

SOFTENING = 1e-4
# Of the terms' sizes; as much again where an atom is 0.2 Å away.
TOLERANCE, NEAR = 4e-6, 0.2
BOX = np.diag([14.0, 13.0, 15.0])
TRICLINIC = np.array([[14.0, 0.0, 0.0], [-4.0, 13.0, 0.0], [3.0, -3.5, 15.0]])
# Every scheme with every kind of cell that it takes.
KINDS = [
    *(
        pytest.param(scheme, cell, id=f"{scheme}-{name}")
        for scheme in ("shift", "taylor2", "truncate")
        for name, cell in (("free", None), ("box", BOX), ("triclinic", TRICLINIC))
    ),
    pytest.param("direct", None, id="direct-free"),
]


def molecule(count=60, seed=3, extent=(9.0, 6.0, 11.0)):
    """x, y, z and charge, (n, 4): no two axes or directions alike, and away from the origin."""
    rng = np.random.default_rng(seed)
    places = np.round(rng.uniform(0, extent, (count, 3)) ** 1.1 + [-7.0, 3.0, 20.0], 3)
    return np.column_stack([places, np.round(rng.uniform(-1, 1, count), 3)])


def write_npz(path, atoms, cell=None):
    np.savez(path, xyz=atoms[:, :3], q=atoms[:, 3], **({} if cell is None else {"cell": cell}))
    return path


def write_pqr(path, atoms):
    lines = [f"ATOM {n} CA MET A {n} {x:.3f} {y:.3f} {z:.3f} {q:.3f} 1.5" for n, (x, y, z, q) in enumerate(atoms, 1)]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_trajectory(folder, count, *, cells=None, seed=8):
    """a.pqr and a.dcd of so many frames; returns each frame's atoms as they stand in the files."""
    import MDAnalysis

    first = molecule()
    write_pqr(folder / "a.pqr", first)
    rng = np.random.default_rng(seed)
    frames = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        universe = MDAnalysis.Universe(str(folder / "a.pqr"), to_guess=())
        with MDAnalysis.Writer(str(folder / "a.dcd"), len(first)) as writer:
            for number in range(count):
                places = (first[:, :3] + rng.normal(0, 0.7, (len(first), 3))).astype(np.float32)
                universe.atoms.positions = places
                if cells is not None:
                    universe.dimensions = cells[number]
                writer.write(universe.atoms)
                frames.append(np.column_stack([places.astype(np.float64), first[:, 3]]))
    return frames


def job(folder, source, output, *, memory=64 << 20, chunk_bytes=None, resume=False, device=None, **parameters):
    asked = workloads()["coulomb"].Parameters(**parameters)
    spec = JobSpec(workload="coulomb", input=folder / source, output=folder / output, parameters=asked)
    options = RunOptions(memory_bytes=memory, chunk_bytes=chunk_bytes, resume=resume)
    return plan_job(spec, device or CpuDevice(2), options), options


def make_map(folder, source="a.npz", output="out.npy", **options):
    """The map in float32 [x, y, z], and the receipt."""
    receipt = run_job(*job(folder, source, output, **options))
    return np.load(folder / output), receipt


def points_of(receipt):
    """(nx, ny, nz, 3): where the points lie, by the receipt."""
    image = receipt["image"]
    index = np.moveaxis(np.indices(image["shape"]), 0, -1)
    return np.array(image["origin_angstrom"]) + index * np.array(image["spacing_angstrom"])


def definition(
    atoms, points, scheme="shift", cutoff=12.0, *, dielectric=1.0, by_distance=False, exclude=0.0, cell=None, images=3
):
    """Values and terms' sizes in e/Å at each point, float64."""
    multiples = [(0, 0, 0)] if cell is None else itertools.product(range(-images, images + 1), repeat=3)
    shifts = np.array([*multiples], float) @ (np.zeros((3, 3)) if cell is None else cell)
    values, sizes = np.zeros(points.shape[:-1]), np.zeros(points.shape[:-1])
    nearest = np.full(points.shape[:-1], np.inf)
    together = -(-20_000 // nearest.size)  # images of an atom, along a first axis
    for (*place, charge), first in itertools.product(atoms, range(0, len(shifts), together)):
        images = np.array(place) + shifts[first : first + together]
        distance = np.linalg.norm(points - np.expand_dims(images, tuple(range(1, points.ndim))), axis=-1)
        nearest = np.minimum(nearest, distance.min(0))
        r = np.hypot(distance, SOFTENING)
        rho = r / cutoff
        term = {
            "shift": (1 - rho**2) ** 2 / r,
            "taylor2": 1 / r - (1.875 - 1.25 * rho**2 + 0.375 * rho**4) / cutoff,
            "truncate": 1 / r,
            "direct": 1 / r,
        }[scheme]
        within = np.ones_like(r, bool) if scheme == "direct" else distance <= cutoff
        power = r if by_distance else 1.0
        values += np.where(within, charge * term / power, 0).sum(0)
        sizes += np.where(within, abs(charge) / r / power * (1 + NEAR / r), 0).sum(0)
    near = nearest < exclude
    values[near] = sizes[near] = 0
    return values / dielectric, sizes / dielectric


def check(got, expected, sizes, factor=1.0):
    """Every value within its own bound; NaN fails."""
    assert got.dtype == np.float32
    assert got.shape == expected.shape
    error = np.abs(got - factor * expected)
    allowed = factor * TOLERANCE * sizes
    assert (error <= allowed).all(), f"off by {np.nanmax(error / allowed)} times what is allowed"
