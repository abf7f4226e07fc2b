"""The bilateral filter against OpenCV on the CPU or, with --device cuda, against NPP, a function for cupyx's
generic_filter, and a plain CUDA kernel of one pixel a thread. cupyx and cuCIM (26.10) have no bilateral filter.

Results of the last two are compared with ours; OpenCV's window is a disk.
"""

from __future__ import annotations

import argparse
import ctypes
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.images import npp
from benchmarks.options import Options
from benchmarks.rounds import Rival, device_copy, event_seconds, host_seconds, library, measure, ratio
from kernels.bilateral import bilateral

Run = Callable[[], Any]
SIGMA = 2.0
WORKS = [
    *((dtype, (size, size)) for size in (5, 9) for dtype in ("uint8", "uint16", "float32")),
    *((dtype, (size,) * 3) for size in (3, 5) for dtype in ("uint16", "float32")),
]
SOURCE = Path(__file__).with_suffix(".cu")
TYPES = {"uint8": "unsigned char", "uint16": "unsigned short", "float32": "float"}


def main() -> None:
    options = Options("images/bilateral", __doc__)
    options.add_rounds()
    options.add_rows()
    options.add_argument("--size", type=int, help="side of the square images in pixels (default: 2048, cuda: 8192)")
    asked = options.parse_args()
    for dtype, sizes in WORKS:
        if asked.only in f"{dtype} {'×'.join(map(str, sizes))}":
            _compare(dtype, sizes, asked.size or (8192 if asked.device == "cuda" else 2048), asked)


def _compare(dtype: str, sizes: tuple[int, ...], side: int, asked: argparse.Namespace) -> None:
    shape = (side, side) if len(sizes) == 2 else (side // 32, side // 4, 128)
    image: Any = np.random.default_rng(0).random(shape, np.float32)
    sigma_range = 0.1
    if dtype != "float32":
        scale = np.iinfo(dtype).max
        image, sigma_range = (image * scale).round().astype(dtype), 0.1 * scale
    clock = host_seconds
    if asked.device == "cuda":
        import cupy

        image, clock = cupy.asarray(image), event_seconds
    out = image.copy()
    runs: dict[str, Run | None] = {
        "millrace": lambda: bilateral(
            image, sigma_range, SIGMA, size=sizes, mode="nearest", out=out, workers=asked.workers
        )
    }
    if asked.device == "cuda":
        runs |= {"NPP": _npp(image, sizes, sigma_range), "cupyx.generic_filter": _generic(image, sizes, sigma_range)}
        runs |= {"plain kernel": _plain(image, sizes, sigma_range), "copy": device_copy(image)}
        ours = bilateral(image, sigma_range, SIGMA, size=sizes, mode="nearest")
        for name in ("cupyx.generic_filter", "plain kernel"):
            run = runs[name]
            assert run is not None
            apart = abs(run().astype(np.float64) - ours).max()
            assert apart <= (1 if dtype != "float32" else 2e-4 * sigma_range), f"{name} is {apart} apart"
    else:
        runs["OpenCV"] = _opencv(image, sizes, sigma_range, asked.workers)
    rivals = measure(
        [Rival(name=name, device=asked.device, run=run, clock=clock) for name, run in runs.items()], asked.repeats
    )
    print(f"\n{dtype} {'×'.join(map(str, sizes))}, {' × '.join(map(str, shape))}")
    copied = rivals[-1].median_s if asked.device == "cuda" else math.nan
    for rival in rivals:
        middle, low, high = ratio(rivals[0], rival)
        print(
            f"{rival.name:21} {rival.median_s * 1e3:10.3f} ms  {copied / rival.median_s:7.4f} of a copy  "
            f"{middle:8.2f} times our time ({low:.2f} – {high:.2f})",
            flush=True,
        )


def _opencv(image: Any, sizes: tuple[int, ...], sigma_range: float, workers: int) -> Run | None:
    cv2 = library("cv2")
    if cv2 is None or len(sizes) != 2 or image.dtype == np.uint16:
        return None
    cv2.setNumThreads(workers)
    return lambda: cv2.bilateralFilter(image, sizes[0], sigma_range, SIGMA, borderType=cv2.BORDER_REPLICATE)


def _npp(image: Any, sizes: tuple[int, ...], sigma_range: float) -> Run | None:
    if len(sizes) != 2:
        return None
    squares = ctypes.c_float(sigma_range**2), ctypes.c_float(SIGMA**2)
    return npp.filtering("nppiFilterBilateralGaussBorder", image, sizes[0] // 2, 1, *squares)


def _code(image: Any, sizes: tuple[int, ...], sigma_range: float) -> str:
    macros = {
        "Sample": TYPES[image.dtype.name], "ROUND": "rintf" if image.dtype.kind != "f" else "",
        "DEEP": sizes[0] // 2 if len(sizes) == 3 else 0, "RADIUS": sizes[-1] // 2,
        "BY_VALUE": f"({-0.5 / sigma_range**2:.9e}f)", "BY_PLACE": f"({-0.5 / SIGMA**2:.9e}f)",
    }  # fmt: skip
    return "".join(f"#define {name} {value}\n" for name, value in macros.items()) + SOURCE.read_text()


def _generic(image: Any, sizes: tuple[int, ...], sigma_range: float) -> Run:
    import cupy
    from cupyx.scipy.ndimage import generic_filter

    kernel = cupy.RawKernel(_code(image, sizes, sigma_range), "of_window")
    return lambda: generic_filter(image, kernel, sizes, mode="nearest")


def _plain(image: Any, sizes: tuple[int, ...], sigma_range: float) -> Run:
    import cupy

    planes, rows, columns = (1,) * (3 - image.ndim) + image.shape
    kernel, out = cupy.RawKernel(_code(image, sizes, sigma_range), "of_pixel"), cupy.empty_like(image)

    def run() -> Any:
        kernel((-(-columns // 32), -(-rows // 8), planes), (32, 8), (image, out, planes, rows, columns))
        return out

    return run


if __name__ == "__main__":
    main()
