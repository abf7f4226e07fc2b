"""Non-uniform Fourier transforms of radial trajectories, on the CPU or, with --device cuda, on a GPU: planned once,
then both directions and the normal operator of CG-SENSE, against SigPy and cuFINUFFT if these are installed.

Reports times, samples of all coils per second, and on CUDA the time of a copy of the same images and samples, measured
in the same rounds, as a fraction of the transform's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from benchmarks.options import Options
from benchmarks.rounds import Rival, measure, print_row, queued_seconds, row
from kernels.nufft import Nufft, Toeplitz, toeplitz_kernel
from kernels.nufft.cases import radial, random_values

COPY = "copy"
DIRECTIONS = ("adjoint", "forward", "normal")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One size of problem; each direction is a row of the table."""

    shape: tuple[int, ...]
    points: int
    readout: int
    coils: int
    eps: float = 1e-3
    devices: tuple[str, ...] = ("cuda",)

    def name(self, direction: str) -> str:
        sizes = " × ".join(map(str, self.shape))
        return f"{direction}, {sizes}, {self.points} samples, {self.coils} coils, eps {self.eps:g}"

    def trajectory(self) -> Any:
        return (radial(self.points, len(self.shape), readout=self.readout) * np.array(self.shape)).astype(np.float32)

    @property
    def bytes(self) -> int:
        """Minimum traffic of a transform."""
        return 8 * self.coils * (self.points + math.prod(self.shape)) + 4 * self.points * len(self.shape)


WORKLOADS = [
    Workload(shape=(256, 256), points=6400, readout=256, coils=12, devices=("cpu", "cuda")),
    Workload(shape=(64, 64, 64), points=100_000, readout=128, coils=4, devices=("cpu", "cuda")),
    Workload(shape=(256, 256), points=65_536, readout=512, coils=12),
    Workload(shape=(256, 256), points=655_360, readout=512, coils=32),
    Workload(shape=(256, 256), points=655_360, readout=512, coils=32, eps=1e-6),
    Workload(shape=(128, 128, 128), points=2_000_000, readout=256, coils=1),
    Workload(shape=(256, 256, 176), points=6_800_384, readout=512, coils=1),
    Workload(shape=(256, 256, 176), points=6_800_384, readout=512, coils=8),
]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The inputs of a workload's rivals, arrays of one library."""

    trajectory: Any
    samples: Any
    images: Any
    weights: Any


def inputs(work: Workload, library: Any) -> Inputs:
    """Arrays of `library`, NumPy or CuPy."""
    return Inputs(
        trajectory=library.asarray(work.trajectory()),
        samples=library.asarray(random_values((work.coils, work.points), 1)),
        images=library.asarray(random_values((work.coils, *work.shape), 2)),
        weights=library.linspace(0.5, 1.5, work.points, dtype=np.float32),
    )


def ours(
    work: Workload, direction: str, given: Inputs, workers: int | None, method: str = "auto"
) -> Callable[[], object]:
    """The public classes, with preallocated results."""
    samples, images = given.samples, given.images
    if direction == "normal":
        kernel = toeplitz_kernel(given.trajectory, given.weights, work.shape, work.eps, workers=workers)
        toeplitz, image, out = Toeplitz(kernel, work.shape, workers=workers), images[0].copy(), images[0].copy()
        return lambda: toeplitz.apply_sense(image, images, out)
    plan = Nufft(given.trajectory, work.shape, eps=work.eps, coils=work.coils, method=method, workers=workers)
    if direction == "adjoint":
        return lambda: plan.adjoint(samples, given.weights, images)
    return lambda: plan.forward(images, samples)


def by_sigpy(work: Workload, direction: str, given: Inputs) -> Callable[[], object]:
    """SigPy's transforms; the normal operator includes the maps, as in SigPy's SenseRecon."""
    sigpy = import_module("sigpy")
    if direction == "adjoint":
        shape = [work.coils, *work.shape]
        return lambda: sigpy.nufft_adjoint(given.samples * given.weights, given.trajectory, shape)
    if direction == "forward":
        return lambda: sigpy.nufft(given.images, given.trajectory)
    linop = import_module("sigpy.mri.linop").Sense(given.images, coord=given.trajectory, weights=given.weights)
    return lambda: linop.N(given.images[0])


