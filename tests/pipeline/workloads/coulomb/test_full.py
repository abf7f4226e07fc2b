"""Full maps, periodic and free: every value against Ewald's sum or the plain one, frames, chunks and audits."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from kernels.coulomb import Cell
from kernels.ewald import Method, potential
from kernels.ewald.reference import AUDIT, ewald, plain
from pipeline.errors import AuditError, InputError, ParameterError
from pipeline.formats.image.base import Region
from pipeline.workloads.coulomb import audit
from pipeline.workloads.coulomb.grid import part_of
from tests.pipeline.workloads.coulomb.coulomb_jobs import (
    TRICLINIC,
    job,
    make_map,
    molecule,
    points_of,
    write_npz,
    write_trajectory,
)

NET_E = molecule()[:, 3].sum()
GRID = {"origin": "-9.3,1.1,17.7", "shape": "11,7,13", "spacing": "1.1,1.3,1.2", "units": "e/A"}


@pytest.fixture
def folder(tmp_path):
    atoms = molecule()
    write_npz(tmp_path / "a.npz", atoms)
    write_npz(tmp_path / "cell.npz", atoms, TRICLINIC)
    neutral = atoms.copy()
    neutral[0, 3] -= neutral[:, 3].sum()
    write_npz(tmp_path / "neutral.npz", neutral, TRICLINIC)
    return tmp_path


def expected(receipt, atoms, cell, **options):
    """The definition at every point, to 2e-8, and the points beyond 1 Å of any atom."""
    points = points_of(receipt).reshape(-1, 3)
    apart = points[:, None] - atoms[None, :, :3]
    if cell is None:
        values = plain(atoms, points, **options)
    else:
        apart -= np.rint(apart @ np.linalg.inv(cell)) @ cell
        values = ewald(atoms, points, Cell(vectors=tuple(map(tuple, cell))), exponent=AUDIT, **options)
    shape = receipt["image"]["shape"]
    return values.reshape(shape), (np.linalg.norm(apart, axis=-1).min(1) > 1).reshape(shape)


def relative(got, values, far):
    return np.linalg.norm((got - values)[far]) / np.linalg.norm(values[far])


@pytest.mark.parametrize("accuracy", [1e-4, 1e-6])
@pytest.mark.parametrize(("scheme", "source"), [("ewald", "cell.npz"), ("full", "a.npz")])
def test_maps_are_the_whole_sum(folder, scheme, source, accuracy):
    cell = TRICLINIC if scheme == "ewald" else None
    got, receipt = make_map(folder, source, scheme=scheme, accuracy=accuracy, dielectric="2", **GRID)
    values, far = expected(receipt, molecule(), cell)
    assert relative(got, values / 2, far) < accuracy
    assert receipt["audit"]["samples"] > 180
    assert receipt["audit"]["worst_error"] <= receipt["audit"]["tolerance"] == 4 * accuracy
    assert receipt["image"]["accuracy"] == accuracy
    assert receipt["image"]["near_angstrom"] == (4 if scheme == "ewald" else 5)
    if scheme == "ewald":
        charge = receipt["image"]["charge_e"]
        assert receipt["image"]["background"] == f"uniform, {-charge:g} e a cell"
        assert receipt["image"]["boundary"] == "tinfoil"


def test_a_vacuum_and_gaussian_charges(folder):
    neutral = np.load(folder / "neutral.npz")
    atoms = np.column_stack([neutral["xyz"], neutral["q"]])
    got, receipt = make_map(folder, "neutral.npz", scheme="ewald", boundary="vacuum", **GRID)
    assert relative(got, *expected(receipt, atoms, TRICLINIC, vacuum=True)) < 1e-4
    assert receipt["image"]["background"] == "none"
    got, receipt = make_map(folder, "cell.npz", scheme="ewald", smear=0.25, **GRID)
    assert relative(got, *expected(receipt, molecule(), TRICLINIC, smear_per_angstrom=0.25)) < 1e-4
    assert "near_angstrom" not in receipt["image"]


def test_points_near_atoms_are_excluded_and_chunks_do_not_matter(folder):
    options = {"scheme": "ewald", "exclude_radius": 1, **GRID}
    got, receipt = make_map(folder, "cell.npz", **options)
    _, far = expected(receipt, molecule(), TRICLINIC)
    np.testing.assert_array_equal(got != 0, far)
    cut, receipt = make_map(folder, "cell.npz", chunk_bytes=4096, **options)
    assert receipt["chunks"] > 1
    np.testing.assert_array_equal(cut, got)


@pytest.mark.parametrize(
    ("how", "count", "same"), [("avg", 18, True), ("avg", 3, False), ("max", 3, True), ("std", 3, False)]
)
def test_frames_are_combined(tmp_path, how, count, same):
    """In one cell the mean's far field is computed for runs of frames at once; else frame by frame."""
    cells = [[14 + (not same) * 0.1 * n, 13, 15, 90, 90, 90] for n in range(count)]
    frames = write_trajectory(tmp_path, count, cells=cells)
    options = {"trajectory": tmp_path / "a.dcd", "combine": how, "scheme": "ewald", **GRID}
    got, receipt = make_map(tmp_path, "a.pqr", **options)
    maps, fars = zip(
        *(expected(receipt, atoms, np.diag(cell[:3])) for atoms, cell in zip(frames, cells, strict=True)), strict=True
    )
    right = {"avg": np.mean, "max": np.max, "std": np.std}[how](maps, axis=0)
    assert relative(got, right, np.all(fars, axis=0)) < 2e-4
    cut, _ = make_map(tmp_path, "a.pqr", chunk_bytes=1 << 15, **options)
    np.testing.assert_array_equal(cut, got)
    planned, _ = job(tmp_path, "a.pqr", "b.npy", **options)
    assert planned.job._far.is_linear == (same and how == "avg")
    planned.job.close()
    planned.output.discard()


