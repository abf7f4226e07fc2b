"""Potential maps as a whole job: every value against the definition in float64."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.workloads.coulomb.units import per_e_per_angstrom
from tests.pipeline.formats.charges.real_molecules import real_molecule
from tests.pipeline.workloads.coulomb.coulomb_jobs import (
    BOX,
    TRICLINIC,
    check,
    definition,
    make_map,
    molecule,
    points_of,
    write_npz,
    write_pqr,
    write_trajectory,
)

GRID = {"origin": "-9.3,1.1,17.7", "shape": "23,17,29", "spacing": "0.5,0.7,0.6", "units": "e/A"}
SMALL = GRID | {"shape": "11,7,13", "spacing": "1.1,1.3,1.7"}


@pytest.fixture
def folder(tmp_path):
    write_npz(tmp_path / "a.npz", molecule())
    return tmp_path


@pytest.mark.parametrize("scheme", ["shift", "taylor2", "truncate", "direct"])
@pytest.mark.parametrize(
    ("dielectric", "factor", "by_distance"), [("1", 1, False), ("78.5", 78.5, False), ("4r", 4, True), ("r", 1, True)]
)
def test_every_scheme_is_its_formula(folder, scheme, dielectric, factor, by_distance):
    cutoff = {} if scheme == "direct" else {"cutoff": "6.5"}
    got, receipt = make_map(folder, scheme=scheme, dielectric=dielectric, **cutoff, **GRID)
    expected = definition(molecule(), points_of(receipt), scheme, 6.5, dielectric=factor, by_distance=by_distance)
    check(got, *expected)
    assert receipt["audit"]["samples"] > 290
    assert receipt["audit"]["rms_error"] <= receipt["audit"]["worst_error"] <= receipt["audit"]["tolerance"] < 1e-5


def test_defaults(folder):
    got, receipt = make_map(folder)
    assert receipt["parameters"] == {
        "frames": ":", "combine": "avg", "scheme": "shift", "cutoff": 12.0, "dielectric": "1", "exclude_radius": 0.0,
        "cell": "file", "spacing": [0.5, 0.5, 0.5], "padding": 5.0, "units": "kT/e", "temperature": 298.15,
    }  # fmt: skip
    atoms, points = molecule(), points_of(receipt)
    low, high = atoms[:, :3].min(0), atoms[:, :3].max(0)
    assert (points[0, 0, 0] <= low - 5).all()
    assert (points[0, 0, 0] > low - 5.5).all()
    assert (points[-1, -1, -1] >= high + 5).all()
    np.testing.assert_array_equal(points % 0.5, 0)
    part = (slice(None, None, 5),) * 3
    check(got[part], *definition(atoms, points[part]), factor=per_e_per_angstrom("kT/e"))


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"units": "e/A"}, 2 / 3),
        ({"units": "V"}, 14.3996455 * 2 / 3),
        ({"units": "mV"}, 14399.6455 * 2 / 3),
        ({"units": "kcal/mol/e"}, 332.06371 * 2 / 3),
        ({"units": "kT/e"}, 14.3996455 / (8.617333262e-5 * 298.15) * 2 / 3),
        ({"units": "kT/e", "temperature": "310"}, 14.3996455 / (8.617333262e-5 * 310) * 2 / 3),
    ],
)
def test_units_of_a_single_charge(folder, options, value):
    write_npz(folder / "one.npz", np.array([[1.0, 2.0, 3.0, 2.0]]))
    got, receipt = make_map(folder, "one.npz", origin="1,2,6", shape="1,1,1", scheme="direct", **options)
    assert got[0, 0, 0] == pytest.approx(value, rel=3e-7)
    assert receipt["image"]["units"].startswith(options["units"])


@pytest.mark.parametrize("cell", [BOX, TRICLINIC], ids=["box", "triclinic"])
@pytest.mark.parametrize("scheme", ["shift", "taylor2", "truncate"])
@pytest.mark.parametrize("where", ["file", "option"])
def test_periodic_cells_against_images_one_by_one(folder, cell, scheme, where):
    atoms = molecule(25)
    atoms[:5, :3] += cell[0] - cell[2]  # outside the cell
    write_npz(folder / "cell.npz", atoms, cell if where == "file" else 5 * BOX)
    option = {} if where == "file" else {"cell": ",".join(map(str, cell.ravel()))}
    got, receipt = make_map(folder, "cell.npz", scheme=scheme, cutoff=5.9, exclude_radius=1.1, **option, **SMALL)
    check(got, *definition(atoms, points_of(receipt), scheme, 5.9, exclude=1.1, cell=cell, images=2))
    assert receipt["image"]["periodic"]


@pytest.mark.parametrize("options", [{"cell": "none"}, {"scheme": "direct"}])
def test_a_cell_that_does_not_count(folder, options):
    write_npz(folder / "cell.npz", molecule(), BOX)
    got, receipt = make_map(folder, "cell.npz", **options, **SMALL)
    check(got, *definition(molecule(), points_of(receipt), options.get("scheme", "shift")))
    assert not receipt["image"]["periodic"]
    assert receipt["parameters"]["cell"] == "none"


@pytest.mark.parametrize("scheme", ["shift", "direct"])
def test_points_near_and_on_atoms(folder, scheme):
    atoms = np.array([[0.0, 0, 0, -0.5], [2.0, 0, 0, 0.25], [2.0, 0, 3, 0]])
    write_npz(folder / "near.npz", atoms)
    grid = {"origin": "-1,-1,-1", "shape": "5,3,7", "spacing": "1", "units": "e/A", "scheme": scheme}
    got, receipt = make_map(folder, "near.npz", **grid)
    check(got, *definition(atoms, points_of(receipt), scheme))
    assert got[1, 1, 1] == pytest.approx(-0.5 / 1e-4, rel=1e-3)  # right on the atom
    got, _ = make_map(folder, "near.npz", exclude_radius=0.9, **grid)
    check(got, *definition(atoms, points_of(receipt), scheme, exclude=0.9))
    # Atoms without charge exclude too.
    assert got[1, 1, 1] == got[3, 1, 1] == got[3, 1, 4] == 0
    assert np.count_nonzero(got == 0) == 3


COMBINED = {"avg": np.mean, "min": np.min, "max": np.max, "std": np.std}


@pytest.mark.parametrize("how", COMBINED)
def test_frames_are_combined(tmp_path, how):
    frames = write_trajectory(tmp_path, 7)[1:6:2]
    got, receipt = make_map(
        tmp_path, "a.pqr", trajectory=str(tmp_path / "a.dcd"), frames="1:6:2", combine=how, cell="none", **SMALL
    )
    points = points_of(receipt)
    maps, sizes = zip(*(definition(atoms, points) for atoms in frames), strict=True)
    check(got, COMBINED[how](maps, axis=0), np.max(sizes, axis=0))
    assert receipt["image"]["frames"] == 3
    assert "a.dcd" in receipt["parameters"]["trajectory"]


def test_each_frame_has_its_own_cell(tmp_path):
    cells = [(14.0, 13.0, 15.0, 90, 90, 90), (16.0, 14.0, 15.5, 90, 90, 90)]
    frames = write_trajectory(tmp_path, 2, cells=cells)
    got, receipt = make_map(tmp_path, "a.pqr", trajectory=str(tmp_path / "a.dcd"), cutoff=5.0, **SMALL)
    points = points_of(receipt)
    found = [
        definition(atoms, points, cutoff=5.0, cell=np.diag(np.float64(cell[:3])), images=2)
        for atoms, cell in zip(frames, cells, strict=True)
    ]
    maps, sizes = zip(*found, strict=True)
    check(got, np.mean(maps, axis=0), np.mean(sizes, axis=0))


@pytest.mark.parametrize("how", ["none", "avg", "min", "max"])
def test_one_frame_is_itself_however_combined(tmp_path, how):
    frames = write_trajectory(tmp_path, 4)
    got, receipt = make_map(
        tmp_path, "a.pqr", trajectory=str(tmp_path / "a.dcd"), frames="-2", combine=how, cell="none", **SMALL
    )
    check(got, *definition(frames[2], points_of(receipt)))


def test_the_grid_covers_the_atoms_of_all_frames(tmp_path):
    frames = np.array(write_trajectory(tmp_path, 5))
    _, receipt = make_map(
        tmp_path, "a.pqr", trajectory=str(tmp_path / "a.dcd"), padding=0, spacing=0.25, cell="none", scheme="direct"
    )
    points = points_of(receipt)
    low, high = frames[..., :3].min((0, 1)), frames[..., :3].max((0, 1))
    assert ((points[0, 0, 0] <= low) & (points[0, 0, 0] > low - 0.25)).all()
    assert ((points[-1, -1, -1] >= high) & (points[-1, -1, -1] < high + 0.25)).all()


def test_any_order_of_the_atoms(folder):
    """Their order decides the rounding and nothing else."""
    atoms = molecule()[np.random.default_rng(1).permutation(60)]
    write_npz(folder / "b.npz", atoms)
    got, receipt = make_map(folder, "b.npz", **SMALL)
    check(got, *definition(molecule(), points_of(receipt)))


def test_a_selection(folder):
    write_pqr(folder / "a.pqr", molecule())
    got, receipt = make_map(folder, "a.pqr", select="resid 10:29", **SMALL)
    check(got, *definition(molecule()[9:29], points_of(receipt)))
    assert receipt["image"]["atoms"] == 20


@pytest.mark.parametrize("name", ["1a63.pqr", "watbox_sl40.pqr", "actin_dimer.pqr"])
@pytest.mark.parametrize("scheme", ["shift", "direct"])
def test_real_molecules(tmp_path, name, scheme):
    from pipeline.formats.charges import open_point_charges

    source = real_molecule(name)
    with open_point_charges(source) as found:
        atoms = np.column_stack([found.frame(0).coordinates, found.charges])
    got, receipt = make_map(tmp_path, source, spacing=2, scheme=scheme)
    chosen = tuple(np.random.default_rng(5).integers(0, got.shape, (100, 3)).T)
    values, sizes = definition(atoms, points_of(receipt)[chosen], scheme)
    check(got[chosen], values, sizes, factor=per_e_per_angstrom("kT/e"))


def test_a_real_trajectory_in_its_dodecahedron(tmp_path):
    topology, trajectory = real_molecule("adk_oplsaa.tpr"), real_molecule("adk_oplsaa.xtc")
    got, receipt = make_map(
        tmp_path, topology, trajectory=str(trajectory), select="name C*", frames="::4", spacing=5, combine="max"
    )
    assert receipt["image"]["frames"] == 3
    assert receipt["image"]["periodic"]
    assert np.isfinite(got).all()
    assert receipt["audit"]["samples"] > 250
