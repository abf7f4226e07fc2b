"""Dask and distributed: nannies and why workers end, spans, heartbeats, leases, and settings."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import dask
import pytest
from dask.utils import key_split
from distributed import Client, Nanny, Scheduler, Semaphore, Worker, comm
from distributed.client import ClosedClientError
from distributed.nanny import WorkerProcess
from distributed.security import Security
from distributed.spans import SpansSchedulerExtension

from pipeline.cluster.dask import worker_processes
from pipeline.cluster.dask.scheduler import dask_setup


def with_a_worker(look: Callable[[Scheduler, Worker, Client], Any]) -> None:
    """In this process, without connections: `look` runs on the event loop of all three."""

    async def run() -> None:
        async with (
            Scheduler(protocol="inproc", dashboard=False, dashboard_address="127.0.0.1:0") as scheduler,
            Worker(scheduler.address, nthreads=1, dashboard=False, metrics={"ours": lambda worker: 7}) as worker,
            Client(scheduler.address, asynchronous=True, set_as_default=False) as client,
        ):
            await look(scheduler, worker, client)

    with dask.config.set({"distributed.worker.memory.terminate": False}):
        asyncio.run(run())


@pytest.mark.parametrize("name", worker_processes._CONFIG)
def test_a_setting_is_still_known(name: str) -> None:
    """Dask ignores those that it does not know."""
    dask.config.get(name)


def test_a_nanny_starts_workers_through_instantiate() -> None:
    assert inspect.iscoroutinefunction(Nanny.instantiate)
    assert list(inspect.signature(Nanny.instantiate).parameters) == ["self"]
    assert "await self.instantiate()" in inspect.getsource(Nanny.start_unsafe)
    assert "await self.instantiate()" in inspect.getsource(Nanny._on_worker_exit)  # and so counts the deaths
    assert "env=self.env" in inspect.getsource(Nanny.instantiate)  # as it is then


def test_a_worker_tells_its_nanny_why_it_ends() -> None:
    assert list(inspect.signature(Nanny.close_gracefully).parameters) == ["self", "reason"]
    assert "close_gracefully(reason=reason)" in inspect.getsource(Worker.close)
    lost, closed = worker_processes._SCHEDULER_LOST
    assert lost in inspect.getsource(Worker.handle_scheduler)
    assert closed in inspect.getsource(Scheduler.close)


def test_a_nannys_process_tells_its_address_its_state_and_its_end() -> None:
    assert "self.process = WorkerProcess(" in inspect.getsource(Nanny.instantiate)
    assert {"status", "worker_address"} <= set(WorkerProcess.__init__.__code__.co_names)
    assert WorkerProcess.__annotations__["stopped"] == "asyncio.Event"
    assert isinstance(inspect.getattr_static(WorkerProcess, "pid"), property)


def test_spans_can_be_replaced_by_what_keeps_nothing() -> None:
    for name in ("observe_tasks", "heartbeat"):
        assert callable(getattr(SpansSchedulerExtension, name))

    async def look(scheduler: Scheduler, worker: Worker, client: Client) -> None:
        dask_setup(scheduler)
        assert await client.submit(sum, [1, 2]) == 3
        await worker.heartbeat()  # which carries what the worker's own spans have seen
        assert worker.status.name == "running"
        assert "millrace-forget-keys" in scheduler.periodic_callbacks

    with_a_worker(look)


def test_the_cache_of_key_names_can_be_emptied() -> None:
    key_split.cache_clear()


def test_the_scheduler_tells_a_workers_own_metrics_and_when_it_was_heard() -> None:
    async def look(scheduler: Scheduler, worker: Worker, client: Client) -> None:
        await worker.heartbeat()
        identity = await client.scheduler.identity(n_workers=-1)
        found = identity["workers"][worker.address]
        assert found["metrics"]["ours"] == 7
        assert {"name", "host", "services", "last_seen"} <= set(found)
        assert {"cpu", "memory"} <= set(found["metrics"])
        worker.metrics["later"] = lambda worker: 8  # as `dask_setup` adds ours
        await worker.heartbeat()
        assert scheduler.workers[worker.address].metrics["later"] == 8

    with_a_worker(look)


def test_a_task_can_look_at_its_own_state_on_its_worker() -> None:
    def task() -> str:
        from distributed import get_worker

        worker = get_worker()
        key = worker.get_current_task()
        worker.log_event("ours", (key, 1))
        assert len(worker.state.executing) == 1
        return str(worker.state.tasks[key].state)

    async def look(scheduler: Scheduler, worker: Worker, client: Client) -> None:
        assert await client.submit(task) == "executing"
        assert scheduler.get_events("ours")

    with_a_worker(look)


def test_a_semaphores_renewals_can_be_ended() -> None:
    async def look(scheduler: Scheduler, worker: Worker, client: Client) -> None:
        semaphore = Semaphore(name="ours", scheduler_rpc=client.scheduler, loop=client.loop)
        assert await semaphore.acquire(timeout=10)
        semaphore.loop.add_callback(semaphore.refresh_callback.stop)
        await semaphore.release()

    with_a_worker(look)


def test_a_client_has_a_loop_of_its_own_to_stop() -> None:
    client = inspect.getsource(Client.__init__)
    assert "self._loop_runner = LoopRunner(" in client
    assert issubclass(ClosedClientError, Exception)


def test_a_connection_can_be_made_to_see_whether_a_scheduler_answers() -> None:
    async def look(scheduler: Scheduler, worker: Worker, client: Client) -> None:
        made = await comm.connect(scheduler.address, timeout=5, **Security().get_connection_args("worker"))
        await made.close()

    with_a_worker(look)
