"""Regularised reconstruction on a GPU, step by step: the operators of an iteration, and whole solutions.

One slice of 256² and 32 coils, 400 spokes of 512 samples; 25 frames of 320² and 24 coils; and 5 coefficients of volumes
with 12 virtual coils.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.options import Options
from kernels.nufft import Nufft, SubspaceToeplitz, Toeplitz, toeplitz_kernel, toeplitz_shape
from kernels.proximal import differences, inner, magnitudes
from kernels.sense import CapturedCg, conjugate_gradient, density, gridded, toeplitz_normal
from kernels.sense.regularized import L1Wavelet, LowRank, Problem, TotalVariation, largest_eigenvalue, regularized_sense

ROUNDS = 7


def milliseconds(cupy: Any, run: Callable[[], Any]) -> str:
    """Median and range of a call, by events around it, after two calls to warm up."""
    run(), run()
    found = []
    for _ in range(ROUNDS):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(cupy.cuda.get_elapsed_time(begin, end))
    return f"{np.median(found):9.3f} ms ({min(found):.3f} to {max(found):.3f})"


def scan(cupy: Any, n: int, coils: int, spokes: int, count: int) -> tuple[Any, Any, Any, float]:
    """The normal operator, right-hand side, transform's arguments and energy of random samples along golden angles."""
    rng = np.random.default_rng(0)
    angle = np.arange(spokes) * np.pi * (np.sqrt(5) - 1) / 2
    radius = (np.arange(count) - count // 2) * (n / count)
    points = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)])[:, None]
    trajectory = cupy.asarray(points.reshape(2, -1).T.copy())
    maps = cupy.asarray(rng.normal(size=(coils, n, n)) + 1j * rng.normal(size=(coils, n, n)), cupy.complex64)
    maps /= cupy.sqrt(cupy.sum(cupy.abs(maps) ** 2, axis=0))
    weights = density.pipe_menon(trajectory, (n, n))
    transform = Nufft(trajectory, (n, n), eps=1e-4, coils=coils)
    grid = (cupy.arange(n, dtype=np.float32) - n // 2) / n
    picture = ((cupy.hypot(grid[:, None], grid) < 0.4) + (cupy.hypot(grid[:, None] - 0.1, grid) < 0.1)) * (1 + 0j)
    data = transform.forward(maps * picture.astype(np.complex64))
    normal = toeplitz_normal(Toeplitz(toeplitz_kernel(trajectory, weights, (n, n), 1e-4), (n, n)), maps)
    right = gridded(transform, data, maps, weights)
    energy = float(cupy.sum(cupy.abs(data) ** 2 * weights))
    return normal, right, (transform, data, maps, weights), energy


def time_subspace(cupy: Any, n: int, coils: int = 12, coefficients: int = 5) -> None:
    """Iterations of low rank over coefficients; the kernels are positive multiples of one, which costs the same."""
    shape = (n,) * 3
    rng = cupy.random.default_rng(0)
    kernel = rng.random(toeplitz_shape(shape, host=False), dtype=np.float32) / (8 * n**3)
    diagonal = np.eye(coefficients)[np.triu_indices(coefficients)] + 0.1
    kernels = cupy.asarray(diagonal, np.float32).reshape(-1, 1, 1, 1) * kernel

    def noise(*sizes: int) -> Any:
        return rng.standard_normal((*sizes, 2), dtype=np.float32).view(np.complex64)[..., 0]

    maps, images = noise(coils, *shape), noise(coefficients, *shape)
    maps /= cupy.sqrt(cupy.sum(cupy.abs(maps) ** 2, axis=0))
    toeplitz, out = SubspaceToeplitz(kernels, coefficients, shape), cupy.empty_like(images)
    penalty = LowRank(0.01, shape, xp=cupy, frames=coefficients)
    problem = Problem(
        normal=lambda series: toeplitz.apply_sense(series, maps, out), right=images, energy=1e9, penalties=[penalty]
    )
    name = f"{n}³, {coils} coils, {coefficients} coefficients"
    print(f"{name}: normal", milliseconds(cupy, lambda: toeplitz.apply_sense(images, maps, out)))
    print(f"{name}: llr prox", milliseconds(cupy, lambda: penalty.shrink(images, np.float32(0.01))))
    print(f"{name}: 5 iterations", milliseconds(cupy, lambda: regularized_sense(problem, iterations=5, largest=1.0)))


def main() -> None:
    Options("mri/regularized", __doc__).parse_args()
    import cupy

    print(cupy.cuda.runtime.getDeviceProperties(0)["name"].decode())
    blocks = cupy.zeros((2, 1 << 28), np.float32)
    print("copy of 1 GiB          ", milliseconds(cupy, lambda: cupy.copyto(blocks[1], blocks[0])))
    n = 256
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        one, right, rest, energy = scan(cupy, n, 32, 400, 512)

        def normal(series: Any) -> Any:
            return one(series[0])[None]

        image = right[None].copy()
        penalty = L1Wavelet(0.005, (n, n), xp=cupy)
        largest = largest_eigenvalue(normal, image)
        print(f"largest eigenvalue      {largest:.3f}")
        solver = CapturedCg(one, right)
        for name, run in {
            "right-hand side": lambda: gridded(*rest),
            "normal operator": lambda: normal(image),
            "wavelet prox": lambda: penalty.shrink(image, np.float32(0.01)),
            "inner": lambda: inner(image, image),
            "magnitudes": lambda: magnitudes(image),
            "differences": lambda: differences(image, (1, 2)),
            "10 CG iterations": lambda: conjugate_gradient(one, right, iterations=10),
            "right and 10 CG, graph": lambda: solver.solve(gridded(*rest), iterations=10),
            "10 CG, new graph": lambda: CapturedCg(one, right).solve(right, iterations=10),
            "right and 10 CG": lambda: conjugate_gradient(one, gridded(*rest), iterations=10),
        }.items():
            print(f"{name:23}", milliseconds(cupy, run))
        for name, penalties, iterations in (
            ("FISTA l1-wavelet, 100", [penalty], 100),
            ("ADMM tv, 30", [TotalVariation(0.005, (1, 2))], 30),
        ):
            for capture in (False, True):
                asked = Problem(normal=normal, right=image, energy=energy, penalties=penalties, capture=capture)
                run = lambda asked=asked, iterations=iterations: regularized_sense(  # noqa: E731
                    asked, iterations=iterations, largest=largest
                )
                print(f"{name:23}", milliseconds(cupy, run), "graph" if capture else "launches")
        n, frames = 320, 25
        parts = [scan(cupy, n, 24, 21, 640) for _ in range(frames)]
        series = cupy.stack([each[1] for each in parts])
        product = cupy.empty_like(series)

        def all_frames(given: Any) -> Any:
            for each, picture, into in zip(parts, given, product, strict=True):
                into[...] = each[0](picture)
            return product

        energy = sum(each[3] for each in parts)
        for name, penalties in (
            ("25 frames, tv in time", [TotalVariation(0.01, (0,))]),
            ("25 frames, llr", [LowRank(0.01, (n, n), xp=cupy, frames=frames)]),
        ):
            asked = Problem(normal=all_frames, right=series, energy=energy, penalties=penalties)
            print(
                f"{name:23}", milliseconds(cupy, lambda asked=asked: regularized_sense(asked, iterations=20)), "20 its"
            )
        time_subspace(cupy, 128)


if __name__ == "__main__":
    main()
