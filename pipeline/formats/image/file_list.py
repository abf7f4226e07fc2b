"""Many small files of one kind as one image, which has the further axis N: one job reads and writes all of them.

The list `NAME.files` is JSON that `write_list` makes: the files, their sizes and times, and what their results are
called. The result of such a job is `NAME.result.files` beside it. Files are written into a folder beside that list,
and get their names in the list's `folder` when the list is published, after one sync for all of them.

In a service only lists that it has made itself are used, by their SHA-256: a user's list could name anyone's files.
Folders are used through descriptors, so that no link leads out of the data roots.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.parallel import split
from pipeline.errors import InputError, OutputError, StorageError
from pipeline.formats.image.base import ImageFormat, ImageHeader, ImageReader, ImageWriter, Region, Storage, require_fit
from pipeline.formats.image.contiguous import ContiguousSamples
from pipeline.formats.image.metadata.notes import Notes
from pipeline.formats.image.whole_files import WholeFiles, loops_for
from pipeline.storage.confinement import in_its_folder, is_confined, open_beneath
from pipeline.storage.output_lock import mode_of
from pipeline.storage.partial import Callback, Opening, PartialFile, no_callback, sync_file_system, sync_opened
from pipeline.storage.positional import OpenFolder, PositionalFile, memory_of, reading
from pipeline.storage.writable import writing

SUFFIX = ".files"
_RESULT = ".result" + SUFFIX
_START = b'{"millrace-files": 1'
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class ListedFile:
    """One input, its size and time when it was listed, and its result's name in the list's folder."""

    path: str
    nbytes: int
    mtime_ns: int
    output: str


@dataclass(frozen=True, kw_only=True)
class StoredSamples:
    """How every file of a list holds its samples, if they are one run of bytes: NumPy's name of the dtype, and where
    they begin."""

    dtype: str
    offset: int


@dataclass(frozen=True, kw_only=True)
class FileList:
    """Files of the same shape, axes, dtype and metadata, but with notes of their own. `folder`: of the results."""

    files: tuple[ListedFile, ...]
    folder: str
    stored: StoredSamples | None = None

    def encoded(self) -> bytes:
        rows = [[file.path, file.nbytes, file.mtime_ns, file.output] for file in self.files]
        stored = None if self.stored is None else asdict(self.stored)
        return json.dumps({"millrace-files": 1, "folder": self.folder, "stored": stored, "files": rows}).encode()

    @classmethod
    def read(cls, path: Path) -> FileList:
        """InputError if the list is missing or damaged, or a service has not made it."""
        with reading(path), open(path, "rb", opener=open_beneath) as file:
            text = file.read()
        if is_confined(path) and _vouched.get(path) != sha256_of(text):
            raise InputError(f"{path}: is a list of files, which a service does not take; submit the files themselves")
        try:
            return _parsed(text)
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path}: the list of files is damaged; run the job again without --resume") from error

    @cached_property
    def whole(self) -> WholeFiles | None:
        """The files for compiled loops; None if there are too few."""
        loops = loops_for(len(self.files))
        if loops is None:
            return None
        found = WholeFiles(loops, [file.path for file in self.files], [file.output for file in self.files])
        found.expect([(file.nbytes, file.mtime_ns) for file in self.files])
        return found


@lru_cache(maxsize=2)
def _parsed(text: bytes) -> FileList:
    """A list, which one job reads several times."""
    found = json.loads(text)
    stored = found["stored"]
    return FileList(
        files=tuple(ListedFile(*row) for row in found["files"]),
        folder=found["folder"],
        stored=None if stored is None else StoredSamples(**stored),
    )


_vouched: dict[Path, str] = {}  # SHA-256 by the path of the list


def vouch(path: Path, sha256: str | None) -> None:
    """From now on this process reads that confined list, if its content has this SHA-256; None: no longer."""
    if sha256 is None:
        _vouched.pop(path, None)
    else:
        _vouched[path] = sha256


def sha256_of(encoded: bytes) -> str:
    return hashlib.sha256(encoded).hexdigest()


def result_of(listed: Path) -> Path:
    """The result of a list."""
    return listed.with_name(listed.name.removesuffix(SUFFIX) + _RESULT)


def is_list(path: Path) -> bool:
    return path.name.endswith(SUFFIX)


class FileLists(ImageFormat):
    """Lists of files, each of any other format."""

    name = "list of files"
    suffixes = (SUFFIX,)

    def __init__(
        self,
        open_image: Callable[[Path], ImageReader],
        format_for: Callable[[Path, Storage], ImageFormat],
        storage: Storage = Storage(),  # noqa: B008 - it is frozen
    ) -> None:
        """The functions open and choose the formats of the files themselves."""
        self._open_image, self._format_for, self._storage = open_image, format_for, storage

    def storing(self, storage: Storage) -> FileLists:
        return FileLists(self._open_image, self._format_for, storage)

    def recognises(self, path: Path, first_bytes: bytes) -> bool:
        return is_list(path) and first_bytes.startswith(_START)

    def open(self, path: Path) -> ImageReader:
        return FileListReader(path, self._open_image)

    def refusal(self, header: ImageHeader, path: Path) -> str | None:
        final, form = self._first(path)
        return form.refusal(of_one_file(header), final)

    def block_shape(self, header: ImageHeader) -> tuple[int, ...]:
        return (1, *header.shape[1:])

    def create(self, path: Path, header: ImageHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        _, form = self._first(path)
        return FileListWriter(path, header, opening, form, self._open_image)

    def _first(self, path: Path) -> tuple[Path, ImageFormat]:
        """The first result, and the format of all."""
        listed = FileList.read(_listed(path))
        final = Path(listed.folder, listed.files[0].output)
        return final, self._format_for(final, self._storage)


def _listed(result: Path) -> Path:
    """The list that a result is of."""
    if not result.name.endswith(_RESULT):
        raise OutputError(f"{result}: the result of NAME{SUFFIX} is called NAME{_RESULT}; name it so")
    return result.with_name(result.name.removesuffix(_RESULT) + SUFFIX)


def of_one_file(header: ImageHeader) -> ImageHeader:
    """The header of each file of a list, with the notes of the first."""
    return replace(header, shape=header.shape[1:], axes=header.axes[1:])


class FileListReader(ImageReader):
    """Reads regions of listed files. Raises InputError also if a file changed after it was listed."""

    def __init__(self, path: Path, open_image: Callable[[Path], ImageReader]) -> None:
        self.path = path
        self._open_image = open_image
        self._list = FileList.read(path)
        self._one = self._first_header()
        header = self._one
        self.header = replace(header, shape=(len(self._list.files), *header.shape), axes="N" + header.axes)
        self.block_shape = (1, *header.shape)
        stored = self._list.stored
        self._samples = None
        if stored is not None:
            dtype = np.dtype(stored.dtype)
            self._samples = ContiguousSamples(shape=header.shape, dtype=dtype, offset=stored.offset)
        _ = self._list.whole  # made once, before several threads want it

    def _first_header(self) -> ImageHeader:
        """The header of the first file that has not changed since it was listed."""
        fault: InputError | None = None
        for file in self._list.files:
            try:
                with self._open_image(Path(file.path)) as reader:
                    header = reader.header
                _check_unchanged(file)
                return header
            except InputError as error:
                fault = fault or error
        raise fault or InputError(f"{self.path}: lists no file")

    def read(self, region: Region, out: NDArray[Any]) -> None:
        require_fit(self.header, region, out)
        first, samples, inside = region.start[0], self._samples, Region(region.start[1:], region.stop[1:])
        if samples is None:
            for file, target in zip(self._list.files[first : region.stop[0]], out, strict=True):
                self._read_part(file, inside, target)
            return
        is_whole, left = inside.shape == self._one.shape, list(range(len(out)))
        if is_whole and left and self._list.whole is not None:
            left = self._list.whole.read(slice(first, region.stop[0]), samples.offset, out)
            if not samples.dtype.isnative:
                done = np.delete(np.arange(len(out)), left)
                out[done] = out[done].byteswap()
        for number in left:
            self._read_run(self._list.files[first + number], samples, inside, out[number])

    def _read_run(self, file: ListedFile, samples: ContiguousSamples, inside: Region, target: NDArray[Any]) -> None:
        """Read samples without the file's header, which was read when it was listed."""
        with closing(PositionalFile(Path(file.path))) as opened:
            try:
                samples.read(opened, inside, target)
            finally:  # what was written meanwhile shows
                if opened.version != (file.nbytes, file.mtime_ns):
                    raise _changed(file)

    def _read_part(self, file: ListedFile, inside: Region, target: NDArray[Any]) -> None:
        with self._open_image(Path(file.path)) as reader:
            if (reader.header.shape, reader.header.dtype) != (self._one.shape, self._one.dtype):
                raise _changed(file)
            reader.read(inside, target)
        _check_unchanged(file)

    def close(self) -> None:
        """No file stays open."""


