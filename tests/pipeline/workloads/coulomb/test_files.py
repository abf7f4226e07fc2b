"""Each format holds the map where it belongs: the right values at the right places, in readers of others' making."""

from __future__ import annotations

import json

import gridData
import mrcfile
import numpy as np
import pytest
import zarr

from pipeline.engine.run import run_job
from tests.images import read_image
from tests.pipeline.workloads.coulomb.coulomb_jobs import (
    check,
    definition,
    job,
    make_map,
    molecule,
    points_of,
    write_npz,
)

BOHR = 0.529177210903
# A grid and a molecule that look different from every side.
GRID = {"origin": "-8,2.25,19.5", "shape": "7,11,5", "spacing": "0.5,0.75,1.5", "units": "kcal/mol/e"}
ORIGIN, SPACING = np.array([-8, 2.25, 19.5]), np.array([0.5, 0.75, 1.5])


def by_grid_data(path, **options):
    found = gridData.Grid(str(path), **options)
    return found.grid, found.origin, found.delta


def by_mrcfile(path):
    with mrcfile.open(path) as found:
        header = found.header
        assert (int(header.mapc), int(header.mapr), int(header.maps)) == (3, 2, 1)
        size = np.array([header.cella.x, header.cella.y, header.cella.z])
        samples = np.array([header.mx, header.my, header.mz])
        starts = np.array([header.nzstart, header.nystart, header.nxstart])[::1]
        steps = size / samples
        first = np.array([header.origin.x, header.origin.y, header.origin.z])
        return np.array(found.data), first + np.array([starts[2], starts[1], starts[0]])[::-1] * steps, steps


def by_hand(path):
    """Gaussian's own description of a cube."""
    lines = path.read_text().splitlines()
    count, *origin = lines[2].split()
    axes = [line.split() for line in lines[3:6]]
    shape = [int(axis[0]) for axis in axes]
    steps = np.diag(np.array([axis[1:] for axis in axes], float))
    values = np.array(" ".join(lines[6 + int(count) :]).split(), float).reshape(shape)
    atoms = np.array([line.split() for line in lines[6 : 6 + int(count)]], float)
    np.testing.assert_allclose(atoms[:, 2:] * BOHR, molecule()[:, :3], atol=1e-6)
    np.testing.assert_allclose(atoms[:, 1], molecule()[:, 3], atol=1e-6)
    return values, np.array(origin, float) * BOHR, steps * BOHR


def by_zarr(path):
    group = zarr.open_group(str(path), mode="r")
    grid = group.attrs["grid"]
    assert grid["units"] == "kcal/mol/e"
    return group["0"][...], np.array(grid["origin_angstrom"]), np.diag(grid["vectors_angstrom"])


def by_numpy(path):
    receipt = json.loads(path.with_name(path.name + ".receipt.json").read_text())
    return np.load(path), *(np.array(receipt["image"][f"{what}_angstrom"]) for what in ("origin", "spacing"))


READERS = {
    ".dx": by_grid_data,
    ".dx.gz": by_grid_data,
    ".mrc": lambda path: by_grid_data(path, file_format="MRC"),
    ".ccp4": by_mrcfile,
    ".cube": by_hand,
    ".zarr": by_zarr,
    ".npy": by_numpy,
}


@pytest.fixture
def folder(tmp_path):
    write_npz(tmp_path / "a.npz", molecule())
    return tmp_path


@pytest.mark.parametrize("suffix", READERS)
def test_values_lie_where_they_belong(folder, suffix):
    receipt = run_job(*job(folder, "a.npz", f"out{suffix}", **GRID))
    values, origin, steps = READERS[suffix](folder / f"out{suffix}")
    np.testing.assert_allclose(origin, ORIGIN, atol=1e-6)
    np.testing.assert_allclose(steps, SPACING, rtol=1e-6)
    assert values.shape == (7, 11, 5)
    points = origin + np.moveaxis(np.indices(values.shape), 0, -1) * steps
    np.testing.assert_allclose(points, points_of(receipt), atol=1e-5)
    expected, sizes = definition(molecule(), points_of(receipt))
    check(np.asarray(values, np.float32), expected, sizes, factor=332.06371)


