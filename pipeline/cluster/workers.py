"""Jobs over Dask workers, one process for each GPU: the only module that knows Dask.

Dask moves tasks and results of a few hundred bytes. The samples go from the workers' own reads to their own writes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import secrets
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import Future as ThreadFuture
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import dask
from distributed import Client, Future, KilledWorker, Nanny, Reschedule, Scheduler, SpecCluster, Status, get_worker
from distributed.comm import connect
from distributed.security import Security
from distributed.utils import get_ip, get_ip_interface

from pipeline import __version__, metrics
from pipeline.cluster import fork_server, worker_states
from pipeline.cluster.communicator import Deadline
from pipeline.cluster.segments import (
    ClusterJob,
    DeviceProfile,
    Segment,
    SegmentReceipt,
    WorkerDevice,
    close_job,
    cut_segments,
    leave,
    leaving,
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
from pipeline.workloads import Chunk, Plan, Workload

# Two segments at a time on each worker: while one is written, the next is read.
TASKS_A_WORKER = 2
CONNECT_SECONDS = 10.0
START_SECONDS = 60.0
LIVENESS_SECONDS = 0.5
# What stops a job waits so long for chunks in hand.
CLOSE_SECONDS = 5.0
# A segment is tried so often. Each time Dask itself gives it up only after the death of several workers.
MOST_ATTEMPTS = 4
LOOPBACK = "127.0.0.1"
# Tell workers to leave: systemd, Kubernetes and Docker send the first, Slurm's --signal whichever it is told.
LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# Dask's topic under which workers tell how far segments have come; the scheduler keeps some thousand such words.
STAGES_TOPIC = "millrace-stages"

_CONFIG = {
    "distributed.worker.daemon": False,
    "distributed.worker.multiprocessing-method": fork_server.METHOD,
    # A worker's memory is the ring, which the job's plan bounds.
    "distributed.worker.memory.terminate": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.target": False,
    "distributed.admin.tick.limit": "30s",
    "distributed.worker.http.routes": ["distributed.http.worker.prometheus", "distributed.http.health"],
    "distributed.diagnostics.nvml": False,  # we ask the driver ourselves
}


class DaskWorkers:
    """The workers of a Dask cluster as one device: what planning asks of it, and `stream` for the engine."""

    def __init__(self, client: Client, worker_device: WorkerDevice, where: str) -> None:
        """ClusterError or DeviceUnavailable where a worker is not fit for the job; `where`: the cluster in words."""
        self._client = client
        self._worker_device = worker_device
        self._where = where
        # Whether this process counts in its metrics what its workers do: where nobody asks them for theirs.
        self.gathers_metrics = False
        found = self._checked_profiles()
        self._profiles = list(found.values())
        names = {address: str(worker["name"]) for address, worker in self.identities().items()}
        self.devices: dict[str, Mapping[str, Any]] = {
            names.get(address, address): each.description for address, each in found.items()
        }
        hosts = Counter(each.host for each in self._profiles)
        self._ring_depth = max(each.ring_depth for each in self._profiles)
        kind = self._profiles[0].description["name"].partition(":")[0]
        self.name = f"{len(self._profiles)} × {kind}"
        # The memory that a user allows is a host's, and its workers share it.
        self.ring_depth = self._ring_depth * max(hosts.values())
        self._records: WeakValueDictionary[str, StageRecord] = WeakValueDictionary()  # of the jobs that are under way
        client.subscribe_topic(STAGES_TOPIC, self._hear)

    def _hear(self, event: tuple[float, Any]) -> None:
        """A segment under way tells what its stages have done."""
        job, segment, stages = event[1]
        record = self._records.get(job)
        if record is not None:
            record.under_way[segment] = stages

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
        if self.gathers_metrics:
            events = _counting(job.workload, events)
        events.on_begun(record)
        ring_bytes = job.cut.budget_bytes * self.ring_depth
        shares = Shares(self, cluster_job, job, ranks=len(self._profiles), memory_bytes=ring_bytes)
        if shares.are_better:
            with record.timed():
                shares.stream(plan, ledger, events, record)
            return record
        run = _ClusterRun(self._client, cluster_job, self._where, events.check)
        by_index = {chunk.index: chunk for chunk in plan.chunks}
        self._records[cluster_job.name] = record
        with record.timed():
            for receipt in run.receipts(cut_segments(plan, len(self._profiles))):
                record.under_way.pop(receipt.segment.chunks[0], None)
                record.include(receipt.stages)
                for notes in receipt.notes:
                    job.workload.add_audit_notes(notes)
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
        return {address: worker["last_seen"] for address, worker in self.identities().items()}

    def identities(self) -> Mapping[str, Mapping[str, Any]]:
        """What the scheduler knows of each worker, by address."""
        if self._client.status != "running":
            raise ClusterError(f"{self._where} went away")
        try:
            # `scheduler_info` now and then returns no workers: its periodic update, which asks for none, comes between.
            identity = self._client.sync(
                self._client.scheduler.identity, n_workers=-1, callback_timeout=CONNECT_SECONDS
            )
        except (OSError, TimeoutError) as error:
            raise ClusterError(f"{self._where} went away: {error}") from error
        workers: Mapping[str, Mapping[str, Any]] = identity["workers"]
        return workers

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
        record = StageRecord(gathers=self.gathers_metrics)
        for stage, totals in record.totals.items():
            totals.lanes = sum(each.lanes.get(stage, 1) for each in self._profiles)
        return record

    def _checked_profiles(self) -> dict[str, DeviceProfile]:
        workers = list(self.last_heard())
        if not workers:
            raise DeviceUnavailable(f"{self._where} has no workers: start some, then run again")
        for address, version in self._on_each(workers, _version).items():
            if version != __version__:
                raise DeviceUnavailable(
                    f"the worker {address} of {self._where} runs Millrace {version}, this is {__version__}: "
                    "install the same on both"
                )
        return self._on_each(workers, profile, self._worker_device)

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
            _run_segment,
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
        """Cancel what is left, and let the workers give back what they hold for the job.

        Where segments are under way, until their chunks in hand are in the ledger, but not for long.
        """
        stopped = bool(self._running)

        def close() -> None:
            with suppress(Exception):  # a cluster that is gone holds nothing
                if self._client.status == "running":
                    self._client.cancel(list(self._running), force=True)
                    self._client.run(_close_job, self._job.name, stopped, on_error="ignore")

        closing = threading.Thread(target=close, name="close-job", daemon=True)
        closing.start()
        if stopped:
            closing.join(CLOSE_SECONDS)


class _Nanny(Nanny):  # type: ignore[misc]
    """Counts how often it has had to start its worker anew."""

    starts = 0
    tells_worker = False  # where nobody asks this process for its metrics: the worker's then say it

    async def instantiate(self) -> Any:
        if self.starts > 0:
            metrics.worker_restarts.inc()
            if self.tells_worker:
                self.env[worker_states.RESTARTS] = str(self.starts)
        self.starts += 1
        return await super().instantiate()


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
        "dashboard_address": f"{LOOPBACK}:0",  # where Prometheus finds a worker's metrics
        "preload": [worker_states.__name__],
        "silence_logs": logging.CRITICAL,
    }
    workers = {
        number: {"cls": _Nanny, "options": common | {"env": spec.environment, "name": f"millrace-{number}"}}
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
        fork_server.begin()
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


def serve_workers(address: str, specs: Sequence[WorkerSpec], drain_s: float, metrics_port: int | None = None) -> None:
    """Worker processes of this machine for a scheduler elsewhere, each with a nanny, until it or a signal ends them.

    metrics_port : where the first serves its metrics, the second on the next port, and so on; None: on any free ones.
                   They are on the interface that leads to the scheduler.

    SIGTERM and SIGUSR1 drain: no more tasks, and the chunks in hand are finished and kept, within `drain_s`; a second
    one ends the workers at once. DeviceUnavailable where no scheduler answers.
    """

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            scheduler = await connect(address, timeout=CONNECT_SECONDS, **Security().get_connection_args("worker"))
            await scheduler.close()  # it is there: what fails from now on takes longer
            told = asyncio.create_task(_told_to_leave())
            await asyncio.sleep(0)  # from here on: a process that has not quite started cannot be stopped cleanly
            for number, spec in enumerate(specs):
                nanny = _Nanny(
                    address,
                    nthreads=TASKS_A_WORKER,
                    memory_limit=0,
                    interface=spec.interface,
                    env=spec.environment,
                    dashboard=False,
                    dashboard_address=endpoints[number],
                    preload=[worker_states.__name__],
                    death_timeout=START_SECONDS,
                )
                nanny.tells_worker = True
                nannies.append(await stack.enter_async_context(nanny))
            finished = asyncio.gather(*(nanny.finished() for nanny in nannies))
            ends: list[asyncio.Future[Any]] = [finished, told]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if told.done():
                await _drain(address, [nanny.worker_address for nanny in nannies if nanny.worker_address], drain_s)
            else:
                told.cancel()
                await finished

    endpoints = [_endpoint(address, spec, metrics_port, number) for number, spec in enumerate(specs)]
    nannies: list[Any] = []
    with dask.config.set(_CONFIG):
        with _leave_signals_ignored():
            fork_server.begin()
        try:
            asyncio.run(serve())
        except (OSError, TimeoutError, ValueError) as error:
            raise DeviceUnavailable(f"{address}: no Dask scheduler answers there: {error}; is it running?") from error
        except RuntimeError as error:
            raise ClusterError(f"the workers do not start: {error}: {error.__cause__}") from error


def _endpoint(address: str, spec: WorkerSpec, first_port: int | None, number: int) -> str | None:
    """Where a worker serves its metrics, HOST:PORT. ParameterError where the port is taken: Dask would take another."""
    if first_port is None:
        return None
    host = get_ip_interface(spec.interface) if spec.interface else get_ip(urlsplit(address).hostname)
    metrics.check_port(host, first_port + number)
    return f"{host}:{first_port + number}"


@contextmanager
def _leave_signals_ignored() -> Iterator[None]:
    """What is started meanwhile ignores them too, its children also: they may be sent to every process of a task or of
    a session, and this one decides."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in LEAVE_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