def _check_unchanged(file: ListedFile) -> None:
    with reading(Path(file.path)):
        found = os.stat(file.path)  # noqa: PTH116
    if (found.st_size, found.st_mtime_ns) != (file.nbytes, file.mtime_ns):
        raise _changed(file)


def _changed(file: ListedFile) -> InputError:
    return InputError(f"{file.path}: changed while it was read; run again")


class FileListWriter(ImageWriter):
    """Writes whole files. `left_out`: the numbers of files that are not published."""

    def __init__(
        self,
        path: Path,
        header: ImageHeader,
        opening: Opening,
        form: ImageFormat,
        open_image: Callable[[Path], ImageReader],
    ) -> None:
        self.path, self.header, self._form, self._open_image = path, header, form, open_image
        self.left_out: Mapping[int, Any] = {}
        self._list = FileList.read(_listed(path))
        self._one = of_one_file(header)
        self._staged = path.with_name(path.name + ".staged")
        self._opened: OpenFolder | None = None  # the staged folder
        self._opening = threading.Lock()
        text = self._list.encoded()
        self._partial = PartialFile(path, len(text), opening)
        self._live = opening is not Opening.JOIN  # owned, and neither published, kept nor discarded
        if opening is Opening.NEW:
            try:
                self._partial.write_at(0, text)
                self._remove_staged()
                with writing(path), in_its_folder(self._staged) as here:
                    here.mkdir()
            except BaseException:
                self._partial.discard()
                raise

    @cached_property
    def _head(self) -> bytes | None:
        """What every file holds before its samples; None: not known without its name."""
        names = self._list.files[0].output, "another-" + self._list.files[0].output
        one, other = (self._form.head(self._one, Path(name)) for name in names)
        return one if one == other else None

    def write(self, region: Region, samples: NDArray[Any]) -> None:
        require_fit(self.header, region, samples)
        if Region(region.start[1:], region.stop[1:]) != Region.whole(self._one.shape):
            raise ValueError(f"{self.path}: files are written whole")
        first = region.start[0]
        for number in self._write_quickly(slice(first, region.stop[0]), samples):
            self._write(self._list.files[first + number], samples[number])

    def _write_quickly(self, files: slice, samples: NDArray[Any]) -> list[int]:
        """Write files that differ in their samples only; returns the places of those left."""
        whole, head = self._list.whole, self._head
        if whole is None or head is None or self._one.notes != Notes() or not len(samples):
            return list(range(len(samples)))
        with writing(self.path), self._in_staged() as folder:
            return whole.write(files, folder, head, samples)

    def _write(self, file: ListedFile, samples: NDArray[Any]) -> None:
        name, header = file.output, self._header_of(file)
        head = (self._head if header is self._one else None) or self._form.head(header, Path(name))
        if head is None:
            writer = self._form.create(self._staged / name, header)
            try:
                writer.write(Region.whole(self._one.shape), samples)
                writer.publish()
            finally:
                writer.discard()
            return
        pieces = [memoryview(head), memory_of(samples)]
        try:
            with self._in_staged() as folder:
                descriptor = os.open(name, _NEW, 0o666, dir_fd=folder)
            try:
                if os.writev(descriptor, pieces) != len(head) + samples.nbytes:  # as on a nearly full disk
                    _write_all(descriptor, pieces)
            finally:
                os.close(descriptor)
        except OSError as error:
            with writing(Path(self._list.folder, name), samples.nbytes):
                raise error

    @contextmanager
    def _in_staged(self) -> Iterator[int]:
        """A descriptor of the folder of files that have no name yet."""
        with self._opening:
            if self._opened is None:
                self._opened = OpenFolder(self._staged)
        with self._opened.in_use() as descriptor:
            yield descriptor

    def _header_of(self, file: ListedFile) -> ImageHeader:
        """The list's header with this file's own notes: files of a list may differ in these."""
        if self._one.notes == Notes():
            return self._one
        try:
            with self._open_image(Path(file.path)) as reader:
                return replace(self._one, notes=reader.header.notes)
        except (InputError, StorageError):  # its samples were read before
            return replace(self._one, notes=Notes())

    def flush(self) -> None:
        with writing(self.path), self._in_staged() as staged:
            sync_file_system(staged)

    def publish(self, on_sealed: Callback = no_callback) -> None:
        with writing(self.path), self._in_staged() as staged:
            for number in self.left_out:  # a full disk needs their room
                with suppress(OSError):
                    os.unlink(self._list.files[number].output, dir_fd=staged)
        self.flush()
        first = Path(self._list.folder, self._list.files[0].output)
        with (
            writing(first),
            closing(OpenFolder(first.parent)) as opened,
            opened.in_use() as folder,
            self._in_staged() as staged,
        ):
            older = set(os.listdir(folder))  # noqa: PTH208 - thousands
            files = self._list.files
            new, others = split(
                [number for number in range(len(files)) if number not in self.left_out],
                lambda number: files[number].output not in older,
            )
            if self._list.whole is not None:
                new = self._list.whole.move(np.array(new, np.int64), staged, folder)
            for number in new:
                self._put(staged, folder, files[number].output, is_new=True)
            for number in others:
                self._put(staged, folder, files[number].output, is_new=False)
            sync_opened(folder)
        self._partial.publish(on_sealed)
        self._close()
        self._remove_staged()

    def _put(self, staged: int, folder: int, name: str, *, is_new: bool) -> None:
        """Give a result its name, and the permissions of the older one it replaces."""
        try:
            mode = None if is_new else mode_of(name, folder)
            if mode is not None:
                os.chmod(name, mode, dir_fd=staged)
            os.replace(name, name, src_dir_fd=staged, dst_dir_fd=folder)
        except OSError as error:
            # A run that was killed while it published has renamed it.
            if is_new or not isinstance(error, FileNotFoundError):
                with writing(Path(self._list.folder, name)):
                    raise error

    def keep(self) -> None:
        self._close()
        self._partial.keep()

    def discard(self) -> None:
        if self._live:
            self._close()
            self._remove_staged()
        self._close()
        self._partial.discard()

    def _close(self) -> None:
        self._live = False
        if self._opened is not None:
            self._opened.close()

    def _remove_staged(self) -> None:
        with suppress(OSError), in_its_folder(self._staged) as here:
            shutil.rmtree(here, ignore_errors=True)


def _write_all(descriptor: int, pieces: Sequence[memoryview]) -> None:
    place = 0
    for piece in pieces:
        done = 0
        while done < len(piece):
            done += os.pwrite(descriptor, piece[done:], place + done)
        place += len(piece)
