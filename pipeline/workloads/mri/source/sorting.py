"""Readouts in the order of a sorting file, so that a frame is a motion state."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import InputError, counted
from pipeline.formats.kspace.base import KSpaceReader, Readouts
from pipeline.formats.numpy_files import mapped_array

LEFT_OUT = -1


class SortedReader(KSpaceReader):
    """Another reader's readouts, state by state, each state in the order of measurement; without those left out."""

    def __init__(self, reader: KSpaceReader, sorting: Path, where: Path) -> None:
        """sorting : .npy of whole numbers, (readouts,) or (slices, readouts): the state of each, or −1

        InputError if it does not fit the data, or a state has no readouts.
        """
        self.path, self.header, self._reader = reader.path, reader.header, reader
        option = f"--sorting {sorting}"
        states = mapped_array(sorting)
        if states.dtype.kind not in "iu" or states.ndim not in (1, 2) or not states.size:
            raise InputError(
                f"{option}: holds {states.dtype} {states.shape}; whole numbers (readouts,) or (slices, readouts) are "
                "needed; save states.astype(int)"
            )
        states = np.asarray(states, np.int64).reshape(-1, states.shape[-1])
        if len(states) not in (1, self.header.slices):
            slices = f"the {counted(self.header.slices, 'slice')} of {where}"
            raise InputError(f"{option}: has {counted(len(states), 'row')}; give one, or one for each of {slices}")
        if states.min() < LEFT_OUT:
            raise InputError(f"{option}: holds {states.min()}; states count from 0, and −1 leaves a readout out")
        self.states = int(states.max()) + 1
        for time in range(self.header.times):
            for slice_ in range(self.header.slices):
                readouts, _ = reader.extent(time, slice_)
                if readouts != states.shape[1]:
                    raise InputError(
                        f"{option}: has {counted(states.shape[1], 'number')}, and slice {slice_}, time {time} of "
                        f"{where} has {counted(readouts, 'readout')}: one number for each is needed"
                    )
        counts = np.stack([np.bincount(row[row >= 0], minlength=self.states) for row in states])
        if self.states == 0:
            raise InputError(f"{option}: leaves every readout out; number the states from 0")
        if not counts.all():
            slice_, empty = np.argwhere(counts == 0)[0]
            raise InputError(
                f"{option}: state {empty} of {self.states} has no readouts in slice {slice_}; number the states from 0 "
                "without gaps, or use fewer"
            )
        self._orders = [np.concatenate([np.flatnonzero(row == s) for s in range(self.states)]) for row in states]
        self._ends = np.cumsum(counts, axis=1)

    def range_of(self, state: int, time: int, slice_: int) -> Readouts:
        """The readouts of a state, as this reader counts them."""
        ends = self._ends[min(slice_, len(self._ends) - 1)]
        return Readouts(time, slice_, int(ends[state - 1]) if state else 0, int(ends[state]))

    def places(self, readouts: Readouts) -> NDArray[np.int64]:
        """Their numbers in the file."""
        return self._order(readouts.slice)[readouts.first : readouts.stop]

    def in_file(self, time: int, slice_: int) -> tuple[int, int]:
        """`extent` with the readouts that are left out."""
        return self._reader.extent(time, slice_)

    def extent(self, time: int, slice_: int) -> tuple[int, int]:
        return len(self._order(slice_)), self._reader.extent(time, slice_)[1]

    def trajectory(self, readouts: Readouts) -> NDArray[np.float64]:
        return np.concatenate([self._reader.trajectory(run) for _, run in self._runs(readouts)])

    def read(self, readouts: Readouts, out: NDArray[Any]) -> None:
        for place, run in self._runs(readouts):
            part = np.empty((out.shape[0], run.count, out.shape[2]), out.dtype)
            self._reader.read(run, part)
            out[:, place : place + run.count] = part

    def noise(self) -> NDArray[np.complex64] | None:
        return self._reader.noise()

    def density(self, readouts: Readouts) -> NDArray[np.float32] | None:
        found = [self._reader.density(run) for _, run in self._runs(readouts)]
        kept = [each for each in found if each is not None]
        return np.concatenate(kept) if len(kept) == len(found) else None

    def hold_at_most(self, budget_bytes: int) -> int:
        return self._reader.hold_at_most(budget_bytes)

    def close(self) -> None:
        self._reader.close()

    def _order(self, slice_: int) -> NDArray[np.int64]:
        return self._orders[min(slice_, len(self._orders) - 1)]

    def _runs(self, readouts: Readouts) -> list[tuple[int, Readouts]]:
        """Consecutive readouts of the other reader, and where they go."""
        order = self.places(readouts)
        begins = [0, *(np.flatnonzero(np.diff(order) != 1) + 1), len(order)]
        return [
            (int(a), Readouts(readouts.time, readouts.slice, int(order[a]), int(order[b - 1]) + 1))
            for a, b in pairwise(begins)
            if b > a
        ]