async def _told_to_leave() -> None:
    """Returns at the first of `LEAVE_SIGNALS`; the next does what it did before."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    handlers = {number: signal.getsignal(number) for number in LEAVE_SIGNALS}
    for number in LEAVE_SIGNALS:
        loop.add_signal_handler(number, told.set)
    try:
        await told.wait()
    finally:
        for number, handler in handlers.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


async def _drain(address: str, workers: Sequence[str], drain_s: float) -> None:
    """Returns when these workers have nothing in hand, or time is up, or their scheduler is gone."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(drain_s):
            async with Client(address, asynchronous=True, set_as_default=False) as client:
                await client.run(_leave, workers=list(workers), on_error="ignore")


async def _leave(dask_worker: Any) -> None:
    """On a worker: the scheduler gives its tasks to others from now on."""
    dask_worker.status = Status.paused
    await asyncio.get_running_loop().run_in_executor(None, leave)
    while dask_worker.state.executing:
        await asyncio.sleep(0.05)


def _quiet_dask() -> None:
    """Dask's own words about lost connections would stand among ours, which say what they mean for the job."""
    if not os.environ.get("MILLRACE_DEBUG"):
        for name in [name for name in logging.root.manager.loggerDict if name.startswith("distributed")]:
            logging.getLogger(name).setLevel(logging.CRITICAL)


async def _close_job(name: str, wait: bool) -> None:
    """On a thread of its own: a worker's event loop must not wait."""
    closing = asyncio.get_running_loop().run_in_executor(None, close_job, name)
    if wait:
        await asyncio.wait({closing}, timeout=CLOSE_SECONDS)


def _run_segment(job: ClusterJob, segment: Segment) -> SegmentReceipt:
    worker = get_worker()
    try:
        if leaving.is_set():
            raise ClusterError("this worker leaves")
        return run_segment(
            job, segment, lambda stages: worker.log_event(STAGES_TOPIC, (job.name, segment.chunks[0], stages))
        )
    except MillraceError:
        if not leaving.is_set():
            raise
        raise Reschedule from None  # another worker finds in the ledger what was done here


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


def _counting(workload: Workload, events: RunEvents) -> RunEvents:
    """The same events, with the chunks that workers write counted in this process's metrics."""
    count = metrics.work_of(workload.name, workload.unit)

    def written(chunk: Chunk) -> None:
        count.read(chunk.input_bytes)
        count.written(chunk.output_bytes, chunk.work)
        events.on_written(chunk)

    return replace(events, on_written=written)


def _version() -> str:
    return __version__


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100 - a symbolic link stays one: its target may change with the host
