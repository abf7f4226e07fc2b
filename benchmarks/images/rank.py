"""Rank filters against other libraries, on the CPU or, with --device cuda, on a GPU (on arrays in device memory).

The installed libraries, ours and a copy by the device are interleaved in one run. Slow libraries filter the first rows
alone; their speed is by pixel.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.options import Options
from benchmarks.rounds import Rival, band, host_seconds, measure, queued_seconds
from kernels.rank import maximum_filter, median_filter

OURS, COPY = "millrace", "copy"
QUEUED_CALLS, LONG_S = 10, 0.02
# Samples of windows that a slow library reads in one run.
SLOW_TAPS = {"cpu": 3e7, "cuda": 1e10}


@dataclass(frozen=True, kw_only=True)
class Work:
    """One row of the table."""

    dtype: str
    size: tuple[int, ...]
    most: bool = False  # the maximum instead of the median

    @property
    def name(self) -> str:
        return f"{'maximum' if self.most else 'median'} {self.dtype} {'×'.join(map(str, self.size))}"

    def image(self, side: int) -> Any:
        """Random samples: side² pixels, or as many in a volume."""
        shape = (side, side) if len(self.size) == 2 else (side // 32, side // 4, 128)
        rng = np.random.default_rng(0)
        if np.dtype(self.dtype).kind == "f":
            return rng.standard_normal(shape, self.dtype)
        return rng.integers(0, np.iinfo(self.dtype).max, shape, self.dtype, endpoint=True)


WORKS = (
    *(Work(dtype="uint16", size=(size, size)) for size in (3, 5, 7, 15, 31)),
    *(Work(dtype="uint16", size=(size,) * 3) for size in (3, 5)),
    *(Work(dtype="uint8", size=(size, size)) for size in (3, 5, 7, 15, 31, 63)),
    *(Work(dtype="float32", size=(size, size)) for size in (3, 5, 15)),
    *(Work(dtype="uint16", size=(size, size), most=True) for size in (3, 31)),
)


def rivals(work: Work, image: Any, device: str, workers: int) -> Iterator[tuple[Rival, float]]:
    """Every library that can do this work, and how many pixels it filters in a run."""
    filtered, out = maximum_filter if work.most else median_filter, image.copy()
    options: dict[str, Any] = {"mode": "nearest", "out": out, "workers": workers}
    clock = _event_seconds if device == "cuda" else host_seconds
    rows = min(len(image), max(work.size[0], int(SLOW_TAPS[device] / math.prod(work.size) / (image.size / len(image)))))
    part = image[:rows].copy()

    def rival(name: str, run: Callable[[], object] | None, array: Any) -> tuple[Rival, float]:
        return Rival(name=name, device=device, run=run, clock=clock), array.size

    yield rival(OURS, lambda: filtered(image, work.size, **options), image)
    if device == "cpu":
        yield rival("OpenCV", _opencv(work, image, workers), image)
    for name, module in (("SciPy", "scipy.ndimage"),) if device == "cpu" else (("cupyx", "cupyx.scipy.ndimage"),):
        theirs = getattr(_module(module), "maximum_filter" if work.most else "median_filter", None)
        yield rival(name, theirs and partial(theirs, part, work.size, mode="nearest"), part)
    if device == "cuda":
        yield rival("cuCIM", _cucim(work, image), image)
    yield rival(COPY, (lambda: np.copyto(out, image)) if device == "cpu" else _device_copy(out, image), image)


def _opencv(work: Work, image: Any, workers: int) -> Callable[[], object] | None:
    cv2 = _module("cv2")
    has = work.dtype == "uint8" or (work.size[0] <= 5 and not work.dtype.endswith("64")) or work.most
    if cv2 is None or len(work.size) != 2 or not has:
        return None
    cv2.setNumThreads(workers)
    out = image.copy()
    if work.most:
        return lambda: cv2.dilate(image, np.ones(work.size, np.uint8), out, borderType=cv2.BORDER_REPLICATE)
    return lambda: cv2.medianBlur(image, work.size[0], out)


def _cucim(work: Work, image: Any) -> Callable[[], object] | None:
    """Its median of integers counts in histograms, whose time hardly depends on the window."""
    module = _module("cucim.skimage.morphology" if work.most else "cucim.skimage.filters")
    if module is None or len(work.size) != 2:
        return None
    import cupy

    footprint = cupy.ones(work.size, bool)
    return partial(module.dilation if work.most else module.median, image, footprint, mode="nearest")


def _device_copy(out: Any, image: Any) -> Callable[[], object]:
    import cupy

    return lambda: cupy.copyto(out, image)


def _event_seconds(run: Callable[[], object]) -> float:
    alone = queued_seconds(run, 1)
    return alone if alone > LONG_S else queued_seconds(run, QUEUED_CALLS)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _measure(work: Work, side: int, options: argparse.Namespace) -> dict[str, Any]:
    image = work.image(side)
    if options.device == "cuda":
        import cupy

        image = cupy.asarray(image)
    contenders = list(rivals(work, image, options.device, options.workers))
    pixels = {rival.name: count for rival, count in contenders}
    present = measure([rival for rival, _ in contenders], options.repeats)
    copied = next(pixels[COPY] / rival.median_s for rival in present if rival.name == COPY)
    ours = [pixels[OURS] / seconds for seconds in present[0].seconds]
    rows = {}
    print(f"\n{work.name}, {' × '.join(map(str, image.shape))}")
    for rival in present:
        speeds = [pixels[rival.name] / seconds for seconds in rival.seconds]
        low, high = band(speeds)
        middle = pixels[rival.name] / rival.median_s
        rows[rival.name] = {"pixels_per_s": middle, "band": [low, high], "fraction_of_copy": middle / copied}
        line = f"  {rival.name:10} {middle / 1e6:9.1f} Mpixel/s  ({low / 1e6:.1f} – {high / 1e6:.1f})"
        line += f"   {middle / copied:.5f} of the copy"
        if rival.name != OURS:
            ratios = [a / b for a, b in zip(ours, speeds, strict=True)]
            least, most = band(ratios)
            rows[rival.name]["ours_is_faster_by"] = [float(np.median(ratios)), least, most]
            line += f"   ours ×{np.median(ratios):.2f}  ({least:.2f} – {most:.2f})"
        print(line, flush=True)
    return {"work": work.name, "rivals": rows}


def main() -> None:
    parser = Options("images/rank", __doc__)
    parser.add_rounds(repeats=5)
    parser.add_rows()
    parser.add_argument("--size", type=int, help="side of the square image in pixels (default: 2048, cuda: 8192)")
    options = parser.parse_args()
    side = options.size or (8192 if options.device == "cuda" else 2048)
    report = [_measure(work, side, options) for work in WORKS if options.only in work.name]
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
