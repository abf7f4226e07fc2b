"""The overhead of our collectives over bare NCCL or TCP, and the recovery time of a gang after kill -9.

bus    all-reduces of 1, 16, 256 and 2048 MiB on GPUs, ours and NCCL's interleaved: one at a time, and several queued;
       with non-blocking calls, as in Millrace, and with NCCL's default, which may hang
many   a thousand small arrays, one by one and in one bucket; on GPUs, otherwise over TCP
fixed  the deterministic sum of 16 shards of float32 against the plain one; on GPUs, otherwise over TCP
kills  seconds from kill -9 of a random rank at a random time to the gang's result, on GPUs, otherwise CPU processes
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import Options, run_parts
from pipeline.cluster.communicators.base import Communicator
from pipeline.cluster.communicators.deterministic import fixed_tree_sum
from pipeline.cluster.communicators.nccl import NcclCommunicator, connect_nccl
from pipeline.cluster.communicators.peers import Endpoint, Membership, listen
from pipeline.cluster.communicators.tcp import connect_tcp
from pipeline.cluster.dask.worker_processes import local_workers
from pipeline.cluster.dask.worker_start import cpu_workers, gpu_workers
from pipeline.cluster.dask.workers import DaskWorkers
from pipeline.cluster.gang.gang import GangResult, run_gang
from pipeline.cluster.gang.member import Member
from pipeline.engine.devices.discovery import usable_gpus

MIB = 1 << 20
SIZES = (1, 16, 256, 2048)
ROUNDS = 7
# Duration of a round, and the maximum number of queued calls.
ROUND_SECONDS = 0.03
QUEUED = 16
SMALL_ARRAYS = 1000
SHARDS = 16
HOST = "127.0.0.1"
NCCL_FLOAT32, NCCL_SUM = 7, 0

Figures = dict[str, Any]


def on_ranks(measure: Callable[..., Figures], count: int, gpus: bool, *arguments: Any, **environment: str) -> Figures:
    """Runs a function of a communicator on ranks that are processes of this host; returns the result of rank 0."""
    context = multiprocessing.get_context("spawn")
    listeners = [listen(HOST) for _ in range(count)]
    endpoints = tuple(listener.getsockname()[:2] for listener in listeners)
    found = context.SimpleQueue()
    ranks = [
        context.Process(
            target=_rank, args=(measure, rank, listeners[rank], endpoints, gpus, arguments, environment, found)
        )
        for rank in range(count)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    if any(each.exitcode for each in ranks):
        raise SystemExit("a rank failed: see above")
    figures: Figures = found.get()
    return figures


def _rank(
    measure: Callable[..., Figures],
    rank: int,
    listener: socket.socket,
    endpoints: tuple[Endpoint, ...],
    gpus: bool,
    arguments: Sequence[Any],
    environment: Mapping[str, str],
    found: Any,
) -> None:
    os.environ.update(environment)
    membership = Membership(rank=rank, epoch=1, endpoints=endpoints, secret=b"benchmark" * 4)
    with connect_tcp(listener, membership) as control:
        if not gpus:
            figures = measure(control, np, *arguments)
        else:
            import cupy

            cupy.cuda.Device(rank).use()
            with connect_nccl(control) as communicator:
                figures = measure(communicator, cupy, *arguments)
    if rank == 0:
        found.put(figures)


def in_turns(control: Communicator, ways: Mapping[str, tuple[int, Callable[[], object]]]) -> dict[str, list[float]]:
    """Seconds per collective of each variant, by round: a variant is a number of collectives at once."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(-1, ROUNDS):  # the first warms up
        for name, (collectives, call) in ways.items():
            control.barrier()
            began = time.perf_counter()
            call()
            spent = control.allreduce(np.array([time.perf_counter() - began]), "max")[0]
            calls = max(1, min(200, int(ROUND_SECONDS / spent)))
            control.barrier()
            began = time.perf_counter()
            for _ in range(calls):
                call()
            if round_ >= 0:
                seconds[name].append((time.perf_counter() - began) / calls / collectives)
    return seconds


