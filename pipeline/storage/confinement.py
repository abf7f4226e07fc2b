"""Paths that may not leave a service's data roots, even if files or folders become symbolic links while a job runs.

A check of a name can be overtaken before the name is opened. So a file is pinned first, by a descriptor that reads
nothing (O_PATH), the system is asked where it really is, and it is opened through that descriptor. New files are
created, renamed and removed through a descriptor of their folder, which must be where its name says.

Only names under the roots of a `Confinement` that this process knows are checked. The service's jobs carry it; without
one, as in `millrace run`, files are opened as usual. Hard links and mounts are the operator's business.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pipeline.errors import InputError, MillraceError
from pipeline.storage.objects import ObjectPath

_STATE_FILES = ("lock", "previews")
_STATE_PREFIXES = ("jobs.sqlite", "audit.jsonl", "crash.log")
_FOLDER = os.O_PATH | os.O_DIRECTORY
_KEPT_OPEN = 3  # folders of a thread
_WRITTEN_AT_ONCE = 512  # buffers, of the 1,024 that the system takes
# Of a new file. Those of an iterator are written one by one, so that they may be of the same memory. A function gets
# the file's descriptor, may write to it, and returns what follows at its position.
Buffers = Sequence[Any] | Iterator[Any] | Callable[[int], Sequence[Any]]


class Confinement:
    """The folders whose files jobs may use, except the service's state. Known to every process that unpickles it."""

    def __init__(self, roots: tuple[Path, ...], state: Path | None = None) -> None:
        """`state`: the service's state folder, which may lie under a root and hold users' files too."""
        self.roots = roots
        self.state = state
        # On another host a root may be a link.
        self._real = [(os.fspath(root), os.path.realpath(root)) for root in roots]
        self._real_state = None if state is None else os.path.realpath(state)

    def __reduce__(self) -> Any:
        return _received, (self.roots, self.state)

    def place_of(self, path: str) -> str | None:
        """Where a path under the roots must be if no link leads elsewhere; None for other paths and for the state."""
        for pair in self._real:
            for root in pair:
                if _is_under(path, root):
                    place = os.path.normpath(f"{pair[1].rstrip('/')}/{path[len(root) :].lstrip('/')}")
                    return None if self._is_state(place) and "/../" not in path else place
        return None

    def holds(self, place: str) -> bool:
        """Whether a path without links is under the roots, and not the service's state."""
        return any(_is_under(place, real) for _, real in self._real) and not self._is_state(place)

    def _is_state(self, place: str) -> bool:
        if self._real_state is None or not _is_under(place, self._real_state):
            return False
        first = place[len(self._real_state) :].strip("/").partition("/")[0]
        return first in _STATE_FILES or first.startswith(_STATE_PREFIXES)


_known: dict[tuple[tuple[Path, ...], Path | None], Confinement] = {}  # by their roots and states


def confine(confinement: Confinement) -> None:
    """From now on, refuse paths under the roots if links lead elsewhere, in this process."""
    _known[confinement.roots, confinement.state] = confinement


def _received(roots: tuple[Path, ...], state: Path | None) -> Confinement:
    confinement = Confinement(roots, state)
    confine(confinement)
    return confinement


def is_confined(path: Path) -> bool:
    """Whether a path may not lead out of the roots of a service's job."""
    return bool(_confining(path))


def resolved(path: Path) -> Path:
    """The path without symbolic links. Of a job of the service it is already: a link there now is not followed."""
    return path if isinstance(path, ObjectPath) or _confining(path) else Path(os.path.realpath(path))


def real_path(path: str) -> str:
    """As `os.path.realpath`, but the system looks up the folder, which is much faster than doing so part by part."""
    folder, last = os.path.split(path)
    if last not in ("", ".", ".."):
        with suppress(OSError):
            pinned = os.open(folder, _FOLDER)
            try:
                place = os.path.join(_place_of(pinned), last)  # noqa: PTH118
            finally:
                os.close(pinned)
            if not os.path.islink(place):  # noqa: PTH114
                return place
    return os.path.realpath(path)


