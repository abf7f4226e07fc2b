"""`millrace serve`: the store, the workers, the runner and the API, put together and taken apart in order."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from pipeline.cluster.dask import fork_server
from pipeline.cluster.dask.worker_states import watched
from pipeline.cluster.executor import Executor, open_executor, worker_specs
from pipeline.config import Settings
from pipeline.engine.discovery import usable_gpus
from pipeline.errors import DISK_FAULTS, MillraceError, ParameterError, StorageError
from pipeline.service import notify
from pipeline.service.app import make_app
from pipeline.service.http.app_state import Service
from pipeline.service.http.connections import TimedRequests
from pipeline.service.http.scrape import begin_job_counts
from pipeline.service.http.tokens import TokensFile
from pipeline.service.roots import DataRoots
from pipeline.service.runner import Limits, Runner
from pipeline.service.settings import JOBS, ServiceSettings
from pipeline.service.store import Store
from pipeline.workloads import unusable

LOG = logging.getLogger("millrace.service")
# What is left of SIGTERM's patience once runs have stopped: for answers under way.
CLOSE_S = 2
# Connections that wait to be taken, while the service starts too.
BACKLOG = 2048
# A client that has read nothing of its answer for so long is taken for gone.
UNREAD_S = 900
# Each client that waits for a job keeps a connection open; the usual limit of 1,024 files would not last.
MOST_FILES = 65_536


def serve(settings: ServiceSettings, *, on_ready: Callable[[str], None] = lambda address: None) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP, then drains: no new claims, chunks in hand are finished and kept.

    on_ready : called with the address once jobs are taken

    Raises ParameterError for settings that cannot be, DeviceUnavailable for a device that is not here, StorageError
    where the disk under the state folder fails.
    """
    roots = DataRoots(settings.data_roots, but=settings.state_dir)
    tokens = TokensFile(settings.tokens_file).now if settings.tokens_file is not None else lambda: None
    _allow_files()
    for line in unusable():
        LOG.warning("%s", line)
    with ExitStack() as stack:
        stack.enter_context(_sole_server(settings.state_dir))
        previews = _previews_folder(settings.state_dir)
        listener = stack.enter_context(_listening(settings))
        store = Store(settings.state_dir / JOBS)
        stack.callback(store.close)
        os.chdir(roots.roots[0])  # where relative paths begin, those among a job's parameters too
        place = stack.enter_context(_open_workers(_place_settings(settings)))
        workers = stack.enter_context(watched(place.device))
        threading.Thread(target=_settle, name="settle").start()
        limits = Limits(
            jobs_at_once=settings.jobs_at_once,
            jobs_at_once_of_an_owner=settings.jobs_at_once_of_an_owner,
            memory_bytes=settings.memory,
            keep_s=settings.keep_days * 86_400.0,
        )
        runner = Runner(store, place, roots, limits, previews=previews, has_workers=lambda: bool(workers()))
        stopping, closing = threading.Event(), threading.Event()
        service = Service(
            settings=settings, store=store, runner=runner, roots=roots, previews=previews,
            workers=workers, ready=lambda: _missing(store, workers, stopping), tokens=tokens,
            stopping=stopping, closing=closing,
        )  # fmt: skip
        # Without a lifespan, of which nothing here makes use: a second signal would leave its traceback in the log.
        server = _Server(
            uvicorn.Config(
                make_app(service), http=TimedRequests, log_level="warning", lifespan="off",
                timeout_graceful_shutdown=CLOSE_S,
            )
        )  # fmt: skip
        server.stopping, server.closing, server.heartbeat = stopping, closing, notify.Heartbeat()
        runner.start()
        host, port = listener.getsockname()[:2]
        server.on_started = lambda: on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        server.on_stop = lambda: _drain(runner, settings.drain_s)
        server.status = lambda: f"jobs running: {runner.running}, at most {settings.jobs_at_once} at once"
        server.run(sockets=[listener])


