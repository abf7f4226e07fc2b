"""Rank filters and morphology against other libraries, on the CPU or, with --device cuda, on arrays of a GPU.

The installed libraries, ours and a copy by the device are interleaved in one run. Slow libraries filter the first rows
alone; their speed is by pixel.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.images import npp
from benchmarks.options import Options
from benchmarks.rounds import Rival, band, device_copy, event_seconds, host_seconds, library, measure
from kernels.morphology import white_tophat
from kernels.rank import maximum_filter, median_filter

OURS, COPY = "millrace", "copy"
FILTERS = {"median": median_filter, "maximum": maximum_filter, "tophat": white_tophat}
NAMES = {  # in SciPy and cupyx, in cuCIM, in NPP
    "median": ("median_filter", "filters.median", "nppiFilterMedianBorder"),
    "maximum": ("maximum_filter", "morphology.dilation", "nppiFilterMaxBorder"),
    "tophat": ("white_tophat", "morphology.white_tophat", "nppiMorphTopHatBorder"),
}
# Samples of windows that a slow library reads in one run.
SLOW_TAPS = {"cpu": 3e7, "cuda": 1e10}


@dataclass(frozen=True, kw_only=True)
class Work:
    """One row of the table."""

    dtype: str
    size: tuple[int, ...]
    what: str = "median"

    @property
    def name(self) -> str:
        return f"{self.what} {self.dtype} {'×'.join(map(str, self.size))}"

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
    *(
        Work(dtype=dtype, size=(size, size), what=what)
        for what, sizes in (("maximum", (3, 15, 51, 255)), ("tophat", (3, 15, 51, 255)))
        for dtype in ("uint16", "float32", "uint8")
        for size in sizes
    ),
)


def rivals(work: Work, image: Any, device: str, workers: int) -> Iterator[tuple[Rival, float]]:
    """Every library that can do this work, and how many pixels it filters in a run."""
    out = image.copy()
    options: dict[str, Any] = {"mode": "nearest", "out": out, "workers": workers}
    clock = event_seconds if device == "cuda" else host_seconds
    rows = min(len(image), max(work.size[0], int(SLOW_TAPS[device] / math.prod(work.size) / (image.size / len(image)))))
    part = image[:rows].copy()

    def rival(name: str, run: Callable[[], object] | None, array: Any) -> tuple[Rival, float]:
        return Rival(name=name, device=device, run=run, clock=clock), array.size

    yield rival(OURS, lambda: FILTERS[work.what](image, work.size, **options), image)
    by_axis = part if work.what == "median" else image  # SciPy and cupyx take minima and maxima an axis at a time
    if device == "cpu":
        yield rival("OpenCV", _opencv(work, image, workers), image)
        yield rival("SciPy", _ndimage(work, by_axis, "scipy.ndimage"), by_axis)
        yield rival(COPY, lambda: np.copyto(out, image), image)
    else:
        yield rival("cupyx", _ndimage(work, by_axis, "cupyx.scipy.ndimage"), by_axis)
        yield rival("cuCIM", _cucim(work, part), part)
        yield rival("NPP", _npp(work, part), part)
        yield rival(COPY, device_copy(image), image)


def _ndimage(work: Work, image: Any, module: str) -> Callable[[], object] | None:
    theirs = getattr(library(module), NAMES[work.what][0], None)
    return theirs and partial(theirs, image, work.size, mode="nearest")


def _opencv(work: Work, image: Any, workers: int) -> Callable[[], object] | None:
    cv2 = library("cv2")
    has = work.dtype == "uint8" or work.size[0] <= 5 or work.what != "median"
    if cv2 is None or len(work.size) != 2 or not has:
        return None
    cv2.setNumThreads(workers)
    out = image.copy()
    if work.what == "median":
        return lambda: cv2.medianBlur(image, work.size[0], out)
    how = cv2.MORPH_DILATE if work.what == "maximum" else cv2.MORPH_TOPHAT
    window = np.ones(work.size, np.uint8)
    return lambda: cv2.morphologyEx(image, how, window, out, borderType=cv2.BORDER_REPLICATE)


def _cucim(work: Work, image: Any) -> Callable[[], object] | None:
    """Its median of integers counts in histograms, whose time hardly depends on the window."""
    module, _, name = NAMES[work.what][1].partition(".")
    theirs = getattr(library(f"cucim.skimage.{module}"), name, None)
    if theirs is None or len(work.size) != 2:
        return None
    import cupy

    return partial(theirs, image, cupy.ones(work.size, bool), mode="nearest")


def _npp(work: Work, image: Any) -> Callable[[], object] | None:
    # Its median of 15 × 15 touches memory beyond its arrays, which ends the process's use of the GPU.
    if len(work.size) != 2 or (work.what == "median" and work.size[0] > 7):
        return None
    import cupy

    window = npp.window(work.size[0])
    scratch = cupy.empty(max(64 << 20, 8 * image.nbytes), np.uint8)
    arguments = {
        "median": (*window, scratch),
        "maximum": window,
        "tophat": (cupy.ones(work.size, np.uint8), *window, scratch),
    }
    run = npp.filtering(NAMES[work.what][2], image, *arguments[work.what])
    try:
        _ = run and run()
    except RuntimeError:  # a window that it does not take
        return None
    return run


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