def test_a_wrong_map_is_not_published(folder, monkeypatch):
    right = audit.full_expectation

    def off(*arguments):
        found = right(*arguments)
        found.values[...] += 3e-4 * np.abs(found.values).mean()
        return found

    monkeypatch.setattr(audit, "full_expectation", off)
    with pytest.raises(AuditError, match="relative to the RMS potential of uncorrelated charges"):
        make_map(folder, "cell.npz", scheme="ewald", accuracy=1e-5, **GRID)
    assert not (folder / "out.npy").exists()


@pytest.mark.parametrize("accuracy", [1e-4, 1e-6])
@pytest.mark.parametrize(("scheme", "cutoff"), [("ewald", 0.8), ("full", 1.6)])
def test_a_mesh_takes_no_more_memory_than_is_counted(folder, scheme, accuracy, cutoff):
    options = {"scheme": scheme, "accuracy": accuracy, "cutoff": cutoff, **GRID}
    planned, _ = job(folder, "cell.npz", "b.npy", memory=1 << 30, **options)
    far, header, atoms = planned.job._far, planned.job.header, molecule()
    grid, out = part_of(header, Region.whole(header.shape)), np.zeros(header.shape, np.float32)
    # Compiles, and makes the spectrum's table.
    potential(atoms, grid, Method(accuracy=accuracy), cell=planned.job._frames.cells[0], out=out)
    tracemalloc.start()
    try:
        far.add(0, atoms, grid, out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        planned.job.close()
        planned.output.discard()
    # Both devices count alike, but a CPU holds less of a mesh without images: it skips the zeros, and a GPU does not.
    least = 0.5 if scheme == "ewald" else 0.3
    assert least * far.nbytes < peak < 1.05 * far.nbytes


def test_the_memory_left_for_chunks_is_that_beside_the_mesh(folder):
    options = {"scheme": "full", "spacing": "0.5"}
    for memory in (8 << 20, 64 << 20):
        planned, _ = job(folder, "a.npz", "b.npy", memory=memory, **options)
        taken = planned.job.workspace_bytes(memory)
        assert taken == min(planned.job._far.nbytes, memory * 7 // 8)
        assert 8 << 20 < planned.job._far.nbytes < 50 << 20
        assert planned.budget.budget_bytes + taken <= memory
        planned.output.discard()


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("a.npz", {"scheme": "ewald"}, "--scheme ewald: .*a.npz states no periodic cell: pass --cell, or choose full"),
        ("cell.npz", {"scheme": "ewald", "boundary": "vacuum"}, f"--boundary: .*cell.npz: .* to {NET_E:.6g} e: "),
        ("cell.npz", {"scheme": "ewald", "cutoff": 8}, "--cutoff: .*cell.npz: cutoff 8 Å passes half the cell's"),
        ("a.npz", {"scheme": "full", "cutoff": 0.01}, "--scheme full: the mesh would have .* points: raise the cutoff"),
        ("cell.npz", {"scheme": "ewald", "cell": "0.01,0.01,0.01"}, "a cell of 0.01 Å between opposite faces"),
    ],
)
def test_refusals(folder, source, options, message):
    with pytest.raises((ParameterError, InputError), match=message) as refused:
        make_map(folder, source, **options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "ewald", "accuracy": 1e-7}, "--accuracy 1e-07 is finer than float32 maps can be"),
        ({"scheme": "ewald", "dielectric": "4r"}, "--dielectric 4r: one that grows with the distance"),
        ({"scheme": "ewald", "cell": "none"}, "--scheme ewald needs a periodic cell"),
        ({"scheme": "full", "boundary": "vacuum"}, "--boundary is for --scheme ewald"),
        ({"scheme": "full", "cell": "30,30,30"}, "--scheme full has no images"),
        ({"scheme": "ewald", "smear": 0.25, "cutoff": 4}, "--smear leaves no near part"),
        ({"scheme": "shift", "accuracy": 1e-4}, "--accuracy is for the schemes ewald and full"),
        ({"smear": 0.25}, "--smear is for the schemes ewald and full"),
    ],
)
def test_parameters_that_contradict(options, message):
    from pipeline.workloads.coulomb.parameters import CoulombParameters

    with pytest.raises(ValueError, match=message):
        CoulombParameters(**options)


