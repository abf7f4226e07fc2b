"""Dask workers: started here for a job or service, found at a scheduler, or started for a scheduler elsewhere."""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, closing, contextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import dask
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from distributed import Client, Nanny, Scheduler, SpecCluster, Status
from distributed.comm import connect
from distributed.security import Security
from distributed.utils import get_ip, get_ip_interface

from pipeline import metrics
from pipeline.cluster.dask import scheduler as scheduler_setup
from pipeline.cluster.dask import worker_start, worker_states
from pipeline.cluster.dask.connection import Connection
from pipeline.cluster.dask.hung_workers import LocalWorkers, silent_replaced
from pipeline.cluster.dask.segment_tasks import TASKS_A_WORKER
from pipeline.cluster.dask.worker_start import WorkerSpec
from pipeline.cluster.dask.workers import CONNECT_SECONDS, START_SECONDS, DaskWorkers
from pipeline.cluster.segments import WorkerDevice, leave
from pipeline.errors import ClusterError, DeviceUnavailable, too_many_files

LOOPBACK = "127.0.0.1"
LOOK_SECONDS = 2.0  # a running scheduler answers within this time
END_SECONDS = 10.0  # before workers that do not end are killed
# Drain the workers: systemd, Kubernetes and Docker send SIGTERM, Slurm the one given by --signal.
LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_CONFIG = {
    "distributed.worker.daemon": False,
    "distributed.worker.multiprocessing-method": worker_start.METHOD,
    # A worker's memory is the ring, which the job's plan bounds.
    "distributed.worker.memory.terminate": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.target": False,
    "distributed.admin.tick.limit": "30s",
    # A task is given up after the third death of a worker that ran it.
    "distributed.scheduler.allowed-failures": 2,
    # A nanny restarts its worker however long that takes; Dask would end the nanny for good.
    "distributed.deploy.lost-worker-timeout": "1h",
    "distributed.worker.http.routes": ["distributed.http.worker.prometheus", "distributed.http.health"],
    "distributed.diagnostics.nvml": False,  # we query the driver ourselves
    # Limits what Dask keeps for debugging, since a service runs for months.
    "distributed.admin.log-length": 100,
    "distributed.admin.low-level-log-length": 100,
    "distributed.diagnostics.computations.max-history": 10,
    "distributed.admin.system-monitor.log-length": 10,
    "distributed.admin.system-monitor.disk": False,
    "distributed.worker.profile.enabled": False,
    # How often Dask checks its event loop for delays; the default is fifty times a second, in each process.
    "distributed.admin.tick.interval": "1s",
}

# Dask's reasons for closing a worker that has lost its scheduler.
_SCHEDULER_LOST = ("worker-handle-scheduler-connection-broken", "scheduler-close")


class _Nanny(Nanny):  # type: ignore[misc]
    """Counts the restarts of its worker, and knows whether the scheduler was lost."""

    starts = 0
    lost_scheduler = False
    passes_restarts = False  # to its worker, whose metrics count them if this process serves none

    async def instantiate(self) -> Any:
        if self.starts > 0:
            metrics.worker_restarts.inc()
            if self.passes_restarts:
                self.env[worker_states.RESTARTS] = str(self.starts)
        self.starts += 1
        return await super().instantiate()

    def close_gracefully(self, reason: str = "nanny-close-gracefully") -> None:
        """Also called by its worker, with the reason of its end."""
        self.lost_scheduler = reason in _SCHEDULER_LOST
        super().close_gracefully(reason)


@contextmanager
def local_workers(specs: Sequence[WorkerSpec]) -> Iterator[DaskWorkers]:
    """Start worker processes on this machine, each with a nanny that restarts it; the context ends them.

    They talk over loopback under new certificates: no other user of the machine can send them code.
    """
    _quiet_dask()
    security = _security()
    common = {
        "nthreads": TASKS_A_WORKER,
        "memory_limit": 0,
        "host": LOOPBACK,
        "protocol": "tls",
        "security": security,
        "dashboard": False,
        "dashboard_address": f"{LOOPBACK}:0",  # of a worker's metrics, for Prometheus
        "preload": [worker_states.__name__],
        "silence_logs": logging.CRITICAL,
    }
    nannies = {
        number: {"cls": _Nanny, "options": common | {"env": spec.environment, "name": f"millrace-{number}"}}
        for number, spec in enumerate(specs)
    }
    scheduler = {
        "cls": Scheduler,
        "options": {
            "host": LOOPBACK, "port": 0, "protocol": "tls", "security": security,
            "dashboard": False, "dashboard_address": f"{LOOPBACK}:0", "preload": [scheduler_setup.__name__],
        },
    }  # fmt: skip
    with dask.config.set(_CONFIG):
        worker_start.start_fork_server()
        try:
            cluster = SpecCluster(nannies, scheduler, security=security, silence_logs=logging.CRITICAL)
        except Exception as error:
            raise ClusterError(f"the local workers do not start: {_reason(error)}") from error
        where = "the local cluster"
        connect = partial(Client, cluster, security=security, set_as_default=False)
        with _closed_or_killed(cluster), closing(Connection(connect, where)) as connection:
            try:
                connection.client.wait_for_workers(len(specs), timeout=START_SECONDS)
            except TimeoutError as error:
                raise ClusterError(f"the local workers do not start: {error}") from error
            local = LocalWorkers(lambda: list(cluster.workers.values()))
            workers = DaskWorkers(connection, specs[0].device, where, local.end)
            with silent_replaced(workers.last_heard, local):
                yield workers


