from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ParameterError
from pipeline.workloads.common.index_range import IndexRange
from tests.pipeline.formats.image.contract import QUICK, one_line

PATH = Path("md.xtc")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2:10:3", [2, 5, 8]),
        ("::", list(range(10))),
        (":4", [0, 1, 2, 3]),
        ("::4", [0, 4, 8]),
        ("7:", [7, 8, 9]),
        ("7::", [7, 8, 9]),
        ("-3:", [7, 8, 9]),
        (":-1:2", [0, 2, 4, 6, 8]),
        ("7", [7]),
        ("-1", [9]),
        ("-2", [8]),
        ("0:1:1", [0]),
        ("0:10:10", [0]),
        (" 3:5:1 ", [3, 4]),
    ],
)
def test_what_is_chosen(text: str, numbers: list[int]) -> None:
    assert list(IndexRange.parse(text).of(10, "--frames", PATH)) == numbers


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "start:stop:step"),
        ("a:b:c", "start:stop:step"),
        ("1.5", "start:stop:step"),
        ("1:2:3:4", "start:stop:step"),
        ("0:10:0", "step 0"),
        ("0:10:-1", "step -1"),
        ("0:10:1000", "the step last, as in Python: 0:1000:10"),  # as if begin:step:end
        (":10:", "write ::10 for a step of 10, or :10 for a stop"),
        ("100:110:500", "the step last, as in Python: 100:500:110"),
        ("9" * 30, "start:stop:step"),
    ],
)
def test_what_is_no_range(text: str, word: str) -> None:
    with pytest.raises(ValueError, match=word) as caught:
        IndexRange.parse(text)
    one_line(caught.value, text)


@pytest.mark.parametrize("text", ["10", "-11", "10:", "5:5", "5:4", "0:11", "-20:", "-1:-1"])
def test_a_range_that_does_not_fit(text: str) -> None:
    with pytest.raises(ParameterError) as caught:
        IndexRange.parse(text).of(10, "--frames", PATH)
    one_line(caught.value, "md.xtc", "10")


@QUICK
@given(st.integers(-30, 30) | st.none(), st.integers(1, 30), st.integers(-30, 30) | st.none(), st.integers(1, 20))
def test_the_chosen_are_those_of_a_slice_or_an_error(begin: int | None, step: int, end: int | None, count: int) -> None:
    text = f"{'' if begin is None else begin}:{'' if end is None else end}:{step}"
    try:
        chosen = IndexRange.parse(text).of(count, "--frames", PATH)
    except ValueError as error:
        assert step > 1
        one_line(error)
    except ParameterError as error:
        one_line(error)
        assert (begin or 0) < -count or (end or 0) > count or not range(count)[begin:end:step]
    else:
        assert list(chosen) == list(range(count))[begin:end:step]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_one_is_numbered_as_python_does(count: int) -> None:
    numbers = range(count)
    for number in range(-count, count):
        assert list(IndexRange.parse(str(number)).of(count, "--frames", PATH)) == [numbers[number]]
    for number in (-count - 1, count):
        with pytest.raises(ParameterError, match="numbered 0 to"):
            IndexRange.parse(str(number)).of(count, "--frames", PATH)
