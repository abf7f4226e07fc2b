from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.formats.grid.base import GridHeader
from pipeline.formats.grid.cube import MOST_ATOMS
from tests.pipeline.formats.grid.contract import GridContract, field, grid, noise, places, write_whole

BOHR = 0.529177210903
ATOMS = np.array([[1.5, -2.25, 3.0, -0.834], [0.0, 10.0, -20.0, 0.417]])


def parsed(path: Path) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Atoms (number, charge, x, y, z), origin, steps, values: by the format's description, lengths in bohr."""
    lines = path.read_text("ascii").splitlines()
    count, *origin = lines[2].split()
    axes = [line.split() for line in lines[3:6]]
    shape = [int(axis[0]) for axis in axes]
    atoms = np.array([line.split() for line in lines[6 : 6 + int(count)]], float)
    values = np.array(" ".join(lines[6 + int(count) :]).split(), float)
    return atoms, np.array(origin, float), np.array([axis[1:] for axis in axes], float), values.reshape(shape)


def rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
    texts = [f"{value:.5e}" if np.signbit(value) else f"{value:.6e}" for value in values.reshape(-1).tolist()]
    return np.array(texts, np.float32).reshape(values.shape)


class TestContract(GridContract):
    suffixes = (".cube", ".cub")

    def read(self, path: Path) -> NDArray[np.float32]:
        return parsed(path)[-1].astype(np.float32)

    def stored(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        return rounded(values)


def test_every_value_lies_where_it_should_in_bohr(tmp_path: Path) -> None:
    vectors = ((0.5, 0.0, 0.0), (0.1, 0.75, 0.0), (0.2, -0.3, 1.0))
    header = GridHeader(shape=(3, 7, 5), origin=(1.0, -2.0, 30.0), vectors=vectors, units="V", title="T")
    write_whole(tmp_path / "a.cube", header, field(header))
    _, origin, steps, values = parsed(tmp_path / "a.cube")
    index = np.moveaxis(np.indices((3, 7, 5)), 0, -1)
    found = (origin + index @ steps) * BOHR
    np.testing.assert_allclose(found, places(header), atol=1e-9)
    x, y, z = np.moveaxis(found, -1, 0)
    np.testing.assert_allclose(values, x - 3 * y + 0.125 * z, rtol=1e-5, atol=1e-9)


def test_the_file_keeps_to_fortrans_columns(tmp_path: Path) -> None:
    header = grid((2, 3, 8))
    write_whole(tmp_path / "a.cube", header, noise(header))
    lines = (tmp_path / "a.cube").read_text().splitlines()
    assert lines[0] == "Potential of a test (kT/e at 298.15 K)"
    assert "kT/e at 298.15 K" in lines[1]
    rows = lines[7:]
    assert len(rows) == 2 * 3 * 2  # a row of z begins a line
    for row in rows:
        fields = [row[start : start + 13] for start in range(0, len(row), 13)]  # 6E13.5
        assert all(re.fullmatch(r"(\d\.\d{6}|-\d\.\d{5})E[+-]\d\d ?", text) for text in fields)
    assert {len(row.split()) for row in rows[::2]} == {6}
    assert {len(row.split()) for row in rows[1::2]} == {2}


def test_atoms_stand_in_the_header_with_their_charges(tmp_path: Path) -> None:
    whole = grid((2, 3, 4))
    header = GridHeader(shape=whole.shape, origin=whole.origin, vectors=whole.vectors, units="V", atoms=ATOMS)
    write_whole(tmp_path / "a.cube", header, noise(header))
    atoms, *_, values = parsed(tmp_path / "a.cube")
    np.testing.assert_array_equal(atoms[:, 0], 0)
    np.testing.assert_array_equal(atoms[:, 1], ATOMS[:, 3])
    np.testing.assert_allclose(atoms[:, 2:] * BOHR, ATOMS[:, :3], atol=1e-9)
    np.testing.assert_array_equal(values.astype(np.float32), rounded(noise(header)))


@pytest.mark.parametrize("atoms", [None, np.zeros((0, 4)), np.zeros((MOST_ATOMS + 1, 4))])
def test_without_atoms_to_show_one_stands_at_the_origin(tmp_path: Path, atoms: NDArray[np.float64] | None) -> None:
    whole = grid((2, 3, 4))
    header = GridHeader(shape=whole.shape, origin=whole.origin, vectors=whole.vectors, units="V", atoms=atoms)
    write_whole(tmp_path / "a.cube", header, noise(header))
    found, *_ = parsed(tmp_path / "a.cube")
    np.testing.assert_allclose(found[0] * [1, 1, BOHR, BOHR, BOHR], [0, 0, *header.origin], atol=1e-9)
    assert len(found) == 1
