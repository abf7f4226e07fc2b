"""Saved states of iterations, from which another process continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from kernels.runtime.arrays import namespace


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """How iterations survive the process.

    saved : the state that an interrupted run saved, by name; None: there is none
    due   : whether the state should be saved now
    save  : takes the arrays of a state, of the host or the device, which change afterwards
    """

    saved: Mapping[str, NDArray[Any]] | None
    due: Callable[[], bool]
    save: Callable[[Mapping[str, Any]], None]

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether the saved state has these arrays, of these shapes and dtypes."""
        saved = self.saved or {}
        return all(
            name in saved and saved[name].shape == array.shape and saved[name].dtype == array.dtype
            for name, array in state.items()
        )


def put(state: Mapping[str, Any], saved: Mapping[str, NDArray[Any]]) -> None:
    """Copy saved arrays into those of a state."""
    for name, array in state.items():
        array[...] = namespace(array).asarray(saved[name])
