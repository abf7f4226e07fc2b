"""`millrace serve`: starts and stops the store, the workers, the runner and the API in order."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from pipeline import __version__
from pipeline.cluster.dask import worker_start
from pipeline.cluster.dask.worker_states import watched
from pipeline.cluster.executor import Executor, open_executor, worker_specs
from pipeline.config import Settings
from pipeline.engine.devices.discovery import usable_gpus
from pipeline.errors import MillraceError, ParameterError, StorageError
from pipeline.service.app import make_app
from pipeline.service.http.app_state import Service
from pipeline.service.http.edge.connections import BoundedRequests
from pipeline.service.http.edge.tls import Renewal, check_certificate, warn_if_plain
from pipeline.service.http.scrape import begin_job_counts
from pipeline.service.http.users.tokens import TokensFile
from pipeline.service.http.views import no_worker
from pipeline.service.reporting import systemd
from pipeline.service.reporting.audit import AuditLog
from pipeline.service.reporting.webhooks import Webhooks, check_webhook, read_secret
from pipeline.service.roots import DataRoots
from pipeline.service.running.job_process import JobProcesses
from pipeline.service.running.runner import Limits, Runner
from pipeline.service.settings import AUDIT, JOBS, ServiceSettings
from pipeline.service.store import Store
from pipeline.service.store.state_folder import noting_crashes, sole_server
from pipeline.stopping import SIGNALS
from pipeline.workloads import unusable

LOG = logging.getLogger("millrace.service")
# Time for open answers to finish once runs have stopped.
CLOSE_S = 2
# Connections waiting to be accepted, also while the service starts.
BACKLOG = 2048
# A client that reads nothing of its answer for so long is considered gone.
UNREAD_S = 900
# Each client that waits for a job keeps a connection open; the usual limit of 1,024 files would not last.
MOST_FILES = 65_536
# A thread's freed memory serves other threads only within an arena; glibc has up to eight of them for each core.
_M_ARENA_MAX, ARENAS = -8, 2
# How long a check of the store stays valid: it writes to the disk, and anyone may request /readyz.
READY_S = 5.0
# What opening and planning a job may take at least; else four times its share of the memory, since some formats are
# read whole and converted.
LEAST_PLANNING_BYTES = 2 << 30


def serve(settings: ServiceSettings, *, on_ready: Callable[[str], None] = lambda address: None) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP, then drains: no new claims, chunks in hand are finished and kept.

    on_ready : called with the address once jobs are accepted

    Raises ParameterError for invalid settings, DeviceUnavailable for a missing device, StorageError if the disk of the
    state folder fails.
    """
    roots = DataRoots(settings.data_roots, but=settings.state_dir, groups=settings.group_roots)
    roots.confine()
    tokens = TokensFile(settings.tokens_file).now if settings.tokens_file is not None else lambda: None
    check_certificate(settings)
    warn_if_plain(settings)
    _allow_files()
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, ARENAS)
    for line in unusable():
        LOG.warning("%s", line)
    with ExitStack() as stack:
        stack.enter_context(sole_server(settings.state_dir))
        crash = stack.enter_context(noting_crashes(settings.state_dir))
        if crash is not None:
            LOG.error("the last server crashed (%s)", crash)
        previews = _previews_folder(settings.state_dir)
        audit = stack.enter_context(_audited(settings, roots))
        listener = stack.enter_context(_listening(settings))
        secret = read_secret(settings.webhook_secret_file) if settings.webhook_secret_file is not None else None
        store = Store(settings.state_dir / JOBS, webhook=settings.webhook_url, quota_days=settings.quota_days)
        stack.callback(store.close)
        if roots.folder is not None:
            os.chdir(roots.folder)  # for relative paths, also in a job's parameters
        executor = stack.enter_context(_open_workers(_executor_settings(settings)))
        workers = stack.enter_context(watched(executor.device))
        threading.Thread(target=_settle, name="settle").start()
        limits = Limits(
            jobs_at_once=settings.jobs_at_once,
            jobs_at_once_of_an_owner=settings.jobs_at_once_of_an_owner,
            memory_bytes=settings.memory,
            planning_s=settings.planning_s,
            keep_s=settings.keep_days * 86_400.0,
        )
        worker_start.start_fork_server()  # with a scheduler elsewhere it does not run yet
        share_bytes = settings.memory // settings.jobs_at_once
        processes = JobProcesses(max(LEAST_PLANNING_BYTES, 4 * share_bytes), settings.jobs_at_once)
        stack.callback(processes.close)
        runner = Runner(
            store, executor, roots, limits, previews=previews, has_workers=lambda: bool(workers()), processes=processes
        )
        stopping, over = threading.Event(), threading.Event()
        store_fault = _StoreFault(store)
        service = Service(
            settings=settings, store=store, runner=runner, roots=roots, previews=previews, processes=processes,
            workers=workers, ready=lambda: _missing(store_fault, workers, stopping), tokens=tokens,
            stopping=stopping, closing=over, audit=audit,
        )  # fmt: skip
        # Without the unused lifespan: a second signal would log its traceback.
        server = _Server(
            uvicorn.Config(
                make_app(service), http=BoundedRequests, log_level="warning", lifespan="off", proxy_headers=False,
                ssl_certfile=settings.tls_cert, ssl_keyfile=settings.tls_key,
                timeout_graceful_shutdown=CLOSE_S,
            )
        )  # fmt: skip
        server.stopping, server.closing, server.watchdog = stopping, over, systemd.Watchdog()
        runner.start(crashed=crash is not None)
        if secret is not None:
            webhooks = Webhooks(store, secret, partial(_may_be_told, settings))
            stack.callback(webhooks.close)
            webhooks.start()
        host, port = listener.getsockname()[:2]
        scheme = "http"
        if settings.tls_cert is not None and settings.tls_key is not None:
            scheme, server.renewal = "https", Renewal(settings.tls_cert, settings.tls_key)
        server.on_started = lambda: on_ready(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")
        server.on_stop = lambda: _drain(runner, settings.drain_s)
        server.status = lambda: f"jobs running: {runner.running}, at most {settings.jobs_at_once} at once"
        server.run(sockets=[listener])


class _Server(uvicorn.Server):
    """Keeps answering while runs are drained, so that clients learn how their jobs ended."""

    stopping: threading.Event
    closing: threading.Event
    on_started: Callable[[], None]
    on_stop: Callable[[], None]
    status: Callable[[], str]
    watchdog: systemd.Watchdog
    renewal: Renewal | None = None  # of the certificate

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures SIGHUP too. Signals ignored at the start stay ignored, as under nohup."""
        before = {number: signal.getsignal(number) for number in SIGNALS}
        with super().capture_signals():
            if threading.current_thread() is not threading.main_thread():
                yield
                return
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if handler is signal.SIG_IGN else self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before[signal.SIGHUP])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_started()
        systemd.notify(READY="1", STATUS=self.status())

    async def on_tick(self, counter: int) -> bool:
        self.watchdog.beat(self.status())
        if self.renewal is not None and self.config.ssl is not None:
            self.renewal.look(self.config.ssl)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.stopping.is_set():
            super().handle_exit(sig, frame)  # a second signal: stop at once
            return
        self.stopping.set()
        systemd.notify(STOPPING="1", STATUS="finishing current chunks")
        threading.Thread(target=self._stop, name="drain", daemon=True).start()

    def _stop(self) -> None:
        try:
            self.on_stop()
        finally:
            self.closing.set()
            self.should_exit = True


def _settle() -> None:
    """Excludes long-lived objects from garbage collection: a full collection would delay every request by a tenth of a
    second, about every 20 jobs."""
    gc.freeze()
    begin_job_counts()
    gc.freeze()


def _may_be_told(settings: ServiceSettings, url: str) -> bool:
    try:
        if url != settings.webhook_url:
            check_webhook(url, settings.webhook_hosts)
    except ParameterError:
        return False
    return True


def _drain(runner: Runner, seconds: float) -> None:
    if not runner.drain(seconds):
        LOG.warning("some jobs did not stop in %s s; their finished chunks are kept", seconds)


@contextmanager
def _open_workers(settings: Settings) -> Iterator[Executor]:
    """As `open_executor`, but a single GPU gets a worker process too: a crash of the driver or a kernel then ends the
    worker, which is restarted, not the service."""
    if settings.scheduler is not None or settings.workers is not None:
        with open_executor(settings) as executor:
            yield executor
        return
    worker_start.start_fork_server()  # before Dask is imported here
    from pipeline.cluster.dask.worker_processes import local_workers

    with local_workers(worker_specs(settings)) as workers:
        yield Executor(device=workers, stream=workers.stream)


def _executor_settings(settings: ServiceSettings) -> Settings:
    """The executor's settings: by default every GPU, or one process on the CPU if there is none. `open_executor`
    refuses contradictions and missing GPUs."""
    device, workers = settings.device, settings.workers
    if settings.scheduler is None and device in ("auto", "cpu"):
        on_cpu = device == "cpu" or not usable_gpus()
        device = "cpu" if on_cpu else "all"
        workers = (workers or 1) if on_cpu else workers
    shared = {name: getattr(settings, name) for name in Settings.model_fields if hasattr(settings, name)}
    return Settings.model_validate(shared | {"device": device, "workers": workers})


class _StoreFault:
    """Why the store cannot take jobs, if it cannot; checked at most once in READY_S."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._checked_at = float("-inf")
        self._fault: str | None = None

    def __call__(self) -> str | None:
        with self._lock:
            if time.monotonic() - self._checked_at > READY_S:
                try:
                    self._store.check()
                    self._fault = None
                except StorageError as error:
                    self._fault = str(error)
                self._checked_at = time.monotonic()
            return self._fault


def _missing(
    store_fault: Callable[[], str | None], workers: Callable[[], list[dict[str, Any]]], stopping: threading.Event
) -> str | None:
    """Why no job can be accepted now, if so."""
    if stopping.is_set():
        return "the service is stopping"
    try:
        return store_fault() or no_worker(workers())
    except MillraceError as error:
        return str(error)


def _allow_files() -> None:
    """Raises the limit on open files, for the workers too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def _audited(settings: ServiceSettings, roots: DataRoots) -> Iterator[AuditLog]:
    """The audit log, from the start of the service to its end."""
    path = settings.audit_log or settings.state_dir / AUDIT
    if settings.audit_log is not None and roots.holds(path):
        raise ParameterError(f"audit_log {path}: jobs may write there; choose a file outside the data roots")
    with closing(AuditLog(path, most_bytes=settings.audit_log_bytes, files=settings.audit_log_files)) as audit:
        audit.note("start", who=None, source=socket.gethostname(), version=__version__)
        yield audit
        audit.note("stop", who=None, source=socket.gethostname())


def _previews_folder(state_dir: Path) -> Path:
    folder = state_dir / "previews"
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError as error:
        raise ParameterError(f"{folder}: is not a folder; remove it, or choose another state_dir") from error
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror}; choose another state_dir") from error
    return folder


@contextmanager
def _listening(settings: ServiceSettings) -> Iterator[socket.socket]:
    """A listening socket, opened before any worker starts, to find a taken port early."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # With IPPROTO_TCP asyncio sets TCP_NODELAY; otherwise each answer takes 40 ms longer.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise ParameterError(f"host {settings.host}: {error.strerror}; choose another") from error
    except UnicodeError as error:
        raise ParameterError(f"host {settings.host!a}: is not a host name; choose another") from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNREAD_S)  # inherited by connections
        try:
            listener.bind(address)
            listener.listen(BACKLOG)  # two servers may both bind; uvloop would not report the failure
        except OSError as error:
            raise ParameterError(
                f"host {settings.host}, port {settings.port}: {error.strerror}; choose another"
            ) from error
        yield listener
