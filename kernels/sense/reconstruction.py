"""Images from non-Cartesian multi-coil k-space: gridding, and iterative SENSE.

    s_c,m = Σ_r map_c(r) ρ(r) e^{−2πi k_m·r/N} + noise

Gridding is the weighted adjoint, Σ_c conj(map_c) Fᴴ W s_c. CG-SENSE solves the weighted, damped normal equations

    (Σ_c conj(map_c) Fᴴ W F map_c + λ) ρ = Σ_c conj(map_c) Fᴴ W s_c

by conjugate gradients. With weights that add up to 1 and Σ |map|² = 1 the operator's diagonal, which λ is relative to,
is 1.

Source: Pruessmann, Weiger, Börnert, Boesiger, "Advances in sensitivity encoding with arbitrary k-space trajectories",
Magn. Reson. Med. 46 (2001).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from kernels.nufft import Toeplitz
from kernels.runtime.arrays import namespace
from kernels.sense.coil_groups import groups_of, parts_of
from kernels.sense.conjugate_gradient import conjugate_gradient


class Transform(Protocol):
    """`kernels.nufft.Nufft`, or `OffResonance` around one."""

    def forward(self, images: Any) -> Any: ...

    def adjoint(self, samples: Any, weights: Any = None) -> Any: ...


def gridded(transform: Transform, samples: Any, maps: Any, weights: Any) -> Any:
    """Σ_c conj(map_c) Fᴴ W s_c: complex64 (*shape).

    samples : complex64 (coils, m), NumPy or CuPy like all arrays here; or an iterable of them, one for each group
    maps    : complex64 (coils, *shape), or `GroupedMaps`
    weights : float32 (m,), adding up to 1
    """
    total: Any = None
    parts = _parts(samples, maps)
    for (_, group), part in zip(groups_of(maps), parts, strict=True):
        total = _combined(transform.adjoint(part, weights), group, total)
    return total


def _combined(images: Any, maps: Any, total: Any) -> Any:
    """Σ_c conj(map_c) image_c, added to the total if there is one; may overwrite the images."""
    if namespace(images) is not np:
        from kernels.nufft.toeplitz import cuda

        return cuda.combined(images, maps, total)
    images *= maps.conj()
    summed = images.sum(axis=0)
    return summed if total is None else total + summed


def _parts(samples: Any, maps: Any) -> Iterator[Any]:
    if hasattr(samples, "shape"):
        yield from (samples[part] for part in parts_of(maps))
    else:
        yield from samples


def sense_normal(transform: Transform, maps: Any, weights: Any) -> Callable[[Any], Any]:
    """Σ_c conj(map_c) Fᴴ W F map_c by forward and adjoint transforms."""

    def normal(image: Any) -> Any:
        total: Any = None
        for _, group in groups_of(maps):
            total = _combined(transform.adjoint(transform.forward(group * image), weights), group, total)
        return total

    return normal


def toeplitz_normal(toeplitz: Toeplitz, maps: Any) -> Callable[[Any], Any]:
    """The same operator by one pair of FFTs on a doubled grid, for any number of samples.

    The groups of `GroupedMaps` are added in coil order, so the bits do not depend on where they are stored.
    """

    def normal(image: Any) -> Any:
        if hasattr(maps, "shape"):
            return toeplitz.apply_sense(image, maps)
        total: Any = None
        for _, group in groups_of(maps):
            total = toeplitz.apply_sense(image, group, total, add=total is not None)
        return total

    return normal


def cg_sense(normal: Callable[[Any], Any], right: Any, **how: Any) -> tuple[Any, Any]:
    """The image and the curve of relative residuals; the options are those of `conjugate_gradient`."""
    return conjugate_gradient(normal, right, **how)
