"""Many inputs of one run: patterns and folders, the names of their results, and which files are of one kind."""

from __future__ import annotations

import glob
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pipeline.errors import InputError, MillraceError, OutputError, ParameterError
from pipeline.formats import image as images
from pipeline.formats.image.base import ImageReader
from pipeline.formats.image.file_list import SUFFIX, ListedFile, StoredSamples
from pipeline.formats.image.whole_files import WholeFiles, loops_for
from pipeline.formats.image.zarr import is_zarr
from pipeline.storage.confinement import open_beneath
from pipeline.storage.objects import ObjectPath
from pipeline.storage.positional import reading
from pipeline.workloads import Workload

DEFAULT_NAME = "{name}"
PLACEHOLDERS = ("stem", "suffix", "name", "parent", "index")
_PLACEHOLDER = re.compile(r"\{(\w*)\}")
# Larger images gain nothing from company.
MOST_BYTES = 64 << 20
# Bytes beside the samples that are compared instead of read as a header again.
_MOST_BESIDE = 64 << 10
_MOST_TEMPLATES = 8


@dataclass(frozen=True)
class Wanted:
    """One input and its result."""

    input: Path
    output: Path


def takes_images(workload: Workload) -> bool:
    """Whether lists of files can be results of this workload, as those of all image workloads."""
    try:
        workload.check_output(Path(f"result{SUFFIX}"))
    except MillraceError:
        return False
    return True


def is_many(given: Path, workload: Workload) -> bool:
    """Whether an input argument stands for many files: a pattern, or a folder of images."""
    if isinstance(given, ObjectPath):
        return "*" in given.key
    if os.path.lexists(given):
        return takes_images(workload) and given.is_dir() and not is_zarr(given)
    pattern = str(given)
    # A missing file whose name has brackets is called missing.
    return "*" in pattern or "?" in pattern or (glob.has_magic(pattern) and bool(glob.glob(pattern)))  # noqa: PTH207


def check_folder(given: Sequence[Path], folder: Path, workload: Workload) -> None:
    """OutputError if the results of many files have no folder: the output is a file, or is called like one."""
    if folder.is_dir():
        return
    is_file = os.path.lexists(folder)
    if not is_file:
        with suppress(MillraceError):
            workload.check_output(folder)
            is_file = True
    if is_file:
        first = "several inputs"
        if len(given) == 1 and given[0].is_dir():
            first = f"{given[0]}: is a folder"
        elif len(given) == 1 and not is_many(given[0], workload):
            first = "--output belongs to several inputs"
        raise OutputError(f"{first}; name a folder for the results, not the file {folder}")


def matching(given: Iterable[Path], workload: Workload) -> list[Path]:
    """The files that the arguments stand for, each once. InputError if one stands for none."""
    found: dict[Path, None] = {}
    for each in given:
        files = [each]
        if is_many(each, workload):
            files = _in_folder(each) if each.is_dir() else sorted(map(Path, glob.glob(str(each), recursive=True)))  # noqa: PTH207
            if not files:
                what = "holds no image" if each.is_dir() else "matches no file"
                raise InputError(f"{each}: {what}; check the {'folder' if each.is_dir() else 'pattern'}")
        found.update(dict.fromkeys(files))
    return list(found)


def _in_folder(folder: Path) -> list[Path]:
    """A folder's images by their suffixes, in the order of their names."""
    suffixes = tuple(suffix for form in images.FORMATS for suffix in form.suffixes)
    with reading(folder), os.scandir(folder) as entries:
        names = sorted(e.name for e in entries if e.name.lower().endswith(suffixes) and not e.name.startswith("."))
    return [folder / name for name in names]


def named(inputs: Sequence[Path], folder: Path, template: str, workload: Workload) -> list[Wanted]:
    """The inputs with their results, which the template names in the folder.

    ParameterError for an unknown placeholder; OutputError if two results have one name, a result would replace an
    input, or the workload makes no such file.
    """
    taken: dict[str, Path] = {}
    for index, path in enumerate(inputs):
        name = _name(template, path, index)
        if name in taken:
            raise OutputError(
                f"{taken[name]} and {path} would both become {folder / name}: tell them apart with --output, which "
                "takes {stem}, {suffix}, {name}, {parent} and {index}"
            )
        taken[name] = path
    for suffix in {Path(name).suffix: name for name in taken}.values():
        workload.check_output(folder / suffix)
    real, there = Path(os.path.realpath(folder)), {path.parent for path in inputs}
    if str(real) in map(os.path.realpath, there):
        own = {os.path.realpath(path): path for path in inputs}
        for name in taken:
            if str(real / name) in own:
                raise OutputError(f"{folder / name} is an input itself: give --output, or another folder")
    _refuse_blocked(folder, taken)
    return [Wanted(path, folder / name) for name, path in taken.items()]


def _refuse_blocked(folder: Path, names: Mapping[str, Path]) -> None:
    """OutputError if a folder or something else that is no file has a result's name."""
    if not folder.is_dir():
        return
    with reading(folder), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name in names and not (entry.is_file() or entry.is_symlink() or is_zarr(Path(entry.path))):
                raise OutputError(f"{entry.path}: is not a regular file and would be replaced; give --output")


