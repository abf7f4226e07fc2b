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
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

from pipeline.errors import OutputError, counted
from pipeline.formats.positional import Shared
from pipeline.formats.writable import WritableFile, writing

_NO_MORE = "was removed or replaced while it was written; run the job again"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_PERMISSIONS = stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO


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
                descriptor = _claimed_file(path, final, _mode_of(serves or final))
            else:
                descriptor = _existing(path, os.O_RDWR, claim=opening is Opening.RESUME)
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
            if not _names(self.path, descriptor):
                raise OutputError(f"{self.path}: {_NO_MORE}")
            _take_mode(descriptor, _mode_of(self.final))
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
                if _names(self.path, descriptor):
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
                descriptor = _claimed_folder(path, _mode_of(final))
            else:
                descriptor = _existing(path, os.O_RDONLY | os.O_DIRECTORY, claim=self._live)
        super().__init__(path, descriptor)

    @property
    def inside(self) -> Path:
        """Where the files go, `in_use` alone: a path that is this folder's even when its name is another one's."""
        by_descriptor = Path(f"/proc/self/fd/{self._descriptor}")
        return by_descriptor if by_descriptor.exists() else self.path

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While files are written: they are this folder's.

        OutputError where it has been published, removed or replaced: a worker that was thought to be gone must not
        write into what another run has begun under the same name.
        """
        with self._in_use() as descriptor:
            if not _names(self.path, descriptor):
                raise OutputError(f"{self.path}: {_NO_MORE}")
            yield

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
            if not _names(self.path, self._descriptor):
                raise OutputError(f"{self.path}: {_NO_MORE}")
            _take_mode(self._descriptor, _mode_of(self.final))
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
                if _names(self.path, self._descriptor):
                    shutil.rmtree(self.path)
        self.keep()


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


def _existing(path: Path, flags: int, *, claim: bool) -> int:
    """Open the partial output that is there, locked if it is to be owned. OutputError where there is none."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as exc:
        way_out = "run the job again without --resume" if claim else "a worker needs the folder under the same path"
        raise OutputError(f"{path}: is not there: {way_out}") from exc
    try:
        if claim:
            _lock(descriptor, path)
            # Between opening and locking, the owner may have published it: then this is the finished output.
            if not _names(path, descriptor):
                raise OutputError(
                    f"{path}: another run has published or removed it meanwhile: run the job again without --resume"
                )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _mode_of(output: Path) -> int | None:
    """The permissions of an older output; None where there is none, which leaves it to the user's umask."""
    try:
        mode = output.lstat().st_mode
    except FileNotFoundError:
        return None
    return mode & _PERMISSIONS if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else None


def _take_mode(descriptor: int, mode: int | None) -> None:
    now = stat.S_IMODE(os.fstat(descriptor).st_mode)
    if mode is not None and now & _PERMISSIONS != mode:  # file systems without modes refuse to change one
        os.fchmod(descriptor, now & ~_PERMISSIONS | mode)


def _claimed_file(path: Path, final: Path, mode: int | None) -> int:
    """Create and lock an empty partial file. What stands there is removed, once the lock says that its owner is gone.

    Removed, not emptied: a worker cut off from the interrupted run may still hold it open and write to it. Of the mode
    its owner's right to read and write is never missing: workers that join open it by its name.
    """
    mode = None if mode is None else mode | stat.S_IRUSR | stat.S_IWUSR
    created_as = 0o666 if mode is None else mode
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, created_as)
        except IsADirectoryError as exc:
            raise OutputError(
                f"{path}: is a folder in the way of {final.name}; remove it, or choose another name"
            ) from exc
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OutputError(f"{path}: stands in the way and is no regular file; remove it")
            _lock(descriptor, path)
            # Between opening and locking, the owner may have published it: then this is the finished file.
            if _names(path, descriptor):
                if os.fstat(descriptor).st_size == 0:
                    _take_mode(descriptor, mode)
                    return descriptor
                path.unlink()
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        if exc.errno == errno.EWOULDBLOCK:
            raise OutputError(
                f"{path}: another run is writing this output; wait for it, stop it, or choose another name"
            ) from exc
        if exc.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):  # file systems without locks
            raise


def _names(path: Path, descriptor: int) -> bool:
    """Whether the path still names the open file."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _claimed_folder(path: Path, mode: int | None) -> int:
    """Create and lock an empty partial folder; what an interrupted run left there is removed, as for a file."""
    mode = None if mode is None else mode | stat.S_IRWXU
    while True:
        _remove_abandoned(path)
        try:
            path.mkdir(_PERMISSIONS if mode is None else mode)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except (FileExistsError, FileNotFoundError):
            if not path.parent.is_dir():
                raise
            continue  # another run made or removed it at the same moment: its lock says whether it is still alive
        try:
            _lock(descriptor, path)
            # Between creating and locking, another run may have taken it for an abandoned one.
            if _names(path, descriptor):
                _take_mode(descriptor, mode)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _remove_abandoned(path: Path) -> None:
    """Remove what an interrupted run left under a partial folder's name; OutputError where that run is still alive."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    try:
        _lock(descriptor, path)
        if not _names(path, descriptor):
            return  # by now it is another's, or gone
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()
    finally:
        os.close(descriptor)


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
    names = os.fsencode(one), os.fsencode(other)
    if renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
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
