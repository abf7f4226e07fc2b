"""Commands as processes of their own, which start without the seconds that their imports take.

`Popen` and `run` are `subprocess`'s. What they start is forked from a process that has imported what commands need:

    test process                  warm parent: one thread, started once
    Popen ── program, fds ──────► fork ──► fork ──► the program, with its arguments, folder, environment, streams
          ◄────────── pid ──────             ends                  and signals as if just started
                                            the orphan becomes the test process's child (prctl, CHILD_SUBREAPER)

A fork server that the program starts for its workers is forked in the same way. Start-up itself is tested with
`subprocess`: tests/pipeline/test_start.py, test_stopping.py and test_without_cuda.py, tests/deploy and tests/docs.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import multiprocessing.util
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

# The command as another process runs it, whether or not it is on the PATH.
COMMAND = [sys.executable, "-c", "from pipeline.cli import main; main()"]
_MOST_BYTES = 1 << 17
_SET_CHILD_SUBREAPER = 36
_DEFAULTS = (True, None, None, None, -1, False, -1)  # restore_signals, …, process_group of `subprocess.Popen`
_ROOT = Path(__file__).parents[1]
# Variables that are read when Python starts, or when a module is imported: a program with other ones starts cold.
_READ_EARLY = (
    "COVERAGE", "HOME", "LANG", "LC_", "LD_", "MILLRACE_CACHE_DIR", "NUMBA", "OPENBLAS", "PYTHON", "TZ",
    "XDG_CACHE_HOME",
)  # fmt: skip
# Dask's nannies set the first in their own process. The second is honoured (see `_run`).
_LATER = ("PYTHONHASHSEED", "PYTHONPATH")


class _Program(NamedTuple):
    """What a child of the warm parent runs: `python -c TEXT` or `python -m TEXT`, with arguments."""

    kind: str
    text: str
    arguments: list[str]
    folder: str
    environment: dict[str, str]
    ignored: list[signal.Signals]
    blocked: set[signal.Signals]
    cores: set[int]


class _WarmParent:
    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.commands", str(theirs.fileno())],
            cwd=_ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=_environment or None,
        )  # fmt: skip
        theirs.close()
        self._early = _read_early(_environment or os.environ)
        self._one_at_a_time = threading.Lock()
        atexit.register(self.close)

    def fits(self, environment: dict[str, str]) -> bool:
        return self._process.poll() is None and _read_early(environment) == self._early

    def start(self, program: _Program, streams: list[int]) -> int | None:
        """Process id of the program, now a child of this process; None if it could not be started."""
        prctl = ctypes.CDLL(None).prctl
        with self._one_at_a_time:
            prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._connection, [pickle.dumps(program)], streams)
                return int(self._connection.recv(64) or 0) or None
            finally:
                prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def close(self) -> None:
        self._connection.close()
        self._process.wait()


_parents: list[_WarmParent] = []
_environment: dict[str, str] = {}  # the warm parent's; if empty, the one in which it is first needed


def keep_environment() -> None:
    """Before the first test: one that sets variables may be the first to start a command."""
    _environment.update(os.environ)


def _warm_parent() -> _WarmParent:
    if not _parents:
        _parents.append(_WarmParent())
    return _parents[0]


def _read_early(environment: Any) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_EARLY) and name not in _LATER}


class Popen(subprocess.Popen):
    """Started warm if it is Python with -c or -m, and with no options but folder, environment and streams."""

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *others,
    ) -> None:  # fmt: skip
        streams = (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        plain = others == _DEFAULTS and not (executable or preexec_fn or pass_fds or shell)
        words = [] if isinstance(args, str | bytes | os.PathLike) else [os.fspath(word) for word in args]
        environment = dict(os.environ if env is None else env)
        if plain and words[:1] == [sys.executable] and words[1] in ("-c", "-m") and _warm_parent().fits(environment):
            program = _Program(
                *words[1:3], arguments=words[3:], folder=str(Path(cwd or ".").absolute()), environment=environment,
                ignored=[number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN],
                blocked=signal.pthread_sigmask(signal.SIG_BLOCK, ()), cores=os.sched_getaffinity(0),
            )  # fmt: skip
            theirs = [ours if given == -1 else given for ours, given in enumerate((p2cread, c2pwrite, errwrite))]
            if (pid := _warm_parent().start(program, theirs)) is not None:
                self.pid, self._child_created = pid, True
                self._close_pipe_fds(*streams)
                return
        super()._execute_child(
            args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, *streams,
            *others,
        )  # fmt: skip


def run(command, *, timeout=None, check=False, capture_output=False, input=None, **options):  # noqa: A002
    """As `subprocess.run`, with `Popen`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


