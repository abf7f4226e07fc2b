"""Files read by position: from any thread, at any offset, straight into the caller's memory."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import InputError, StorageError, counted, too_many_files
from pipeline.storage.confinement import in_its_folder, open_beneath

_WAYS_OUT = {
    errno.ENOENT: "no such file; check the path",
    errno.ENOTDIR: "no such file: a part of the path is not a folder; check the path",
    errno.EISDIR: "is a folder where a file is needed; name the file",
    errno.EACCES: "may not be read by this user; change its permissions, or run as another user",
    errno.EPERM: "may not be read by this user; change its permissions, or run as another user",
    errno.ELOOP: "is a symbolic link that leads to itself; name the file itself",
    errno.EXDEV: "leads out of the service's data roots by a symbolic link; put its target under them",
    errno.ENAMETOOLONG: "has a name too long for its file system; use a shorter one",
    errno.ENXIO: "is not a regular file; name the file itself",
}


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Translate OSError in reading `path`: to InputError if the user can fix it, else to StorageError."""
    try:
        yield
    except OSError as exc:
        way_out = _WAYS_OUT.get(exc.errno or 0)
        if way_out is not None:
            raise InputError(f"{path}: {way_out}") from exc
        raise StorageError(f"{path}: reading failed: {reason(exc)}; {storage_way_out(exc)}") from exc


def storage_way_out(exc: OSError) -> str:
    """What to do if files could not be opened, read or written although their paths are right."""
    return too_many_files(exc) or "check the disk, then run again"


def reason(exc: OSError) -> str:
    """The system's error message with its code, on one line."""
    return f"{exc.strerror or exc} ({errno.errorcode.get(exc.errno or 0, exc.errno)})"


def first_bytes(path: Path, nbytes: int = 1, opened: Callable[[Path], PositionalFile] | None = None) -> bytes:
    """Up to `nbytes` from a file's start. InputError if the file cannot be read or is empty."""
    file = PositionalFile(path) if opened is None else opened(path)
    try:
        found = file.head(nbytes)
    finally:
        file.close()
    if not found:
        raise InputError(f"{path}: the file is empty; copy or export it again")
    return found


def memory_of(samples: NDArray[Any]) -> memoryview:
    """The bytes of a C-contiguous array, shared, not copied."""
    if not samples.flags.c_contiguous:
        raise ValueError("samples must be C-contiguous")
    return samples.reshape(-1).view(np.uint8).data


def read_fully(descriptor: int, path: Path, offset: int, into: memoryview) -> None:
    """Fill `into` (of bytes) from `offset`, by as many calls as it takes. InputError if the file ends before it."""
    done = 0
    while done < len(into):
        got = os.preadv(descriptor, [into[done:]], offset + done)
        if got == 0:
            raise InputError(
                f"{path}: truncated: the file ends at byte {offset + done:,}, "
                f"{counted(len(into) - done, 'byte')} short; copy or export it again"
            )
        done += got


class SharedDescriptor:
    """An open file or folder that several threads use at once.

    The descriptor is closed only after the last call in flight: a number closed earlier could already refer to
    another file.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._users = 0
        self._closing = False
        self._lock = threading.Lock()

    def close(self) -> None:
        """Harmless a second time."""
        with self._lock:
            close_now = not self._closing and self._users == 0
            self._closing = True
        if close_now:
            self._release()

    @contextmanager
    def _in_use(self) -> Iterator[int]:
        with self._lock:
            if self._closing:
                raise ValueError(f"{self.path}: used after it was closed")
            self._users += 1
        try:
            yield self._descriptor
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            close_now = self._closing and self._users == 0
        if close_now:
            self._release()

    def _release(self) -> None:
        os.close(self._descriptor)

    def __del__(self) -> None:
        # Dropped without close, as by an interrupted caller, it must not leak its descriptor.
        with suppress(AttributeError):  # __init__ failed before it had opened anything
            self.close()


class OpenFolder(SharedDescriptor):
    """An open folder, to use by its descriptor: a confined one is where its name says. Raises OSError."""

    def __init__(self, path: Path) -> None:
        with in_its_folder(path / "_") as here:
            super().__init__(path, os.open(here.parent, os.O_RDONLY | os.O_DIRECTORY))

    def in_use(self) -> AbstractContextManager[int]:
        return self._in_use()


def _opened(path: Path) -> int:
    # O_NONBLOCK: opening a named pipe must not wait for its other end.
    return open_beneath(path, os.O_RDONLY | os.O_NONBLOCK)


class PositionalFile(SharedDescriptor):
    """An open regular file. `read_at` keeps no position and may be called from several threads at once."""

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        """Open `path` for reading, or take over an open descriptor of it. InputError if it cannot be read."""
        with reading(path):
            super().__init__(path, _opened(path) if descriptor is None else descriptor)
            mode = os.fstat(self._descriptor).st_mode
        if not stat.S_ISREG(mode):
            self.close()
            kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
            raise InputError(f"{path}: is {kind} where a file is needed; name the file itself")

    @property
    def name(self) -> Path:
        """A name of this very file in this process, while it is open."""
        return Path(f"/proc/self/fd/{self._descriptor}")

    @property
    def size(self) -> int:
        """The file's current size in bytes."""
        with self._in_use() as descriptor, reading(self.path):
            return os.fstat(descriptor).st_size

    @property
    def version(self) -> tuple[int, int]:
        """The file's current size in bytes, and the time of its last change in nanoseconds."""
        with self._in_use() as descriptor, reading(self.path):
            found = os.fstat(descriptor)
        return found.st_size, found.st_mtime_ns

    def in_use(self) -> AbstractContextManager[int]:
        """The descriptor, which stays open in the context; -1 if there is none."""
        return self._in_use()

    def read_at(self, offset: int, into: memoryview) -> None:
        """Fill `into` (writable, of bytes) from `offset`. InputError if the file ends before it is full."""
        self.read_runs([(offset, into)])

    def read_runs(self, runs: Iterable[tuple[int, memoryview]]) -> None:
        """`read_at` for many offsets with the overhead of one call."""
        with self._in_use() as descriptor, reading(self.path):
            for offset, into in runs:
                if os.preadv(descriptor, [into], offset) < len(into):
                    read_fully(descriptor, self.path, offset, into)

    def read_some(self, offset: int, into: memoryview) -> int:
        """Read into `into` (writable, of bytes) from `offset`; returns the number of bytes, fewer if the file ends."""
        with self._lock:
            if self._closing:
                raise ValueError(f"{self.path}: used after it was closed")
            self._users += 1
        try:
            return os.preadv(self._descriptor, [into], offset)
        except OSError:
            with reading(self.path):
                raise
        finally:
            self._leave()

    def head(self, nbytes: int, offset: int = 0) -> bytes:
        """Up to `nbytes` from `offset`; fewer if the file ends earlier."""
        with self._in_use() as descriptor, reading(self.path):
            return os.pread(descriptor, nbytes, offset)