def _name(template: str, path: Path, index: int) -> str:
    known = ", ".join(f"{{{each}}}" for each in PLACEHOLDERS)

    def value(found: re.Match[str]) -> str:
        if found[1] not in PLACEHOLDERS:
            raise ParameterError(f"--output {template}: {found[0]} is none of {known}")
        if found[1] == "index":
            return str(index)
        return path.absolute().parent.name if found[1] == "parent" else str(getattr(path, found[1]))

    name = _PLACEHOLDER.sub(value, template)
    if {"{", "}"} & set(_PLACEHOLDER.sub("", template)):
        raise ParameterError(f"--output {template}: close or remove the brace that belongs to none of {known}")
    if "/" in name or name in ("", ".", "..") or "\0" in name:
        raise ParameterError(f"--output {template}: must name a file in OUTPUT; it makes {name!r} of {path.name}")
    return name


@dataclass(frozen=True)
class Kind:
    """Files of one kind share a plan: `key` tells kinds apart."""

    key: str
    nbytes: int  # of the samples of one file
    stored: StoredSamples | None


@dataclass(frozen=True)
class _Template:
    """The bytes of a file before and after its samples; other files with the same ones are of the same kind."""

    kind: Kind
    before: bytes
    after: bytes

    def fits(self, descriptor: int) -> bool:
        end = len(self.before) + self.kind.nbytes
        return os.pread(descriptor, len(self.before), 0) == self.before and (
            not self.after or os.pread(descriptor, len(self.after), end) == self.after
        )


@dataclass
class Scan:
    """Reads headers and sorts files by kind.

    kinds  : files that can share chunks, by their kind and the suffixes of their results
    alone  : files that are run one after the other: large images, and Zarr
    failed : why a file cannot be used
    """

    kinds: dict[tuple[Kind, str], list[tuple[Wanted, ListedFile]]] = field(default_factory=lambda: defaultdict(list))
    alone: list[Wanted] = field(default_factory=list)
    failed: dict[Wanted, str] = field(default_factory=dict)
    _templates: dict[int, list[_Template]] = field(default_factory=lambda: defaultdict(list))

    def add_all(self, wanted: Sequence[Wanted]) -> None:
        """As `add` of each. Of thousands, compiled loops find those that are like one that was read."""
        loops = loops_for(len(wanted))
        if loops is None:
            for each in wanted:
                self.add(each)
            return
        paths, names = [_absolute(each.input) for each in wanted], [each.output.name for each in wanted]
        files, left = WholeFiles(loops, paths, names), np.arange(len(wanted))
        sizes = files.rows[:, loops.NBYTES]  # 0: not looked at
        while len(left):
            template, left = self.add(wanted[left[0]]), left[1:]
            if template is None:
                continue
            before, nbytes, after = template.before, template.kind.nbytes, template.after
            alike = left[np.isin(sizes[left], (0, len(before) + nbytes + len(after)))]
            alike = alike[files.match(alike, before, nbytes, after)]
            for number, version in zip(alike.tolist(), files.versions(alike), strict=True):
                self._enter(template.kind, wanted[number], ListedFile(paths[number], *version, names[number]))
            left = np.setdiff1d(left, alike, assume_unique=True)

    def add(self, wanted: Wanted) -> _Template | None:
        """Returns the template of a file that is unlike all before."""
        try:
            return self._add(wanted)
        except MillraceError as error:
            self.failed[wanted] = str(error)
            return None

    def _add(self, wanted: Wanted) -> _Template | None:
        path, template = _absolute(wanted.input), None
        try:
            descriptor = open_beneath(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                found = os.fstat(descriptor)
                templates = self._templates.get(found.st_size, ())
                kind = next((each.kind for each in templates if each.fits(descriptor)), None)
                if kind is None:
                    kind, template = self._read(wanted.input, descriptor, found.st_size)
            finally:
                os.close(descriptor)
        except OSError as error:
            with reading(wanted.input):
                raise error
        if kind is None:
            self.alone.append(wanted)
        else:
            self._enter(kind, wanted, ListedFile(path, found.st_size, found.st_mtime_ns, wanted.output.name))
        return template

    def _enter(self, kind: Kind, wanted: Wanted, listed: ListedFile) -> None:
        self.kinds[kind, listed.output.partition(".")[2].lower()].append((wanted, listed))

    def _read(self, path: Path, descriptor: int, size: int) -> tuple[Kind | None, _Template | None]:
        """The kind by the header, None: to be run alone; and its template, if it can have one."""
        with images.open_image(path) as reader:
            header = reader.header
            if path.is_dir() or header.nbytes > MOST_BYTES:
                return None, None
            stored = _stored(reader, size)
            kind = Kind(repr(header), header.nbytes, stored)
        beside, others = size - header.nbytes, self._templates[size]
        if stored is None or beside > _MOST_BESIDE or len(others) >= _MOST_TEMPLATES:
            return kind, None
        end = stored.offset + header.nbytes
        before, after = os.pread(descriptor, stored.offset, 0), os.pread(descriptor, size - end, end)
        others.append(_Template(kind, before, after))
        return kind, others[-1]


def alike(
    first: Path, wanted: Sequence[Wanted], most_bytes: int
) -> tuple[StoredSamples | None, list[tuple[Wanted, ListedFile]]]:
    """The files that can share chunks with the input `first`, that one included; none if it has to be run alone.

    most_bytes : of the samples of each file
    """
    scan = Scan()
    scan.add_all(wanted)
    for (kind, _), files in scan.kinds.items():
        if files[0][0].input == first and kind.nbytes <= most_bytes:
            return kind.stored, files
    return None, []


def _absolute(path: Path) -> str:
    return os.path.abspath(path)  # noqa: PTH100 - a link stays one


def _stored(reader: ImageReader, size: int) -> StoredSamples | None:
    run = reader.run
    if run is None or run[1] + reader.header.nbytes > size:
        return None
    return StoredSamples(dtype=run[0].str, offset=run[1])
