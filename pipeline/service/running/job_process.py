"""Jobs that are open in processes of their own, with a bound on memory: a damaged or hostile file may end such a
process, never the server. Files are looked at in them too.

The processes are forked from the workers' fork server; one is always ready, and each serves one job after another.
Samples do not pass through them: workers read and write the chunks. What the server asks of an open job (its plan, its
sink, its reference) are small messages, one at a time.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import logging
import multiprocessing
import pickle
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar, cast

from pipeline.cluster.dask.worker_start import METHOD
from pipeline.cluster.silence import cpu_seconds
from pipeline.config import format_bytes
from pipeline.errors import InputError, MillraceError, too_little_memory
from pipeline.workloads import JobSpec, OpenJob, workload_named
from pipeline.workloads.many_files import open_job

T = TypeVar("T")

LOG = logging.getLogger("millrace.service")
# A process serves another job only if it has given back all but this share of its memory.
GROWN_SHARE = 0.25
# Processes kept for later jobs.
MOST_READY = 4
# How often `check` is called while an answer is awaited.
CHECK_S = 0.25
# How long a killed process is waited for: one that a file system holds up does not end.
END_S = 5.0
# Methods whose results stay in the process, and those that close what a dead process cannot hold open.
_KEEPING, _CLOSING = ("reference", "sink"), ("close", "discard", "keep")
_PR_SET_PDEATHSIG = 1

Members = tuple[tuple[str, bool], ...]  # public names, and whether each is a method's


class ProcessDied(MillraceError):
    """The process that had the job open is gone."""


class JobProcesses:
    """Opens jobs in processes. Thread-safe."""

    def __init__(self, limit_bytes: int, most_ready: int = 1) -> None:
        """limit_bytes : what each may allocate
        most_ready  : how many are kept for later jobs
        """
        self._limit_bytes = limit_bytes
        self._most_ready = min(most_ready, MOST_READY)
        self._lock = threading.Lock()
        self._ready: list[_Process] = []
        self._all: set[_Process] = set()
        self._closed = False
        self._prepare()

    def lease(self, check: Callable[[], None]) -> Lease:
        """A process for one job; `release` it.

        check : called while the job is opened and planned; may raise, which ends the process

        Raises MillraceError if no process can be started.
        """
        with self._lock:
            process = self._ready.pop() if self._ready else None
        process = process or self._started()
        process.check = check
        return Lease(process, partial(self._put_back, process))

    def look(
        self, path: Path, function: Callable[..., T], *arguments: Any, known: object, most_bytes: int, most_s: float
    ) -> T:
        """`Lease.call` in a process of its own, for so long at most. InputError if it takes longer, or dies of it."""
        ends_at = time.monotonic() + most_s

        def check() -> None:
            if time.monotonic() > ends_at:
                raise InputError(
                    f"{path}: looking at it takes more than {most_s:.0f} s; choose a smaller part, or write a pyramid"
                )

        lease = self.lease(check)
        try:
            return lease.call(function, path, *arguments, known=known, most_bytes=most_bytes)
        except ProcessDied as error:
            said = "the process that read it died; the file is damaged, or too large to show"
            raise InputError(f"{path}: {said}") from error
        finally:
            lease.release()

    def close(self) -> None:
        """End every process, those of open jobs too."""
        with self._lock:
            self._closed = True
            processes, self._all = self._all, set()
        for process in processes:
            process.end()

    def _prepare(self) -> None:
        """Start a process for the next job, which takes a moment, on a thread."""

        def start() -> None:
            with suppress(MillraceError):  # the next job reports it
                self._put_back(self._started())

        threading.Thread(target=start, name="job-process", daemon=True).start()

    def _started(self) -> _Process:
        try:
            process = _Process(self._limit_bytes)
        except (OSError, EOFError) as error:
            raise MillraceError(f"no process can be started for the job: {error}; check the limits") from error
        with self._lock:
            if not self._closed:
                self._all.add(process)
                return process
        process.end()
        raise MillraceError("the service is stopping")

    def _put_back(self, process: _Process) -> None:
        process.check = None
        is_fresh = process.is_fresh()
        with self._lock:
            if is_fresh and not self._closed:
                self._ready.append(process)
            surplus = process if not is_fresh else self._ready.pop(0) if len(self._ready) > self._most_ready else None
            if surplus is not None:
                self._all.discard(surplus)
            is_needed = not self._ready and not self._closed
        if surplus is not None:
            surplus.end()
        if is_needed:
            self._prepare()


class Lease:
    """A process while it serves one job."""

    def __init__(self, process: _Process, put_back: Callable[[], None]) -> None:
        self._process = process
        self.release = put_back

    def open(self, spec: JobSpec, most_bytes: int | None = None) -> OpenJob:
        """The job, open in the process until `release`; it may allocate `most_bytes` at most, if that is less than any
        job may. Raises as its workload's `open`; ProcessDied."""
        return cast("OpenJob", _remote(self._process, 0, self._process.ask("open", spec, most_bytes)))

    def call(self, function: Callable[..., T], path: Path, *arguments: Any, known: object = None, most_bytes: int) -> T:
        """What a module's function returns for a file and further arguments.

        known      : sent along, as a `Confinement`, which the process keeps to from then on
        most_bytes : what it may allocate

        Raises as the function does; ProcessDied.
        """
        return cast("T", self._process.ask("call_function", function, path, arguments, most_bytes, known))

    def settle(self, check: Callable[[float, float], None]) -> None:
        """Planning is over: from now on `check` gets the seconds that the present request takes so far, and for how
        many of these the process has not used the CPU. If it raises, the process ends, and loses what it writes."""
        process, cpu_s, busy_at = self._process, -1.0, 0.0

        def look() -> None:
            nonlocal cpu_s, busy_at
            now, used_s = time.monotonic(), process.cpu_seconds()
            if used_s != cpu_s or busy_at < process.asked_at:
                cpu_s, busy_at = used_s, now
            check(now - process.asked_at, now - busy_at)

        process.check = look


