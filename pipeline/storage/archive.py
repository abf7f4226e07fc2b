"""Folders packed into a tar stream and unpacked again: how results that are folders travel over HTTP."""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, cast

from pipeline.errors import ServiceError, StorageError
from pipeline.storage.confinement import by_descriptor, open_beneath

MEDIA_TYPE = "application/x-tar"
PIECE_BYTES = 1 << 20
_BLOCK = tarfile.BLOCKSIZE


def packed(folder: Path) -> Iterator[bytes]:
    """The tar stream of a folder's files and subfolders, sorted by name; symbolic links are left out.

    Raises StorageError before the archive's end if something cannot be read, or if the folder has been replaced or its
    entries have changed since the start: a Zarr chunk that is left out would be read as the fill value.
    """
    versions = {each: _version(each) for each in _folders(folder)}
    yield from _packed_folder(folder, PurePosixPath(folder.name))
    for each, version in versions.items():
        if _version(each) != version:
            raise StorageError(f"{each}: was changed while it was read; fetch it again")
    yield bytes(2 * _BLOCK)


def unpack(pieces: Iterator[bytes], folder: Path) -> None:
    """Unpack the stream of `packed` into a new folder; the name of the archive's top folder is ignored.

    Raises ServiceError if the archive holds anything but files and folders within it; OSError is passed on.
    """
    folder.mkdir()
    try:
        with tarfile.open(fileobj=cast("Any", _Pieces(pieces)), mode="r|") as archive:
            for member in archive:
                _unpack_member(archive, member, folder)
    except tarfile.TarError as error:
        raise ServiceError(f"{folder}: the service sent a damaged archive ({error}); fetch it again") from error


def _header(name: PurePosixPath, kind: bytes, size: int) -> bytes:
    info = tarfile.TarInfo(str(name))
    info.type, info.size, info.mode = kind, size, 0o755 if kind == tarfile.DIRTYPE else 0o644
    return info.tobuf(tarfile.PAX_FORMAT)


def _folders(folder: Path) -> Iterator[Path]:
    """The folder and those within it, each before its names are read."""
    yield folder
    with _reading(folder), by_descriptor(folder) as here, os.scandir(here) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    for name in names:
        yield from _folders(folder / name)


def _version(folder: Path) -> tuple[int, ...]:
    """Changes if the folder is replaced, or entries are added or removed."""
    with _reading(folder):
        found = folder.lstat()
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _packed_folder(folder: Path, name: PurePosixPath) -> Iterator[bytes]:
    yield _header(name, tarfile.DIRTYPE, 0)
    with _reading(folder), by_descriptor(folder) as here:
        entries = sorted(each.name for each in here.iterdir())
    for entry in (folder / each for each in entries):
        with _reading(entry):
            mode = entry.lstat().st_mode
        if stat.S_ISDIR(mode):
            yield from _packed_folder(entry, name / entry.name)
        elif stat.S_ISREG(mode):
            yield from _packed_file(entry, name / entry.name)
        elif not stat.S_ISLNK(mode):
            raise StorageError(f"{entry}: is neither a file nor a folder; remove it, then fetch the folder again")


def _packed_file(path: Path, name: PurePosixPath) -> Iterator[bytes]:
    with _reading(path), open(path, "rb", opener=_open_itself) as file:
        size = left = os.fstat(file.fileno()).st_size
        yield _header(name, tarfile.REGTYPE, size)
        while left > 0:
            piece = file.read(min(left, PIECE_BYTES))
            if not piece:
                raise StorageError(f"{path}: became shorter while it was read")
            left -= len(piece)
            yield piece
    yield bytes(-size % _BLOCK)


def _open_itself(path: str, flags: int) -> int:
    """Follow no symbolic link, and do not wait for the other end of a pipe."""
    return open_beneath(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise StorageError(f"{path}: was removed while its folder was read; fetch it again") from error
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from error


def _unpack_member(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or not (member.isreg() or member.isdir()):
        raise ServiceError(f"{folder}: the service sent {member.name!r} in the archive, which is not unpacked")
    target = folder.joinpath(*name.parts[1:])
    if member.isdir():
        target.mkdir(parents=True, exist_ok=True)
        return
    content = archive.extractfile(member)
    assert content is not None, "a regular file has content"
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as file:
        while piece := content.read(PIECE_BYTES):
            file.write(piece)


class _Pieces:
    """Reads pieces of any size as one file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = b""

    def read(self, size: int) -> bytes:
        parts, wanted = [], size
        while wanted > 0:
            self._left = self._left or next(self._pieces, b"")
            if not self._left:
                break
            parts.append(self._left[:wanted])
            self._left = self._left[wanted:]
            wanted -= len(parts[-1])
        return b"".join(parts)
