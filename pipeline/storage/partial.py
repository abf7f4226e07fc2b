"""Partial outputs: written as `OUTPUT.partial`, synced to disk, then renamed to `OUTPUT` atomically.

Nothing changes under the final name before `publish`. The owner locks its partial output for as long as it lives: a
second run on the same output is refused; what an interrupted run left is replaced or resumed. Other processes, on this
machine or another, may join and write their share.

A new output takes the permissions of the older one it replaces, from its first byte. A symbolic link at an output's
path is itself replaced; only the path that the user named is resolved, by `behind_link`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path

from pipeline.errors import OutputError, counted
from pipeline.storage.confinement import (
    Buffers,
    Subfolders,
    in_its_folder,
    open_within,
    put_within,
    remove_files_within,
    resolved,
)
from pipeline.storage.output_lock import (
    create_locked_file,
    create_locked_folder,
    is_at,
    mode_of,
    open_existing,
    set_mode,
)
from pipeline.storage.positional import SharedDescriptor
from pipeline.storage.writable import WritableFile, writing

_GONE = "was removed or replaced while it was written; run the job again"
_UNFINISHED = ".unfinished"  # in a partial folder: files until they are whole
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
LATE_FILES_S = 10.0


class Opening(Enum):
    """How a writer treats an existing partial output."""

    NEW = "new"  # owns a new one, which replaces what an interrupted run left
    RESUME = "resume"  # owns what an interrupted run left, unchanged
    JOIN = "join"  # another process owns it: write a share, never publish or remove


# `publish` calls it once the partial output is complete and on disk, just before the rename.
Callback = Callable[[], None]


def no_callback() -> None:
    """Default no-op callback."""


class PartialFile(WritableFile):
    """The partial version of the file `final`: `<final name>.partial` beside it, `nbytes` long from the start."""

    def __init__(
        self, final: Path, nbytes: int = 0, opening: Opening = Opening.NEW, *, scratch_for: Path | None = None
    ) -> None:
        """`scratch_for`: the output that this scratch file helps to make. Messages name that output, whose older
        version also determines the permissions. A scratch file is never published.

        OutputError if the folder is not writable, `final` is not a regular file, or another run is writing it; also
        if RESUME or JOIN finds no partial file, or one of another length.
        """
        _refuse_unless_file(final)
        path = partial_path(final)
        with writing(scratch_for or final, nbytes), in_its_folder(path) as here:
            if opening is Opening.NEW:
                descriptor = create_locked_file(here, final, mode_of(scratch_for or final))
            else:
                descriptor = open_existing(here, os.O_RDWR, lock=opening is Opening.RESUME)
        super().__init__(path, descriptor, scratch_for or final)
        self._live = opening is not Opening.JOIN  # owned, and neither published, kept nor discarded
        self._publishable = self._live and scratch_for is None
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

    def publish(self, on_sealed: Callback = no_callback) -> None:
        """Sync the file and rename it to its final name."""
        if not self._publishable:
            raise ValueError(f"{self.path}: only its owner publishes it, and a scratch file is never published")
        with self._in_use() as descriptor, writing(self.final), in_its_folder(self.path) as here:
            os.fsync(descriptor)
            if not is_at(here, descriptor):
                raise OutputError(f"{self.path}: {_GONE}")
            set_mode(descriptor, mode_of(self.final))
            on_sealed()
            here.replace(here.with_name(self.final.name))
            self._live = False
            sync_folder(here.parent)
        self.close()

    def discard(self) -> None:
        """Remove the partial file; harmless after `publish` or a second time."""
        if self._live:
            self._live = False
            with self._in_use() as descriptor, writing(self.final), in_its_folder(self.path) as here:
                if is_at(here, descriptor):
                    here.unlink()
        self.close()

    def keep(self) -> None:
        """Close, and leave the partial file in place for RESUME."""
        self._live = False
        self.close()


class PartialFolder(SharedDescriptor):
    """The partial version of the folder `final`: `<final name>.partial` beside it, for formats that are file trees."""

    def __init__(self, final: Path, may_replace: Callable[[Path], bool], opening: Opening = Opening.NEW) -> None:
        """`may_replace`: returns whether this output may replace an older folder with the final name.

        OutputError if it may not, the parent folder is not writable, or another run is writing it; also if RESUME or
        JOIN finds no partial folder.
        """
        path = partial_path(final)
        self.final = final
        self._live = opening is not Opening.JOIN  # owned, and neither published, kept nor discarded
        if os.path.lexists(final) and not (final.is_dir() and not final.is_symlink() and may_replace(final)):
            raise OutputError(f"{final}: exists and is not an earlier result; remove it, or choose another name")
        with writing(final), in_its_folder(path) as here:
            if opening is Opening.NEW:
                descriptor = create_locked_folder(here, mode_of(final))
            else:
                descriptor = open_existing(here, os.O_RDONLY | os.O_DIRECTORY, lock=self._live)
        super().__init__(path, descriptor)
        self._token = os.urandom(6).hex()
        self._folders = Subfolders(descriptor)
        self._made: set[str] = set()

    @property
    def inside(self) -> Path:
        """Where to write the files, only while `in_use`: stays this folder even if its name now belongs to another."""
        return Path(f"/proc/self/fd/{self._descriptor}")

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Guards writing files into this folder.

        OutputError if the folder has been published, removed or replaced, before or during the block: a worker that was
        believed dead must not write into the output of another run with the same name.
        """
        with self._in_use() as descriptor:
            if not is_at(self.path, descriptor):
                raise OutputError(f"{self.path}: {_GONE}")
            try:
                yield
            except FileNotFoundError as exc:  # files are removed before their folder
                raise OutputError(f"{self.path}: {_GONE}") from exc

    def open_file(self, name: str, flags: int = os.O_RDONLY) -> int:
        """A descriptor of a file inside, which may lie in subfolders; no link is followed. Raises as `open_within`."""
        with self._in_use() as descriptor:
            return open_within(descriptor, name, flags)

    def read(self, name: str) -> bytes:
        """The bytes of a file inside. Raises as `open_within`."""
        with os.fdopen(self.open_file(name), "rb") as file:
            return file.read()

    def put(self, name: str, buffers: Buffers) -> None:
        """Write a file inside, which may lie in subfolders, all or nothing; no link is followed. As `put_within`."""
        with self._in_use():
            put_within(self._folders, name, buffers, f"{_UNFINISHED}/{self._token}-{threading.get_ident()}")

    @contextmanager
    def open_folders(self, wanted: Iterable[str]) -> Iterator[tuple[int, int, str]]:
        """For files that are put here in another way: make folders inside; yields descriptors of this one and of that
        of unfinished files, and how the names in it begin, of one thread each."""
        with self._in_use() as descriptor:
            for name in set(wanted) - self._made:
                self._folders.at(name)
                self._made.add(name)
            yield descriptor, self._folders.at(_UNFINISHED), self._token

    def scratch(self) -> int:
        """A descriptor, which the caller closes, of a new file inside that has no name: it goes when it is closed."""
        with self._in_use():
            begun, name = self._folders.at(_UNFINISHED), f"{self._token}-{threading.get_ident()}-scratch"
            descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=begun)
            os.unlink(name, dir_fd=begun)
            return descriptor

    def _release(self) -> None:
        self._folders.close()
        super()._release()

    def flush(self) -> None:
        """Sync what has been written so far."""
        with self._in_use() as descriptor, writing(self.final):
            sync_file_system(descriptor)

    def keep(self) -> None:
        """Close, and leave the partial folder in place for RESUME. Harmless after `publish` or `discard`."""
        self._live = False
        self.close()

    def publish(self, on_sealed: Callback = no_callback) -> None:
        """Sync every file, rename the folder to its final name atomically, then remove the older folder."""
        if not self._live:
            raise ValueError(f"{self.final}: already published or discarded, or owned by another process")
        with writing(self.final), in_its_folder(self.path) as here:
            with suppress(FileNotFoundError):  # what killed workers have left
                remove_files_within(self._descriptor, _UNFINISHED)
            sync_file_system(self._descriptor)
            if not is_at(here, self._descriptor):
                raise OutputError(f"{self.path}: {_GONE}")
            set_mode(self._descriptor, mode_of(self.final))
            on_sealed()
            older = _take_name(here, here.with_name(self.final.name))
            self.keep()
            sync_folder(here.parent)
            if older is not None:
                shutil.rmtree(older)

    def discard(self) -> None:
        """Remove the partial folder; harmless after `publish` or a second time."""
        if self._live:
            with writing(self.final), in_its_folder(self.path) as here:
                if is_at(here, self._descriptor):
                    _remove_with_late_files(here)
        self.keep()


