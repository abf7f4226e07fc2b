"""The tables beside a map: means over planes, and potentials at given points without an atom's own term."""

from __future__ import annotations

import csv
import errno
import os

import numpy as np
import pytest

from kernels.coulomb import Cell
from kernels.ewald.reference import ewald, plain
from pipeline.engine.run import run_job
from pipeline.errors import InputError, StorageError
from pipeline.storage.writable import writing
from pipeline.workloads.coulomb import tables
from pipeline.workloads.coulomb.tables import read_points
from tests.images import read_image
from tests.pipeline.workloads.coulomb.coulomb_jobs import (
    TRICLINIC,
    definition,
    job,
    make_map,
    molecule,
    write_npz,
    write_trajectory,
)


def full_disk(path, *_):
    with writing(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


GRID = {"origin": "-9.3,1.1,17.7", "shape": "11,7,13", "spacing": "1.1,1.3,1.2", "units": "e/A"}


def table(path):
    """Names, and numbers (lines, columns)."""
    names, *rows = csv.reader(path.read_text().splitlines())
    return names, np.array(rows, float)


@pytest.mark.parametrize(("axis", "others"), [("x", (1, 2)), ("y", (0, 2)), ("z", (0, 1))])
@pytest.mark.parametrize("output", ["out.npy", "out.dx"])
def test_profiles_are_means_of_the_map(tmp_path, axis, others, output):
    write_npz(tmp_path / "a.npz", molecule())
    whole, receipt = make_map(tmp_path, "a.npz", "whole.npy", **GRID)
    run_job(*job(tmp_path, "a.npz", output, profile=axis, **GRID))
    names, rows = table(tmp_path / f"{output}.profile-{axis}.csv")
    along = "xyz".index(axis)
    assert names == [f"{axis}_angstrom", "mean potential [e/A]"]
    origin, spacing = (receipt["image"][name][along] for name in ("origin_angstrom", "spacing_angstrom"))
    np.testing.assert_allclose(rows[:, 0], origin + spacing * np.arange(whole.shape[along]), rtol=1e-8)
    np.testing.assert_allclose(rows[:, 1], whole.mean(others, np.float64), rtol=1e-5, atol=1e-7)
    picture = read_image(tmp_path / f"{output}.profile-{axis}.png")
    assert (picture == (5, 80, 200)).all(2).any(), "a line"


@pytest.mark.parametrize("output", ["out.npy", "out.dx", "out.mrc", "out.zarr"])
def test_no_map_is_published_without_its_tables(tmp_path, monkeypatch, output):
    """A run that is killed between the two leaves tables for the run that resumes, which only cleans up."""
    write_npz(tmp_path / "a.npz", molecule())
    monkeypatch.setattr(tables, "_write", full_disk)
    with pytest.raises(StorageError, match="no space"):
        run_job(*job(tmp_path, "a.npz", output, profile="z", **GRID))
    assert not (tmp_path / output).exists()


@pytest.mark.parametrize("scheme", ["shift", "taylor2", "truncate", "direct", "full", "ewald"])
def test_potentials_at_atoms_leave_out_their_own_terms(tmp_path, scheme):
    atoms = molecule()
    write_npz(tmp_path / "a.npz", atoms, TRICLINIC if scheme == "ewald" else None)
    elsewhere = np.array([[-3.25, 6.5, 25.125]])
    points = np.concatenate([atoms[:4, :3], elsewhere])
    (tmp_path / "points.csv").write_text("x,y,z\n" + "\n".join(",".join(map(str, p)) for p in points.tolist()) + "\n\n")
    make_map(tmp_path, "a.npz", scheme=scheme, at=tmp_path / "points.csv", **GRID)
    names, rows = table(tmp_path / "out.npy.at.csv")
    assert names == ["x_angstrom", "y_angstrom", "z_angstrom", "potential [e/A]"]
    np.testing.assert_allclose(rows[:, :3], points, rtol=1e-8)
    for number, point in enumerate(points):
        others = np.delete(atoms, number, 0) if number < 4 else atoms
        if scheme == "ewald":
            cell = Cell(vectors=tuple(map(tuple, TRICLINIC)))
            right = ewald(atoms, point[None], cell, own_angstrom=1e-3)[0]
        elif scheme in ("full", "direct"):
            right = plain(others, point[None])[0]
        else:
            right = definition(others, point[None], scheme)[0][0]
        assert abs(rows[number, 3] - right) < 1e-6 * max(1, abs(right))


def test_points_of_a_trajectory_are_combined(tmp_path):
    frames = write_trajectory(tmp_path, 3)
    (tmp_path / "points.csv").write_text("1.5,4,22\n")
    make_map(tmp_path, "a.pqr", trajectory=tmp_path / "a.dcd", scheme="full", combine="max", at=tmp_path / "points.csv",
             **GRID)  # fmt: skip
    _, rows = table(tmp_path / "out.npy.at.csv")
    right = max(plain(atoms, np.array([[1.5, 4, 22]]))[0] for atoms in frames)
    assert abs(rows[0, 3] - right) < 1e-6 * abs(right)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x,y,z\n1,2\n", "points.csv, line 2: give three numbers x,y,z in angstrom; got '1,2'"),
        ("1,2,3\na,b,c\n", "points.csv, line 2: give three numbers"),
        ("1,2,nan\n", "points.csv, line 1: a coordinate is not finite"),
        ("0;0;0\n", "points.csv, line 1: give three numbers x,y,z in angstrom; got '0;0;0'"),
        ("1,2\n3,4,5\n", "points.csv, line 1: give three numbers x,y,z in angstrom; got '1,2'"),
        ("x,y,z\n", "points.csv: holds 0 points"),
    ],
)
def test_points_that_cannot_be_read(tmp_path, text, message):
    (tmp_path / "points.csv").write_text(text)
    with pytest.raises(InputError, match=message):
        read_points(tmp_path / "points.csv")
    with pytest.raises(InputError, match=r"none\.csv: no such file; check the path"):
        read_points(tmp_path / "none.csv")
