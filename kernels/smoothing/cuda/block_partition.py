"""Partitions lines of work into pieces, one per block: long pieces first and shorter ones last, so that all of a device
finishes at about the same time, although starting a piece costs something."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kernels.smoothing.cuda import tuning

# Candidates: how often long pieces alone would fill the device, the share that stays long, and the number of shorter
# ones that replace a long one.
ROUNDS = (0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 12)
FEW = 16  # up to this many pieces per line, every number and half number is tried
LONG_SHARES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
SHORTER = (1, 2, 3, 4, 6, 8)
RUNS = 8  # most runs of equal pieces in a line


def up_to(number: int, multiple: int) -> int:
    """`number` rounded up to a multiple."""
    return -(-number // multiple) * multiple


class BlockPartition(ctypes.Structure):
    """struct BlockPartition of bands.cuh."""

    _fields_ = (("last", ctypes.c_int * RUNS), ("more", ctypes.c_int * RUNS))
    pieces: int

    @classmethod
    def of(cls, runs: Sequence[tuple[int, int]]) -> BlockPartition:
        """From (pieces, positions per piece) of each run, the longest pieces first."""
        made = cls()
        made.pieces = 0
        lengths = [length for _, length in runs]
        for run, ((pieces, length), following) in enumerate(zip(runs, [*lengths[1:], 0], strict=True)):
            made.pieces += pieces
            made.last[run], made.more[run] = made.pieces, length - following
        return made


@dataclass(frozen=True, kw_only=True)
class PieceCost:
    """The cost of a piece of a line, in positions of the line."""

    unit: int  # positions of a unit; a piece consists of whole units
    lost: int = 0  # positions that a piece processes but does not write
    most: int | None = None  # maximum units of a piece
    begin: float = 0  # positions that a block could have processed while it starts
    tail: float = tuning.TAIL  # extra time of the last piece, as a share of a piece's time

    def length(self, units: int) -> int:
        """Positions written by a piece of `units` units."""
        return units * self.unit - self.lost

    def units(self, length: int) -> int:
        """The fewest units that write `length` positions."""
        return max(-(-(length + self.lost) // self.unit), self.lost // self.unit + 1)

    def time(self, units: int) -> float:
        return units * self.unit + self.begin


def mostly_short(line: int, lines: int, resident: int, unit: int) -> BlockPartition:
    """An eighth of each of `lines` lines of `line` positions in long pieces, each a third of an equal share for every
    `resident` block, and the rest in pieces of two units.

    The data that neighbouring pieces share is then still in L2 for the second one, and memory moves little more than
    for a copy; the long pieces keep the others out of step. For work that waits for memory with any partition.
    """
    length = max(up_to(min(math.ceil(line * lines / resident / 3), line), unit), 2 * unit)
    longs = max(line // 8 // length, 1)
    return BlockPartition.of([(longs, length), (max(-(-(line - longs * length) // (2 * unit)), 0), 2 * unit)])


def factored(line: int, lines: int, resident: int, cost: PieceCost, share: float) -> BlockPartition:
    """In each round, one piece per resident block; the round takes this share of the rest, down to the shortest piece.

    Hummel, Schonberg and Flynn, "Factoring: a method for scheduling parallel loops", CACM 35 (8), 1992.
    """
    at_once = resident // lines or resident / lines
    left = line
    runs: list[tuple[int, int]] = []
    while left > 0:
        length = cost.length(cost.units(min(math.ceil(left * share / at_once), left)))
        pieces = -(-left // length)
        if len(runs) < RUNS - 1:
            pieces = min(pieces, math.ceil(at_once))
        runs.append((pieces, length))
        left -= pieces * length
    return BlockPartition.of(runs)


def partition(line: int, lines: int, resident: int, cost: PieceCost) -> BlockPartition:
    """Long pieces followed by shorter ones: those that finish first according to `cost`."""
    longs, length, shorter = _best(line, lines, resident, cost)
    return BlockPartition.of([(longs, length), (max(-(-(line - longs * length) // shorter), 0), shorter)])


@lru_cache(maxsize=256)
def _best(line: int, lines: int, resident: int, cost: PieceCost) -> tuple[int, int, int]:
    best, best_time = (1, line, line), float("inf")
    for units in _long(line, lines, resident, cost):
        for longs, shorter in _tapers(line, units, cost):
            rest = max(line - longs * cost.length(units), 0)
            shorts = -(-rest // cost.length(shorter))
            time = _done(lines * longs, cost.time(units), lines * shorts, cost.time(shorter), resident, cost.tail)
            if time < best_time:
                best, best_time = (longs, cost.length(units), cost.length(shorter)), time
    return best


def _done(longs: int, long_time: float, shorts: int, short_time: float, resident: int, tail: float) -> float:
    """Finishing time of long blocks followed by short ones, of which the last of either kind takes `tail` more."""
    rounds, left = divmod(longs, resident)
    end = (rounds + (left > 0)) * long_time
    beside = (resident - left) * int(long_time / short_time) if left else 0  # run beside the last long ones
    shorter_rounds = max(-(-(shorts - beside) // resident), 0)
    return max(end + tail * long_time, end + (shorter_rounds + tail) * short_time)


def _long(line: int, lines: int, resident: int, cost: PieceCost) -> list[int]:
    """Candidate lengths of long pieces, in units."""
    fewest = 1 if cost.most is None else -(-line // cost.length(cost.most))
    pieces = {fewest + half / 2 for half in range(2 * FEW)}
    pieces.update(max(int(rounds * resident / lines), fewest) for rounds in ROUNDS)
    return sorted({cost.units(math.ceil(line / count)) for count in pieces})


def _tapers(line: int, units: int, cost: PieceCost) -> Iterator[tuple[int, int]]:
    """Candidates for the number of long pieces in a line, and the units of the short ones that replace the others."""
    pieces = -(-line // cost.length(units))
    yield pieces, units
    few = range(1, pieces) if pieces <= FEW else {int(pieces * share) for share in LONG_SHARES}
    for longs, parts in itertools.product(few, SHORTER):
        shorter = cost.units(-(-(line - longs * cost.length(units)) // ((pieces - longs) * parts)))
        if shorter < units:
            yield longs, shorter