# What follows runs in the warm parent and its children.


def _serve(descriptor: int) -> _Program | None:
    """Forks a child for each request. Returns there with its program, and in the parent at the end with None."""
    _import()
    connection = socket.socket(fileno=descriptor)
    while True:
        request, streams, *_ = socket.recv_fds(connection, _MOST_BYTES, 3)
        if not request:
            return None
        reading, writing = os.pipe()
        if (middle := os.fork()) == 0:
            middle = os.getpid()
            if os.fork() != 0:
                os._exit(0)
            while os.getppid() == middle:
                time.sleep(0.001)
            connection.close()
            os.close(reading)
            program = pickle.loads(request)
            try:
                _become(program, streams)
            except OSError:  # of the folder, and told by the cold start that follows
                os._exit(1)
            os.write(writing, str(os.getpid()).encode())
            os.close(writing)
            return program
        os.close(writing)
        os.waitpid(middle, 0)  # the child has no parent any more but the test process
        connection.send(os.read(reading, 64) or b"0")
        for each in (reading, *streams):
            os.close(each)


def _import() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test process
    from pipeline.cli import cli

    for name in cli.commands:
        cli.commands[name]
    for name in (
        "pipeline.cluster.dask.worker_imports", "pipeline.service.server", "pipeline.client", "h5py", "imagecodecs",
        "scipy.linalg", "tifffile", "zarr",
    ):  # fmt: skip
        importlib.import_module(name)
    assert _has_one_thread()
    multiprocessing.util.spawnv_passfds = _fork_server
    gc.collect()
    gc.freeze()


def _become(program: _Program, streams: list[int]) -> None:
    """What a new process has of its caller."""
    os.chdir(program.folder)
    for at, descriptor in enumerate(streams):
        os.dup2(descriptor, at)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(program.environment)
    importlib.import_module("dask").config.refresh()
    os.sched_setaffinity(0, program.cores)
    for number in signal.valid_signals():
        if signal.getsignal(number) == signal.SIG_IGN:  # by the warm parent or, after nohup, by who started it
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in program.ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, program.blocked)
    for at, name in enumerate(("stdin", "stdout", "stderr")):
        before = getattr(sys, name)
        raw = io.FileIO(at, "r" if at == 0 else "w", closefd=False)
        buffered = io.BufferedReader(raw) if at == 0 else io.BufferedWriter(raw)
        stream = io.TextIOWrapper(buffered, before.encoding, before.errors, line_buffering=at == 2)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(program: _Program) -> NoReturn:
    """Runs it as the interpreter would, but does not take every module apart at the end, which would take 0.2 s."""
    from pipeline.workloads import registry

    code: Any = 0
    try:
        sys.argv[:] = [program.kind, *program.arguments]
        if "PYTHONPATH" in program.environment:
            sys.path[1:1] = program.environment["PYTHONPATH"].split(os.pathsep)
            for known in (registry._offered, registry._installed):  # workloads of packages that are found there
                known.cache_clear()
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        if program.kind == "-m":
            sys.path[0] = program.folder
            runpy.run_module(program.text, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = ""
            exec(compile(program.text, "<string>", "exec"), vars(main))
    except SystemExit as stop:
        code = stop.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


def _has_one_thread() -> bool:
    return len([*Path("/proc/self/task").iterdir()]) == 1


_spawn = multiprocessing.util.spawnv_passfds


def _fork_server(path: Any, arguments: list[str], descriptors: list[int]) -> int:
    """For `multiprocessing.util.spawnv_passfds`: forks instead, as long as there is but one thread."""
    if not _has_one_thread() or "forkserver" not in arguments[-1]:
        return _spawn(path, arguments, descriptors)
    if pid := os.fork():
        return pid
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kept = {0, 1, 2, *descriptors}
    for descriptor in {int(path.name) for path in Path("/proc/self/fd").iterdir()} - kept:
        with suppress(OSError):
            os.close(descriptor)
    code = 1
    try:
        exec(arguments[-1], {"__name__": "__main__"})
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        os._exit(code)


if __name__ == "__main__" and (found := _serve(int(sys.argv[1]))) is not None:
    _run(found)
