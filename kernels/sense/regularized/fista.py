"""FISTA with adaptive restart, for one penalty whose proximal operator is known.

Each iteration applies the normal operator once: its values at extrapolated images follow by linearity, and so does the
objective. The step shrinks if the eigenvalue's estimate proves too small.

Without random shifts, a step that would raise the objective is refused, and momentum restarts; it also restarts when it
points uphill. With random shifts momentum continues: each shift has its own proximal operator, so neither test means
anything. (Restarts made the error of images from 24 spokes up to 10 % larger after 100 iterations.)

Sources: Beck, Teboulle, "A fast iterative shrinkage-thresholding algorithm", SIAM J. Imaging Sci. 2 (2009); O'Donoghue,
Candès, "Adaptive restart for accelerated gradient schemes", Found. Comput. Math. 15 (2015).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.proximal import inner
from kernels.runtime.arrays import namespace
from kernels.runtime.repeated import Captured
from kernels.sense.iterate import iterate
from kernels.sense.regularized.problem import Problem, captured_step, penalty_states
from kernels.sense.resumption import put

# Power iterations end once the estimate grows by less than this share; the result is larger by the same share.
_POWER_SHARE, _POWER_STEPS = 0.01, 12
_ROUNDING = 1e-6  # rises of the objective up to this share are rounding
_SMALLEST = 1e-300
_VECTORS = ("image", "before", "normal", "normal_before")  # of the state; CUDA's have these names too


def largest_eigenvalue(normal: Callable[[Any], Any], like: Any, *, capture: bool = False) -> float:
    """Estimate a positive operator's largest eigenvalue from above, by power iteration.

    like    : the first vector, such as the right-hand side; if it is 0, the estimate is 1
    capture : whether a CUDA graph can hold the operator

    Waits for the device.
    """
    xp = namespace(like)
    size = math.sqrt(float(inner(like, like)))
    if not size > 0:
        return 1.0
    # Without noise, the iterations may never see an eigenvector that is orthogonal to `like`.
    noise = np.random.default_rng(0).random(like.shape, np.float32) - np.float32(0.5)  # drawn faster than a Gaussian's
    noise *= np.float32(math.sqrt(12 / like.size))
    spread = xp.asarray(noise)
    vector = like / np.float32(size) + np.float32(0.5) * spread
    vector = (vector / np.float32(math.sqrt(float(inner(vector, vector))))).astype(like.dtype)
    rows = iterate(_Power(normal, vector, capture), _POWER_STEPS, tolerance=_POWER_SHARE)
    return float(rows[-1, 0]) * (1 + _POWER_SHARE) or 1.0


class _Power:
    """Power iteration; see `iterate`. status: the estimate, and the share by which it grew."""

    rests = False

    def __init__(self, normal: Callable[[Any], Any], vector: Any, capture: bool) -> None:
        self._normal, self._vector, self._xp = normal, vector, namespace(vector)
        self.status = self._xp.zeros(2)
        self.captured = Captured(self.step) if capture and self._xp is not np else None

    def step(self) -> None:
        image = self._normal(self._vector)
        found = self._xp.sqrt(inner(image, image))
        self.status[1] = found / self._xp.maximum(self.status[0], _SMALLEST) - 1
        self.status[0] = found
        real = self._vector.real.dtype
        self._vector[...] = image / self._xp.maximum(found, np.finfo(real).tiny).astype(real)

    def state(self) -> Mapping[str, Any]:
        return {"vector": self._vector, "status": self.status}

    def restore(self, saved: Mapping[str, Any]) -> None:
        put(self.state(), saved)


class Fista:
    """The state of the iterations; see `kernels.sense.iterate`. `image` is complex [frames, *shape]."""

    rests = True

    def __init__(self, problem: Problem, largest: float, tolerance: float = 0.0, *, applied: bool = False) -> None:
        """largest: of the normal operator's eigenvalues. tolerance: the change from which the image rests. applied: the
        normal operator has been applied, so it has what it needs."""
        (self._penalty,) = problem.penalties
        self._problem = problem
        xp = namespace(problem.right)
        self.status = xp.full(3, np.inf)
        key = (problem.right.shape, self._penalty.key) if applied and self._penalty.key else None
        self.captured = captured_step(problem, self.step, key)
        if xp is np:
            vectors: Any = _Vectors  # the host looks at each status itself
        else:
            from kernels.proximal.cuda import FistaVectors as vectors  # noqa: N813 - one of two classes
        self._vectors = vectors(
            problem.right,
            largest,
            self.status,
            strength=self._penalty.strength,
            damping=problem.damping,
            energy=problem.energy,
            monotone=getattr(self._penalty, "shift", None) is None,
            tolerance=tolerance,
        )

    @property
    def image(self) -> Any:
        return self._vectors.image

    def state(self) -> Mapping[str, Any]:
        return {**self._vectors.state(), "status": self.status, **penalty_states(self._problem)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self._vectors.restore(saved)
        put({"status": self.status, **penalty_states(self._problem)}, saved)

    def step(self) -> None:
        self._penalty.turn()
        image, size = self._penalty.shrink(*self._vectors.gradient())
        self._vectors.accept(image, size, self._problem.normal(image))


class _Vectors:
    """The vector operations of an iteration on the CPU; on CUDA `kernels.proximal.cuda.FistaVectors`."""

    def __init__(
        self,
        right: NDArray[Any],
        largest: float,
        status: NDArray[np.float64],
        *,
        strength: float,
        damping: float,
        energy: float,
        monotone: bool,
        tolerance: float,
    ) -> None:
        self._right, self._status, self._real = right, status, right.real.dtype.type
        self._strength, self._damping, self._energy, self._monotone = strength, damping, energy, monotone
        self._tolerance = tolerance
        self.image, self._normal = np.zeros_like(right), np.zeros_like(right)
        self._before, self._normal_before = self.image, self._normal
        self._lipschitz, self._momentum, self._beta, self._objective = largest + damping, 1.0, 0.0, math.inf

    def state(self) -> Mapping[str, NDArray[Any]]:
        numbers = np.array([self._lipschitz, self._momentum, self._beta, self._objective, 0.0])
        return {**dict(zip(_VECTORS, self._all(), strict=True)), "numbers": numbers}

    def restore(self, saved: Mapping[str, NDArray[Any]]) -> None:
        self.image, self._before, self._normal, self._normal_before = (saved[name].copy() for name in _VECTORS)
        self._lipschitz, self._momentum, self._beta, self._objective, _ = map(float, saved["numbers"])

    def _all(self) -> tuple[NDArray[Any], ...]:
        return self.image, self._before, self._normal, self._normal_before

    def _start(self) -> NDArray[Any]:
        return np.asarray(self.image + self._real(self._beta) * (self.image - self._before))

    def gradient(self) -> tuple[NDArray[Any], float]:
        """The point after a gradient step, and the threshold for it."""
        start, rate = self._start(), self._real(1 / self._lipschitz)
        gradient = self._normal + self._real(self._beta) * (self._normal - self._normal_before) - self._right
        if self._damping:
            gradient += self._real(self._damping) * start
        return start - rate * gradient, self._strength * float(rate)

    def accept(self, image: NDArray[Any], size: Any, normal: NDArray[Any]) -> None:
        """Takes the new image, with its penalty and its normal operator, unless it raises the objective."""
        if self._status[2] <= self._tolerance:
            return
        change = image - self.image
        squares, moved = float(inner(image, image)), float(inner(change, change))
        fidelity = 0.5 * float(inner(image, normal)) - float(inner(image, self._right)) + 0.5 * self._energy
        objective = fidelity + 0.5 * self._damping * squares + self._strength * float(size)
        bent = float(inner(change, normal - self._normal)) + self._damping * moved
        refused = self._monotone and objective > self._objective * (1 + _ROUNDING) and self._beta > 0
        again = refused or (self._monotone and float(inner(image - self._start(), change)) < 0)
        self._lipschitz = max(self._lipschitz, bent / max(moved, _SMALLEST))
        following = 1.0 if again else 0.5 + math.sqrt(0.25 + self._momentum**2)
        self._beta = 0.0 if again else (self._momentum - 1) / following
        self._momentum = following
        self._status[2] = 1.0 if refused else math.sqrt(moved / max(squares, _SMALLEST))
        if refused:
            return
        self._before, self.image = self.image, image
        self._normal_before, self._normal = self._normal, normal.copy()
        self._objective = self._status[0] = objective
        self._status[1] = math.sqrt(2 * max(fidelity, 0.0) / max(self._energy, _SMALLEST))
