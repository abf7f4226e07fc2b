"""Files written by position from any thread, and the translation of the system's write errors."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import OutputError, StorageError
from pipeline.storage.positional import PositionalFile, reason, storage_way_out

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_FOLDER_FAULTS = {
    errno.ENOENT: "does not exist; create it, or choose another",
    errno.ENOTDIR: "is not a folder; choose another",
    errno.EACCES: "may not be written to by this user; change its permissions, or choose another",
    errno.EPERM: "may not be written to by this user; change its permissions, or choose another",
    errno.EXDEV: "leads elsewhere by a symbolic link; choose another",
    errno.EROFS: "is on a read-only file system; choose another",
    errno.ENAMETOOLONG: "does not take a name this long; use a shorter one",
}
_NOTHING = np.empty(0, np.uint8)
_TMPFS_MAGIC = 0x01021994


@contextmanager
def writing(final: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Translate OSError in writing `final`: to OutputError if its folder is at fault, else to StorageError."""
    try:
        yield
    except OSError as exc:
        folder = final.parent
        if exc.errno in _NO_SPACE:
            raise StorageError(_no_space(final, needed_bytes, exc)) from exc
        if exc.errno == errno.EFBIG:
            raise StorageError(
                f"{final}: larger than its file system or this user's limit (ulimit -f) allows; choose another folder"
            ) from exc
        if exc.errno == errno.ELOOP:
            raise OutputError(
                f"{final}: a symbolic link that cannot be followed is in the way ({exc.filename or final}); remove it"
            ) from exc
        if exc.errno == errno.ENOENT and folder.is_dir():
            raise OutputError(f"{final}: the folder {folder} takes no new files; choose another") from exc
        if exc.errno in _FOLDER_FAULTS:
            raise OutputError(f"{final}: the folder {folder} {_FOLDER_FAULTS[exc.errno]}") from exc
        raise StorageError(f"{final}: writing failed: {reason(exc)}; {storage_way_out(exc)}") from exc


class WritableFile(PositionalFile):
    """An open file that any thread writes (and reads back) by position."""

    def __init__(self, path: Path, descriptor: int, final: Path) -> None:
        super().__init__(path, descriptor)
        self.final = final
        self._reserved_bytes = 0
        self._map: NDArray[np.uint8] | None = None

    def reserve(self, nbytes: int) -> None:
        """Make the file `nbytes` long and allocate its space, so that a full disk is found before any work starts.

        On a file system that cannot preallocate, only the length is set. StorageError if space is short, OutputError if
        it would be on an empty disk too.
        """
        with self._in_use() as descriptor, writing(self.final, nbytes):
            disk = os.fstatvfs(descriptor)
            if 0 < (total := disk.f_blocks * disk.f_frsize) < nbytes:
                raise OutputError(
                    f"{self.final}: {nbytes:,} bytes are needed, and the whole disk of {self.final.parent} has "
                    f"{total:,}; choose another folder"
                )
            # Checked first: an allocation that fails late would meanwhile fill the disk for other users.
            if disk.f_blocks and nbytes > disk.f_bavail * disk.f_frsize:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(descriptor, nbytes)
            if nbytes == 0:
                return
            try:
                os.posix_fallocate(descriptor, 0, nbytes)
                self._reserved_bytes = nbytes
            except OSError as exc:
                if exc.errno not in _CANNOT_RESERVE:
                    os.ftruncate(descriptor, 0)  # free what was allocated: others need it, and the message counts it
                    raise

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Store all of `data` (of bytes) from `offset`. StorageError if the disk is full or fails."""
        self.write_runs([(offset, memoryview(data))])

    def write_runs(self, runs: Iterable[tuple[int, memoryview]]) -> None:
        """`write_at` for many offsets with the overhead of one call."""
        with self._in_use() as descriptor, writing(self.final):
            mapped = self._mapped(descriptor)
            for offset, data in runs:
                if offset + len(data) <= len(mapped):
                    # NumPy copies without holding the interpreter's lock.
                    mapped[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
                    continue
                done = os.pwrite(descriptor, data, offset)
                while done < len(data):
                    done += os.pwrite(descriptor, data[done:], offset + done)

    @contextmanager
    def written_in_place(self) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """The descriptor, and the mapped bytes from the start, empty if none are, for writers of another kind."""
        with self._in_use() as descriptor, writing(self.final):
            yield descriptor, self._mapped(descriptor)

    def close(self) -> None:
        self._map = _NOTHING
        super().close()

    def _mapped(self, descriptor: int) -> NDArray[np.uint8]:
        """The reserved bytes, memory-mapped, if the file lives in memory (tmpfs); else empty.

        `pwrite` takes the file's lock and so serialises threads; copying into its mapping does not.
        """
        if self._map is None:
            size = self._reserved_bytes if _lives_in_memory(descriptor) else 0
            self._map = np.frombuffer(mmap.mmap(descriptor, size), np.uint8) if size else _NOTHING
        return self._map

    def flush(self) -> None:
        """Sync what has been written so far."""
        with self._in_use() as descriptor, writing(self.final):
            os.fdatasync(descriptor)


def _no_space(final: Path, needed_bytes: int | None, exc: OSError) -> str:
    needed = "" if needed_bytes is None else f"{needed_bytes:,} bytes are needed"
    free = files = ""
    with suppress(OSError):
        disk = os.statvfs(final.parent)
        free = f"{disk.f_bavail * disk.f_frsize:,} bytes are free in {final.parent}"
        files = "it takes no further files (no inodes are left)" if disk.f_files and not disk.f_favail else ""
    quota = "the user's quota is used up" if exc.errno == errno.EDQUOT else ""
    found = ", ".join(part for part in (needed, free, files, quota) if part)
    return f"{final}: no space: {found}; free some, or choose another folder"


def _lives_in_memory(descriptor: int) -> bool:
    """Whether the file is on tmpfs, as /dev/shm is."""
    fstatfs = getattr(ctypes.CDLL(None, use_errno=True), "fstatfs", None)
    found = (ctypes.c_long * 32)()  # struct statfs, whose first word is the file system's type
    return fstatfs is not None and fstatfs(descriptor, found) == 0 and found[0] == _TMPFS_MAGIC
