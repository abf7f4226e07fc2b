"""Smoothing against other libraries, on the CPU or, with --device cuda, on a GPU (on arrays in device memory).

The installed libraries, ours and a copy by the device are interleaved in one run. Calls of more than a quarter of a
second run once, and those that would take more than two seconds, judged by a part of the image, do not run.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.images.smoothing.inputs import WORKLOADS, Workload
from benchmarks.options import Options
from benchmarks.rounds import Rival, band, library, measure, ratio
from kernels.smoothing import gaussian_filter, uniform_filter

OURS, COPY = "millrace", "copy"
ONCE_S, LIMIT_S = 0.25, 2.0
PART_ROWS = 64


def cpu_rivals(work: Workload, image: Any, workers: int) -> Iterator[Rival]:
    """Every library that can do this work on the CPU; `benchmarks.images.smoothing.cuda` has those for a GPU."""
    yield Rival(name=OURS, device="cpu", run=_ours(work, image, workers))
    yield Rival(name="OpenCV", device="cpu", run=_opencv(work, image, workers))
    yield Rival(name="SciPy", device="cpu", run=_scipy(work, image))
    yield Rival(name=COPY, device="cpu", run=_copy(image))


def _ours(work: Workload, image: Any, workers: int) -> Callable[[], object]:
    out = np.ones_like(image)
    common: dict[str, Any] = {"mode": "mirror", "axes": (0, 1), "out": out, "workers": workers}
    if work.size:
        return lambda: uniform_filter(image, work.size, **common)
    return lambda: gaussian_filter(image, float(work.sigma or 0), **common)


def _opencv(work: Workload, image: Any, workers: int) -> Callable[[], object] | None:
    cv2 = library("cv2")
    if cv2 is None:
        return None
    cv2.setNumThreads(workers)
    out = np.ones_like(image)
    if work.size:
        return lambda: cv2.blur(image, (work.size, work.size), out)
    sigma = work.sigma or 0
    return lambda: cv2.GaussianBlur(image, (8 * sigma + 1, 8 * sigma + 1), sigma, out)


def _scipy(work: Workload, image: Any) -> Callable[[], object] | None:
    ndimage = library("scipy.ndimage")
    if ndimage is None:
        return None
    out = np.ones_like(image)
    if work.size:
        return lambda: ndimage.uniform_filter(image, work.size, out, mode="mirror", axes=(0, 1))
    return lambda: ndimage.gaussian_filter(image, work.sigma, output=out, mode="mirror", axes=(0, 1))


def _copy(image: Any) -> Callable[[], object]:
    """The memory bound of one thread: read once, write once."""
    out = np.ones_like(image)
    return lambda: np.copyto(out, image)


def main() -> None:
    options = _options()
    side = options.size or (8192 if options.device == "cuda" else 4000)
    device = _device_name(options)
    print(f"{side} × {side} pixels on {device}, median of {options.repeats} rounds")
    report: dict[str, Any] = {"device": device, "pixels": [side, side], "repeats": options.repeats}
    report |= {"rivals": [], "variants": []}
    for work in WORKLOADS:
        if options.only in work.name:
            _measure(work, side, options, report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False))
    if options.plot:
        _plot(report["rivals"], options.plot)
        if options.variants:
            from benchmarks.images.smoothing.variants import plot_variants

            plot_variants(report["variants"], options.plot.with_stem(f"{options.plot.stem}-variants"))


def _measure(work: Workload, side: int, options: argparse.Namespace, report: dict[str, Any]) -> None:
    image = work.image(side)
    contenders = _quick(_rivals(work, image[:PART_ROWS], options), _rivals(work, image, options), side)
    result = _result(work.name, contenders, side**2 / 1e6, options.repeats)
    _print(result)
    report["rivals"].append(result)
    if options.variants:
        from benchmarks.images.smoothing.variants import measure_variants, print_variants

        del contenders  # their arrays
        variants = measure_variants(work, image, options.repeats)
        print_variants(variants)
        report["variants"].append(variants)


def _rivals(work: Workload, image: Any, options: argparse.Namespace) -> Iterator[Rival]:
    if options.device == "cpu":
        return cpu_rivals(work, image, options.workers)
    from benchmarks.images.smoothing.cuda import cuda_rivals

    return cuda_rivals(work, image)


def _quick(parts: Iterable[Rival], whole: Iterable[Rival], side: int) -> list[Rival]:
    """The rivals, compiled by filtering a part of the image (ours by all of it), without those that take too long."""
    found = []
    for part, rival in zip(parts, whole, strict=True):
        if rival.name == OURS and rival.run is not None:
            rival.run()
        elif part.run is not None:
            try:
                part.run()
                seconds = part.clock(part.run) * side / PART_ROWS
            except RuntimeError as error:
                seconds = math.inf
                print(f"{part.name}: {error}")
            if seconds > LIMIT_S:
                print(f"{part.name}: about {seconds:.0f} s a call")
                rival = replace(rival, run=None)
        found.append(rival)
    return found


def _options() -> argparse.Namespace:
    parser = Options("images/smoothing", __doc__)
    parser.add_rounds(repeats=7)
    parser.add_rows()
    parser.add_argument("--variants", action="store_true", help="also every variant of ours, from naive on (cuda)")
    parser.add_argument("--size", type=int, help="side of the square image in pixels (default: 4000, cuda: 8192)")
    parser.add_argument("--plot", type=Path, help="plot to this file; variants: FILE-variants (needs matplotlib)")
    options = parser.parse_args()
    if options.variants and options.device != "cuda":
        parser.error("--variants are kernels: add --device cuda")
    return options


def _device_name(options: argparse.Namespace) -> str:
    if options.device == "cuda":
        from pipeline.engine.devices.discovery import cuda_properties

        return str(cuda_properties(0)["model"])
    return f"{options.workers} CPU threads"


def _result(name: str, contenders: list[Rival], megapixels: float, repeats: int) -> dict[str, Any]:
    present = measure(contenders, repeats, ONCE_S)
    rows = {}
    copy_s = next(rival.median_s for rival in present if rival.name == COPY)
    for rival in present:
        low, high = band([megapixels / seconds for seconds in rival.seconds])
        rows[rival.name] = {
            "device": rival.device,
            "megapixels_per_s": megapixels / rival.median_s,
            "band": [low, high],
            "fraction_of_copy": copy_s / rival.median_s,
            "ours_is_faster_by": ratio(present[0], rival),
        }
    return {"work": name, "rivals": rows, "absent": [rival.name for rival in contenders if rival.run is None]}


def _print(result: dict[str, Any]) -> None:
    print(f"\n{result['work']}")
    for name, row in result["rivals"].items():
        low, high = row["band"]
        line = f"  {name:10} {row['megapixels_per_s']:8.0f} Mpixel/s  ({low:.0f} – {high:.0f})"
        line += f"   {row['fraction_of_copy']:.3f} of the copy"
        if name != OURS:
            median, least, most = row["ours_is_faster_by"]
            line += f"   ours ×{median:.2f}  ({least:.2f} – {most:.2f})"
        print(line, flush=True)
    if result["absent"]:
        print(f"  absent, not able to do this or too slow: {', '.join(result['absent'])}")


def _plot(results: list[dict[str, Any]], path: Path) -> None:
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(name for result in results for name in result["rivals"]))
    figure, axes = plt.subplots(figsize=(10, 0.6 * len(results) + 1.5), layout="constrained")
    for position, name in enumerate(names):
        positions = [i + 0.8 * position / len(names) for i in range(len(results))]
        speeds = [result["rivals"].get(name, {}).get("megapixels_per_s", 0) for result in results]
        axes.barh(positions, speeds, height=0.8 / len(names), label=name)
    axes.set_yticks([i + 0.3 for i in range(len(results))], [result["work"] for result in results])
    axes.invert_yaxis()
    axes.set_xlabel("Mpixel/s")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(path)


if __name__ == "__main__":
    main()
