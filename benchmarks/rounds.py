"""Interleaved rounds: every rival once, then every rival again, so that slow moments affect all of them equally."""

from __future__ import annotations

import importlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

QUEUED_CALLS, LONG_S = 10, 0.02


def host_seconds(run: Callable[[], object]) -> float:
    """Wall time of a call that returns when its work is done."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def queued_seconds(run: Callable[[], object], calls: int = 5) -> float:
    """Seconds per call on the current CUDA stream, by events around `calls` of them."""
    import cupy

    began, ended = cupy.cuda.Event(), cupy.cuda.Event()
    began.record()
    for _ in range(calls):
        run()
    ended.record()
    ended.synchronize()
    return float(cupy.cuda.get_elapsed_time(began, ended)) / 1e3 / calls


def event_seconds(run: Callable[[], object]) -> float:
    """Seconds per call of ten queued ones, which hides the launch overhead of the host; of one call if it is long."""
    alone = queued_seconds(run, 1)
    return alone if alone > LONG_S else queued_seconds(run, QUEUED_CALLS)


def device_copy(image: Any) -> Callable[[], object]:
    """A copy by the device to another array."""
    import cupy

    out = cupy.ones_like(image)
    return lambda: cupy.copyto(out, image)


@dataclass(frozen=True, kw_only=True)
class Rival:
    """One contender: `run` does the whole work once; `clock` runs it and returns the seconds it took."""

    name: str
    device: str  # "cpu", "cuda"
    run: Callable[[], object] | None  # None: not installed here
    clock: Callable[[Callable[[], object]], float] = host_seconds
    seconds: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def measure(rivals: Sequence[Rival], repeats: int, once_s: float = math.inf) -> list[Rival]:
    """Times the installed rivals for `repeats` rounds after one warm-up round.

    A rival whose warm-up takes more than `once_s` is not run again: that time stands for every round.
    """
    present = [rival for rival in rivals if rival.run is not None]
    warm_up = [rival.clock(rival.run) for rival in present if rival.run is not None]
    for _ in range(repeats):
        for rival, first_s in zip(present, warm_up, strict=True):
            assert rival.run is not None
            rival.seconds.append(first_s if first_s > once_s else rival.clock(rival.run))
    return present


def library(name: str) -> Any:
    """A rival's module; None if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def band(values: Sequence[float]) -> tuple[float, float]:
    """The 10th and 90th percentiles."""
    low, high = np.quantile(values, (0.1, 0.9))
    return float(low), float(high)


def ratio(ours: Rival, theirs: Rival) -> tuple[float, float, float]:
    """Our speed-up: median and band of the ratios by round. Claim it only if the band excludes 1."""
    ratios = [b / a for a, b in zip(ours.seconds, theirs.seconds, strict=True)]
    return (statistics.median(ratios), *band(ratios))


def row(rival: Rival, first: Rival, **more: float | None) -> dict[str, Any]:
    """A rival's figures for --json and `print_row`; `more` are the benchmark's own."""
    return {
        "milliseconds": 1e3 * rival.median_s,
        "band": [1e3 * seconds for seconds in band(rival.seconds)],
        **more,
        "first_is_faster_by": ratio(first, rival),
    }


def print_row(name: str, figures: dict[str, Any], *more: str) -> None:
    low, high = figures["band"]
    median, least, most = figures["first_is_faster_by"]
    line = f"  {name:18} {figures['milliseconds']:9.3f} ms ({low:.3f} – {high:.3f})"
    print("  ".join([line, *more, f"×{median:.2f} ({least:.2f} – {most:.2f})"]), flush=True)
