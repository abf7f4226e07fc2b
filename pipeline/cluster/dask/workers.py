"""The workers of a Dask cluster, one process for each GPU, as one device.

Dask moves tasks and results of a few hundred bytes. The samples go from the workers' own reads to their own writes.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import Future as ThreadFuture
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from distributed import Client, Future, KilledWorker, Semaphore, get_worker

from pipeline import __version__, metrics
from pipeline.cluster.communicators.base import Deadline
from pipeline.cluster.dask.connection import Connection, listen, scheduler_lost, submit
from pipeline.cluster.dask.hung_workers import ChunkWatch
from pipeline.cluster.dask.segment_tasks import STAGES_TOPIC, SegmentTasks
from pipeline.cluster.dask.worker_states import REPORT
from pipeline.cluster.gang.gang_lock import one_at_a_time
from pipeline.cluster.gang.gang_stream import GangStream
from pipeline.cluster.gang.member import STUCK_EXIT_CODE
from pipeline.cluster.job_memory import MemoryShare, MemoryWatch
from pipeline.cluster.segments import ClusterJob, DeviceProfile, WorkerDevice, cut_segments, profile
from pipeline.engine.devices.device import good_chunk_bytes
from pipeline.engine.ledger import Ledger
from pipeline.engine.planned import PlannedJob
from pipeline.engine.run import RunEvents
from pipeline.engine.stages import StageRecord
from pipeline.errors import ClusterError, DeviceUnavailable, MillraceError, RankLost
from pipeline.storage.objects import ObjectPath
from pipeline.workloads import Chunk, Plan, Workload

CONNECT_SECONDS = 10.0
START_SECONDS = 60.0


class DaskWorkers:
    """The workers of a Dask cluster as one device: what planning asks of it, and `stream` for the engine."""

    def __init__(
        self,
        connection: Connection,
        worker_device: WorkerDevice,
        where: str,
        end_worker: Callable[[str], None] | None = None,
    ) -> None:
        """where   : names the cluster in messages
        end_worker : ends the process of the worker at an address; by default the process is asked to end

        ClusterError or DeviceUnavailable if a worker is unfit.
        """
        self._end_worker = end_worker or (lambda address: self.tell([address], _end_process))
        self._connection = connection
        self._address = str(connection.client.scheduler.address)
        self._worker_device = worker_device
        self._where = where
        # Whether this process counts its workers' work in its own metrics, if theirs are not scraped.
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
        # `--memory` is per host, and the workers on a host share it.
        self.ring_depth = self._ring_depth * max(hosts.values())
        self._in_use: Counter[str] = Counter()  # addresses of workers, by the jobs that run on only some
        self._records: WeakValueDictionary[str, StageRecord] = WeakValueDictionary()  # by running job

    def _hear(self, event: tuple[float, Any]) -> None:
        """Take over a running segment's report."""
        job, segment, stages = event[1]
        record = self._records.get(job)
        if record is not None:
            record.under_way[segment] = stages

    def target_bytes(self, job_bytes: int) -> int:
        """Good chunk size, input and output together, for a worker's share of such a job."""
        share = job_bytes // len(self._profiles)
        return min(good_chunk_bytes(share, each.chunk_range) for each in self._profiles)

    def describe(self) -> dict[str, Any]:
        """The description for the receipt."""
        descriptions = [dict(each.description) | {"host": each.host} for each in self._profiles]
        return {"name": self.name, "model": descriptions[0]["model"], "cluster": self._where, "workers": descriptions}

    def stream(self, job: PlannedJob, plan: Plan, ledger: Ledger, events: RunEvents) -> StageRecord:
        """Stream the plan's chunks, segment by segment, on any worker that has room. The workers keep the ledger.

        Raises the job's first own error; ClusterError if the scheduler is lost, or if a segment kills one worker after
        another.
        """
        if not ledger.exists:
            ledger.create()
        cluster_job = ClusterJob(
            name=f"{job.spec.workload}-{secrets.token_hex(8)}",
            spec=replace(job.spec, input=_absolute(job.spec.input), output=_absolute(job.spec.output)),
            budget=job.budget,
            held_bytes=max(job.held_bytes // (self.ring_depth // self._ring_depth), job.budget.budget_bytes),
            ledger_identity=ledger.identity,
            worker_device=self._worker_device,
            share=MemoryShare(limit_bytes=job.bounds.memory_bytes, ring_bytes=job.ring_bytes + job.held_bytes),
            gpu_memory_bytes=job.bounds.gpu_memory_bytes,
        )
        with self._some(job.bounds.workers) as some:
            return self._stream(cluster_job, job, plan, ledger, events, some)

    def _stream(
        self,
        cluster_job: ClusterJob,
        job: PlannedJob,
        plan: Plan,
        ledger: Ledger,
        events: RunEvents,
        some: SomeWorkers | None,
    ) -> StageRecord:
        client = self._connection.client
        record = self._new_record()
        memory = MemoryWatch(self.identities, _report_of, cluster_job.name, cluster_job.share, events.on_memory)
        events = replace(events, check=_both(events.check, memory))
        if self.gathers_metrics:
            events = _counting(job.workload, events)
        events.on_begun(record)
        ring_bytes = job.budget.budget_bytes * self.ring_depth
        ranks = len(self._profiles) if some is None else some.count
        gang = GangStream(some or self, cluster_job, job, ranks=ranks, memory_bytes=ring_bytes)
        if gang.is_better:
            gang.stream(plan, ledger, events, record)
            return record
        listen(client, self._where, STAGES_TOPIC, self._hear)  # a restarted scheduler has no subscriptions
        watch = ChunkWatch(
            self.identities, self._end_worker, cluster_job, record, self._where, job.bounds.opening_s
        )  # fmt: skip

        addresses = None if some is None else some.addresses
        run = SegmentTasks(client, cluster_job, self._where, _both(events.check, watch), addresses)
        by_index = {chunk.index: chunk for chunk in plan.chunks}
        self._records[cluster_job.name] = record
        with record.timed():
            for receipt in run.receipts(cut_segments(plan, ranks)):
                record.under_way.pop(receipt.segment.chunks[0], None)
                record.include(receipt.stages)
                for notes in receipt.notes:
                    job.output.add_notes(notes)
                for index in receipt.segment.chunks:
                    events.on_written(by_index[index])
        return record

    @contextmanager
    def _some(self, count: int | None) -> Iterator[SomeWorkers | None]:
        """At most `count` of the workers; None: all of them."""
        if count is None or count >= len(self._profiles):
            yield None
            return
        with closing(SomeWorkers(self, count, self._in_use)) as some:
            yield some

    # For gangs

    @contextmanager
    def lock(self, lock_s: float | None, check: Callable[[], None]) -> Iterator[None]:
        """`one_at_a_time` for the gangs of all processes on these workers."""
        client = self._connection.client
        semaphore = Semaphore(name="millrace-gang", scheduler_rpc=client.scheduler, loop=client.loop)
        with (
            closing(_SchedulersLock(semaphore, partial(self._ask, client))) as lock,
            one_at_a_time(self._address, lock_s, check, lock),
        ):
            yield

    def last_heard(self) -> Mapping[str, float]:
        """The current workers by address, and when the scheduler last heard of each, by its clock."""
        return {address: worker["last_seen"] for address, worker in self.identities().items()}

    def identities(self) -> Mapping[str, Mapping[str, Any]]:
        """What the scheduler knows of each worker, by address."""
        # `scheduler_info` sometimes returns no workers: its periodic update asks for none.
        client = self._connection.client
        identity: Mapping[str, Any] = self._ask(client, lambda: client.scheduler.identity(n_workers=-1))
        return dict(identity["workers"])

    def _ask(self, client: Client, question: Callable[[], Awaitable[Any]]) -> Any:
        """The scheduler's answer to a call on the client's event loop. ClusterError if there is none."""
        if client.status != "running":
            raise scheduler_lost(self._where)
        try:
            return client.sync(question, callback_timeout=CONNECT_SECONDS)
        except OSError as error:  # its message names an internal connection
            raise scheduler_lost(self._where) from error
        except Exception as error:  # a client that is being closed raises anything
            raise ClusterError(f"{self._where} no longer answers: {type(error).__name__}: {error}") from error

    def start_on(self, address: str, function: Callable[..., Any], *args: Any, on_done: Callable[[], None]) -> GangCall:
        """Run a function on one worker, on a new thread. Its result raises RankLost if that worker is gone.

        A task bound to one worker would wait forever if that died. So other workers may take it, but refuse to run it.
        """
        client = self._connection.client
        future = submit(
            client, self._where, _on_gang_thread, address, function, args,
            workers=[address], allow_other_workers=True, pure=False, retries=0, priority=1,
        )  # fmt: skip
        future.add_done_callback(lambda _: on_done())
        return GangCall(client, future, self._where)

    def tell(self, addresses: Sequence[str], function: Callable[..., Any], *args: Any, wait_s: float = 0.0) -> None:
        """Run `function(*args, address)`, which must not block, on the event loops of those workers that are alive.

        wait_s : at most this long until they have run it
        """

        def tell_one(address: str) -> None:
            with suppress(Exception):  # the worker may be gone
                self._connection.client.run(function, *args, address, workers=[address], on_error="ignore")

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
        """A function's result on every worker. MillraceError passes through."""
        client = self._connection.client
        futures = {
            address: submit(client, self._where, function, *args, workers=[address], pure=False, retries=0)
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


class SomeWorkers:
    """Some of the workers for one job: those that the fewest such jobs use. A lost one is replaced.

    For gangs as `DaskWorkers`.
    """

    def __init__(self, workers: DaskWorkers, count: int, in_use: Counter[str]) -> None:
        """in_use : of all such jobs together, by address"""
        self._workers = workers
        self.count = count
        self._in_use = in_use
        self._chosen: list[str] = []
        self.lock, self.tell, self.start_on = workers.lock, workers.tell, workers.start_on

    def addresses(self) -> list[str]:
        """Addresses of the chosen workers that are alive, at most as many as allowed."""
        heard = self._workers.last_heard()
        with _choosing:
            for lost in [address for address in self._chosen if address not in heard]:
                self._chosen.remove(lost)
                del self._in_use[lost]
            others = sorted(heard.keys() - set(self._chosen), key=lambda address: (self._in_use[address], address))
            for address in others[: self.count - len(self._chosen)]:
                self._chosen.append(address)
                self._in_use[address] += 1
            return list(self._chosen)

    def last_heard(self) -> Mapping[str, float]:
        heard, chosen = self._workers.last_heard(), self.addresses()
        return {address: heard[address] for address in chosen if address in heard}

    def close(self) -> None:
        """The workers are free for other jobs."""
        with _choosing:
            self._in_use.subtract(self._chosen)
            self._chosen.clear()


_choosing = threading.Lock()


class _SchedulersLock:
    """A lock between processes. Its holder renews it; if the holder dies, it expires in half a minute.

    If the holder's event loop hangs for that long, it expires too early, and the workers refuse the second gang.
    """

    def __init__(self, semaphore: Semaphore, ask: Callable[[Callable[[], Awaitable[Any]]], Any]) -> None:
        self._semaphore = semaphore
        self._ask = ask

    def acquire(self, *, timeout: float) -> bool:
        return bool(self._ask(lambda: self._semaphore.acquire(timeout=timeout)))

    def release(self) -> None:
        with suppress(ClusterError):  # a lost scheduler holds no locks
            self._ask(self._semaphore.release)

    def close(self) -> None:
        """Stop the renewals: Dask would continue them."""
        renewals = getattr(self._semaphore, "refresh_callback", None)  # None if locks are configured never to expire
        if renewals is not None:
            self._semaphore.loop.add_callback(renewals.stop)


class GangCall:
    """A call that runs on one worker."""

    def __init__(self, client: Client, future: Future, where: str) -> None:
        self._client = client
        self._future = future
        self._where = where

    def result(self) -> Any:
        """The function's result or error; RankLost if its worker is gone. Call it only after `on_done`."""
        if self._future.cancelled() or self._client.status != "running":
            raise scheduler_lost(self._where)
        try:
            return self._future.result()
        except MillraceError:
            raise
        except (OSError, CancelledError) as error:
            raise scheduler_lost(self._where) from error
        except KilledWorker as error:
            raise RankLost(f"a worker of {self._where} died") from error
        except Exception as error:
            raise ClusterError(f"a worker of {self._where} failed: {type(error).__name__}: {error}") from error


async def _on_gang_thread(address: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a function on a daemon thread: it blocks neither the event loop, nor Dask's task threads, nor the exit."""
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
    """The same events, but they count the workers' chunks in this process's metrics."""
    count = metrics.work_of(workload.name, workload.unit)

    def written(chunk: Chunk) -> None:
        count.read(chunk.input_bytes)
        count.written(chunk.output_bytes, chunk.work)
        events.on_written(chunk)

    return replace(events, on_written=written)


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def check() -> None:
        first()
        second()

    return check


def _report_of(worker: Mapping[str, Any]) -> Mapping[str, Any]:
    report: Mapping[str, Any] = worker["metrics"].get(REPORT, {})
    return report


def _end_process(address: str) -> None:
    os._exit(STUCK_EXIT_CODE)


def _version() -> str:
    return __version__


def _absolute(path: Path) -> Path:
    # Symbolic links are kept: their targets may differ between hosts.
    return path if isinstance(path, ObjectPath) else Path(os.path.abspath(path))  # noqa: PTH100