def _security() -> Security:
    """As Dask's `Security.temporary`, whose certificate is valid for only a year."""
    key, certificate = _self_signed()
    keys = {f"tls_{role}_key": key for role in ("client", "scheduler", "worker")}
    certificates = {f"tls_{role}_cert": certificate for role in ("client", "scheduler", "worker")}
    return Security(require_encryption=True, tls_ca_file=certificate, **keys, **certificates)


def _self_signed() -> tuple[str, str]:
    """A new private key and its certificate, which is valid at any time, both as PEM.

    The key alone decides whom to trust: a restarted worker must be let in even if the service has run for years or the
    clock was set back to before its start.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "millrace")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(1970, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31, 23, 59, 59))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private.decode(), certificate.public_bytes(pem).decode()


def _reason(error: BaseException) -> str:
    """The root cause of an error of Dask, which hides it, and the remedy if there is one."""
    while (behind := error.__cause__ or error.__context__) is not None:
        error = behind
    return "; ".join(filter(None, (f"{type(error).__name__}: {error}", too_many_files(error))))


@contextmanager
def _closed_or_killed(cluster: SpecCluster) -> Iterator[None]:
    nannies = list(cluster.workers.values())
    try:
        yield
    finally:
        # Errors while workers end (one dies, or takes longer than Dask waits) do not affect their results. For one that
        # hangs as it starts, Dask would wait forever, and so would Python at exit.
        processes = [nanny.process for nanny in nannies]  # a nanny may leave its process running
        with suppress(Exception):
            cluster.close(timeout=END_SECONDS)
        for process in processes:
            with suppress(Exception):  # it has ended
                os.kill(process.pid, signal.SIGKILL)
        if cluster.scheduler.status != Status.closed:  # Dask ends it last, so not at all if a worker took too long
            with suppress(Exception):
                cluster.sync(cluster.scheduler.close, callback_timeout=END_SECONDS)


@contextmanager
def workers_of(address: str, device: str, threads: int | None) -> Iterator[DaskWorkers]:
    """Connect to the workers of a running Dask scheduler. DeviceUnavailable if none answers."""
    _quiet_dask()
    where = f"the scheduler {address}"

    def connect() -> Client:
        asyncio.run(_greet(address, CONNECT_SECONDS))  # a client would wait forever for a silent server
        return Client(address, timeout=CONNECT_SECONDS, set_as_default=False)

    try:
        connection = Connection(connect, where)
    except Exception as error:  # another server's answer may raise anything in Dask
        raise DeviceUnavailable(
            f"--scheduler {address}: no Dask scheduler answers there ({_cause(error)}); start one with "
            "`dask scheduler`, or leave --scheduler out"
        ) from error
    with closing(connection):
        with suppress(TimeoutError):  # workers may just have been started
            connection.client.wait_for_workers(1, timeout=CONNECT_SECONDS)
        yield DaskWorkers(connection, WorkerDevice(device=device, threads=threads), where)


def serve_workers(address: str, specs: Sequence[WorkerSpec], drain_s: float, metrics_port: int | None = None) -> None:
    """Run worker processes, each with a nanny, for a scheduler elsewhere, until it or a signal ends them.

    metrics_port : port of the first worker's metrics, the second uses the next one, and so on; None: any free ports.
                   They are on the interface that leads to the scheduler.

    SIGTERM and SIGUSR1 drain: workers take no more tasks, and chunks in hand are finished and kept, within `drain_s`;
    a second signal ends the workers at once. DeviceUnavailable if no scheduler answers, ClusterError if it is lost.
    """

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            try:
                await _greet(address, CONNECT_SECONDS)  # fails sooner than starting workers would
            except Exception as error:  # another server's answer may raise anything in Dask
                raise _no_scheduler(address, error) from error
            draining = asyncio.create_task(_leave_signal())
            await asyncio.sleep(0)  # handle signals from here on: workers that are starting cannot be stopped cleanly
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
                nanny.passes_restarts = True
                nannies.append(await stack.enter_async_context(nanny))
            finished = asyncio.gather(*(nanny.finished() for nanny in nannies))
            ends: list[asyncio.Future[Any]] = [finished, draining]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if draining.done():
                await _drain(address, nannies, drain_s)
            else:
                draining.cancel()
                await finished
                await _check_scheduler(address)
                if any(nanny.lost_scheduler for nanny in nannies):  # else it has closed the workers
                    raise ClusterError(f"{address}: the connection to the scheduler was lost; start this again")

    endpoints = [_endpoint(address, spec, metrics_port, number) for number, spec in enumerate(specs)]
    nannies: list[Any] = []
    with dask.config.set(_CONFIG):
        with _leave_signals_ignored():
            worker_start.start_fork_server()
        try:
            asyncio.run(serve())
        except (OSError, TimeoutError, ValueError) as error:
            raise _no_scheduler(address, error) from error
        except RuntimeError as error:
            asyncio.run(_check_scheduler(address))
            raise ClusterError(f"the workers do not start: {error}: {error.__cause__}") from error


def _endpoint(address: str, spec: WorkerSpec, first_port: int | None, number: int) -> str | None:
    """The HOST:PORT of a worker's metrics. ParameterError if the port is taken: Dask would use another."""
    if first_port is None:
        return None
    host = get_ip_interface(spec.interface) if spec.interface else get_ip(urlsplit(address).hostname)
    metrics.check_port(host, first_port + number)
    return f"{host}:{first_port + number}"


