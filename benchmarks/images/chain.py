"""A chain of three steps against its kernels by themselves, on the CPU or, with --device cuda, in a GPU's memory.

The chain computes one chunk, the whole image, as a job does; the kernels filter the same image.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import Options
from benchmarks.rounds import Rival, band, host_seconds, measure, queued_seconds
from kernels.morphology import white_tophat
from kernels.rank import median_filter
from kernels.smoothing import gaussian_filter
from pipeline.formats.image.base import Region
from pipeline.workloads import JobSpec, workload_named

STEPS: dict[str, Callable[[Any], Any]] = {
    "median size=3": lambda image: median_filter(image, 3),
    "tophat size=51": lambda image: white_tophat(image, 51),
    "gaussian sigma=2": lambda image: gaussian_filter(image, 2),
}


def main() -> None:
    parser = Options("images/chain", __doc__)
    parser.add_rounds(repeats=5)
    parser.add_argument("--size", type=int, help="side of the square image in pixels (default: 2048, cuda: 8192)")
    options = parser.parse_args()
    side = options.size or (8192 if options.device == "cuda" else 2048)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        source = Path(folder) / "in.npy"
        np.lib.format.open_memmap(source, "w+", np.uint16, (side, side))
        workload: Any = workload_named("chain")
        spec = JobSpec(
            workload="chain", input=source, output=Path(folder) / "out.npy",
            parameters=workload.Parameters(step=[*STEPS]),
        )  # fmt: skip
        job: Any = workload.open(spec)
        region = Region((0, 0), (side, side))
        with_halo = job._held(region).shape
        samples: Any = np.random.default_rng(0).integers(0, 1 << 16, with_halo, np.uint16)
        image = samples[:side, :side].copy()
        if options.device == "cuda":
            import cupy

            samples, image = cupy.asarray(samples), cupy.asarray(image)
        clock = queued_seconds if options.device == "cuda" else host_seconds
        runs: dict[str, Callable[[], Any]] = {"chain": lambda: job.computed(samples, region)}
        runs |= {name: partial(step, image) for name, step in STEPS.items()}
        rivals = measure(
            [Rival(name=name, device=options.device, run=run, clock=clock) for name, run in runs.items()],
            options.repeats,
        )
        job.close()
    for rival in rivals:
        low, high = band(rival.seconds)
        print(f"{rival.name:18} {rival.median_s * 1e3:9.3f} ms  ({low * 1e3:.3f} – {high * 1e3:.3f})")
    ratios = [chain / sum(rest) for chain, *rest in zip(*(rival.seconds for rival in rivals), strict=True)]
    low, high = band(ratios)
    print(f"chain / sum of kernels {np.median(ratios):.3f}  ({low:.3f} – {high:.3f})")


if __name__ == "__main__":
    main()
