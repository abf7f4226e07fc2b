"""All of Millrace's smoothing variants on a GPU, from naive to production, against a device copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.images.smoothing.inputs import Workload
from benchmarks.rounds import QUEUED_CALLS, band, queued_seconds
from kernels.smoothing.cases import Case
from kernels.smoothing.cuda import VARIANTS, smooth

COPY = "copy"
ROUND_S = 0.02  # target of a round: QUEUED_CALLS calls if these are fast, otherwise fewer …
SLOW_S = 0.25  # … and above this only one round


def measure_variants(work: Workload, host_image: Any, repeats: int) -> dict[str, Any]:
    """Times each variant that applies: median and band of `repeats` rounds, interleaved with the copy."""
    import cupy

    image = cupy.asarray(host_image)
    out = cupy.ones_like(image)
    windows = _case(work, image.shape).windows()
    runs: dict[str, Callable[[], object]] = {COPY: lambda: cupy.copyto(out, image)}
    for name, variant in VARIANTS.items():
        if variant.can_filter(image.shape, image.dtype, windows):
            part = image[: max(2 * windows[0].taps, 64)]
            smooth(part, windows, 0, None, variant=name)  # compiled before it is timed
            runs[name] = lambda name=name: smooth(image, windows, 0, out, variant=name)
    seconds = {name: [queued_seconds(run, 1)] for name, run in runs.items()}
    calls = {name: max(1, min(QUEUED_CALLS, int(ROUND_S / first))) for name, (first,) in seconds.items()}
    timed = [name for name, (first,) in seconds.items() if first < SLOW_S]
    for name in timed:
        seconds[name].clear()
    for _ in range(repeats):
        for name in timed:
            seconds[name].append(queued_seconds(runs[name], calls[name]))
    copy_s = statistics.median(seconds[COPY])
    rows = {name: _row(each, calls[name], 2 * image.nbytes, copy_s) for name, each in seconds.items()}
    return {"work": work.name, "variants": rows}


def _case(work: Workload, shape: tuple[int, ...]) -> Case:
    what: dict[str, Any] = {"sizes": (work.size,) * 2} if work.size else {"sigmas": (float(work.sigma or 0),) * 2}
    return Case(shape=shape, dtype=work.dtype, axes=(0, 1), modes=("mirror",) * 2, **what)


def _row(seconds: list[float], calls: int, least_bytes: int, copy_s: float) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {
        "milliseconds": 1e3 * median,
        "band": [1e3 * limit for limit in band(seconds)],
        "gigabytes_per_s": least_bytes / median / 1e9,  # the image read once and written once
        "fraction_of_copy": copy_s / median,
        "rounds": len(seconds),
        "calls_a_round": calls,
    }


def print_variants(result: dict[str, Any]) -> None:
    print(f"\n{result['work']}, every variant")
    for name, row in result["variants"].items():
        low, high = row["band"]
        line = (
            f"  {name:14} {row['milliseconds']:10.3f} ms  ({low:.3f} – {high:.3f})  {row['gigabytes_per_s']:7.1f} GB/s"
        )
        print(f"{line}   {row['fraction_of_copy']:.4f} of the copy", flush=True)


def plot_variants(results: list[dict[str, Any]], path: Path) -> None:
    """Fraction of the copy on a logarithmic scale: one panel per image type, one group of bars per filter."""
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    panels: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        panels.setdefault(result["work"].split(", ")[1], []).append(result)
    names = [name for name in VARIANTS if any(name in result["variants"] for result in results)]
    colours = dict(zip(names, plt.get_cmap("tab20").colors, strict=False))
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(10, 3 * len(panels) + 0.5), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, (image, rows) in zip(axes[:, 0], panels.items(), strict=True):
        for position, name in enumerate(names):
            there = [i for i, row in enumerate(rows) if name in row["variants"]]
            fractions = [rows[i]["variants"][name]["fraction_of_copy"] for i in there]
            axis.bar(
                [i + 0.8 * position / len(names) for i in there], fractions, width=0.8 / len(names), color=colours[name]
            )
        axis.set_xticks([i + 0.35 for i in range(len(rows))], [row["work"].split(", ")[0] for row in rows])
        axis.set_yscale("log")
        axis.set_ylabel("fraction of the copy")
        axis.set_title(image)
        axis.grid(axis="y", alpha=0.4)
    figure.legend(handles=[Patch(color=colours[name], label=name) for name in names], loc="outside right upper")
    figure.savefig(path)
    plt.close(figure)
