"""Outputs in the making: written as `OUTPUT.partial`, made durable, then renamed to `OUTPUT` at once.

Until `publish` nothing changes under the final name. A partial output is locked while its owner lives: a second run
on the same output is refused, and what an interrupted run left behind is replaced, or taken over to be completed.
Other processes, of this machine or another, may join to write their share of it.

Where an older output stands under the final name, its permissions are the newer one's from the first byte on. A link in
the place of an output is replaced itself; only the output that the user named is looked for `behind_link`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

from pipeline.errors import OutputError, counted
from pipeline.storage.output_lock import claimed_file, claimed_folder, existing, mode_of, names, take_mode
from pipeline.storage.positional import Shared
from pipeline.storage.writable import WritableFile, writing

_NO_MORE = "was removed or replaced while it was written; run the job again"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
LATE_FILES_S = 10.0


class Opening(Enum):
    """What a writer does with a partial output that is already there."""

    NEW = "new"  # owns a fresh one; what an interrupted run left is replaced
    RESUME = "resume"  # owns what an interrupted run left, as it is
    JOIN = "join"  # another process owns it: only writes its share, and never publishes or removes


# Called by `publish` when all is in the partial output and on disk, just before that takes its final name.
Sealed = Callable[[], None]


def not_told() -> None:
    """Nobody needs to know that an output is sealed."""


class PartialFile(WritableFile):
    """The file `final` in the making, as `<final name>.partial` beside it, `nbytes` long from the start."""

    def __init__(
        self, final: Path, nbytes: int = 0, opening: Opening = Opening.NEW, *, serves: Path | None = None
    ) -> None:
        """`serves`: the output that this one only helps to make. Messages name that, and its older version's mode is
        this one's too; it is never published.

        OutputError where the folder cannot be written to, `final` is no file, or another run is at work on it; also
        where RESUME or JOIN finds no partial file, or one of another length.
        """
        _refuse_unless_file(final)
        path = partial_path(final)
        with writing(serves or final, nbytes):
            if opening is Opening.NEW:
                descriptor = claimed_file(path, final, mode_of(serves or final))
            else:
                descriptor = existing(path, os.O_RDWR, claim=opening is Opening.RESUME)
        super().__init__(path, descriptor, serves or final)
        self._live = opening is not Opening.JOIN  # owned, and neither published nor given up
        self._publishable = self._live and serves is None
        try:
            if opening is Opening.NEW:
                self.reserve(nbytes)
            elif self.size == nbytes:
                self._reserved_bytes = nbytes
            else:
                raise OutputError(
                    f"{path}: has {counted(self.size, 'byte')} where the job writes {nbytes:,}: "
                    "run again without --resume"
                )
        except BaseException:
            self.keep() if opening is Opening.RESUME else self.discard()
            raise

    def publish(self, sealed: Sealed = not_told, *, nbytes: int | None = None) -> None:
        """Make the file durable and give it its final name. `nbytes`: its length, where more was reserved."""
        if not self._publishable:
            raise ValueError(f"{self.path}: is another process's to publish, or nobody's")
        with self._in_use() as descriptor, writing(self.final):
            if nbytes is not None:
                os.ftruncate(descriptor, nbytes)
            os.fsync(descriptor)
            if not names(self.path, descriptor):
                raise OutputError(f"{self.path}: {_NO_MORE}")
            take_mode(descriptor, mode_of(self.final))
            sealed()
            self.path.replace(self.final)
            self._live = False
            sync_folder(self.final.parent)
        self.close()

    def discard(self) -> None:
        """Remove the partial file; harmless after `publish` or a second time."""
        if self._live:
            self._live = False
            with self._in_use() as descriptor, writing(self.final):
                if names(self.path, descriptor):
                    self.path.unlink()
        self.close()

    def keep(self) -> None:
        """Close, and leave the partial file where it is: for RESUME."""
        self._live = False
        self.close()


class PartialFolder(Shared):
    """The folder `final` in the making, as `<final name>.partial` beside it: for formats that are a tree of files."""

    def __init__(self, final: Path, may_replace: Callable[[Path], bool], opening: Opening = Opening.NEW) -> None:
        """`may_replace` says whether an older folder under the final name is one that this output may replace.

        OutputError where it may not, where the parent cannot be written to, or another run is at work on it; also
        where RESUME or JOIN finds no partial folder.
        """
        path = partial_path(final)
        self.final = final
        self._live = opening is not Opening.JOIN  # owned, and neither published nor given up
        if os.path.lexists(final) and not (_is_folder(final) and may_replace(final)):
            raise OutputError(f"{final}: something else stands under that name; remove it, or choose another name")
        with writing(final):
            if opening is Opening.NEW:
                descriptor = claimed_folder(path, mode_of(final))
            else:
                descriptor = existing(path, os.O_RDONLY | os.O_DIRECTORY, claim=self._live)
        super().__init__(path, descriptor)

    @property
    def inside(self) -> Path:
        """Where the files go, `in_use` alone: a path that is this folder's even when its name is another one's."""
        by_descriptor = Path(f"/proc/self/fd/{self._descriptor}")
        return by_descriptor if by_descriptor.exists() else self.path

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While files are written: they are this folder's.

        OutputError where it has been published, removed or replaced, now or meanwhile: a worker that was thought to be
        gone must not write into what another run has begun under the same name.
        """
        with self._in_use() as descriptor:
            if not names(self.path, descriptor):
                raise OutputError(f"{self.path}: {_NO_MORE}")
            try:
                yield
            except FileNotFoundError as exc:  # what lies inside goes before the folder itself
                raise OutputError(f"{self.path}: {_NO_MORE}") from exc

    def flush(self) -> None:
        """Make durable what has been written so far."""
        with self._in_use() as descriptor, writing(self.final):
            _sync_file_system(descriptor)

    def keep(self) -> None:
        """Close, and leave the partial folder where it is: for RESUME. Harmless after `publish` or `discard`."""
        self._live = False
        self.close()

    def publish(self, sealed: Sealed = not_told) -> None:
        """Make every file durable, then take the final name at once; an older folder there is removed afterwards."""
        if not self._live:
            raise ValueError(f"{self.final}: published or discarded before")
        with writing(self.final):
            _sync_file_system(self._descriptor)
            if not names(self.path, self._descriptor):
                raise OutputError(f"{self.path}: {_NO_MORE}")
            take_mode(self._descriptor, mode_of(self.final))
            sealed()
            older = _take_name(self.path, self.final)
            self.keep()
            sync_folder(self.final.parent)
            if older is not None:
                shutil.rmtree(older)

    def discard(self) -> None:
        """Remove the partial folder; harmless after `publish` or a second time."""
        if self._live:
            with writing(self.final):
                if names(self.path, self._descriptor):
                    _remove_with_late_files(self.path)
        self.keep()


