from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ParameterError
from pipeline.formats.molecule import FrameRange, Molecule, Still, cell_from, cell_vectors
from tests.pipeline.formats.contract import QUICK, one_line

PATH = Path("md.xtc")


@pytest.mark.parametrize(
    ("text", "frames"),
    [
        ("2:3:10", [2, 5, 8]),
        ("::", list(range(10))),
        ("::4", [0, 1, 2, 3]),
        (":4:", [0, 4, 8]),
        ("7::", [7, 8, 9]),
        ("-3::", [7, 8, 9]),
        (":2:-1", [0, 2, 4, 6, 8]),
        ("7", [7]),
        ("-1", [9]),
        ("-2", [8]),
        ("0:1:1", [0]),
        ("0:10:10", [0]),
        (" 3:1:5 ", [3, 4]),
    ],
)
def test_frames(text: str, frames: list[int]) -> None:
    assert list(FrameRange.parse(text).of(10, PATH)) == frames


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "begin:step:end"),
        ("1:5", "begin:step:end"),
        ("a:b:c", "begin:step:end"),
        ("1.5", "begin:step:end"),
        ("1:2:3:4", "begin:step:end"),
        ("0:0:10", "step 0"),
        ("0:-1:10", "step -1"),
        ("0:1000:10", "step in the middle"),  # as if begin:end:step
        ("100:500:110", "step in the middle"),
        ("9" * 30, "begin:step:end"),
    ],
)
def test_what_is_no_range_of_frames(text: str, word: str) -> None:
    with pytest.raises(ValueError, match=word) as caught:
        FrameRange.parse(text)
    one_line(caught.value, text)


@pytest.mark.parametrize("text", ["10", "-11", "10::", "5:1:5", "5:1:4", "0:1:11", "-20:1:", "-1:1:-1"])
def test_a_range_that_does_not_fit_the_trajectory(text: str) -> None:
    with pytest.raises(ParameterError) as caught:
        FrameRange.parse(text).of(10, PATH)
    one_line(caught.value, "md.xtc", "10")


@QUICK
@given(st.integers(-30, 30) | st.none(), st.integers(1, 30), st.integers(-30, 30) | st.none(), st.integers(1, 20))
def test_frames_are_those_of_a_slice_or_an_error(begin: int | None, step: int, end: int | None, count: int) -> None:
    text = f"{'' if begin is None else begin}:{step}:{'' if end is None else end}"
    try:
        chosen = FrameRange.parse(text).of(count, PATH)
    except (ValueError, ParameterError) as error:
        one_line(error)
    else:
        assert list(chosen) == list(range(count))[begin:end:step]


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