async def _greet(address: str, within_s: float) -> None:
    """Raises any exception if no scheduler answers: Dask misreads another server's answer as message lengths."""
    async with asyncio.timeout(within_s + 1):  # the other timeout is for connecting only
        comm = await connect(address, timeout=within_s, **Security().get_connection_args("worker"))
        await comm.close()


def _no_scheduler(address: str, error: Exception) -> DeviceUnavailable:
    return DeviceUnavailable(f"{address}: no Dask scheduler answers there: {_cause(error)}; is it running?")


def _cause(error: Exception) -> str:
    if isinstance(error, OSError | ValueError | KeyError):
        return f"{type(error).__name__}: {error}" if str(error) else "no reason given"
    return "another server is there"  # Dask misread its answer, so the error means nothing


async def _check_scheduler(address: str) -> None:
    try:
        await _greet(address, LOOK_SECONDS)
    except Exception as error:
        raise ClusterError(f"{address}: the scheduler no longer answers; start it, then this again") from error


@contextmanager
def _leave_signals_ignored() -> Iterator[None]:
    """Processes started meanwhile, and their children, ignore these signals too: they may be sent to every process of a
    task or session, but only this process handles them."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in LEAVE_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


async def _leave_signal() -> None:
    """Returns at the first of `LEAVE_SIGNALS`, then restores their handlers."""
    loop, received = asyncio.get_running_loop(), asyncio.Event()
    handlers = {number: signal.getsignal(number) for number in LEAVE_SIGNALS}
    for number in LEAVE_SIGNALS:
        loop.add_signal_handler(number, received.set)
    try:
        await received.wait()
    finally:
        for number, handler in handlers.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


async def _drain(address: str, nannies: Sequence[Nanny], drain_s: float) -> None:
    """Returns when the workers have nothing in hand, time is up, or the scheduler is gone."""
    for nanny in nannies:
        nanny.close_gracefully()  # it restarts no worker from now on
    processes = [nanny.process for nanny in nannies if nanny.process is not None]
    at_work = [process for process in processes if process.status == Status.running]
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(drain_s), Client(address, asynchronous=True, set_as_default=False) as client:
            await asyncio.gather(*(_until_left(client, process) for process in at_work))


async def _until_left(client: Client, process: Any) -> None:
    """Returns when a worker has nothing in hand, or its process has ended: the scheduler would call a dead worker for
    another half minute."""
    left = asyncio.ensure_future(client.run(_leave, workers=[process.worker_address], on_error="ignore"))
    ended = asyncio.ensure_future(process.stopped.wait())
    try:
        await asyncio.wait((left, ended), return_when=asyncio.FIRST_COMPLETED)
        if left.done():
            left.result()
    finally:
        left.cancel()
        ended.cancel()


async def _leave(dask_worker: Any) -> None:
    """Pause a worker: the scheduler reassigns its tasks."""
    dask_worker.status = Status.paused
    await asyncio.get_running_loop().run_in_executor(None, leave)
    while dask_worker.state.executing:
        await asyncio.sleep(0.05)


def _quiet_dask() -> None:
    """Silence Dask's logs of lost connections: our messages explain what they mean for the job."""
    if not os.environ.get("MILLRACE_DEBUG"):
        for name in [name for name in logging.root.manager.loggerDict if name.startswith("distributed")]:
            logging.getLogger(name).setLevel(logging.CRITICAL)