class _Process:
    """One process, and its answers."""

    def __init__(self, limit_bytes: int) -> None:
        self.check: Callable[[], None] | None = None
        self.asked_at = 0.0  # on the monotonic clock: when the present request was sent
        self._lock = threading.RLock()
        context: Any = multiprocessing.get_context(METHOD)
        self._connection, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, limit_bytes), name="millrace-job", daemon=True)
        with other:
            self._process.start()

    def ask(self, what: str, *arguments: Any, callback: Callable[[], None] | None = None) -> Any:
        """The answer to a request. Raises what it raised there, or ProcessDied."""
        with self._lock:
            self.asked_at = time.monotonic()
            try:
                self._connection.send((what, *arguments))
                while True:
                    self._wait()
                    kind, value = self._connection.recv()
                    if kind != "callback":
                        break
                    assert callback is not None, "it asked for one"
                    self._connection.send(_answer(callback))
            except (EOFError, OSError) as error:
                raise ProcessDied("the process that had the job open died; see the log of the system") from error
        if kind == "error":
            raise value
        return value

    def _wait(self) -> None:
        while (check := self.check) is not None and not self._connection.poll(CHECK_S):
            try:
                check()
            except BaseException:
                self.end()
                raise

    def cpu_seconds(self) -> float:
        return cpu_seconds(self._process.pid)

    def is_fresh(self) -> bool:
        """Whether it lives, and has given back its memory."""
        try:
            return bool(self.ask("is_fresh"))
        except MillraceError:
            return False

    def end(self) -> None:
        """Harmless a second time, and while another thread does it or waits for an answer."""
        self._process.kill()
        self._process.join(END_S)
        with self._lock:  # its descriptor may soon be another file's
            self._connection.close()


class _Remote:
    """An object in a process. Subclasses have its members."""

    def __init__(self, process: _Process, number: int) -> None:
        self._process = process
        self._number = number
        self._kept: dict[str, Any] = {}

    def _get(self, name: str) -> Any:
        if self._number == 0:
            return self._process.ask("get", self._number, name)
        if name not in self._kept:  # only a job's own values change
            self._kept[name] = self._process.ask("get", self._number, name)
        return self._kept[name]

    def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        if name in self._kept:
            return self._kept[name]
        callback = None
        if name == "publish":
            callback, arguments = arguments[0], ()
        try:
            found = self._process.ask("call", self._number, name, arguments, named, callback=callback)
        except ProcessDied:
            if name not in _CLOSING:
                raise
            found = None
        if name not in _KEEPING:
            return found
        made = _remote(self._process, *found)
        if name == "reference":  # the same on every call
            self._kept[name] = made
        return made


