"""Images from non-Cartesian multi-coil k-space: gridding, and iterative SENSE.

    s_c,m = Σ_r map_c(r) ρ(r) e^{−2πi k_m·r/N} + noise

Gridding is the weighted adjoint, Σ_c conj(map_c) Fᴴ W s_c. CG-SENSE solves the weighted, damped normal equations

    (Σ_c conj(map_c) Fᴴ W F map_c + λ) ρ = Σ_c conj(map_c) Fᴴ W s_c

by conjugate gradients. With weights that add up to 1 and Σ |map|² = 1 the operator's diagonal is 1, and λ is relative
to it.

Source: Pruessmann, Weiger, Börnert, Boesiger, "Advances in sensitivity encoding with arbitrary k-space trajectories",
Magn. Reson. Med. 46 (2001).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from kernels.nufft import Toeplitz
from kernels.sense.arrays import namespace
from kernels.sense.conjugate_gradient import conjugate_gradient

# Of all coil images of a group: 1 GiB.
_GROUP_VALUES = 1 << 27


class Transform(Protocol):
    """`kernels.nufft.Nufft`, or `OffResonance` around one."""

    def forward(self, images: Any) -> Any: ...

    def adjoint(self, samples: Any, weights: Any = None) -> Any: ...


def gridded(transform: Transform, samples: Any, maps: Any, weights: Any) -> Any:
    """Σ_c conj(map_c) Fᴴ W s_c: complex64 (*shape).

    samples : complex64 (coils, m), NumPy or CuPy, as are all arrays here
    maps    : complex64 (coils, *shape)
    weights : float32 (m,), adding up to 1
    """
    xp = namespace(samples)
    total: Any = 0
    for part in _coil_groups(maps):
        images = transform.adjoint(samples[part], weights)
        images *= maps[part].conj()
        total = total + xp.sum(images, axis=0)
    return total


def sense_normal(transform: Transform, maps: Any, weights: Any) -> Callable[[Any], Any]:
    """Σ_c conj(map_c) Fᴴ W F map_c by forward and adjoint transforms."""

    def normal(image: Any) -> Any:
        total: Any = 0
        for part in _coil_groups(maps):
            total = total + gridded(transform, transform.forward(maps[part] * image), maps[part], weights)
        return total

    return normal


def _coil_groups(maps: Any) -> Iterator[slice]:
    """Coils whose images are in memory together: of small images all, of large volumes a few."""
    count = max(1, _GROUP_VALUES // math.prod(maps.shape[1:]))
    for first in range(0, len(maps), count):
        yield slice(first, first + count)


def toeplitz_normal(toeplitz: Toeplitz, maps: Any) -> Callable[[Any], Any]:
    """The same by one pair of FFTs on a doubled grid, whatever the number of samples."""

    def normal(image: Any) -> Any:
        return toeplitz.apply_sense(image, maps)

    return normal


def cg_sense(
    normal: Callable[[Any], Any],
    right: Any,
    *,
    iterations: int,
    damping: float = 0.0,
    tolerance: float = 0.0,
    on_iteration: Callable[[int, Any], None] | None = None,
) -> tuple[Any, Any]:
    """The image of `iterations` steps, or fewer, and the curve of relative residuals: see `conjugate_gradient`."""
    return conjugate_gradient(
        normal, right, iterations=iterations, damping=damping, tolerance=tolerance, on_iteration=on_iteration
    )