def bus_bandwidths(communicator: NcclCommunicator, cupy: Any) -> Figures:
    """GB/s of the bus by size: 2 (n − 1) / n of the bytes over the seconds, as NCCL's own tests count."""
    figures: Figures = {}
    size = communicator.size
    for mib in SIZES:
        source, target = (cupy.full(mib * MIB // 4, each, np.float32) for each in (communicator.rank + 1, 0))
        queued = max(2, min(QUEUED, 4096 // mib))
        seconds = in_turns(communicator._control, _ways(communicator, cupy, source, target, queued))
        assert float(target[0]) == float(target[-1]) == size * (size + 1) / 2
        factor = 2 * (size - 1) / size * source.nbytes / 1e9
        rates = {name: [factor / each for each in found] for name, found in seconds.items()}
        median = {name: statistics.median(found) for name, found in rates.items()}
        figures[f"{mib} MiB"] = {
            "queued": queued,
            "GB/s": median,
            "range": {name: (min(found), max(found)) for name, found in rates.items()},
            "ours / bare": median["ours"] / median["bare"],
            "ours queued / bare queued": median["ours, queued"] / median["bare, queued"],
        }
        del source, target
        cupy.get_default_memory_pool().free_all_blocks()
    return figures


def _ways(communicator: NcclCommunicator, cupy: Any, source: Any, target: Any, queued: int) -> dict[str, Any]:
    from cupy.cuda import nccl

    stream, done = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(disable_timing=True)
    pairs = [(source, target)] * queued
    bare = communicator._nccl

    def begin(count: int) -> None:
        nccl.groupStart()
        for _ in range(count):
            bare.allReduce(source.data.ptr, target.data.ptr, source.size, NCCL_FLOAT32, NCCL_SUM, stream.ptr)
        _in_progress_is_fine(nccl.groupEnd)

    def waited(count: int) -> None:
        begin(count)
        while _in_progress_is_fine(bare.check_async_error):
            pass
        done.record(stream)
        while not done.done:
            pass

    def ours_queued() -> None:
        with communicator._collective("allreduce", queued * source.nbytes, None) as deadline:
            communicator._allreduce_each(pairs, "sum", deadline)

    return {
        "ours": (1, lambda: communicator.allreduce(source, out=target)),
        "bare": (1, lambda: waited(1)),
        "ours, queued": (queued, ours_queued),
        "bare, queued": (queued, lambda: waited(queued)),
    }


def _in_progress_is_fine(call: Callable[[], None]) -> bool:
    try:
        call()
    except KeyError:
        return True
    return False


def measure_bus(options: argparse.Namespace) -> Figures:
    count = len(usable_gpus()[: options.ranks])
    if count < 2:
        return {"skipped": "needs two GPUs"}
    ways = {"without blocking, as Millrace": "0", "blocking, NCCL's default": "1"}
    return {
        f"{count} GPUs, {name}": on_ranks(bus_bandwidths, count, True, NCCL_COMM_BLOCKING=value)
        for name, value in ways.items()
    }


def many_arrays(communicator: Communicator, library: Any) -> Figures:
    arrays = [library.full((7, 5 + number % 32), number, np.float32) for number in range(SMALL_ARRAYS)]
    outs = [library.empty_like(array) for array in arrays]
    control = getattr(communicator, "_control", communicator)

    def one_by_one() -> None:
        for array, out in zip(arrays, outs, strict=True):
            communicator.allreduce(array, out=out)

    flat = library.concatenate([array.reshape(-1) for array in arrays])
    seconds = in_turns(
        control,
        {
            "one by one": (1, one_by_one),
            "in one bucket": (1, lambda: communicator.allreduce_many(arrays)),
            "one array as large": (1, lambda: communicator.allreduce(flat)),
        },
    )
    return {"arrays": SMALL_ARRAYS, "KiB": flat.nbytes / 1024, "ms": _milliseconds(seconds)}


def fixed_sums(communicator: Communicator, library: Any) -> Figures:
    holders = [shard * communicator.size // SHARDS for shard in range(SHARDS)]
    control = getattr(communicator, "_control", communicator)
    figures: Figures = {}
    for mib in (1, 16, 128):
        mine = {
            shard: library.full(mib * MIB // 4, shard, np.float32)
            for shard, holder in enumerate(holders)
            if holder == communicator.rank
        }

        def plain(mine: Mapping[int, Any] = mine) -> None:
            first, *rest = mine.values()
            total = first.copy()
            for each in rest:
                library.add(total, each, out=total)
            communicator.allreduce(total)

        def fixed(mine: Mapping[int, Any] = mine) -> None:
            found = fixed_tree_sum(communicator, mine, holders)
            assert float(found[-1]) == SHARDS * (SHARDS - 1) / 2

        seconds = in_turns(control, {"plain": (1, plain), "deterministic": (1, fixed)})
        medians = _milliseconds(seconds)
        figures[f"{mib} MiB"] = {"ms": medians, "times": medians["deterministic"][0] / medians["plain"][0]}
    return figures


def _milliseconds(seconds: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float, float]]:
    """Median, minimum and maximum."""
    return {name: (statistics.median(s) * 1e3, min(s) * 1e3, max(s) * 1e3) for name, s in seconds.items()}


def measure_many(options: argparse.Namespace) -> Figures:
    return _on_gpus_or_tcp(many_arrays, options.ranks)


def measure_fixed(options: argparse.Namespace) -> Figures:
    return _on_gpus_or_tcp(fixed_sums, options.ranks)


def _on_gpus_or_tcp(measure: Callable[..., Figures], ranks: int) -> Figures:
    gpus = len(usable_gpus()[:ranks])
    if gpus > 1:
        return {f"{gpus} GPUs": on_ranks(measure, gpus, True)}
    return {f"{ranks} processes over TCP": on_ranks(measure, ranks, False)}


# Killing


def summed(member: Member, folder: str, gpus: bool, rounds: int) -> float:
    """The gang job whose ranks are killed: computed shards and all-reduces of 16 MiB."""
    library: Any = np
    if gpus:
        import cupy as library
    (Path(folder) / f"{member.epoch}.{member.rank}.{os.getpid()}").touch()
    member.compute(lambda shard: library.sort(library.asarray(np.random.default_rng(shard).random(1 << 20))))
    ones = library.ones(4 * MIB, np.float32)
    for _ in range(rounds):
        assert float(member.communicator.allreduce(ones)[-1]) == member.size
    return float(member.reduce(deterministic=True)[0])


def measure_kills(options: argparse.Namespace) -> Figures:
    gpus = usable_gpus()[: options.ranks]
    specs = gpu_workers(gpus) if len(gpus) > 1 else cpu_workers(options.ranks, 1)
    arguments = (len(gpus) > 1, 300 if len(gpus) > 1 else 10)
    rng = random.Random(1)
    with local_workers(specs) as workers:
        undisturbed = [_gang(workers, arguments)[0] for _ in range(4)][1:]
        expected = set(undisturbed[0].values)
        rest = statistics.median(each.seconds for each in undisturbed)
        recoveries: list[float] = []
        late = 0
        while len(recoveries) < options.kills:
            while len(workers.last_heard()) < len(specs):
                time.sleep(0.05)
            result, seconds = _gang(workers, arguments, rng.randrange(len(specs)), rng.uniform(0, rest))
            assert set(result.values) == expected
            recoveries.append(seconds)
            late += result.epoch == 1
    recoveries.sort()
    return {
        "ranks": f"{len(specs)} {'GPUs' if len(gpus) > 1 else 'CPU processes'}",
        "kills": options.kills,
        "after the rank's part": late,
        "a gang undisturbed, s": rest,
        "kill to result, s": {
            "median": statistics.median(recoveries),
            "99th percentile": recoveries[int(0.99 * (len(recoveries) - 1))],
            "slowest": recoveries[-1],
        },
    }


def _gang(
    workers: DaskWorkers, arguments: tuple[bool, int], victim: int | None = None, delay_s: float = 0.0
) -> tuple[GangResult, float]:
    """Runs a gang, optionally kills one rank after its start; returns the result and the seconds from kill to it."""
    killed_at, over_ = [0.0], threading.Event()
    with tempfile.TemporaryDirectory() as folder:

        def kill() -> None:
            found: list[Path] = []
            while not found and not over_.wait(0.002):
                found = list(Path(folder).glob(f"1.{victim}.*"))
            if found and not over_.wait(delay_s):
                os.kill(int(found[0].suffix[1:]), signal.SIGKILL)
                killed_at[0] = time.perf_counter()

        killer = threading.Thread(target=kill)
        if victim is not None:
            killer.start()
        result = run_gang(workers, summed, SHARDS, folder, *arguments)
        end = time.perf_counter()
        over_.set()
        if victim is not None:
            killer.join()
    return result, end - killed_at[0] if killed_at[0] else 0.0


PARTS = {"bus": measure_bus, "many": measure_many, "fixed": measure_fixed, "kills": measure_kills}


def main() -> None:
    parser = Options("engine/collectives", __doc__)
    parser.add_parts(PARTS, default=PARTS)
    parser.add_argument("--ranks", type=int, default=4, help="maximum number of GPUs, or of processes on the CPU")
    parser.add_argument("--kills", type=int, default=20, help="number of ranks to kill")
    parser.add_json()
    options = parser.parse_args()
    run_parts(PARTS, options)


if __name__ == "__main__":
    main()
