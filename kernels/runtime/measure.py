"""Measures the ladders of operations on the current GPU: time, fraction of the device's limit, occupancy, and what
bounds each rung.

A rung is warmed up, then timed by CUDA events in rounds that alternate with its ladder's limit, so that a slow moment
affects both. Calls are queued behind other work, which hides the host's launch overhead. If a ladder's bytes do not
far exceed the L2 cache, the cache is overwritten before each call; otherwise calls follow one another.

Roofline: a rung takes at least its bytes over the bandwidth, and its operations over the rate of the unit that does
them. If its time is within 1 / NEAR of the larger of the two, that one bounds it, "memory" or "instruction". If it is
far from both, the bound is "latency": it waits for single accesses, barriers or bank conflicts, or has too little in
flight. A rung that exceeds a limit does less than is counted: fewer operations than the definition, or on other units,
such as tensor cores. Its bound is unknown: "other".
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

from kernels.runtime import operations
from kernels.runtime.ladder import Ladder, Limit
from kernels.runtime.launch import Launch, observe

__all__ = ["Bound", "DeviceFacts", "LadderResult", "Occupancy", "Rung", "bound_of", "ladders_of", "measure", "unpaid"]

Bound = Literal["memory", "instruction", "latency", "other"]
LIMITS: tuple[Limit, ...] = ("copy", "read", "fma", "roots")

NEAR = 0.6  # fraction of a limit from which a rung counts as bound by it
BEYOND = 1.15  # fraction of a limit above which it is not the limit
SAME = 0.02  # relative difference below which times are equal
TIMES = 2  # ratio from which it is reported as a factor instead of per cent
ROUNDS, MOST_CALLS, ROUND_S = 5, 10, 0.02
SLOW_S = 0.1  # a variant this slow is called once
L2_TIMES = 4  # an input larger than this many L2 caches finds nothing of itself there
LIMIT_BYTES = 1 << 30
ATTRIBUTE_L2_BYTES, ATTRIBUTE_THREADS = 38, 39  # cudaDevAttr…
FUNCTION_SHARED_BYTES, FUNCTION_REGISTERS = 1, 4  # CU_FUNC_ATTRIBUTE_…
WARP = 32


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """The device, when it was measured, and its limits."""

    model: str
    driver: str  # the newest CUDA version that it supports
    multiprocessors: int
    l2_bytes: int
    measured: str  # UTC, ISO 8601
    limits: Mapping[str, float]  # per second, by Limit


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """Occupancy of a multiprocessor in a rung's launch with the most threads."""

    kernel: str
    registers: int  # a thread
    shared_bytes: int  # a block
    threads: int  # a block
    active_warps: int  # a multiprocessor
    most_warps: int


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One variant, or one library, on a ladder's input."""

    name: str
    summary: str
    seconds: float  # of one call, median of the rounds
    spread: tuple[float, float]  # fastest and slowest round
    bytes_per_s: float  # of the ladder's least traffic
    flops_per_s: float
    fraction: float  # of the limit
    bound: Bound
    occupancy: Occupancy | None
    calls: int


@dataclass(frozen=True, kw_only=True)
class LadderResult:
    """One ladder, measured."""

    operation: str
    ladder: str
    limit: Limit
    limit_per_s: float
    bytes: int
    flops: int
    bound_rung: str | None  # a rung that is an upper bound, not a step
    rungs: tuple[Rung, ...]
    libraries: tuple[Rung, ...]
    failures: Mapping[str, str] = field(default_factory=dict)  # why a rung could not be measured
    missing: Mapping[str, str] = field(default_factory=dict)  # why a library could not be measured; not an error


def ladders_of(operation: str) -> tuple[Ladder, ...]:
    """An operation's ladders, if it has any. KeyError lists the operations."""
    operations.get(operation)
    package = operations.package_of(operation)
    found = import_module(f"{package}.ladder") if find_spec(f"{package}.ladder") else operations.cuda_module(operation)
    made: Callable[[], tuple[Ladder, ...]] | None = getattr(found, "ladders", None)
    return () if made is None else made()


def bound_of(memory: float, instruction: float) -> Bound:
    """The bound of a rung that reaches these fractions of the bandwidth and of the rate of its operations."""
    if max(memory, instruction) > BEYOND:
        return "other"
    if max(memory, instruction) < NEAR:
        return "latency"
    return "memory" if memory >= instruction else "instruction"


