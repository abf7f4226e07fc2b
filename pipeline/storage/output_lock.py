"""Ownership of partial outputs: created and locked while the owner lives, taken over once it is gone."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from pathlib import Path

from pipeline.errors import OutputError

_PERMISSIONS = stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO


def open_existing(path: Path, flags: int, *, lock: bool) -> int:
    """Open an existing partial output; `lock` it to own it. OutputError if there is none."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as exc:
        way_out = "run the job again without --resume" if lock else "a worker needs the folder under the same path"
        raise OutputError(f"{path}: does not exist: {way_out}") from exc
    try:
        if lock:
            _lock(descriptor, path)
            # Between opening and locking, the owner may have published it: this is then the finished output.
            if not is_at(path, descriptor):
                raise OutputError(
                    f"{path}: another run has just published or removed it: run the job again without --resume"
                )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def mode_of(output: Path | str, folder: int | None = None) -> int | None:
    """The permissions of an older output; None if there is none, so that the user's umask applies.

    folder : a descriptor of the folder that `output` is in
    """
    try:
        mode = os.stat(output, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None
    return mode & _PERMISSIONS if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else None


def set_mode(descriptor: int, mode: int | None) -> None:
    """Set the permissions of an open file or folder; None leaves them unchanged."""
    now = stat.S_IMODE(os.fstat(descriptor).st_mode)
    if mode is not None and now & _PERMISSIONS != mode:  # file systems without permissions refuse a chmod
        os.fchmod(descriptor, now & ~_PERMISSIONS | mode)


def create_locked_file(path: Path, final: Path, mode: int | None) -> int:
    """Create and lock an empty partial file; an older one is removed once its lock shows that its owner is gone.

    Removed, not truncated: a worker cut off from the interrupted run may still hold it open and write to it. The mode
    always lets the owner read and write, since joining workers open the file by name.
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
                raise OutputError(f"{path}: is in the way and not a regular file; remove it")
            _lock(descriptor, path)
            # Between opening and locking, the owner may have published it: this is then the finished file.
            if is_at(path, descriptor):
                if os.fstat(descriptor).st_size == 0:
                    set_mode(descriptor, mode)
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


def is_at(path: Path, descriptor: int) -> bool:
    """Whether the path still names the open file."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def create_locked_folder(path: Path, mode: int | None) -> int:
    """Create and lock an empty partial folder; what an interrupted run left is removed, as for a file."""
    mode = None if mode is None else mode | stat.S_IRWXU
    while True:
        _remove_abandoned(path)
        try:
            path.mkdir(_PERMISSIONS if mode is None else mode)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except (FileExistsError, FileNotFoundError):
            if not path.parent.is_dir():
                raise
            continue  # another run made or removed it at the same moment: its lock shows whether it is still alive
        try:
            _lock(descriptor, path)
            # Between creating and locking, another run may have removed it as abandoned.
            if is_at(path, descriptor):
                set_mode(descriptor, mode)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _remove_abandoned(path: Path) -> None:
    """Remove what an interrupted run left at a partial folder's path; OutputError if that run is still alive."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    try:
        _lock(descriptor, path)
        if not is_at(path, descriptor):
            return  # gone, or replaced by another run
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()
    finally:
        os.close(descriptor)
