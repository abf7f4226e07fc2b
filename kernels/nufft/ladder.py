"""The ladders of the non-uniform transforms: many coils, and one, of a radial slice and of a volume."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from kernels.nufft.cases import radial
from kernels.nufft.exact import ladder as exact
from kernels.nufft.gridding.cuda import VARIANTS, Plan
from kernels.nufft.toeplitz import cuda as toeplitz_cuda
from kernels.nufft.toeplitz.kernel import toeplitz_shape
from kernels.runtime.ladder import Ladder

EPS = 1e-3
SLICE, SLICE_POINTS, SLICE_COILS = (256, 256), 655_360, 32
VOLUME, VOLUME_POINTS, VOLUME_COILS = (256, 256, 176), 6_800_384, 8
ONE_COIL_POINTS = 65_536
READOUT = 512
CUBE, CUBE_COILS = (256, 256, 256), 4


def ladders() -> tuple[Ladder, ...]:
    """Both directions in two and three dimensions, and the normal operator of CG-SENSE in both."""
    back = tuple(name for name in VARIANTS if name.startswith("spread"))
    ahead = tuple(name for name in VARIANTS if name not in back)
    slices, volumes = (SLICE, SLICE_POINTS, SLICE_COILS), (VOLUME, VOLUME_POINTS, VOLUME_COILS)
    one = (SLICE, ONE_COIL_POINTS, 1), (VOLUME, VOLUME_POINTS, 1)
    return (
        *exact.ladders(),
        *(_gridding(direction[:-1], *size) for size in (slices, volumes) for direction in (back, ahead)),
        *(_gridding(direction, *size) for size in one for direction in (back, ahead)),
        *(_toeplitz(shape, coils) for shape, coils in ((SLICE, SLICE_COILS), (CUBE, CUBE_COILS))),
    )


def _times(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))


def _gridding(variants: tuple[str, ...], shape: tuple[int, ...], points: int, coils: int) -> Ladder:
    kind = "adjoint" if variants[0].startswith("spread") else "forward"
    pixels, axes = math.prod(shape), len(shape)
    return Ladder(
        name=f"gridding {kind}, {_times(shape)}, {points} radial samples, {coils} coils, eps {EPS:g}",
        variants=variants,
        bytes=8 * coils * (pixels + points) + 4 * axes * points,
        flops=8 * coils * pixels * points,
        limit="copy",
        prepare=lambda variant: _prepared(variant, shape, points, coils),
        libraries=lambda: _rivals(kind, shape, points, coils),
    )


def _inputs(shape: tuple[int, ...], points: int, coils: int) -> tuple[Any, Any, Any]:
    import cupy

    trajectory = cupy.asarray(radial(points, len(shape), readout=READOUT) * np.array(shape), cupy.float32)
    rng = cupy.random.default_rng(1)
    samples, images = (
        rng.standard_normal((coils, 2 * count), dtype=cupy.float32).view(cupy.complex64)
        for count in (points, math.prod(shape))
    )
    return trajectory, samples, images.reshape(coils, *shape)


def _prepared(variant: str, shape: tuple[int, ...], points: int, coils: int) -> Callable[[], Any]:
    import cupy

    trajectory, samples, images = _inputs(shape, points, coils)
    weights, plan = cupy.linspace(0.5, 1.5, points, dtype=cupy.float32), Plan(trajectory, shape, EPS)

    def run() -> None:
        stream = cupy.cuda.get_current_stream()
        if variant.startswith("spread"):
            plan.adjoint(samples, weights, images, stream, variant)
        else:
            plan.forward(images, samples, stream, variant)

    return run


def _rivals(kind: str, shape: tuple[int, ...], points: int, coils: int) -> Mapping[str, Callable[[], Any]]:
    """cuFINUFFT, planned once, if it is installed."""
    if not find_spec("cufinufft"):
        return {}
    cufinufft = import_module("cufinufft")
    trajectory, samples, images = _inputs(shape, points, coils)
    plan = cufinufft.Plan(1 if kind == "adjoint" else 2, shape, coils, eps=EPS, isign=1 if kind == "adjoint" else -1)
    plan.setpts(*(axis * (2 * np.pi / n) for axis, n in zip(trajectory.T, shape, strict=True)))
    run = (
        (lambda: plan.execute(samples, out=images)) if kind == "adjoint" else lambda: plan.execute(images, out=samples)
    )
    return {"cuFINUFFT": run}


def _toeplitz(shape: tuple[int, ...], coils: int) -> Ladder:
    pixels, cells = math.prod(shape), math.prod(toeplitz_shape(shape, host=False))
    return Ladder(
        name=f"normal operator of {coils} coils, {_times(shape)}",
        variants=tuple(toeplitz_cuda.VARIANTS),
        bytes=8 * (2 * coils + 2) * pixels + 4 * cells,
        flops=coils * (2 * 5 * cells * round(math.log2(cells)) + 2 * cells + 14 * pixels),
        limit="copy",
        prepare=lambda variant: _prepared_toeplitz(variant, shape, coils),
        libraries=dict,
    )


def _prepared_toeplitz(variant: str, shape: tuple[int, ...], coils: int) -> Callable[[], Any]:
    import cupy

    rng = cupy.random.default_rng(1)
    kernel = rng.random(toeplitz_shape(shape, host=False), dtype=cupy.float32)
    image, maps = (
        rng.standard_normal((*leading, *shape, 2), dtype=cupy.float32).view(cupy.complex64)[..., 0].copy()
        for leading in ((), (coils,))
    )
    out, body = cupy.empty_like(image), toeplitz_cuda.Convolution(kernel, shape)
    return lambda: body.apply_sense(image, maps, out, None, variant)