def _remove_with_late_files(folder: Path) -> None:
    """Where one of several files cannot be written, as on a full disk, zarr does not wait for the others: they may come
    and go meanwhile."""
    give_up = time.monotonic() + LATE_FILES_S
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError as exc:
            if exc.errno not in (errno.ENOTEMPTY, errno.ENOENT) or time.monotonic() > give_up:
                raise


def partial_path(final: Path) -> Path:
    """Where an output is written until it is published."""
    return final.with_name(final.name + ".partial")


def samples_path(final: Path) -> Path:
    """Under what name samples gather that can only be encoded when all are there; itself only ever partial."""
    return final.with_name(final.name + ".samples")


def behind_link(output: Path) -> Path:
    """Where an output that the user named goes: through a symbolic link to the file it names, so that the link stays.

    Not for the names that follow from it: such a link may lead out of the folders in which a user may write.
    OutputError where links lead in a circle.
    """
    with writing(output):
        found = Path(os.path.realpath(output)) if output.is_symlink() else output
        if found.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        return found


def settle_older(final: Path) -> None:
    """After a run that was killed while its folder took the final name, where that takes two renames: the older result
    has its name back, or goes where the newer one has it."""
    older = _older_path(final)
    if not older.is_dir():
        return
    with writing(final):
        shutil.rmtree(older) if os.path.lexists(final) else older.rename(final)


def _older_path(final: Path) -> Path:
    return final.with_name(final.name + ".partial.older")


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _refuse_unless_file(final: Path) -> None:
    try:
        mode = final.stat().st_mode
    except OSError:
        return  # nothing there, or a fault that creating the partial file will name
    if stat.S_ISDIR(mode):
        raise OutputError(f"{final}: is a folder; name a file in it")
    if not stat.S_ISREG(mode):
        raise OutputError(f"{final}: is not a regular file and would be replaced; choose another name")


def _take_name(partial: Path, final: Path) -> Path | None:
    """Rename a folder over another; returns where the older one is now, if there was one."""
    older = _older_path(final)
    if not os.path.lexists(final):
        partial.rename(final)
        return older if older.is_dir() else None  # of a run that was killed between its renames
    if _exchanged(partial, final):
        return partial
    if older.is_dir():
        shutil.rmtree(older)  # of a run that was killed before it had removed it
    # Without an atomic exchange the name is empty for a moment, yet one of the two always stands beside it.
    final.rename(older)
    try:
        partial.rename(final)
    except BaseException:
        older.rename(final)
        raise
    return older


def _exchanged(one: Path, other: Path) -> bool:
    """Swap two names at once (Linux renameat2); False where the C library or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    here, there = os.fsencode(one), os.fsencode(other)
    if renameat2(_AT_FDCWD, here, _AT_FDCWD, there, _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(one))


def _sync_file_system(descriptor: int) -> None:
    """One flush for a whole tree: an fsync for each of many thousand chunk files would take minutes."""
    syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if syncfs is None:
        os.sync()
    elif syncfs(descriptor) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def sync_folder(folder: Path) -> None:
    """Make durable which names are in it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot sync a folder
            raise
    finally:
        os.close(descriptor)
