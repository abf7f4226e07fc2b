"""The ladders of the exact transforms: FᴴD of one coil pair by pair, and whole transforms of many coils."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernels.nufft.exact.cuda import VARIANTS, ExactTask, Plan
from kernels.nufft.exact.pairs import VARIANTS as PAIR_BY_PAIR
from kernels.runtime.ladder import Ladder

# Large enough for eight points a thread to fill a GPU, small enough for an atomic addition per pair to finish.
LARGE_SIZE, FEW_POINTS = 1024, 2048
SIZE, MANY_POINTS, MANY_COILS = 256, 65_536, 12
LIBRARY_POINTS = 4096  # samples per cuBLAS call


def ladders() -> tuple[Ladder, ...]:
    """The weighted adjoint of one coil by every step; whole transforms of twelve coils by the fast ones."""
    forward = tuple(name for name in VARIANTS if name.startswith("exact_forward"))
    return (
        _ladder("adjoint", (*PAIR_BY_PAIR, "exact_tensor"), 1, FEW_POINTS, LARGE_SIZE),
        _ladder("adjoint", ("exact_staged", "exact_tensor"), MANY_COILS, MANY_POINTS, SIZE),
        _ladder("forward", forward, MANY_COILS, MANY_POINTS, SIZE),
    )


def _ladder(kind: str, variants: tuple[str, ...], coils: int, points: int, size: int) -> Ladder:
    pixels = size * size
    noun = "coil" if coils == 1 else "coils"
    return Ladder(
        name=f"exact {kind} transform, {size}², {points} samples, {coils} {noun}",
        variants=variants,
        bytes=8 * (coils * (pixels + points) + points),
        flops=8 * coils * pixels * points,
        limit="fma",
        prepare=lambda variant: _prepared(variant, coils, points, size),
        libraries=lambda: {"cuBLAS complex64": _by_library(kind, coils, points, size)},
    )


def _inputs(coils: int, points: int, size: int) -> tuple[Any, Any, Any]:
    import cupy

    rng = cupy.random.default_rng(1)
    trajectory = (rng.random((points, 2), dtype=cupy.float32) - 0.5) * size
    samples, images = (
        rng.standard_normal((coils, count, 2), dtype=cupy.float32).view(cupy.complex64)[..., 0]
        for count in (points, size * size)
    )
    return trajectory, cupy.ascontiguousarray(samples), cupy.ascontiguousarray(images).reshape(coils, size, size)


def _prepared(variant: str, coils: int, points: int, size: int) -> Callable[[], Any]:
    import cupy

    trajectory, samples, images = _inputs(coils, points, size)
    weights = cupy.linspace(0.5, 1.5, points, dtype=cupy.float32)
    plan = Plan(trajectory, (size, size), 3)

    def run() -> None:
        stream = cupy.cuda.get_current_stream()
        task = ExactTask(plan=plan, samples=samples, images=images, weights=weights, stream=stream)
        VARIANTS[variant].run(task)

    return run


def _by_library(kind: str, coils: int, points: int, size: int) -> Callable[[], Any]:
    """The plain complex product by cuBLAS, with factors computed in advance."""
    import cupy

    trajectory, samples, images = _inputs(coils, points, size)
    places = cupy.arange(size) - size // 2
    x, y = (cupy.exp(2j * cupy.pi * (k[:, None] * places / size)).astype(cupy.complex64) for k in trajectory.T)
    parts = [slice(begin, begin + LIBRARY_POINTS) for begin in range(0, points, LIBRARY_POINTS)]

    def adjoint() -> Any:
        for coil, image in zip(samples, images, strict=True):
            image.fill(0)
            for part in parts:
                image += (coil[part, None] * x[part]).T @ y[part]

    def forward() -> Any:
        back = y.conj()
        for image, coil in zip(images, samples, strict=True):
            for part in parts:
                coil[part] = ((back[part] @ image.T) * x[part].conj()).sum(1)

    return adjoint if kind == "adjoint" else forward