def _remove_with_late_files(folder: Path) -> None:
    """If one of several files cannot be written, as on a full disk, zarr does not wait for the others, which may still
    appear during the removal."""
    give_up = time.monotonic() + LATE_FILES_S
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError as exc:
            if exc.errno not in (errno.ENOTEMPTY, errno.ENOENT) or time.monotonic() > give_up:
                raise


def partial_path(final: Path) -> Path:
    """The path of an output until it is published."""
    return final.with_name(final.name + ".partial")


def samples_path(final: Path) -> Path:
    """The path, itself only ever partial, of spooled samples that are encoded once all are present."""
    return final.with_name(final.name + ".samples")


def behind_link(output: Path) -> Path:
    """Resolve a symbolic link at the output path that the user named, so that the link stays and its target is written.

    Not for paths derived from it: a link there may lead out of the folders that the user may write to.
    OutputError if the links form a loop.
    """
    with writing(output):
        found = resolved(output) if output.is_symlink() else output
        if found.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        return found


def settle_older(final: Path) -> None:
    """Clean up after a run that was killed between the two renames that replace a folder: restore the older result's
    name, or remove it if the newer one has the name."""
    if not _older_path(final).is_dir():
        return
    with writing(final), in_its_folder(final) as here:
        older = _older_path(here)
        shutil.rmtree(older) if os.path.lexists(here) else older.rename(here)


