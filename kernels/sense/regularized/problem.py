"""One regularised problem, in units of its right-hand side."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kernels.runtime.arrays import namespace
from kernels.runtime.repeated import Captured
from kernels.sense.regularized.penalties import Penalty


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """What the images must fit.

    normal  : E^H W E of complex [frames, *shape]; returns an array that it may reuse
    right   : E^H W s, complex64 [frames, *shape], NumPy or CuPy
    energy  : Σ W |s|² over all coils and samples
    damping : λ₂, relative to the normal operator's diagonal, which is about 1
    capture : normal may be captured in a CUDA graph: it neither waits for the device nor uses other streams
    """

    normal: Callable[[Any], Any]
    right: Any
    energy: float
    penalties: Sequence[Penalty] = ()
    damping: float = 0.0
    capture: bool = True

    def in_units(self) -> tuple[Problem, float]:
        """The problem with max |b| = 1, and the factor that its images need."""
        xp = namespace(self.right)
        scale = float(xp.abs(self.right).max()) or 1.0
        return replace(
            self,
            right=self.right / np.float32(scale),
            energy=self.energy / scale**2,
        ), scale


def penalty_states(problem: Problem) -> Mapping[str, Any]:
    """The state of all penalties, for a solver's own."""
    found = ((number, penalty.state()) for number, penalty in enumerate(problem.penalties))
    return {f"{name}_{number}": array for number, state in found for name, array in state.items()}


def captured_step(problem: Problem, step: Callable[[], None], key: Hashable = None) -> Captured | None:
    """A solver's step for a CUDA graph, if all operations of the problem can be captured. key: see `Captured`."""
    can = problem.capture and all(penalty.captured for penalty in problem.penalties)
    return Captured(step, key) if can else None
