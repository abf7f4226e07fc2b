"""Partitions of lines into blocks for a GPU: nothing is left out or done twice, and the device is busy to the end."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.smoothing.cuda.block_partition import RUNS, BlockPartition, PieceCost, factored, mostly_short, partition

ROWS = PieceCost(unit=16, begin=1)  # of short windows
POSITIONS = PieceCost(unit=64, lost=32, begin=64)  # of longer Gaussians
RESIDENT = 528  # blocks at once
LINE, LINES, BLOCKS = st.integers(1, 1 << 30), st.integers(1, 100_000), st.integers(1, 2000)


def begin(made: BlockPartition, piece: int) -> int:
    """As in struct BlockPartition of bands.cuh."""
    return sum(min(piece, last) * more for last, more in zip(made.last, made.more, strict=True))


def runs(made: BlockPartition) -> list[tuple[int, int]]:
    """(pieces, length) of each run, from the places of the pieces."""
    firsts = sorted({0, *(last for last in made.last if last < made.pieces)})
    lengths = [begin(made, first + 1) - begin(made, first) for first in firsts]
    return [
        (after - first, n)
        for (first, after), n in zip(itertools.pairwise([*firsts, made.pieces]), lengths, strict=True)
    ]


def covers(made: BlockPartition, line: int) -> bool:
    """Whether the pieces cover the line once, without a piece behind its end; all in 32 bits."""
    end = begin(made, made.pieces)
    assert max(last * more for last, more in zip(made.last, made.more, strict=True)) <= end
    return begin(made, made.pieces - 1) < line <= end < 1 << 31


@given(
    line=LINE,
    lines=LINES,
    resident=BLOCKS,
    unit=st.sampled_from([1, 8, 16, 32, 48, 64]),
    lost=st.sampled_from([0, 16, 32, 64]),
    more=st.none() | st.integers(0, 100),
)
def test_pieces_cover_the_line_once(
    line: int, lines: int, resident: int, unit: int, lost: int, more: int | None
) -> None:
    most = None if more is None else lost // unit + 1 + more
    made = partition(line, lines, resident, PieceCost(unit=unit, lost=lost, most=most, begin=5))
    for _, length in runs(made):
        assert length > 0
        assert (length + lost) % unit == 0
        assert most is None or length + lost <= most * unit
    assert covers(made, line)


@given(line=LINE, lines=LINES, resident=BLOCKS, unit=st.sampled_from([8, 16]))
def test_mostly_short_pieces_cover_the_line_once(line: int, lines: int, resident: int, unit: int) -> None:
    made = mostly_short(line, lines, resident, unit)
    assert covers(made, line)
    assert all(length % unit == 0 for _, length in runs(made))


@given(
    line=LINE,
    lines=LINES,
    resident=BLOCKS,
    unit=st.sampled_from([8, 16, 64]),
    lost=st.sampled_from([0, 32, 64]),
    share=st.sampled_from([0.5, 0.6]),
)
def test_factored_pieces_cover_the_line_once_and_only_shrink(
    line: int, lines: int, resident: int, unit: int, lost: int, share: float
) -> None:
    made = factored(line, lines, resident, PieceCost(unit=unit, lost=lost), share)
    assert covers(made, line)
    lengths = [length for _, length in runs(made)]
    assert lengths == sorted(lengths, reverse=True)
    assert all((length + lost) % unit == 0 for length in lengths)
    if len(lengths) < RUNS:
        assert all(pieces <= max(resident // lines, 1) for pieces, _ in runs(made)) or resident < lines


def test_each_run_of_a_factored_cut_takes_its_share() -> None:
    assert runs(factored(8192, 17, RESIDENT, PieceCost(unit=8), 0.5)) == [
        (31, 136), (31, 72), (31, 32), (31, 16), (31, 8), (1, 8),
    ]  # fmt: skip


@pytest.mark.parametrize("made", [factored(8191, 19, RESIDENT, POSITIONS, 0.6), mostly_short(8191, 17, RESIDENT, 8)])
def test_where_pieces_begin(made: BlockPartition) -> None:
    lengths = itertools.chain.from_iterable(itertools.repeat(length, pieces) for pieces, length in runs(made))
    assert [begin(made, piece) for piece in range(made.pieces + 1)] == list(itertools.accumulate(lengths, initial=0))


def test_an_eighth_of_mostly_short_pieces_is_long() -> None:
    assert runs(mostly_short(8192, 52, RESIDENT, 16)) == [(3, 272), (231, 32)]


@pytest.mark.parametrize("cost", [ROWS, POSITIONS])
@pytest.mark.parametrize("lines", [1, 18, 52, 128, 256, 700])
def test_a_device_is_done_everywhere_at_about_the_same_time(lines: int, cost: PieceCost) -> None:
    """With blocks that take up to a quarter less or more: no later than the best number of equal pieces."""
    line = 1 << 20 if lines == 1 else 8192
    rounds = (1, 2, 3, 4, 6, 8, 12, 16)
    equal = [BlockPartition.of([(-(-line // length), length)]) for length in _lengths(line, lines, rounds, cost)]
    best = min(seconds(made, line, lines, cost) for made in equal)
    assert seconds(partition(line, lines, RESIDENT, cost), line, lines, cost) < best * 1.02


def _lengths(line: int, lines: int, rounds: Iterable[int], cost: PieceCost) -> set[int]:
    counts = {max(count * RESIDENT // lines, 1) for count in rounds}
    return {cost.length(cost.units(-(-line // count))) for count in counts}


def seconds(made: BlockPartition, line: int, lines: int, cost: PieceCost) -> float:
    """Time of blocks that take about what `cost` predicts, each of which starts where another has finished."""
    free = [0.0] * RESIDENT
    random = np.random.default_rng(1)
    for first, end in itertools.pairwise(begin(made, piece) for piece in range(made.pieces + 1)):
        for slower in random.uniform(0.75, 1.25, lines):
            taken = (min(end, line) - first + cost.lost + cost.begin) * slower
            heapq.heapreplace(free, free[0] + taken)
    return max(free)


def test_few_blocks_are_as_many_as_there_can_be() -> None:
    assert partition(1000, 3, RESIDENT, ROWS).pieces == 63


def test_a_narrow_image_fills_the_device() -> None:
    assert partition(1_000_000, 1, RESIDENT, ROWS).pieces > RESIDENT


def test_many_lines_are_left_whole() -> None:
    assert partition(20, 100_000, RESIDENT, ROWS).pieces == 1
    assert factored(20, 100_000, RESIDENT, ROWS, 0.5).pieces == 1