def by_cufinufft(work: Workload, direction: str, given: Inputs, method: int) -> Callable[[], object]:
    """method: 1 by points, 2 through shared memory, 3 (adjoints only) by outputs; its own choice is often slow."""
    cufinufft = import_module("cufinufft")
    kind, sign = (1, 1) if direction == "adjoint" else (2, -1)
    plan = cufinufft.Plan(kind, work.shape, work.coils, eps=work.eps, isign=sign, dtype="complex64", gpu_method=method)
    axes = [given.trajectory[:, axis] * np.float32(2 * np.pi / n) for axis, n in enumerate(work.shape)]
    plan.setpts(*axes)
    if direction == "adjoint":
        return lambda: plan.execute(given.samples, out=given.images)
    return lambda: plan.execute(given.images, out=given.samples)


def cpu_rivals(work: Workload, direction: str, workers: int) -> Iterator[Rival]:
    given = inputs(work, np)
    for count in dict.fromkeys((workers, 1)):
        yield Rival(name=f"{count} threads", device="cpu", run=ours(work, direction, given, count))
    if find_spec("sigpy"):
        yield Rival(name="SigPy", device="cpu", run=by_sigpy(work, direction, given))


def cuda_rivals(work: Workload, direction: str) -> Iterator[Rival]:
    """Ours, the steps of its ladder from the fastest down, the other libraries, and a copy of as many bytes."""
    import cupy

    given = inputs(work, cupy)
    yield Rival(name="ours", device="cuda", run=ours(work, direction, given, None), clock=queued_seconds)
    if direction != "normal":
        gridding = ours(work, direction, given, None, "gridding")
        yield Rival(name="ours, gridding", device="cuda", run=gridding, clock=queued_seconds)
        yield from _steps(work, direction, given)
    if find_spec("cufinufft") and direction != "normal":
        for method in (1, 2, 3) if direction == "adjoint" else (1, 2):
            run = by_cufinufft(work, direction, given, method)
            yield Rival(name=f"cuFINUFFT, {method}", device="cuda", run=run, clock=queued_seconds)
    if find_spec("sigpy"):
        yield Rival(name="SigPy", device="cuda", run=by_sigpy(work, direction, given), clock=queued_seconds)
    source = cupy.ones(work.bytes // 8, cupy.float32)  # read and written: the bytes of a transform
    target = cupy.empty_like(source)
    yield Rival(name=COPY, device="cuda", run=lambda: cupy.copyto(target, source), clock=queued_seconds)


def _steps(work: Workload, direction: str, given: Inputs) -> Iterator[Rival]:
    import cupy

    from kernels.nufft.gridding.cuda import SHARED_WIDTHS, VARIANTS, Plan

    plan, stream = Plan(given.trajectory, work.shape, work.eps), cupy.cuda.get_current_stream()
    for name in reversed(VARIANTS):
        if name.startswith("spread") != (direction == "adjoint"):
            continue
        if name == "spread_shared" and plan.spreading.width != SHARED_WIDTHS[plan.axes]:
            continue

        def run(name: str = name) -> None:
            if direction == "adjoint":
                plan.adjoint(given.samples, given.weights, given.images, stream, name)
            else:
                plan.forward(given.images, given.samples, stream, name)

        yield Rival(name=name, device="cuda", run=run, clock=queued_seconds)


def main() -> None:
    parser = Options("mri/nufft", __doc__)
    parser.add_rounds()
    parser.add_rows()
    options = parser.parse_args()
    results = []
    for work in WORKLOADS:
        for direction in DIRECTIONS:
            if options.only not in work.name(direction) or options.device not in work.devices:
                continue
            cuda = options.device == "cuda"
            rivals = cuda_rivals(work, direction) if cuda else cpu_rivals(work, direction, options.workers)
            result = _result(work, direction, measure(list(rivals), options.repeats))
            _print(result)
            results.append(result)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1, ensure_ascii=False))


def _result(work: Workload, direction: str, rivals: list[Rival]) -> dict[str, Any]:
    copy = next((rival for rival in rivals if rival.name == COPY), None)
    rows = {
        rival.name: row(
            rival,
            rivals[0],
            samples_per_s=work.coils * work.points / rival.median_s,
            copy_fraction=copy.median_s / rival.median_s if copy else None,
        )
        for rival in rivals
        if rival is not copy
    }
    return {"work": work.name(direction), "rows": rows}


def _print(result: dict[str, Any]) -> None:
    print(f"\n{result['work']}")
    for name, figures in result["rows"].items():
        more = [f"{figures['samples_per_s'] / 1e6:8.4g} M samples/s"]
        if figures["copy_fraction"]:
            more.append(f"{figures['copy_fraction']:.3f} of the copy")
        print_row(name, figures, *more)


if __name__ == "__main__":
    main()
