"""Cutting an image into chunks with halos: as few samples read twice as the budget allows."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from pipeline.formats.image.base import Region

# Up to this cost (1: every sample read once, in whole rows and blocks) the target size of a chunk is kept.
ACCEPTED_COST = 1.35
# Each further axis that is cut makes reads and writes shorter; it must save this much re-reading to pay.
CUT_PENALTY = 2.0
# A cut within a block of the file (a tile, a Zarr chunk) has it decoded, or packed, more than once.
UNALIGNED_PENALTY = 2.0
_HALVED_AXES = 3


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Extents of a chunk along each axis; the last chunk along an axis may be shorter.

    halo       : samples that a chunk needs before and after along each axis
    grain      : the file's blocks along each axis, which cuts had better not part
    padded     : axes along which the halo is read even if they are not cut
    """

    shape: tuple[int, ...]
    extents: tuple[int, ...]
    halo: tuple[tuple[int, int], ...]
    grain: tuple[int, ...]
    padded: frozenset[int] = frozenset()

    def is_cut(self, axis: int) -> bool:
        return self.extents[axis] < self.shape[axis]

    @property
    def chunk_halo(self) -> tuple[tuple[int, int], ...]:
        """The halo that is read: by default none along an uncut axis, where the border mode applies as it is."""
        return tuple(
            halo if axis in self.padded or self.is_cut(axis) else (0, 0) for axis, halo in enumerate(self.halo)
        )

    def input_samples(self) -> int:
        halos = self.chunk_halo
        return math.prod(extent + sum(halo) for extent, halo in zip(self.extents, halos, strict=True))

    def output_samples(self) -> int:
        return math.prod(self.extents)

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return math.prod(-(-length // extent) for length, extent in zip(self.shape, self.extents, strict=True))

    @property
    def cost(self) -> float:
        """Re-reading, and what short rows and parted blocks cost besides."""
        inner_cuts = sum(self.is_cut(axis) for axis in range(1, len(self.shape)))
        return self.rereads * CUT_PENALTY**inner_cuts * UNALIGNED_PENALTY**self.parted

    @property
    def parted(self) -> int:
        """Along how many axes blocks of the file are cut."""
        return sum(self.is_cut(axis) and extent % self.grain[axis] != 0 for axis, extent in enumerate(self.extents))

    @property
    def rereads(self) -> float:
        return self.input_samples() / self.output_samples()

    def regions(self) -> Iterator[Region]:
        """The chunks' output regions in reading order, covering the shape exactly once."""
        starts = [range(0, length, extent) for length, extent in zip(self.shape, self.extents, strict=True)]
        for start in product(*starts):
            stop = tuple(min(s + e, n) for s, e, n in zip(start, self.extents, self.shape, strict=True))
            yield Region(start, stop)


def best_tiling(
    shape: tuple[int, ...],
    halo: Sequence[tuple[int, int]],
    itemsize: int,
    *,
    whole: Collection[int] = (),
    grain: tuple[int, ...] | None = None,
    multiple: tuple[int, ...] | None = None,
    padded: Collection[int] = (),
    budget_bytes: int,
    target_bytes: int,
) -> Tiling | None:
    """The tiling whose chunks (input with halo, and output) take about `target_bytes`, at most `budget_bytes`.

    Chunks grow past the target only where halos would otherwise be read too often, or blocks of the file parted.
    The axes `whole` are never cut, the others at multiples of `multiple` alone, which divides `grain`. None where the
    budget does not hold the smallest chunk.
    """
    grain, multiple = grain or (1,) * len(shape), multiple or (1,) * len(shape)
    uncut = Tiling(shape=shape, extents=shape, halo=tuple(halo), grain=grain, padded=frozenset(padded))
    limit = min(target_bytes, budget_bytes)
    best: Tiling | None = None
    while True:
        found = _cheapest(uncut, itemsize, whole, multiple, limit)
        if found is not None and (best is None or found.cost < best.cost):
            best = found
        if limit >= budget_bytes or (best is not None and best.cost <= ACCEPTED_COST):
            return best
        limit = min(2 * limit, budget_bytes)


def _cheapest(
    uncut: Tiling, itemsize: int, whole: Collection[int], multiple: tuple[int, ...], limit: int
) -> Tiling | None:
    """Axis 0 is cut as finely as the limit asks; the others by halving, where that saves re-reading."""
    inner = [
        [length]
        if axis in whole
        else _halvings(length, grain, multiple[axis])
        # Of many axes, whole time points and channels are enough of a choice.
        if axis >= len(uncut.shape) - _HALVED_AXES
        else {length, grain, 1}
        for axis, (length, grain) in enumerate(zip(uncut.shape, uncut.grain, strict=True))
    ][1:]
    finest = None if 0 in whole else multiple[0]
    cut = (_cut_to_fit(uncut, extents, itemsize, limit, finest) for extents in product(*inner))
    return min((tiling for tiling in cut if tiling is not None), key=lambda tiling: tiling.cost, default=None)


def _cut_to_fit(uncut: Tiling, inner: tuple[int, ...], itemsize: int, limit: int, finest: int | None) -> Tiling | None:
    """The longest extent along axis 0 with which a chunk fits, evened out over the chunks; None where none does.

    finest : axis 0 is cut at multiples of this; None: only its whole length counts
    """
    length = uncut.shape[0]
    row = replace(uncut, extents=(length, *inner))
    output_row = math.prod(inner)
    input_row = math.prod(extent + sum(halo) for extent, halo in zip(inner, row.chunk_halo[1:], strict=True))
    samples = limit // itemsize
    if row.input_samples() + row.output_samples() <= samples:
        return row
    longest = (samples - sum(uncut.halo[0]) * input_row) // (input_row + output_row)
    if finest is None or longest < finest:
        return None
    grain = uncut.grain[0] if longest >= uncut.grain[0] else finest
    pieces = max(2, math.ceil(length / (longest // grain * grain)))
    return replace(uncut, extents=(_rounded_up(math.ceil(length / pieces), grain), *inner))


def _halvings(length: int, grain: int, multiple: int) -> list[int]:
    """The whole length, then halves of it in whole blocks down to a single one, then in multiples."""
    halves = [math.ceil(length / 2**power) for power in range(length.bit_length() + 1)]
    return sorted(
        {
            length,
            min(grain, length),
            *(min(_rounded_up(half, grain if half >= grain else multiple), length) for half in halves[1:]),
        },
        reverse=True,
    )


def _rounded_up(length: int, grain: int) -> int:
    return math.ceil(length / grain) * grain
