"""Jobs over Dask workers, one process for each GPU: the only module that knows Dask.

Dask moves tasks and results of a few hundred bytes. The samples go from the workers' own reads to their own writes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import Future as ThreadFuture
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
from distributed import Client, Future, KilledWorker, Nanny, Scheduler, SpecCluster, get_worker
from distributed.security import Security

from pipeline import __version__
from pipeline.cluster.communicator import Deadline
from pipeline.cluster.segments import (
    ClusterJob,
    DeviceProfile,
    Segment,
    SegmentReceipt,
    WorkerDevice,
    close_job_soon,
    cut_segments,
    profile,
    run_segment,
)
from pipeline.cluster.shares import Shares
from pipeline.cluster.worker_specs import WorkerSpec
from pipeline.engine.device import good_chunk_bytes
from pipeline.engine.ledger import Ledger
from pipeline.engine.planned import PlannedJob
from pipeline.engine.run import RunEvents
from pipeline.engine.stages import StageRecord
from pipeline.errors import ClusterError, DeviceUnavailable, MillraceError, RankLost
from pipeline.workloads import Plan

# Two segments at a time on each worker: while one is written, the next is read.
TASKS_A_WORKER = 2
CONNECT_SECONDS = 10.0
START_SECONDS = 60.0
LIVENESS_SECONDS = 0.5
# A segment is tried so often. Each time Dask itself gives it up only after the death of several workers.
MOST_ATTEMPTS = 4
LOOPBACK = "127.0.0.1"

_CONFIG = {
    "distributed.worker.daemon": False,
    # A worker's memory is the ring, which the job's plan bounds.
    "distributed.worker.memory.terminate": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.target": False,
    "distributed.admin.tick.limit": "30s",
}


class DaskWorkers:
    """The workers of a Dask cluster as one device: what planning asks of it, and `stream` for the engine."""

    def __init__(self, client: Client, worker_device: WorkerDevice, where: str) -> None:
        """ClusterError or DeviceUnavailable where a worker is not fit for the job; `where`: the cluster in words."""
        self._client = client
        self._worker_device = worker_device
        self._where = where
        self._profiles = self._checked_profiles()
        hosts = Counter(each.host for each in self._profiles)
        self._ring_depth = max(each.ring_depth for each in self._profiles)
        kind = self._profiles[0].description["name"].partition(":")[0]
        self.name = f"{len(self._profiles)} × {kind}"
        # The memory that a user allows is a host's, and its workers share it.
        self.ring_depth = self._ring_depth * max(hosts.values())

    def target_bytes(self, job_bytes: int) -> int:
        """Bytes of input and output together that make a good chunk of a worker's share of such a job."""
        share = job_bytes // len(self._profiles)
        return min(good_chunk_bytes(share, each.chunk_range) for each in self._profiles)

    def describe(self) -> dict[str, Any]:
        """What the receipt says of it."""
        descriptions = [dict(each.description) | {"host": each.host} for each in self._profiles]
        return {"name": self.name, "model": descriptions[0]["model"], "cluster": self._where, "workers": descriptions}

    def stream(self, job: PlannedJob, plan: Plan, ledger: Ledger, events: RunEvents) -> StageRecord:
        """The plan's chunks, segment by segment, on whichever worker has room. The workers keep the ledger.

        Raises the first error that is the job's own; ClusterError where the scheduler went away, or where a segment
        takes down one worker after another.
        """
        if not ledger.exists:
            ledger.create()
        cluster_job = ClusterJob(
            name=f"{job.spec.workload}-{secrets.token_hex(4)}",
            spec=replace(job.spec, input=_absolute(job.spec.input), output=_absolute(job.spec.output)),
            cut=job.cut,
            held_bytes=job.workload.hold_at_most(job.cut.budget_bytes),
            ledger_identity=ledger.identity,
            worker_device=self._worker_device,
        )
        record = self._new_record()
        ring_bytes = job.cut.budget_bytes * self.ring_depth
        shares = Shares(self, cluster_job, job, ranks=len(self._profiles), memory_bytes=ring_bytes)
        if shares.are_better:
            with record.timed():
                shares.stream(plan, ledger, events, record)
            return record
        run = _ClusterRun(self._client, cluster_job, self._where, events.check)
        by_index = {chunk.index: chunk for chunk in plan.chunks}
        with record.timed():
            for receipt in run.receipts(cut_segments(plan, len(self._profiles))):
                record.include(receipt.stages)
                job.workload.add_audit_notes(receipt.notes)
                for index in receipt.segment.chunks:
                    events.on_written(by_index[index])
        return record

    # For gangs

    @property
    def cluster(self) -> str:
        """The same for all that use the same workers."""
        return str(self._client.scheduler.address)

    def last_heard(self) -> Mapping[str, float]:
        """The workers that are there now, by address, and when the scheduler last heard of each, by its clock."""
        if self._client.status != "running":
            raise ClusterError(f"{self._where} went away")
        try:
            # `scheduler_info` now and then returns no workers: its periodic update, which asks for none, comes between.
            identity = self._client.sync(
                self._client.scheduler.identity, n_workers=-1, callback_timeout=CONNECT_SECONDS
            )
        except (OSError, TimeoutError) as error:
            raise ClusterError(f"{self._where} went away: {error}") from error
        return {address: worker["last_seen"] for address, worker in identity["workers"].items()}

    def start_on(self, address: str, function: Callable[..., Any], *args: Any, on_done: Callable[[], None]) -> GangCall:
        """Run a function on one worker, on a thread of its own. RankLost comes out of it where that worker is gone.

        A task bound to a worker would wait for ever for one that has died: it may run elsewhere, and refuses to.
        """
        future = self._client.submit(
            _on_gang_thread, address, function, args,
            workers=[address], allow_other_workers=True, pure=False, retries=0, priority=1,
        )  # fmt: skip
        future.add_done_callback(lambda _: on_done())
        return GangCall(self._client, future, self._where)

    def tell(self, addresses: Sequence[str], function: Callable[..., Any], *args: Any, wait_s: float = 0.0) -> None:
        """Run `function(*args, address)`, which must not wait, on workers' event loops, as far as they are there.

        wait_s : until they have heard, but no longer
        """

        def tell_one(address: str) -> None:
            with suppress(Exception):  # one that is gone needs no telling
                self._client.run(function, *args, address, workers=[address], on_error="ignore")

        tellers = [
            threading.Thread(target=tell_one, args=(address,), name="gang-tell", daemon=True) for address in addresses
        ]
        for teller in tellers:
            teller.start()
        deadline = Deadline(wait_s)
        for teller in tellers:
            teller.join(deadline.left_s)

    def _new_record(self) -> StageRecord:
        record = StageRecord()
        for totals in record.totals.values():
            totals.lanes = len(self._profiles)
        return record

    def _checked_profiles(self) -> list[DeviceProfile]:
        workers = list(self.last_heard())
        if not workers:
            raise DeviceUnavailable(f"{self._where} has no workers: start some, then run again")
        for address, version in self._on_each(workers, _version).items():
            if version != __version__:
                raise DeviceUnavailable(
                    f"the worker {address} of {self._where} runs Millrace {version}, this is {__version__}: "
                    "install the same on both"
                )
        return list(self._on_each(workers, profile, self._worker_device).values())

    def _on_each(self, workers: Sequence[str], function: Callable[..., Any], *args: Any) -> dict[str, Any]:
        """What a function says on every worker. Its own errors come back as they are."""
        futures = {
            address: self._client.submit(function, *args, workers=[address], pure=False, retries=0)
            for address in workers
        }
        try:
            return {address: future.result(timeout=START_SECONDS) for address, future in futures.items()}
        except MillraceError:
            raise
        except ImportError as error:
            raise DeviceUnavailable(f"a worker of {self._where} lacks Millrace or what it needs: {error}") from error
        except Exception as error:
            raise ClusterError(f"a worker of {self._where} does not answer: {type(error).__name__}: {error}") from error


