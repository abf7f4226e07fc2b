"""A folder as one stream of bytes (a tar archive) and back: how results that are folders travel over HTTP."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, cast

from pipeline.errors import ServiceError, StorageError

MEDIA_TYPE = "application/x-tar"
PIECE_BYTES = 1 << 20
_BLOCK = tarfile.BLOCKSIZE


def packed(folder: Path) -> Iterator[bytes]:
    """The folder's own files and folders, in order; links are left out, wherever they lead.

    Raises StorageError where a file cannot be read, or becomes shorter meanwhile.
    """
    for parent, folders, files in os.walk(folder):
        folders.sort()
        inside = PurePosixPath(folder.name, *Path(parent).relative_to(folder).parts)
        yield _header(inside, tarfile.DIRTYPE, 0)
        for name in sorted(files):
            path = Path(parent, name)
            if path.is_file() and not path.is_symlink():
                yield from _packed_file(path, inside / name)
    yield bytes(2 * _BLOCK)


def unpack(pieces: Iterator[bytes], folder: Path) -> None:
    """Writes what `packed` made into a folder, which is created; its own name in the archive does not count.

    Raises ServiceError where the archive holds anything else than files and folders within it; OSError as it comes.
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


def _packed_file(path: Path, name: PurePosixPath) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            size = left = os.fstat(file.fileno()).st_size
            yield _header(name, tarfile.REGTYPE, size)
            while left > 0:
                piece = file.read(min(left, PIECE_BYTES))
                if not piece:
                    raise StorageError(f"{path}: became shorter while it was read")
                left -= len(piece)
                yield piece
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from error
    yield bytes(-size % _BLOCK)


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
    """Pieces of any size, read as a file."""

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