def test_the_default_reach_shrinks_with_the_cell(folder):
    _, receipt = make_map(folder, "a.npz", scheme="ewald", cell="7,8,9", **GRID)
    assert receipt["image"]["near_angstrom"] == 3.5


class FakeRank:
    """One rank on a CPU, without peers."""

    def __init__(self, threads):
        self.threads = threads

    def room(self, specs):
        arrays = [np.empty(spec.shape, spec.dtype) for spec in specs]
        return SimpleNamespace(
            host=arrays, device=arrays, upload=lambda: None, computed=lambda: None, wait=lambda: None
        )

    def enter(self):
        pass

    def check(self):
        pass

    def note_read(self, seconds, nbytes):
        pass


def test_ranks_that_share_the_frames_get_the_same_bits(tmp_path):
    """Two jobs compute half of the shards each, backwards and on other numbers of threads."""
    count = 17
    frames = write_trajectory(tmp_path, count, cells=[[14, 13, 15, 90, 90, 90]] * count)
    assert len(frames) == count
    options = {"trajectory": tmp_path / "a.dcd", "scheme": "ewald", **GRID}
    got, _ = make_map(tmp_path, "a.pqr", **options)
    region, sums = Region.whole(got.shape), {}
    jobs = [job(tmp_path, "a.pqr", f"{name}.npy", **options)[0] for name in "bc"]
    for rank, planned in enumerate(jobs):
        for shard in reversed(range(rank, planned.job.shards, 2)):
            sums[shard] = planned.job.share(region, shard, FakeRank(rank + 1))
    while len(sums) > 1:  # 16 shards: a complete tree
        sums = {n: sums[2 * n] + sums[2 * n + 1] for n in range(len(sums) // 2)}
    np.testing.assert_array_equal(jobs[0].job.whole(region, sums[0]), got, strict=True)
    for planned in jobs:
        planned.job.share_notes()  # waits for the audit
        planned.job.close()
        planned.output.discard()