class GangCall:
    """A function under way on one worker."""

    def __init__(self, client: Client, future: Future, where: str) -> None:
        self._client = client
        self._future = future
        self._where = where

    def result(self) -> Any:
        """What the function returned or raised; RankLost where its worker is gone. Only once it is done."""
        if self._future.cancelled() or self._client.status != "running":
            raise ClusterError(f"{self._where} went away")
        try:
            return self._future.result()
        except MillraceError:
            raise
        except (OSError, CancelledError) as error:
            raise ClusterError(f"{self._where} went away") from error
        except KilledWorker as error:
            raise RankLost(f"a worker of {self._where} died") from error
        except Exception as error:
            raise ClusterError(f"a worker of {self._where} failed: {type(error).__name__}: {error}") from error


class _ClusterRun:
    """One pass of a job's segments over the workers."""

    def __init__(self, client: Client, job: ClusterJob, where: str, check: Callable[[], None]) -> None:
        self._client = client
        self._job = job
        self._where = where
        self._check = check
        self._finished: queue.SimpleQueue[Future] = queue.SimpleQueue()
        self._running: dict[Future, Segment] = {}
        self._attempts: Counter[Segment] = Counter()

    def receipts(self, segments: Sequence[Segment]) -> Iterator[SegmentReceipt]:
        """What each segment tells when it is done, in the order in which they finish."""
        try:
            for segment in segments:
                self._submit(segment)
            while self._running:
                future = self._next_finished()
                segment = self._running.pop(future)
                receipt = self._outcome(future, segment)
                if receipt is None:
                    self._submit(segment)
                else:
                    yield receipt
        finally:
            self._end()

    def _submit(self, segment: Segment) -> None:
        self._attempts[segment] += 1
        future = self._client.submit(
            run_segment,
            self._job,
            segment,
            # One group of tasks: the scheduler hands them out as workers have room instead of all at once.
            key=(f"segment-{self._job.name}", segment.chunks[0], self._attempts[segment]),
            pure=False,
            retries=0,
        )
        self._running[future] = segment
        future.add_done_callback(self._finished.put)

    def _next_finished(self) -> Future:
        while True:
            self._check()
            with suppress(queue.Empty):
                future = self._finished.get(timeout=LIVENESS_SECONDS)
                if future in self._running:
                    return future
            if self._client.status != "running":
                raise self._scheduler_lost()

    def _outcome(self, future: Future, segment: Segment) -> SegmentReceipt | None:
        """The receipt; None where the segment shall run again because its worker died."""
        if future.cancelled() or self._client.status != "running":
            raise self._scheduler_lost()
        try:
            error = future.exception()
            if error is None:
                receipt: SegmentReceipt = future.result()
                return receipt
        except (OSError, CancelledError) as lost:  # among them distributed's CommClosedError
            raise self._scheduler_lost() from lost
        if isinstance(error, MillraceError):
            raise error
        chunks = f"chunks {segment.chunks[0]} to {segment.chunks[-1]}"
        if not isinstance(error, KilledWorker):
            raise ClusterError(
                f"a worker of {self._where} failed at {chunks}: {type(error).__name__}: {error}"
            ) from error
        if self._attempts[segment] == MOST_ATTEMPTS:
            raise ClusterError(f"{chunks} took down one worker after another of {self._where}: see their logs")
        return None

    def _scheduler_lost(self) -> ClusterError:
        return ClusterError(f"{self._where} went away")

    def _end(self) -> None:
        """Cancel what is left, and let the workers give back what they hold for the job."""
        with suppress(Exception):  # a cluster that is gone holds nothing
            if self._client.status == "running":
                self._client.cancel(list(self._running), force=True)
                self._client.run(close_job_soon, self._job.name, on_error="ignore")