def unpaid(result: LadderResult) -> list[str]:
    """One sentence for each step of the ladder that does not pay on this device."""
    steps = [rung for rung in result.rungs if rung.name != result.bound_rung]
    said = []
    for before, after in itertools.pairwise(steps):
        ratio = after.seconds / before.seconds
        if ratio >= TIMES:
            said.append(f"{after.name} takes {ratio:.1f} times as long as {before.name}")
        elif ratio > 1 + SAME:
            said.append(f"{after.name} is {100 * (ratio - 1):.0f} % slower than {before.name}")
        elif ratio > 1 - SAME:
            said.append(f"{after.name} is as fast as {before.name} (within {100 * SAME:.0f} %)")
    return said


class Meter:
    """Measures on the current device."""

    def __init__(self) -> None:
        import cupy

        from kernels.runtime.limits import cuda as limits

        self._cupy, self._limits = cupy, limits
        device = cupy.cuda.Device()
        attribute = cupy.cuda.runtime.deviceGetAttribute
        self.l2_bytes = int(attribute(ATTRIBUTE_L2_BYTES, device.id))
        self._most_warps = int(attribute(ATTRIBUTE_THREADS, device.id)) // WARP
        free, _total = cupy.cuda.runtime.memGetInfo()
        size = min(LIMIT_BYTES, free // 8) // 16 * 16
        self._task = limits.Task(
            source=limits.random_values(size, "uint8"),
            target=cupy.zeros(size, cupy.uint8),
            stream=cupy.cuda.get_current_stream(),
        )
        self._flushed = self._task.target[: max(2 * self.l2_bytes, 1 << 20)]
        self._flush_s = self._events(self._flush, 10)
        self.limits = {limit: self._median_limit(limit) for limit in LIMITS}

    def facts(self) -> DeviceFacts:
        runtime = self._cupy.cuda.runtime
        properties = runtime.getDeviceProperties(self._cupy.cuda.Device().id)
        version = runtime.driverGetVersion()
        return DeviceFacts(
            model=properties["name"].decode(),
            driver=f"{version // 1000}.{version % 1000 // 10}",
            multiprocessors=int(properties["multiProcessorCount"]),
            l2_bytes=self.l2_bytes,
            measured=datetime.now(UTC).isoformat(timespec="seconds"),
            limits={limit: self.limits[limit] for limit in LIMITS},
        )

    def ladder(self, operation: str, ladder: Ladder) -> LadderResult:
        """Measures every rung, then every library."""
        variants = operations.cuda_module(operation).VARIANTS
        limit_rates: list[float] = []
        failures: dict[str, str] = {}
        missing: dict[str, str] = {}
        rungs, libraries = [], []
        for name in ladder.variants:
            summary = variants[name].summary
            rungs += self._tried(name, summary, partial(ladder.prepare, name), ladder, limit_rates, failures)
        for name, run in self._libraries(ladder, missing).items():
            libraries += self._tried(name, "", partial(_as_it_is, run), ladder, limit_rates, missing)
        self._free()
        return LadderResult(
            operation=operation, ladder=ladder.name, limit=ladder.limit,
            limit_per_s=statistics.median(limit_rates or [self.limits[ladder.limit]]), bytes=ladder.bytes,
            flops=ladder.flops, bound_rung=ladder.bound, rungs=tuple(rungs), libraries=tuple(libraries),
            failures=failures, missing=missing,
        )  # fmt: skip

    def _libraries(self, ladder: Ladder, missing: dict[str, str]) -> Mapping[str, Callable[[], Any]]:
        try:
            return ladder.libraries()
        except Exception as error:  # an installed library may be broken in any way
            missing["libraries"] = f"{type(error).__name__}: {error}"
            return {}

    def _tried(
        self, name: str, summary: str, prepare: Callable[[], Callable[[], Any]], ladder: Ladder,
        limit_rates: list[float], failures: dict[str, str],
    ) -> list[Rung]:  # fmt: skip
        try:
            return [self._rung(name, summary, prepare(), ladder, limit_rates)]
        except Exception as error:  # reported, and the others are still measured
            failures[name] = f"{type(error).__name__}: {error}"
            self._free()
            return []

    def _rung(self, name: str, summary: str, run: Callable[[], Any], ladder: Ladder, limit_rates: list[float]) -> Rung:
        launches = observe(run)
        self._synchronize()
        began = time.perf_counter()
        first = self._events(run, 1)
        host_s = time.perf_counter() - began - first
        calls = max(1, min(MOST_CALLS, int(ROUND_S / max(first, 1e-6))))
        cached = ladder.bytes < L2_TIMES * self.l2_bytes
        seconds, rates = [], []
        for _ in range(1 if first > SLOW_S else ROUNDS):
            rates.append(self._limit_rate(ladder.limit))
            if first > SLOW_S:
                seconds.append(first)
            else:
                seconds.append(self._flushed_calls(run, calls, host_s) if cached else self._calls(run, calls, host_s))
        limit_rates += rates
        median, limit = statistics.median(seconds), statistics.median(rates)
        fractions = self._fractions(ladder, median, limit)
        return Rung(
            name=name, summary=summary, seconds=median, spread=(min(seconds), max(seconds)),
            bytes_per_s=ladder.bytes / median, flops_per_s=ladder.flops / median, fraction=fractions[ladder.limit],
            bound=bound_of(max(fractions["copy"], fractions["read"]) if ladder.limit not in ("copy", "read")
                           else fractions[ladder.limit], max(fractions["fma"], fractions["roots"])),
            occupancy=self._occupancy(launches), calls=calls,
        )  # fmt: skip

    def _fractions(self, ladder: Ladder, seconds: float, limit_per_s: float) -> dict[Limit, float]:
        """Fractions of all limits; of the ladder's own limit as measured in the rung's rounds."""
        rates = {**self.limits, ladder.limit: limit_per_s}
        counted: dict[Limit, float] = {
            "copy": ladder.bytes, "read": ladder.bytes, "fma": ladder.flops / 2, "roots": ladder.roots,
        }  # fmt: skip
        return {limit: counted[limit] / seconds / rates[limit] for limit in LIMITS}

    def _occupancy(self, launches: Sequence[Launch]) -> Occupancy | None:
        if not launches:
            return None
        from cupy_backends.cuda.api import driver

        largest = max(launches, key=lambda launch: _product(launch.grid) * _product(launch.block))
        function, threads = largest.kernel.function, _product(largest.block)
        blocks = driver.occupancyMaxActiveBlocksPerMultiprocessor(function, threads, largest.shared_bytes)
        return Occupancy(
            kernel=largest.kernel.expression,
            registers=driver.funcGetAttribute(FUNCTION_REGISTERS, function),
            shared_bytes=driver.funcGetAttribute(FUNCTION_SHARED_BYTES, function) + largest.shared_bytes,
            threads=threads,
            active_warps=blocks * -(-threads // WARP),
            most_warps=self._most_warps,
        )

    def _limit_rate(self, limit: Limit) -> float:
        """Units per second, from a few launches."""
        counted = {"copy": 2 * self._task.source.nbytes, "read": self._task.source.nbytes}
        run = self._limits.VARIANTS[limit].run
        seconds = self._calls(lambda: run(self._task), 3, 2e-4)
        return float(counted.get(limit, self._limits.chained()) / seconds)

    def _median_limit(self, limit: Limit) -> float:
        self._limits.VARIANTS[limit].run(self._task)
        return float(statistics.median(self._limit_rate(limit) for _ in range(ROUNDS)))

    def _flush(self) -> None:
        self._flushed.data.memset_async(1, self._flushed.nbytes, self._task.stream)

    def _head_start(self, host_s: float) -> None:
        """Keeps the device busy for this long, while the host queues the calls to be timed."""
        for _ in range(min(2000, int(1.5 * host_s / self._flush_s) + 2)):
            self._flush()

    def _calls(self, run: Callable[[], Any], calls: int, host_s: float) -> float:
        """Seconds of a call, averaged over several in a row."""
        self._head_start(calls * host_s)
        return self._events(run, calls)

    def _flushed_calls(self, run: Callable[[], Any], calls: int, host_s: float) -> float:
        """Seconds of a call with a cold L2 cache, median of several."""
        event = self._cupy.cuda.Event
        pairs = [(event(), event()) for _ in range(calls)]
        self._head_start(calls * host_s)
        for began, ended in pairs:
            self._flush()
            began.record()
            run()
            ended.record()
        pairs[-1][1].synchronize()
        elapsed = self._cupy.cuda.get_elapsed_time
        return float(statistics.median(elapsed(began, ended) / 1e3 for began, ended in pairs))

    def _events(self, run: Callable[[], Any], calls: int) -> float:
        began, ended = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        began.record()
        for _ in range(calls):
            run()
        ended.record()
        ended.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(began, ended)) / 1e3 / calls

    def _synchronize(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()

    def _free(self) -> None:
        """Frees the memory that ladders allocated."""
        import gc

        gc.collect()
        self._cupy.get_default_memory_pool().free_all_blocks()


def measure(operations: Sequence[str]) -> Iterator[DeviceFacts | LadderResult]:
    """Yields the current device's facts, then the result of each ladder of each operation as it is measured."""
    meter = Meter()
    yield meter.facts()
    for operation in operations:
        ladders = list(ladders_of(operation))
        while ladders:  # each is dropped after its turn, since a ladder holds its inputs
            yield meter.ladder(operation, ladders.pop(0))
            meter._free()


def _as_it_is(run: Callable[[], Any]) -> Callable[[], Any]:
    return run


def _product(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
