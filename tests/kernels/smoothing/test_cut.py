"""How lines are cut into blocks for a GPU: nothing is left out or done twice, and the device is busy to the end."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.smoothing.cut import Cost, Cut, cut

ROWS = Cost(unit=16, least=2, begin=1)  # as of short windows
POSITIONS = Cost(unit=64, lost=32, begin=64)  # as of longer Gaussians
RESIDENT = 528  # blocks at once


def begins(made: Cut, line: int) -> list[int]:
    """Where each piece begins, and the end of the last, as struct Cut of bands.cuh has it."""
    pieces = range(made.pieces(line) + 1)
    return [min(piece, made.longs) * made.length + max(piece - made.longs, 0) * made.shorter for piece in pieces]


@given(
    line=st.integers(1, 1 << 30),
    lines=st.integers(1, 100_000),
    resident=st.integers(1, 2000),
    unit=st.sampled_from([1, 8, 16, 32, 48, 64]),
    least=st.integers(1, 4),
    lost=st.sampled_from([0, 16, 32, 64]),
    more=st.none() | st.integers(0, 100),
)
def test_pieces_cover_the_line_once(
    line: int, lines: int, resident: int, unit: int, least: int, lost: int, more: int | None
) -> None:
    most = None if more is None else max(least, lost // unit + 1) + more
    made = cut(line, lines, resident, Cost(unit=unit, least=least, lost=lost, most=most, begin=5))
    for length in (made.length, made.shorter):
        assert length > 0
        assert (length + lost) % unit == 0
        assert length + lost >= least * unit
        assert most is None or length + lost <= most * unit
    pieces = made.pieces(line)
    first = made.longs * made.length
    last = first + (pieces - made.longs) * made.shorter
    assert last - (made.shorter if pieces > made.longs else made.length) < line <= last < 1 << 31


def test_where_pieces_begin() -> None:
    made = cut(8192, 52, RESIDENT, ROWS)
    found = begins(made, 8192)
    lengths = [end - begin for begin, end in itertools.pairwise(found)]
    assert lengths == [made.length] * made.longs + [made.shorter] * (len(lengths) - made.longs)
    assert lengths[0] > lengths[-1]


@pytest.mark.parametrize("cost", [ROWS, POSITIONS])
@pytest.mark.parametrize("lines", [1, 18, 52, 128, 256, 700])
def test_a_device_is_done_everywhere_at_about_the_same_time(lines: int, cost: Cost) -> None:
    """Where blocks take up to a quarter less or more: no later than equal pieces, whatever number suits them best."""
    line = 1 << 20 if lines == 1 else 8192
    rounds = (1, 2, 3, 4, 6, 8, 12, 16)
    equal = [Cut(longs=-(-line // length), length=length, shorter=1) for length in _lengths(line, lines, rounds, cost)]
    best = min(seconds(made, line, lines, cost) for made in equal)
    assert seconds(cut(line, lines, RESIDENT, cost), line, lines, cost) < best * 1.02


def _lengths(line: int, lines: int, rounds: Iterable[int], cost: Cost) -> set[int]:
    counts = {max(count * RESIDENT // lines, 1) for count in rounds}
    return {cost.length(cost.units(-(-line // count))) for count in counts}


def seconds(made: Cut, line: int, lines: int, cost: Cost) -> float:
    """Of blocks that take about what `cost` says, one after the other wherever one is done."""
    free = [0.0] * RESIDENT
    found, random = begins(made, line), np.random.default_rng(1)
    for begin, end in itertools.pairwise(found):
        for slower in random.uniform(0.75, 1.25, lines):
            taken = (min(end, line) - begin + cost.lost + cost.begin) * slower
            heapq.heapreplace(free, free[0] + taken)
    return max(free)


def test_few_blocks_are_as_many_as_there_can_be() -> None:
    assert cut(1000, 3, RESIDENT, ROWS).pieces(1000) == 32


def test_a_narrow_image_fills_the_device() -> None:
    assert cut(1_000_000, 1, RESIDENT, ROWS).pieces(1_000_000) > RESIDENT


def test_many_lines_are_left_whole() -> None:
    assert cut(20, 100_000, RESIDENT, ROWS).pieces(20) == 1