@contextmanager
def local_workers(specs: Sequence[WorkerSpec]) -> Iterator[DaskWorkers]:
    """Worker processes on this machine for as long as the context lasts, each with a nanny that restarts it.

    They talk over loopback under certificates made for the occasion: no other user of the machine can send them code.
    """
    _quiet_dask()
    security = Security.temporary()
    common = {
        "nthreads": TASKS_A_WORKER,
        "memory_limit": 0,
        "host": LOOPBACK,
        "protocol": "tls",
        "security": security,
        "dashboard": False,
        "dashboard_address": f"{LOOPBACK}:0",
        "silence_logs": logging.CRITICAL,
    }
    workers = {
        number: {"cls": Nanny, "options": common | {"env": spec.environment, "name": f"millrace-{number}"}}
        for number, spec in enumerate(specs)
    }
    scheduler = {
        "cls": Scheduler,
        "options": {
            "host": LOOPBACK, "port": 0, "protocol": "tls", "security": security,
            "dashboard": False, "dashboard_address": f"{LOOPBACK}:0",
        },
    }  # fmt: skip
    with dask.config.set(_CONFIG):
        try:
            cluster = SpecCluster(workers, scheduler, security=security, silence_logs=logging.CRITICAL)
        except Exception as error:
            raise ClusterError(f"the local workers do not start: {type(error).__name__}: {error}") from error
        with cluster, Client(cluster, security=security, set_as_default=False) as client:
            client.wait_for_workers(len(specs), timeout=START_SECONDS)
            yield DaskWorkers(client, specs[0].device, "the local cluster")