def _remote(process: _Process, number: int, members: Members) -> _Remote:
    return _remote_class(members)(process, number)


@cache
def _remote_class(members: Members) -> type[_Remote]:
    """With real members: the engine looks for an object's capabilities by its attributes."""

    def member(name: str, is_method: bool) -> Any:
        if not is_method:
            return property(lambda self: self._get(name))
        return lambda self, *arguments, **named: self._call(name, *arguments, **named)

    return type("Remote", (_Remote,), {name: member(name, is_method) for name, is_method in members})


# What runs in the process


def serve(connection: Connection, limit_bytes: int) -> None:
    """Answers requests until the connection ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to the whole service: the server ends this process
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the fork server ends with the server
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    gc.freeze()
    base_bytes = _allocated_bytes()
    # Not RLIMIT_AS, which counts mapped files.
    resource.setrlimit(resource.RLIMIT_DATA, (base_bytes + limit_bytes,) * 2)
    server = _Server(connection, limit_bytes, base_bytes)
    with suppress(EOFError, OSError):
        while True:
            what, *arguments = connection.recv()
            connection.send(_answer(partial(getattr(server, what), *arguments)))


class _Server:
    """The requests, by name."""

    def __init__(self, connection: Connection, limit_bytes: int, base_bytes: int) -> None:
        self._connection = connection
        self._limit_bytes = self._most_bytes = limit_bytes
        self._base_bytes = base_bytes
        self._objects: list[Any] = []
        self._input: Path | None = None
        self._doing, self._remedy = "", ""

    def open(self, spec: JobSpec, most_bytes: int | None) -> Members:
        self._limit(most_bytes)
        whose = "the service" if self._most_bytes == self._limit_bytes else "the job"
        self._input, self._doing, self._remedy = spec.input, "planning the job", f", or raise {whose}'s memory"
        self._objects = [self._within_limit(lambda: open_job(workload_named(spec.workload), spec))]
        return _members(self._objects[0])

    def call_function(
        self, function: Callable[..., Any], path: Path, arguments: tuple[Any, ...], most_bytes: int, known: object
    ) -> Any:
        self._limit(most_bytes)
        self._input, self._doing, self._remedy = path, "looking at it", ""
        return self._within_limit(lambda: function(path, *arguments))

    def _limit(self, most_bytes: int | None) -> None:
        self._most_bytes = min(most_bytes or self._limit_bytes, self._limit_bytes)
        hard = self._base_bytes + self._limit_bytes
        # An earlier job may have left some memory behind.
        resource.setrlimit(resource.RLIMIT_DATA, (min(_allocated_bytes() + self._most_bytes, hard), hard))

    def get(self, number: int, name: str) -> Any:
        return self._within_limit(lambda: getattr(self._objects[number], name))

    def call(self, number: int, name: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        if name == "publish":
            arguments = (self._call_back,)
        found = self._within_limit(lambda: getattr(self._objects[number], name)(*arguments, **named))
        if name in _KEEPING:
            self._objects.append(found)
            return len(self._objects) - 1, _members(found)
        return found

    def is_fresh(self) -> bool:
        self._objects.clear()
        gc.collect()
        return _allocated_bytes() - self._base_bytes < GROWN_SHARE * self._limit_bytes

    def _call_back(self) -> None:
        self._connection.send(("callback", None))
        kind, value = self._connection.recv()
        if kind == "error":
            raise value

    def _within_limit(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except MillraceError:
            raise
        except Exception as error:
            if too_little_memory(error) is None:
                raise
            raise InputError(
                f"{self._input}: {self._doing} takes more than {format_bytes(self._most_bytes)} of memory; check the "
                f"file{self._remedy}"
            ) from error


def _answer(work: Callable[[], Any]) -> tuple[str, Any]:
    """The result or the error, as they are sent."""
    try:
        found = "value", work()
        pickle.dumps(found)
    except Exception as error:
        error.add_note("".join(traceback.format_exception(error)))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = MillraceError(f"internal error: {type(error).__name__}: {error}")
        return "error", error
    return found


def _members(target: Any) -> Members:
    names = [name for name in dir(target) if not name.startswith("_")]
    return tuple((name, callable(inspect.getattr_static(target, name))) for name in names)


def _allocated_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmData:")[1].split()[0]) << 10
