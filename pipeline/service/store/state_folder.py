"""The state folder of a service: its lock, how its last server ended, and copies of its database while one runs."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from pipeline.errors import DISK_FAULTS, OutputError, ParameterError, StorageError
from pipeline.service.settings import JOBS
from pipeline.service.store.statements import migrate, storing

_BESIDE = ("-wal", "-shm")
CRASH = "crash.log"
# How often a server notes that the system has killed other processes for want of memory, which is not its own end.
NOTE_S = 5.0
_HEAD_BYTES = 80
_BOOT, _COUNTERS = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/vmstat")


@contextmanager
def sole_server(state_dir: Path) -> Iterator[None]:
    """Locks the state folder: only its sole server may take over the jobs of a killed one."""
    # Both: people may remove a lock file that they think is stale; the lock of a folder may hold on this machine only.
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
            raise ParameterError(
                f"state_dir {state_dir}: another server is using it; stop that, or choose another"
            ) from error
        except OSError as error:  # on some network file systems
            raise ParameterError(
                f"state_dir {state_dir}: cannot be locked ({error.strerror}); choose one on a local disk"
            ) from error
        yield


@contextmanager
def noting_crashes(state_dir: Path) -> Iterator[str | None]:
    """Yields how the folder's last server crashed, in a few words; None if it did not. Notes the same of this one.

    A crash is a fatal signal, whose traceback is kept in crash.log.1, or an end within `NOTE_S` of the system's killing
    processes for want of memory. A server that was killed from outside, or lost its power, has not crashed: no job is
    to blame.

    Raises StorageError if the disk fails.
    """
    path, kept = state_dir / CRASH, state_dir / f"{CRASH}.1"
    try:
        head, _, trace = path.read_text(errors="replace").partition("\n") if path.exists() else ("", "", "")
        if trace:
            path.replace(kept)
        file = path.open("wb")
        file.write(_head())
        file.flush()
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}; choose another state_dir") from error
    was_enabled = faulthandler.is_enabled()
    over = threading.Event()
    with file:
        faulthandler.enable(file)
        noting = threading.Thread(target=_note_on, args=(file.fileno(), over), name="crash-log", daemon=True)
        noting.start()
        try:
            yield f"{trace.partition(chr(10))[0]}; see {kept}" if trace else _ended_for_memory(head)
        finally:
            over.set()
            noting.join()
            faulthandler.disable()
            if was_enabled:
                faulthandler.enable()
    path.unlink(missing_ok=True)


def _head() -> bytes:
    return _memory_kills().ljust(_HEAD_BYTES).encode("ascii") + b"\n"


def _note_on(file: int, over: threading.Event) -> None:
    """Keeps the first line of the file current, before the traceback of a crash."""
    noted = b""
    while not over.wait(NOTE_S):
        head = _head()
        if head != noted:
            with suppress(OSError):
                os.pwrite(file, head, 0)
                noted = head


def _memory_kills() -> str:
    """This boot of the system, and how many processes it has killed for want of memory."""
    with suppress(OSError):
        counters = dict(line.split() for line in _COUNTERS.read_text(encoding="ascii").splitlines())
        return f"{_BOOT.read_text(encoding='ascii').strip()} {counters.get('oom_kill', '0')}"
    return ""


def _ended_for_memory(noted: str) -> str | None:
    boot, _, kills = noted.partition(" ")
    now, _, more = _memory_kills().partition(" ")
    return "out of memory" if kills and boot == now and int(more) > int(kills) else None


def back_up(state_dir: Path, target: Path) -> None:
    """Copies the database, as it is at one moment, to a new file, which appears once it is whole and on disk.

    Raises ParameterError without a database, OutputError if the file is there already, StorageError if the disk fails
    or the database is damaged.
    """
    database = state_dir / JOBS
    if not database.is_file():
        raise ParameterError(f"state_dir {state_dir}: holds no {JOBS}; name the service's")
    unfinished = target.with_name(f"{target.name}.partial")
    try:
        os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600))
        _copy(database, unfinished)
        os.link(unfinished, target)  # unlike a rename, it replaces nothing
    except FileExistsError as error:
        raise OutputError(f"{target}: is there already; name another file") from error
    except OSError as error:
        raise StorageError(f"{target}: {error.strerror}; choose another") from error
    finally:
        unfinished.unlink(missing_ok=True)
    _sync(target.parent)


def restore(state_dir: Path, backup: Path) -> Path | None:
    """Puts a backup in the place of the database, which is kept under another name: returns that name.

    The database is brought to the newest version; everybody must sign in to the page again. Raises ParameterError while
    a server runs, if the file is no backup, or if a newer Millrace wrote it; StorageError if the disk fails.
    """
    if not backup.is_file():
        raise ParameterError(f"{backup}: there is no such file; name one that `millrace backup` wrote")
    with sole_server(state_dir):
        database = state_dir / JOBS
        restored = database.with_name(f"{JOBS}.restoring")
        try:
            restored.unlink(missing_ok=True)
            os.close(os.open(restored, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            _copy(backup, restored)
            with storing(backup), closing(sqlite3.connect(restored, isolation_level=None)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                if connection.execute("PRAGMA user_version").fetchone()[0] == 0:  # an empty file too
                    raise ParameterError(f"{backup}: is not a backup; name a file that `millrace backup` wrote")
                migrate(connection, backup, "name another backup")
                connection.execute("DELETE FROM sessions")  # some may have been ended since
                connection.execute("COMMIT")
            _sync(restored)
            aside = _kept_aside(database) if os.path.lexists(database) else None
            restored.replace(database)
        except OSError as error:
            raise StorageError(f"state_dir {state_dir}: {error.strerror}; make room, or correct the folder") from error
        finally:
            restored.unlink(missing_ok=True)
        _sync(state_dir)
        return aside


def _copy(source: Path, target: Path) -> None:
    """Copies with SQLite's backup: a consistent snapshot, while other processes go on writing."""
    with (
        storing(source),
        closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)) as connection,
        closing(sqlite3.connect(target)) as copy,
    ):
        connection.backup(copy)
        copy.execute("PRAGMA journal_mode = DELETE")  # one file
        (found,) = copy.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise StorageError(f"{source}: is damaged ({found}); restore a backup")
    _sync(target)


def _kept_aside(database: Path) -> Path:
    """Copies the database with its write-ahead log, so that there is one at every moment; the log goes into it."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    aside = database.with_name(f"{JOBS}.before-{stamp}")
    logs = [suffix for suffix in _BESIDE if os.path.lexists(f"{database}{suffix}")]
    for suffix in ("", *logs):
        shutil.copy2(f"{database}{suffix}", f"{aside}{suffix}")
        _sync(Path(f"{aside}{suffix}"))
    try:
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error:  # it is damaged
        pass
    for suffix in logs:
        Path(f"{database}{suffix}").unlink(missing_ok=True)
    return aside


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