def _older_path(final: Path) -> Path:
    return final.with_name(final.name + ".partial.older")


def _refuse_unless_file(final: Path) -> None:
    try:
        mode = final.stat().st_mode
    except OSError:
        return  # nothing there, or an error that creating the partial file reports
    if stat.S_ISDIR(mode):
        raise OutputError(f"{final}: is a folder; name a file in it")
    if not stat.S_ISREG(mode):
        raise OutputError(f"{final}: is not a regular file and would be replaced; choose another name")


def _take_name(partial: Path, final: Path) -> Path | None:
    """Rename a folder over another; returns the older one's new path, if there was one."""
    older = _older_path(final)
    if not os.path.lexists(final):
        partial.rename(final)
        return older if older.is_dir() else None  # left by a run that was killed between its renames
    if _exchanged(partial, final):
        return partial
    if older.is_dir():
        shutil.rmtree(older)  # left by a run that was killed before it removed it
    # Without an atomic exchange the name is briefly free, but both folders exist beside it.
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
    error = _last_error()
    if error.errno in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise error


def sync_file_system(descriptor: int) -> None:
    """One sync for a whole tree: an fsync for each of many thousand chunk files would take minutes."""
    syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if syncfs is None:
        os.sync()
    elif syncfs(descriptor) != 0:
        raise _last_error()


def _last_error() -> OSError:
    """The error of the last call into the C library."""
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def sync_folder(folder: Path) -> None:
    """Sync the folder's entries."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync_opened(descriptor)
    finally:
        os.close(descriptor)


def sync_opened(folder: int) -> None:
    """Sync the entries of an open folder."""
    try:
        os.fsync(folder)
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot sync a folder
            raise