@pytest.mark.parametrize("suffix", [".dx", ".cube", ".mrc"])
def test_units_stand_in_the_header(folder, suffix):
    run_job(*job(folder, "a.npz", f"out{suffix}", **GRID | {"units": "kT/e", "temperature": "310"}))
    assert b"kT/e at 310 K" in (folder / f"out{suffix}").read_bytes()[:2000]


@pytest.mark.parametrize("chunk_bytes", [None, 3000])
def test_a_preview_shows_three_slices(folder, chunk_bytes):
    planned, options = job(folder, "a.npz", "out.npy", chunk_bytes=chunk_bytes, **GRID)
    run_job(planned, options)
    planned.job.write_preview(folder / "small.png")
    shown, values = read_image(folder / "small.png"), np.load(folder / "out.npy")
    limit = np.abs(values).max()
    for across, plane in ((2, values[:, :, 2]), (1, values[:, 5]), (0, values[3])):
        panel = planned.job._slices._panel(across, limit, 3)
        expected = np.where(plane.T[::-1] > 0, 1, -1).repeat(3, 0).repeat(3, 1)
        is_outline = (panel.pixels == (90, 90, 90)).all(2)
        red, _, blue = np.moveaxis(panel.pixels.astype(int), 2, 0)
        assert ((np.sign(blue - red) == expected) | is_outline | (abs(blue - red) < 3)).all()
        grid = planned.job.header
        ends = [
            (grid.origin[n], grid.origin[n] + (grid.shape[n] - 1) * grid.spacing[n]) for n in range(3) if n != across
        ]
        assert [(axis.first, axis.last) for axis in (panel.across, panel.up)] == ends
        middle = grid.origin[across] + (grid.shape[across] // 2) * grid.spacing[across]
        assert panel.title == f"{'xyz'[across]} = {middle:.1f} angstrom"
    assert shown.shape[2] == 3


def test_the_outline_is_that_of_the_atoms_near_the_plane(folder):
    planned, _ = job(folder, "a.npz", "out.npy", origin="0,0,0", shape="41,31,21", spacing="0.5,0.5,1")
    planned.output.discard()
    slices, rows, columns = planned.job._slices, 31, 41
    slices.outline(np.array([[10.0, 7.5, 12.0], [10.0, 7.5, 14.0], [10.0, 7.5, -40.0]]))  # the plane is at z = 10
    edge = slices._edge(2, (columns, rows), 1)
    radius = np.sqrt(3.1**2 - 2.0**2) / 0.5
    y, x = np.nonzero(edge)
    distances = np.hypot(x - 20.0, (rows - 1 - y) - 15.0)
    assert len(distances) > 20
    np.testing.assert_allclose(distances, radius, atol=1.5)


def test_a_preview_of_a_map_that_others_wrote_is_the_same(folder):
    planned, options = job(folder, "a.npz", "out.npy", **GRID)
    run_job(planned, options)
    planned.job.write_preview(folder / "here.png")
    other, _ = job(folder, "a.npz", "out.npy", **GRID)
    other.output.discard()
    other.job.write_preview(folder / "elsewhere.png")
    assert (folder / "here.png").read_bytes() == (folder / "elsewhere.png").read_bytes()


def test_a_preview_of_a_large_map_skips_points(folder):
    got, _ = make_map(folder, origin="-30,2,19", shape="1501,5,7", spacing="0.05", scheme="direct")
    planned, _ = job(folder, "a.npz", "out.npy", origin="-30,2,19", shape="1501,5,7", spacing="0.05", scheme="direct")
    slices = planned.job._slices
    assert slices.step == 3
    from pipeline.formats.image.base import Region

    for start, stop in ((0, 100), (100, 101), (101, 1501)):  # not at multiples of the step
        slices.note(Region((start, 0, 0), (stop, 5, 7)), got[start:stop])
    assert slices.is_complete
    planned.output.discard()
    np.testing.assert_array_equal(slices._planes[2], got[::3, ::3, 3])
    np.testing.assert_array_equal(slices._planes[1], got[::3, 2, ::3])
    np.testing.assert_array_equal(slices._planes[0], got[750, ::3, ::3])