@contextmanager
def workers_of(address: str, device: str, threads: int | None) -> Iterator[DaskWorkers]:
    """The workers of a Dask scheduler that is already there. DeviceUnavailable where none answers."""
    _quiet_dask()
    try:
        client = Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError, TimeoutError, KeyError) as error:
        raise DeviceUnavailable(
            f"--scheduler {address}: no Dask scheduler answers there ({type(error).__name__}: {error}); start one with "
            "`dask scheduler`, or leave --scheduler out"
        ) from error
    with client:
        with suppress(TimeoutError):  # those that have just been started
            client.wait_for_workers(1, timeout=CONNECT_SECONDS)
        yield DaskWorkers(client, WorkerDevice(device=device, threads=threads), f"the scheduler {address}")


def serve_workers(address: str, specs: Sequence[WorkerSpec]) -> None:
    """Worker processes of this machine for a scheduler elsewhere, each with a nanny, until it or a signal ends them.

    DeviceUnavailable where no scheduler answers.
    """

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            for spec in specs:
                nanny = Nanny(
                    address,
                    nthreads=TASKS_A_WORKER,
                    memory_limit=0,
                    interface=spec.interface,
                    env=spec.environment,
                    dashboard=False,
                    death_timeout=CONNECT_SECONDS,
                )
                nannies.append(await stack.enter_async_context(nanny))
            await asyncio.gather(*(nanny.finished() for nanny in nannies))

    nannies: list[Any] = []
    with dask.config.set(_CONFIG):
        try:
            asyncio.run(serve())
        except (OSError, TimeoutError, ValueError) as error:
            raise DeviceUnavailable(f"{address}: no Dask scheduler answers there: {error}; is it running?") from error


def _quiet_dask() -> None:
    """Dask's own words about lost connections would stand among ours, which say what they mean for the job."""
    if not os.environ.get("MILLRACE_DEBUG"):
        for name in [name for name in logging.root.manager.loggerDict if name.startswith("distributed")]:
            logging.getLogger(name).setLevel(logging.CRITICAL)


async def _on_gang_thread(address: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Neither the event loop nor the threads of Dask's tasks wait for a gang; what never ends holds up no exit."""
    if get_worker().address != address:
        raise RankLost(f"the worker {address} is gone")
    outcome: ThreadFuture[Any] = ThreadFuture()

    def work() -> None:
        try:
            outcome.set_result(function(*args))
        except Exception as error:
            outcome.set_exception(error)
        except BaseException as error:
            outcome.set_exception(ClusterError(f"a gang's function ended its thread: {error!r}"))

    threading.Thread(target=work, name="gang", daemon=True).start()
    return await asyncio.wrap_future(outcome)


def _version() -> str:
    return __version__


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100 - a symbolic link stays one: its target may change with the host