def open_beneath(path: Path | str, flags: int, mode: int = 0o777) -> int:
    """`os.open` of an existing file or folder, also as an `opener`.

    OSError (EXDEV) if the path is confined and leads out of the roots; links that stay under them are followed.
    """
    _refuse_object(path)
    found = _confining(path)
    if not found:
        return os.open(path, flags, mode)
    pinned = os.open(path, os.O_PATH | flags & (os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        place = _place_of(pinned)
        if not all(confinement.holds(place) for confinement, _ in found):
            raise _leads_out(path)
        # A link itself, pinned by O_NOFOLLOW, does not open; a pipe does not wait for its other end.
        return os.open(f"/proc/self/fd/{pinned}", flags & ~os.O_NOFOLLOW | os.O_NONBLOCK)
    finally:
        os.close(pinned)


def open_new(path: str, flags: int) -> int:
    """An `opener` of files to write, which follows no link and does not wait for the other end of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


@contextmanager
def by_descriptor(path: Path) -> Iterator[Path]:
    """A name of an existing file or folder, for libraries that open by name; valid inside the context.

    A confined path is opened by `open_beneath`; it must be a file or a folder. Others stay as they are.
    """
    _refuse_object(path)
    if not _confining(path):
        yield path
        return
    descriptor = open_beneath(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO), str(path))
        name = Path(f"/proc/self/fd/{descriptor}")
        with _named(name, path):
            yield name
    finally:
        os.close(descriptor)


@contextmanager
def in_its_folder(path: Path) -> Iterator[Path]:
    """A name to create, rename or remove `path` by; names beside it (`with_name`) are in the same folder.

    Of a confined path it leads through a descriptor of the folder. OSError (EXDEV) if the folder is not where its name
    says. The last part may be a link: open it with O_NOFOLLOW.
    """
    found = _confining(path)
    if not found:
        yield path
        return
    descriptor = os.open(path.parent, _FOLDER)
    try:
        place = _place_of(descriptor)
        if not all(each.holds(place) and os.path.dirname(wanted) == place for each, wanted in found):  # noqa: PTH120
            raise _leads_out(path.parent)
        folder = Path(f"/proc/self/fd/{descriptor}")
        with _named(folder, path.parent):
            yield folder / path.name
    finally:
        os.close(descriptor)


def open_within(folder: int, name: str, flags: int) -> int:
    """Open `name`, which may have several parts, in an open folder without following any link.

    OSError: ELOOP or ENOTDIR if a part is a link.
    """
    with _last_folder(folder, name, make=False) as (here, last):
        return os.open(last, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666, dir_fd=here)


class Subfolders:
    """Folders below an open one, created if missing; no link is followed. Each thread keeps its latest ones open."""

    def __init__(self, folder: int) -> None:
        self._folder = folder
        self._of_threads: dict[int, dict[str, int]] = {}

    def at(self, name: str) -> int:
        """A descriptor of the folder `name`, which may have several parts; "" is the open one. OSError (ELOOP or
        ENOTDIR) if a part is a link."""
        if not name:
            return self._folder
        mine = self._of_threads.setdefault(threading.get_ident(), {})
        found = mine.pop(name, None)
        if found is None:
            if len(mine) == _KEPT_OPEN:
                os.close(mine.pop(next(iter(mine))))
            with _last_folder(self._folder, f"{name}/_", make=True) as (here, _):
                found = os.dup(here)
        mine[name] = found
        return found

    def close(self) -> None:
        """Called when no thread uses the descriptors; harmless a second time."""
        while self._of_threads:
            for descriptor in self._of_threads.popitem()[1].values():
                os.close(descriptor)


def put_within(folders: Subfolders, name: str, buffers: Buffers, unfinished: str) -> None:
    """Write the file `name`, of these buffers, in an open folder, in place of an older one, without following any link.

    Missing folders on the way are created. The file is either old or new, never partial, even if the process is killed.

    unfinished : its name until it is whole, in the same folder or another one in it; of one writer at a time

    OSError as from `open_within`.
    """
    there, _, temporary = unfinished.rpartition("/")
    parent, _, last = name.rpartition("/")
    if last in ("", "..", "."):
        raise _leads_out(name)
    begun, ended = folders.at(there), folders.at(parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(temporary, flags, 0o666, dir_fd=begun)
    try:
        if callable(buffers):
            buffers = buffers(descriptor)
        at_once = 1 if isinstance(buffers, Iterator) else _WRITTEN_AT_ONCE
        left = iter(buffers)
        while some := [memoryview(each).cast("B") for each in itertools.islice(left, at_once)]:
            _write_all(descriptor, some)
    finally:
        os.close(descriptor)
    os.replace(temporary, last, src_dir_fd=begun, dst_dir_fd=ended)


def remove_files_within(folder: int, name: str) -> None:
    """Remove the folder `name`, which holds only files, from an open folder, without following any link.

    OSError as from `open_within`.
    """
    descriptor = open_within(folder, name, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for each in os.listdir(descriptor):  # noqa: PTH208 - by its descriptor
            os.unlink(each, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    with _last_folder(folder, name, make=False) as (here, last):
        os.rmdir(last, dir_fd=here)


def _write_all(descriptor: int, buffers: list[memoryview]) -> None:
    while buffers:
        done = os.writev(descriptor, buffers)
        while buffers and done >= len(buffers[0]):
            done -= len(buffers.pop(0))
        if buffers:
            buffers[0] = buffers[0][done:]


@contextmanager
def _last_folder(folder: int, name: str, make: bool) -> Iterator[tuple[int, str]]:
    """A descriptor of the folder that holds `name`, and the last part of the name."""
    *parts, last = name.split("/")
    if ".." in parts or last in ("", "..", "."):
        raise _leads_out(name)
    here = folder
    try:
        for part in parts:
            there = _subfolder(here, part, make)
            if here != folder:
                os.close(here)
            here = there
        yield here, last
    finally:
        if here != folder:
            os.close(here)


def _subfolder(folder: int, name: str, make: bool) -> int:
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):  # another thread made it meanwhile
        os.mkdir(name, dir_fd=folder)
    return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)


def _confining(path: Path | str) -> list[tuple[Confinement, str]]:
    """The confinements of a path, with the place where each expects it."""
    if not _known:
        return []
    name = os.fspath(path)
    places = ((confinement, confinement.place_of(name)) for confinement in list(_known.values()))
    return [(confinement, place) for confinement, place in places if place is not None]


def _refuse_object(path: Path | str) -> None:
    if isinstance(path, ObjectPath):
        raise InputError(f"{path}: only images are read from an object store; copy it to a file first")


def _leads_out(path: Path | str) -> OSError:
    return OSError(errno.EXDEV, "leads out of the data roots", os.fspath(path))


def _place_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - compared as text


def _is_under(path: str, root: str) -> bool:
    return path == root or path.startswith(root if root.endswith("/") else root + "/")


@contextmanager
def _named(descriptor: Path, path: Path) -> Iterator[None]:
    """Errors name the path that the user knows, not the descriptor."""
    try:
        yield
    except (MillraceError, OSError) as error:
        own, known = re.compile(rf"{descriptor}(?!\d)"), os.fspath(path)
        if isinstance(error, OSError):
            error.filename = own.sub(lambda _: known, os.fsdecode(error.filename or "")) or None
        else:
            error.args = tuple(own.sub(lambda _: known, each) if isinstance(each, str) else each for each in error.args)
        raise
