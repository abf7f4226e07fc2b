from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.formats.charges.base import Molecule, Still, cell_from, cell_vectors

PATH = Path("md.xtc")


@pytest.mark.parametrize("angles", [(90, 90, 90), (60, 60, 90), (70.53, 109.47, 70.53), (80, 95.5, 120)])
def test_a_cell_has_the_lengths_and_angles_given(angles: tuple[float, ...]) -> None:
    cell = cell_vectors(np.array([11.0, 13.0, 17.0]), np.array(angles, float))
    assert cell is not None
    lengths = np.linalg.norm(cell, axis=1)
    np.testing.assert_allclose(lengths, [11, 13, 17], rtol=1e-14)
    unit = cell / lengths[:, None]
    found = [np.degrees(np.arccos(unit[a] @ unit[b])) for a, b in ((1, 2), (0, 2), (0, 1))]
    np.testing.assert_allclose(found, angles, rtol=1e-12)
    assert cell[0, 1] == cell[0, 2] == cell[1, 2] == 0
    assert np.linalg.det(cell) > 0


def test_right_angles_give_exact_zeros() -> None:
    cell = cell_from(np.array([11.0, 13.0, 17.0]))
    assert cell is not None
    np.testing.assert_array_equal(cell, np.diag([11.0, 13.0, 17.0]))


@pytest.mark.parametrize(
    "values",
    [
        [1, 2],
        [[1, 2, 3]],
        [1, 2, -3],
        [1, 2, np.nan],
        [0, 2, 3],
        [5, 5, 5, 90, 90, 180],
        [5, 5, 5, 10, 10, 90],
        [5, 5, 5, 90, 90, 1e-9],
        [5, 5, 5, 1e-300, 1e-300, 1e-300],
        [1e13, 5, 5],
        [1e308, 1e308, 1e308],
        np.diag([1e308, 1e308, 1e308]),
        np.ones((3, 3)),
        np.diag([1, 1, np.inf]),
    ],
)
def test_what_is_no_cell(values: object) -> None:
    with pytest.raises(ValueError, match=r"cell|volume"):
        cell_from(np.array(values, float))


def test_one_frame_as_a_trajectory() -> None:
    still = Still(PATH, Molecule(coordinates=np.zeros((2, 3)), charges=np.ones(2)))
    with still as trajectory:
        assert (trajectory.n_atoms, trajectory.n_frames, trajectory.radii) == (2, 1, None)
        np.testing.assert_array_equal(trajectory.frame(0).coordinates, np.zeros((2, 3)))
        for index in (1, -1):
            with pytest.raises(IndexError):
                trajectory.frame(index)
