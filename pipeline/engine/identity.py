"""Identifies the input of a result: its size, time and SHA-256, computed while the job runs."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from pipeline.errors import InputError, MillraceError
from pipeline.formats.image.zarr import METADATA_NAMES, is_zarr
from pipeline.storage.confinement import open_beneath
from pipeline.storage.objects import ObjectPath

# SHA-256 runs at 1 to 2 GB/s on one core: for larger inputs it would slow the job, and is computed only on request.
HASHED_UP_TO_BYTES = 256 << 20
BLOCK_BYTES = 1 << 20
_REQUEST_BYTES = 8 << 20


def input_version(path: Path) -> dict[str, Any]:
    """What changes with an input: a file's size and time; for a folder, those of all files in it.

    For an object also its ETag; for a Zarr in an object store, those of its metadata alone.
    """
    if isinstance(path, ObjectPath):
        return _objects_version(path)
    paths = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    listing, total, newest = hashlib.sha256(), 0, 0
    for each in paths:
        found = each.stat()
        listing.update(f"{each.relative_to(path)}\0{found.st_size}\0{found.st_mtime_ns}\0".encode())
        total, newest = total + found.st_size, max(newest, found.st_mtime_ns)
    return {"bytes": total, "files": len(paths), "mtime_ns": newest, "listing_sha256": listing.hexdigest()}


class InputIdentity:
    """The version of a job's input, and its SHA-256, which a thread computes in the context."""

    def __init__(self, path: Path, version: Mapping[str, Any] | None = None, *, always_hash: bool = False) -> None:
        """`version`: the `input_version` at planning; default: now."""
        self._path = path
        self._version = input_version(path) if version is None else version
        self._is_folder = isinstance(path, ObjectPath) or path.is_dir()
        self._inode = _inode(path)
        self._digest: str | None = None
        self._abandoned = threading.Event()
        self._thread: threading.Thread | None = None
        # Of objects only on request: they would be transferred twice.
        is_small = self._version["bytes"] <= HASHED_UP_TO_BYTES and not isinstance(path, ObjectPath)
        if (always_hash or is_small) and path.is_file():
            self._thread = threading.Thread(target=self._hash, name="input-sha256", daemon=True)

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._abandoned.set()

    def check(self) -> None:
        """InputError if the input has changed since the job began."""
        if isinstance(self._path, ObjectPath):
            with suppress(FileNotFoundError):
                if input_version(self._path) != self._version:
                    raise self._changed()
        elif self._path.exists() and input_version(self._path) != self._version:
            raise self._changed()

    def check_untouched(self) -> None:
        """As `check`, but also InputError if the input is gone, or was renamed, as when another was in its place for a
        while. For results that are wrong: changes of permissions or links raise, too."""
        self.check()
        if _inode(self._path) != self._inode:
            raise self._changed()

    def _changed(self) -> InputError:
        return InputError(f"{self._path}: changed while it was read; nothing was published; run again")

    def confirmed(self) -> dict[str, Any]:
        """Path, bytes, mtime (seconds since 1970) and SHA-256 (None for folders and for large files not asked for).

        For a folder: the bytes of all its files, the newest mtime, and `listing_sha256`, the SHA-256 of their names,
        sizes and times. Call it after the last read of the input. InputError if it has changed.
        """
        if self._thread is not None:
            self._thread.join()
        self.check()
        found = {
            "path": str(self._path.absolute()),
            "bytes": self._version["bytes"],
            "mtime": self._version["mtime_ns"] / 10**9,
            "sha256": self._digest,
        }
        return found | {"listing_sha256": self._version["listing_sha256"]} if self._is_folder else found

    def _hash(self) -> None:
        digest = hashlib.sha256()
        try:
            for block in _blocks(self._path):
                if self._abandoned.is_set():
                    return
                digest.update(block)
        except (OSError, MillraceError):
            return  # the job reads the same file and reports the error
        self._digest = digest.hexdigest()


def sha256_of_file(path: Path) -> str:
    """The SHA-256 of a small file. Raises OSError."""
    with open(path, "rb", buffering=0, opener=open_beneath) as file:
        return hashlib.sha256(file.read()).hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    if isinstance(path, ObjectPath):
        for start in range(0, path.head()["size"], _REQUEST_BYTES):
            yield from map(bytes, path.get_ranges([start], [_REQUEST_BYTES]))
        return
    with open(path, "rb", buffering=0, opener=open_beneath) as file:
        while block := file.read(BLOCK_BYTES):
            yield block


def _objects_version(path: ObjectPath) -> dict[str, Any]:
    """Size, time and ETag of an object; of a Zarr, those of its metadata, since listing chunks takes long."""
    listing, total, newest, count = hashlib.sha256(), 0, 0, 0
    for each in (path / name for name in METADATA_NAMES) if is_zarr(path) else [path]:
        try:
            found = each.head()
        except FileNotFoundError:
            if each == path:
                raise
            continue
        nanoseconds = round(found["last_modified"].timestamp() * 10**9)
        listing.update(f"{each}\0{found['size']}\0{nanoseconds}\0{found['e_tag']}\0".encode())
        total, newest, count = total + found["size"], max(newest, nanoseconds), count + 1
    return {"bytes": total, "files": count, "mtime_ns": newest, "listing_sha256": listing.hexdigest()}


def _inode(path: Path) -> tuple[int, int] | None:
    """The number of a file or folder, and the time of its last change, of its name too; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns
