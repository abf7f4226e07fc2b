"""MRC2014 and CCP4 maps (`.mrc`, `.mrcs`, `.map`, `.ccp4`), read also if compressed with gzip: images, volumes and
stacks of either, with the sizes of their cell in angstrom.

Sources: https://www.ccpem.ac.uk/mrc_format/mrc2014.php; IMOD's mrc_format.txt (bytes without a sign). The header can
state the first sample's place twice; readers use one of them or add both, so only one is filled: NCSTART, NRSTART and
NSSTART if it is a whole number of steps, which PyMOL, ChimeraX, VMD and GridDataFormats all place right; otherwise
ORIGIN, which some ignore in .map and .ccp4, and of which VMD swaps x and z.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import InputError
from pipeline.formats.image.base import OF_COMPLEX, ImageFormat, ImageHeader, ImageReader, ImageWriter
from pipeline.formats.image.metadata import Calibration, Step, in_unit
from pipeline.formats.image.metadata.calibration import known_step, steps_of
from pipeline.formats.image.metadata.notes import Notes, text_of
from pipeline.formats.image.positional_writer import PositionalWriter
from pipeline.formats.image.volumes.inflated import MAGIC as GZIP
from pipeline.formats.image.volumes.inflated import start_of
from pipeline.formats.image.volumes.ordered import BYTE_ORDERS, ByteOrder, Record, ordered
from pipeline.formats.image.volumes.reader import VolumeReader
from pipeline.storage.object_file import opened_to_read
from pipeline.storage.partial import Callback, Opening, no_callback
from pipeline.storage.positional import PositionalFile

# Declared as a list: mypy takes seconds to find the type of so many tuples.
_FIELDS: list[Any] = [
    ("n", "<i4", 3), ("mode", "<i4"), ("start", "<i4", 3), ("m", "<i4", 3), ("cell", "<f4", 3),
    ("angles", "<f4", 3), ("axes", "<i4", 3), ("least", "<f4"), ("most", "<f4"), ("mean", "<f4"),
    ("ispg", "<i4"), ("nsymbt", "<i4"), ("extra1", "V8"), ("exttyp", "S4"), ("version", "<i4"),
    ("extra2", "V40"), ("imod_stamp", "<i4"), ("imod_flags", "<i4"), ("extra3", "V36"),
    ("origin", "<f4", 3), ("map", "S4"), ("machst", "u1", 4), ("rms", "<f4"), ("nlabl", "<i4"),
    ("labels", "S80", 10),
]  # fmt: skip
HEADER = np.dtype(_FIELDS)
UNDETERMINED = (0.0, -1.0, -2.0, -1.0)  # minimum above maximum, mean below both, negative deviation
_VERSION = 20141
_LITTLE_ENDIAN = (0x44, 0x44, 0, 0)
_MODES = {0: "i1", 1: "i2", 2: "f4", 6: "u2", 12: "f2"}
CODES = {np.dtype(name): mode for mode, name in _MODES.items()}
_COMPLEX = {4: "c8"}
_REFUSED = {3: OF_COMPLEX, 4: OF_COMPLEX, 101: "holds samples of 4 bits: convert it with mrcfile or IMOD's newstack"}
_STAMP, _SIGNED = int.from_bytes(b"IMOD", "little"), 1  # of IMOD, and its flag
_IMAGE, _VOLUME, _STACK = 0, 1, 401  # space groups
_LONGEST_AXIS = (1 << 31) - 1
_LONGEST_EXTENDED = 256 << 20
_LABELS, _LABEL_CHARACTERS = 10, 80
_BLOCK_SAMPLES = 1 << 20
_MOST_THREADS = 8
_TOLERATED_STEPS = 1e-4  # the largest deviation of a start from a whole number of steps
_FARTHEST_SIZES = 10  # ChimeraX ignores a start beyond this many map sizes


@dataclass(frozen=True, repr=False)
class MrcTags:
    """What an MRC result takes over from an MRC input: its header, little-endian, and the extended one.

    known : the calibration as it was read
    fits  : whether the extended header fits the result: it has all sections, in the byte order that is written
    """

    head: bytes
    extended: bytes = b""
    known: Calibration = field(default_factory=Calibration)
    fits: bool = True

    def __repr__(self) -> str:
        return f"MrcTags({self.head!r}, {self.extended!r}, {self.fits})"

    @property
    def record(self) -> Record:
        """A copy of the header's fields."""
        return np.frombuffer(bytearray(self.head), HEADER).reshape(())

    def facts(self) -> dict[str, str]:
        """As `Calibration.facts`."""
        record = self.record
        oblique = np.any(record["angles"] != 90) and np.any(record["angles"] != 0)
        known = {
            "extended": ("extended header", bool(self.extended)),
            "angles": ("cell angles", bool(oblique)),
            "group": ("space group", int(record["ispg"]) not in (_IMAGE, _VOLUME) and record["ispg"] < _STACK),
        }
        return {key: words for key, (words, is_known) in known.items() if is_known}

    def cropped(self, boxes: Mapping[str, range]) -> MrcTags:
        """The tags of a part; the writer adds the new start and cell."""
        record = self.record
        lengths = dict(zip(_letters(record), record["n"].tolist(), strict=True))
        sections = boxes.get("T", range(1)), boxes.get(_letters(record)[2], range(1))
        whole = lengths[_letters(record)[2]] == len(sections[0]) * len(sections[1])
        return replace(self, fits=self.fits and whole)


class Mrc(ImageFormat):
    """Sections are planes along Z; those of a stack of images are time points."""

    name = "MRC"
    suffixes = (".mrc", ".mrcs", ".map", ".ccp4")

    def __init__(self, *, as_stored: bool = False) -> None:
        """`as_stored`: read the axes in the file's order, and complex samples too."""
        self._as_stored = as_stored

    def recognises(self, path: Path, first_bytes: bytes) -> bool:
        if first_bytes.startswith(GZIP):
            return path.name.lower().endswith(tuple(f"{suffix}.gz" for suffix in self.suffixes))
        return first_bytes[208:211] == b"MAP"

    def open(self, path: Path) -> ImageReader:
        file = opened_to_read(path)
        try:
            return _reader(file, as_stored=self._as_stored)
        except BaseException:
            file.close()
            raise

    def refusal(self, header: ImageHeader, path: Path) -> str | None:
        if header.axes not in ("YX", "ZYX", "TYX", "TZYX"):
            return f"{path}: MRC holds rows, columns, planes and time points, not {header.axes}; choose .tif or .zarr"
        if _mode_of(header) is None:
            held = "int8, int16, uint16, float16 and float32"
            return f"{path}: MRC holds {held} samples, not {header.dtype}; choose .tif, .nii or .zarr"
        if max(header.shape) > _LONGEST_AXIS:
            return f"{path}: MRC holds up to {_LONGEST_AXIS:,} along an axis; choose .zarr"
        return None

    def keeps(self, header: ImageHeader, path: Path) -> set[str]:
        tags, kept = header.metadata.get("mrc"), {"origin"}
        kept |= {"plane", "depth"} if _angstrom(header.calibration) is not None else set()
        kept |= {"description"} if _lines(header.notes.description) is not None else set()
        if isinstance(tags, MrcTags):
            kept |= tags.facts().keys() - (set() if tags.fits else {"extended"})
        return kept

    def create(self, path: Path, header: ImageHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        tags = header.metadata.get("mrc")
        tags = tags if isinstance(tags, MrcTags) else None
        extended = tags.extended if tags is not None and tags.fits else b""
        record = _record_of(header, tags)
        record["nsymbt"] = len(extended)
        stored = _stored(record, header.axes)
        return MrcWriter(path, header, opening, record.tobytes() + extended, stored)


class MrcWriter(PositionalWriter):
    """Writes regions straight to their offset; `publish` reads the file for minimum, maximum, mean and deviation."""

    def __init__(self, path: Path, header: ImageHeader, opening: Opening, head: bytes, stored: str) -> None:
        """`stored`: the axes in the order of the file, slowest first."""
        dtype = header.dtype.newbyteorder("<")
        samples = ordered(header.axes, header.shape, stored, dtype=dtype, offset=len(head))
        super().__init__(path, header, opening, samples=samples, head=[head])

    def publish(self, on_sealed: Callback = no_callback) -> None:
        fields = dict(zip(("least", "most", "mean", "rms"), self._statistics(), strict=True))
        for name, value in fields.items():
            place = HEADER.fields[name][1] if HEADER.fields is not None else 0
            self._partial.write_at(place, np.float32(value).astype("<f4").tobytes())
        super().publish(on_sealed)

    def _statistics(self) -> tuple[float, float, float, float]:
        threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
        total = _Moments()
        with ThreadPoolExecutor(threads, thread_name_prefix="statistics") as pool:
            for moments in pool.map(self._moments, self._blocks()):
                total = total.with_(moments)
        found = (total.least, total.most, total.mean, float(np.sqrt(total.squares / total.count)))
        with np.errstate(over="ignore"):
            known = np.isfinite(np.array(found, np.float32)).all()  # false if a value is NaN or infinite
        return found if known else UNDETERMINED

    def _blocks(self) -> Iterator[tuple[int, int]]:
        start, end = self._samples.offset, self._samples.offset + self._samples.nbytes
        at_once = _BLOCK_SAMPLES * self._samples.dtype.itemsize
        for first in range(start, end, at_once):
            yield first, min(at_once, end - first)

    def _moments(self, block: tuple[int, int]) -> _Moments:
        start, nbytes = block
        raw = np.empty(nbytes, np.uint8)
        self._partial.read_at(start, raw.data)
        values = raw.view(self._samples.dtype)
        with np.errstate(all="ignore"):
            mean = float(values.mean(dtype=np.float64))
            apart = values - np.float64(mean)
            squares = float(np.einsum("i,i->", apart, apart))  # BLAS would start threads of its own in each of ours
        return _Moments(float(values.min()), float(values.max()), len(values), mean, squares)


@dataclass(frozen=True)
class _Moments:
    """Minimum, maximum, count and mean of some values, and the sum of squares about the mean."""

    least: float = np.inf
    most: float = -np.inf
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def with_(self, other: _Moments) -> _Moments:
        """The moments of both together (Chan, Golub and LeVeque 1979)."""
        count = self.count + other.count
        apart = other.mean - self.mean
        return _Moments(
            min(self.least, other.least),
            max(self.most, other.most),
            count,
            self.mean + apart * other.count / count,
            self.squares + other.squares + apart**2 * self.count * other.count / count,
        )


def blank() -> Record:
    """A header of one volume of float32, columns along x, without a place or a cell."""
    record = np.zeros((), HEADER)
    record["mode"], record["ispg"], record["version"] = CODES[np.dtype(np.float32)], _VOLUME, _VERSION
    record["angles"], record["axes"] = 90, (1, 2, 3)
    record["least"], record["most"], record["mean"], record["rms"] = UNDETERMINED
    record["map"], record["machst"] = b"MAP ", _LITTLE_ENDIAN
    return record


def put_labels(record: Record, lines: list[bytes]) -> None:
    record["nlabl"] = len(lines)
    record["labels"] = [line.ljust(_LABEL_CHARACTERS) for line in lines] + [b""] * (_LABELS - len(lines))


def whole_starts(steps: NDArray[np.float64], shape: tuple[int, ...]) -> NDArray[np.int64] | None:
    """A start in steps along x, y and z as whole numbers; None if readers would not find it by these."""
    whole = np.rint(steps)
    if np.abs(steps - whole).max() > _TOLERATED_STEPS or np.abs(whole).max() > _FARTHEST_SIZES * max(shape):
        return None
    return whole.astype(np.int64)


# Reading


def _reader(file: PositionalFile, *, as_stored: bool) -> VolumeReader:
    record, order = _read_head(file)
    dtype = _dtype_of(file.path, record, as_stored)
    axes, shape = _axes_of(file.path, record)
    if as_stored:
        stored = _stored(record, axes)
        axes, shape = stored, tuple(shape[axes.index(letter)] for letter in stored)
    offset = HEADER.itemsize + int(record["nsymbt"])
    extended = start_of(file, offset)[HEADER.itemsize :] if offset > HEADER.itemsize else b""
    header = _described(MrcTags(record.tobytes(), extended, fits=order == "<"), shape, axes, dtype)
    samples = ordered(axes, shape, _stored(record, axes), dtype=dtype.newbyteorder(order), offset=offset)
    return VolumeReader(file, header, samples)


def _read_head(file: PositionalFile) -> tuple[Record, ByteOrder]:
    """The header, and the file's byte order."""
    start = start_of(file, HEADER.itemsize)
    if len(start) < HEADER.itemsize:
        raise InputError(f"{file.path}: not an MRC file, or truncated: its header is cut short; copy it again")
    for order in BYTE_ORDERS[::-1] if start[212:214] == b"\x11\x11" else BYTE_ORDERS:
        record = np.frombuffer(start, HEADER.newbyteorder(order)).reshape(()).astype(HEADER)
        is_known = int(record["mode"]) in {*_MODES, *_REFUSED, *_COMPLEX} or 0 <= record["mode"] < 128
        if is_known and min(record["n"]) > 0 and 0 <= record["nsymbt"] <= _LONGEST_EXTENDED:
            return record, order
    raise InputError(f"{file.path}: not an MRC file, or its header is damaged; copy or export it again")


def _dtype_of(path: Path, record: Record, any_samples: bool) -> np.dtype[Any]:
    mode = int(record["mode"])
    if mode == 0 and _is_unsigned(record):
        return np.dtype(np.uint8)
    name = (_MODES | (_COMPLEX if any_samples else {})).get(mode)
    if name is None:
        raise InputError(f"{path}: {_REFUSED.get(mode, f'is of mode {mode}: export it as float32 (mode 2)')}")
    return np.dtype(name)


def _is_unsigned(record: Record) -> bool:
    """Whether IMOD wrote the bytes of mode 0 without a sign."""
    return bool(record["imod_stamp"] == _STAMP and not record["imod_flags"] & _SIGNED)


def _letters(record: Record) -> str:
    """The axes along which columns, rows and sections run."""
    axes = record["axes"].tolist()
    return "".join("XYZ"[axis - 1] for axis in axes) if sorted(axes) == [1, 2, 3] else "XYZ"


def _volumes(record: Record) -> int:
    """How many time points the sections are of: images of a stack each, or volumes of a stack."""
    sections, planes = int(record["n"][2]), int(record["m"][2])
    if record["ispg"] >= _STACK and planes > 0 and sections % planes == 0:
        return sections // planes
    return sections if record["ispg"] == _IMAGE and planes == 1 else 1


def _axes_of(path: Path, record: Record) -> tuple[str, tuple[int, ...]]:
    letters, volumes = _letters(record), _volumes(record)
    if volumes > 1 and letters != "XYZ":
        raise InputError(f"{path}: a stack whose columns do not run along x; export it again")
    sizes = dict(zip(letters, record["n"].tolist(), strict=True)) | {"T": volumes}
    sizes[letters[2]] //= volumes
    axes = "".join(letter for letter in "TZYX" if letter in "YX" or sizes[letter] > 1)
    return axes, tuple(sizes[letter] for letter in axes)


def _stored(record: Record, axes: str) -> str:
    return "".join(letter for letter in "T" + _letters(record)[::-1] if letter in axes)


def _described(tags: MrcTags, shape: tuple[int, ...], axes: str, dtype: np.dtype[Any]) -> ImageHeader:
    record = tags.record
    sizes = _steps(record)
    known = {letter: known_step(size, "angstrom") for letter, size in sizes.items()}
    starts = dict(zip(_letters(record), record["start"].tolist(), strict=True))
    origin = dict(zip("XYZ", record["origin"].astype(np.float64).tolist(), strict=True))
    if not any(origin.values()):
        origin = {letter: starts[letter] * sizes[letter] for letter in sizes}
    origin = {letter: at for letter, at in origin.items() if at and np.isfinite(at) and known[letter] is not None}
    calibration = Calibration(steps_of(**known), origin)
    return ImageHeader(
        shape=shape,
        axes=axes,
        dtype=dtype,
        metadata={"mrc": replace(tags, known=calibration)},
        calibration=calibration,
        notes=Notes(description=_text_of(record)),
    )


def _text_of(record: Record) -> str:
    count = min(max(int(record["nlabl"]), 0), _LABELS)
    lines = [text_of(label).rstrip() for label in record["labels"].tolist()[:count]]
    return "\n".join(line for line in lines if line)


def _steps(record: Record) -> dict[str, float]:
    """In angstrom, by axis; 0 if it is not stated."""
    cell, samples = record["cell"].astype(np.float64), record["m"].astype(np.float64)
    with np.errstate(all="ignore"):
        steps = np.where((samples > 0) & np.isfinite(cell), cell / samples, 0.0)
    return dict(zip("XYZ", steps.tolist(), strict=True))


# Writing


def _mode_of(header: ImageHeader) -> int | None:
    tags = header.metadata.get("mrc")
    if header.dtype == np.uint8 and isinstance(tags, MrcTags) and _is_unsigned(tags.record):
        return 0
    return CODES.get(header.dtype)


def _lines(text: str) -> list[bytes] | None:
    """The labels that hold a text; None if they do not."""
    lines = [line.encode() for line in text.splitlines() if line.strip()]
    return lines if len(lines) <= _LABELS and all(len(line) <= _LABEL_CHARACTERS for line in lines) else None


def _angstrom(known: Calibration) -> dict[str, float] | None:
    """The steps in angstrom; None if one has another unit, or none."""
    found = {letter: in_unit(step.size, step.unit, "angstrom") for letter, step in known.steps.items() if letter != "T"}
    return None if None in found.values() else {letter: size for letter, size in found.items() if size is not None}


def _record_of(header: ImageHeader, tags: MrcTags | None) -> Record:
    sizes = dict.fromkeys("TXYZ", 1) | dict(zip(header.axes, header.shape, strict=True))
    shape = tuple(sizes[letter] for letter in "XYZ")
    if tags is None:
        record, older = blank(), Calibration()
        is_stack = sizes["T"] > 1 or "Z" not in header.axes
        record["ispg"] = _VOLUME if not is_stack else _STACK if "Z" in header.axes else _IMAGE
        record["m"] = shape
        known = _angstrom(header.calibration) or {}
        record["cell"] = [known.get(letter, 0.0) * n for letter, n in zip("XYZ", shape, strict=True)]
    else:
        record, older = tags.record, tags.known
        before = dict(zip(_letters(record), record["n"].tolist(), strict=True))
        before["Z"] //= _volumes(record) if _letters(record) == "XYZ" else 1
        for axis, letter in enumerate("XYZ"):
            if record["m"][axis] == before[letter] != sizes[letter]:  # the cell is that of the samples
                record["cell"][axis] = float(record["cell"][axis]) * sizes[letter] / before[letter]
                record["m"][axis] = sizes[letter]
    letters = _letters(record)
    record["n"] = [sizes[letter] for letter in letters]
    record["n"][2] *= sizes["T"]
    mode = _mode_of(header)
    assert mode is not None, "it was refused"
    record["mode"], record["map"], record["machst"] = mode, b"MAP ", _LITTLE_ENDIAN
    record["least"], record["most"], record["mean"], record["rms"] = UNDETERMINED
    _put_start(record, header.calibration, older, shape)
    if header.notes.description != _text_of(record):
        put_labels(record, _lines(header.notes.description) or [])
    return record


def _put_start(record: Record, known: Calibration, older: Calibration, shape: tuple[int, ...]) -> None:
    """State where the first sample lies, if that is not where the record says."""
    steps, letters = _steps(record), _letters(record)
    position, moved = np.zeros(3), np.zeros(3)
    for axis, letter in enumerate("XYZ"):
        step = known.steps.get(letter, Step(1.0))
        scale = steps[letter] / step.size if steps[letter] else 0.0
        position[axis] = known.origin.get(letter, 0.0) * scale
        moved[axis] = position[axis] - older.origin.get(letter, 0.0) * scale
    if not moved.any():
        return
    lengths = np.array([steps[letter] or 1.0 for letter in "XYZ"])
    starts = None if record["origin"].any() else whole_starts(moved / lengths, shape)
    if starts is None:
        record["origin"], record["start"] = position, 0
        return
    by_letter = dict(zip("XYZ", starts.tolist(), strict=True))
    record["start"] += np.array([by_letter[letter] for letter in letters], np.int32)
