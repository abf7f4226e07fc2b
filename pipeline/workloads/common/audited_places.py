"""Random places of a result, and what was written there by this process or another: what audits compare."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.formats.image.base import Region


class AuditedPlaces:
    """The same places whenever the result has the same shape; `note` may be called from several threads."""

    def __init__(self, shape: tuple[int, ...], count: int) -> None:
        """`count`: at most so many places, each once."""
        places = np.random.default_rng(0).integers(0, shape, (count, len(shape)))
        # As np.unique would have them, which loads masked arrays first.
        self._places: NDArray[np.int64] = np.array(sorted({*map(tuple, places.tolist())}))
        self._written: dict[int, float] = {}
        self._lock = threading.Lock()

    def note(self, region: Region, values: NDArray[Any]) -> None:
        """Remember the values of a chunk at the audited places inside it."""
        inside = np.all((self._places >= region.start) & (self._places < region.stop), axis=1)
        found = {
            int(which): float(values[tuple(self._places[which] - region.start)]) for which in np.flatnonzero(inside)
        }
        with self._lock:
            self._written.update(found)

    def notes(self) -> Mapping[str, float]:
        """The value at each place written so far, under the place's number."""
        with self._lock:
            return {str(which): value for which, value in self._written.items()}

    def add_notes(self, notes: Mapping[str, float]) -> None:
        """Values that another process wrote. ValueError or TypeError where these are no such notes."""
        written = {int(which): float(value) for which, value in notes.items()}
        if not all(0 <= which < len(self._places) for which in written):
            raise ValueError("notes of other places")
        with self._lock:
            self._written.update(written)