class _Server(uvicorn.Server):
    """Answers go on while runs are drained: those who wait learn what became of their jobs."""

    stopping: threading.Event
    closing: threading.Event
    on_started: Callable[[], None]
    on_stop: Callable[[], None]
    status: Callable[[], str]
    heartbeat: notify.Heartbeat

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGHUP too, of a terminal that is closed: raised in the event loop, it would be swallowed there."""
        with super().capture_signals():
            earlier = signal.getsignal(signal.SIGHUP)
            if threading.current_thread() is not threading.main_thread() or earlier is signal.SIG_IGN:  # as under nohup
                yield
                return
            signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, earlier)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_started()
        notify.tell(READY="1", STATUS=self.status())

    async def on_tick(self, counter: int) -> bool:
        self.heartbeat.beat(self.status())
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.stopping.is_set():
            super().handle_exit(sig, frame)  # a second signal: at once
            return
        self.stopping.set()
        notify.tell(STOPPING="1", STATUS="finishes the chunks in hand")
        threading.Thread(target=self._stop, name="drain", daemon=True).start()

    def _stop(self) -> None:
        try:
            self.on_stop()
        finally:
            self.closing.set()
            self.should_exit = True


def _settle() -> None:
    """What a service holds from its start to its end is no garbage: a full collection that looked at all of it would
    keep every request waiting for a tenth of a second, and comes about every 20 jobs."""
    gc.freeze()
    begin_job_counts()
    gc.freeze()


def _drain(runner: Runner, seconds: float) -> None:
    if not runner.drain(seconds):
        LOG.warning("some jobs did not stop in %s s; their finished chunks are kept", seconds)


@contextmanager
def _open_workers(settings: Settings) -> Iterator[Executor]:
    """As `open_executor`, but where that would compute in this process, with its one GPU, a worker does: a fault of the
    driver or of a kernel takes a worker with it, which is started again, and not the service."""
    if settings.scheduler is not None or settings.workers is not None:
        with open_executor(settings) as place:
            yield place
        return
    fork_server.begin()  # before Dask is imported here, too
    from pipeline.cluster.dask.worker_processes import local_workers

    with local_workers(worker_specs(settings)) as workers:
        yield Executor(device=workers, stream=workers.stream)


def _place_settings(settings: ServiceSettings) -> Settings:
    """Every GPU unless a device is named, or a process on the CPU of a machine that has none. What contradicts itself,
    or names a GPU that is not here, is left for `open_executor` to refuse."""
    device, workers = settings.device, settings.workers
    if settings.scheduler is None and device in ("auto", "cpu"):
        on_cpu = device == "cpu" or not usable_gpus()
        device = "cpu" if on_cpu else "all"
        workers = (workers or 1) if on_cpu else workers
    return Settings.model_validate(
        {
            "device": device,
            "workers": workers,
            "threads": settings.threads,
            "scheduler": settings.scheduler,
            "memory": settings.memory,
        }
    )


def _missing(store: Store, workers: Callable[[], list[dict[str, Any]]], stopping: threading.Event) -> str | None:
    """Why no job can be taken now."""
    if stopping.is_set():
        return "the service is stopping"
    try:
        store.check()
        return None if workers() else "there is no worker"
    except MillraceError as error:
        return str(error)


def _allow_files() -> None:
    """As many open files as this process may allow itself, workers included."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def _sole_server(state_dir: Path) -> Iterator[None]:
    """Of all servers on a state folder one is alive: only so may it take over what another had begun."""
    # A file can be removed under its holder, as people do who take it for left behind; the lock of a folder may hold on
    # this machine alone.
    wanted = ((state_dir, os.O_RDONLY | os.O_DIRECTORY), (state_dir / "lock", os.O_RDWR | os.O_CREAT))
    with ExitStack() as stack:
        locks: list[int] = []
        try:
            state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            for path, flags in wanted:
                locks.append(os.open(path, flags, 0o600))
                stack.callback(os.close, locks[-1])
        except OSError as error:
            kind = StorageError if error.errno in DISK_FAULTS else ParameterError
            raise kind(f"state_dir {state_dir}: {error.strerror}; choose another") from error
        try:
            for descriptor in locks:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ParameterError(f"state_dir {state_dir}: another server is at work on it; choose another") from error
        except OSError as error:  # as some network file systems say
            raise ParameterError(
                f"state_dir {state_dir}: cannot be locked ({error.strerror}); choose one on a local disk"
            ) from error
        yield


def _previews_folder(state_dir: Path) -> Path:
    folder = state_dir / "previews"
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError as error:
        raise ParameterError(f"{folder}: is no folder; remove it, or choose another state_dir") from error
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror}; choose another state_dir") from error
    return folder


@contextmanager
def _listening(settings: ServiceSettings) -> Iterator[socket.socket]:
    """Bound first: a port that is taken is found before any worker starts."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # Named TCP: only then asyncio turns off the delay of small packets, which costs 40 ms an answer.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise ParameterError(f"host {settings.host}: {error.strerror}; choose another") from error
    except UnicodeError as error:
        raise ParameterError(f"host {settings.host!a}: is no name of a host; choose another") from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNREAD_S)  # its connections inherit it
        try:
            listener.bind(address)
            listener.listen(BACKLOG)  # two that start at once may both bind, and uvloop would not say that it failed
        except OSError as error:
            raise ParameterError(
                f"host {settings.host}, port {settings.port}: {error.strerror}; choose another"
            ) from error
        yield listener
