"""NIfTI-1 and NIfTI-2 in one file, `.nii` or `.nii.gz`: x changes fastest, then y, z, time, and a fifth axis, the
channels here.

Sources as in `nifti_header`. Values that the header scales (scl_slope, scl_inter) are read as what they stand for.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.deflate import gzipped_bands
from pipeline.errors import InputError, counted
from pipeline.formats.image.base import (
    OF_COMPLEX,
    ImageFormat,
    ImageHeader,
    ImageReader,
    ImageWriter,
    Region,
    require_fit,
)
from pipeline.formats.image.metadata import Calibration, Step, in_unit
from pipeline.formats.image.metadata.calibration import known_step, steps_of
from pipeline.formats.image.metadata.notes import Notes, text_of
from pipeline.formats.image.positional_writer import PositionalWriter
from pipeline.formats.image.pyramid import LABELS
from pipeline.formats.image.spooled_writer import SpooledWriter
from pipeline.formats.image.volumes.inflated import MAGIC, start_of
from pipeline.formats.image.volumes.nifti_header import (
    EXTENDER_BYTES,
    LABELS_INTENT,
    LENGTHS,
    NIFTI1,
    NIFTI2,
    SCANNER,
    TIMES,
    VERSIONS,
    NiftiTags,
    blank,
    put_affine,
)
from pipeline.formats.image.volumes.ordered import BYTE_ORDERS, ByteOrder, Record, ordered
from pipeline.formats.image.volumes.reader import VolumeReader
from pipeline.storage.object_file import opened_to_read
from pipeline.storage.partial import Opening
from pipeline.storage.positional import PositionalFile

_STORED = "CTZYXS"
_LETTERS = "XYZTC"  # of the header's dimensions
_TYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4", 1024: "i8", 1280: "u8"}
_COMPLEX = {32: "c8", 1792: "c16"}
_COMPLEX256 = 2048
_COLOURS = {128: 3, 2304: 4}  # samples of uint8 in a pixel
CODES = {np.dtype(name): code for code, name in (_TYPES | _COMPLEX).items()}
_REFUSED = {
    1: "one bit a sample: save it as uint8",
    1536: "float128 samples: save it as float64, with nibabel's img.set_data_dtype('float64')",
}
_LONGEST_AXIS = (1 << 15) - 1  # of NIfTI-1
_LONGEST_HEAD_BYTES = 64 << 20  # with extensions
_LONGEST_TEXT = 79
_BAND_BYTES = 1 << 20
_SCALED_AT_ONCE = 1 << 16


class Nifti(ImageFormat):
    """Axes of length one are left out; a result of a NIfTI has its whole header."""

    name = "NIfTI"
    suffixes = (".nii", ".nii.gz")

    def __init__(self, *, any_samples: bool = False) -> None:
        """`any_samples`: read complex ones too."""
        self._any_samples = any_samples

    def recognises(self, path: Path, first_bytes: bytes) -> bool:
        if first_bytes.startswith(MAGIC):
            try:
                first_bytes = zlib.decompressobj(31).decompress(first_bytes)
            except zlib.error:
                return False
        return _version_of(first_bytes) is not None

    def open(self, path: Path) -> ImageReader:
        file = opened_to_read(path)
        try:
            return NiftiReader(file, any_samples=self._any_samples)
        except BaseException:
            file.close()
            raise

    def refusal(self, header: ImageHeader, path: Path) -> str | None:
        colours = header.samples_per_pixel in _COLOURS.values() and header.dtype == np.uint8
        if "S" in header.axes and not colours:
            count = counted(header.samples_per_pixel, "sample")
            return (
                f"{path}: NIfTI holds 3 or 4 colour samples of uint8 in a pixel, not {count} of {header.dtype}; "
                "choose .tif or .zarr"
            )
        if header.misread_elsewhere is not None:
            return f"{path}: NIfTI would show {header.misread_elsewhere}; choose .tif"
        if header.dtype not in CODES:
            return f"{path}: NIfTI holds no {header.dtype} samples; choose .tif or .zarr"
        return None

    def keeps(self, header: ImageHeader, path: Path) -> set[str]:
        known, kept = header.calibration, {"origin", "label properties"}
        kept |= {"plane", "depth"} if _length_unit(known) is not None else set()
        kept |= {"time"} if _interval(known) is not None else set()
        kept |= {"description"} if len(header.notes.description.encode()) <= _LONGEST_TEXT else set()
        kept |= {"display"} if len(header.notes.display) == 1 else set()
        tags = header.metadata.get("nifti")
        return kept | (set(tags.facts()) if isinstance(tags, NiftiTags) else set())

    def head(self, header: ImageHeader, path: Path) -> bytes | None:
        in_order = ordered(header.axes, header.shape, _STORED, dtype=header.dtype, offset=0).in_order
        is_plain = in_order and header.dtype.newbyteorder("<").isnative and not path.name.lower().endswith(".gz")
        return nifti_head(header) if is_plain else None

    def create(self, path: Path, header: ImageHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        return nifti_writer(path, header, opening, nifti_head(header))


class NiftiReader(VolumeReader):
    """Samples are scaled as the header says."""

    def __init__(self, file: PositionalFile, *, any_samples: bool = False) -> None:
        record, order, extensions = _read_head(file)
        dtype, colours = _dtype_of(file.path, record, any_samples)
        axes, shape = _axes_of(file.path, record, colours)
        self._scale = _scale_of(record, dtype)
        header = _described(record, extensions, shape, axes, dtype if self._scale is None else _scaled_dtype(dtype))
        stored, offset = dtype.newbyteorder(order), int(record["vox_offset"])
        super().__init__(file, header, ordered(axes, shape, _STORED, dtype=stored, offset=offset))

    @property
    def run(self) -> tuple[np.dtype[Any], int] | None:
        return super().run if self._scale is None else None

    def read(self, region: Region, out: NDArray[Any]) -> None:
        if self._scale is None:
            super().read(region, out)
            return
        require_fit(self.header, region, out)
        stored = np.empty(out.shape, self._samples.dtype.newbyteorder("="))
        self._samples.read(self._file, region, stored)
        slope, intercept = self._scale
        values, flat = out.reshape(-1), stored.reshape(-1)
        for first in range(0, len(flat), _SCALED_AT_ONCE):
            part = slice(first, first + _SCALED_AT_ONCE)
            with np.errstate(over="ignore"):
                values[part] = flat[part].astype(np.float64) * slope + intercept


def nifti_writer(path: Path, header: ImageHeader, opening: Opening, head: bytes) -> ImageWriter:
    """Samples in the order of NIfTI behind this head, compressed if the name ends with .gz."""
    dtype = header.dtype.newbyteorder("<")
    samples = ordered(header.axes, header.shape, _STORED, dtype=dtype, offset=len(head))
    if path.name.lower().endswith(".gz"):
        return NiftiGzWriter(path, header, opening, head)
    return PositionalWriter(path, header, opening, samples=samples, head=[head])


class NiftiGzWriter(SpooledWriter):
    """Compresses the file from first to last, once all samples are present."""

    def __init__(self, path: Path, header: ImageHeader, opening: Opening, head: bytes) -> None:
        super().__init__(path, header, opening)
        dtype = header.dtype.newbyteorder("<")
        self._samples = ordered(header.axes, header.shape, _STORED, dtype=dtype, offset=0)
        self._head = head

    def _encoded(self) -> Iterator[bytes]:
        total = self._samples.nbytes
        bands = [(first, min(first + _BAND_BYTES, total)) for first in range(0, total, _BAND_BYTES)]
        return gzipped_bands(self._band, bands)

    def _band(self, first: int, stop: int) -> bytes:
        band = np.empty(stop - first, np.uint8)
        self._scratch.read_at(first, band.data)
        return (self._head if first == 0 else b"") + band.tobytes()


# Reading


def _version_of(head: bytes) -> tuple[np.dtype[Any], ByteOrder] | None:
    """The version and the byte order by the size of the header and the number of dimensions; None if it is neither."""
    for version, order in ((version, order) for version in VERSIONS for order in BYTE_ORDERS):
        place, code = (40, "h") if version is NIFTI1 else (16, "q")
        if len(head) < place + 8 or struct.unpack_from(f"{order}i", head)[0] != version.itemsize:
            continue
        if 1 <= struct.unpack_from(f"{order}{code}", head, place)[0] <= 7:
            return version, order
    return None


def _read_head(file: PositionalFile) -> tuple[Record, ByteOrder, tuple[tuple[int, bytes], ...]]:
    """The header in native byte order, the file's byte order, and the extensions."""
    path, start = file.path, start_of(file, NIFTI2.itemsize + EXTENDER_BYTES)
    found = _version_of(start)
    if found is None or len(start) < found[0].itemsize:
        raise InputError(f"{path}: not a NIfTI file, or truncated; copy or save it again")
    version, order = found
    stored = np.frombuffer(start, version.newbyteorder(order), 1).reshape(())
    record = stored.astype(version)
    magic = bytes(record["magic"])[:3]
    if magic in (b"ni1", b"ni2"):
        raise InputError(f"{path}: has its samples in a file .img beside it; save both as one .nii first")
    if magic not in (b"n+1", b"n+2"):
        raise InputError(f"{path}: is an Analyze file, or not NIfTI; save it as .nii first")
    least = version.itemsize + EXTENDER_BYTES
    record["vox_offset"] = record["vox_offset"] or least
    offset = float(record["vox_offset"])
    if not (least <= offset <= _LONGEST_HEAD_BYTES and offset == int(offset)):
        raise InputError(f"{path}: its header places the samples at byte {offset:g}; save it again")
    extensions: tuple[tuple[int, bytes], ...] = ()
    if start[version.itemsize : version.itemsize + 1] not in (b"", b"\0") and offset > least:
        extensions = _extensions(start_of(file, int(offset))[least:], order)
    return record, order, extensions


def _extensions(data: bytes, order: str) -> tuple[tuple[int, bytes], ...]:
    """Code and content of each; what is damaged ends the list."""
    found, place = [], 0
    while place + 8 <= len(data):
        nbytes, code = struct.unpack_from(f"{order}2i", data, place)
        if nbytes < 8 or place + nbytes > len(data):
            break
        found.append((code, data[place + 8 : place + nbytes]))
        place += nbytes
    return tuple(found)


def _dtype_of(path: Path, record: Record, any_samples: bool) -> tuple[np.dtype[Any], int]:
    """The dtype of a sample, and how many samples a pixel has."""
    code = int(record["datatype"])
    if code in _COLOURS:
        return np.dtype(np.uint8), _COLOURS[code]
    if code in _TYPES or (any_samples and code in _COMPLEX):
        return np.dtype((_TYPES | _COMPLEX)[code]), 1
    if code in (*_COMPLEX, _COMPLEX256):
        raise InputError(f"{path}: {OF_COMPLEX}")
    raise InputError(f"{path}: holds {_REFUSED.get(code, f'data of type {code}, which NIfTI lacks: save it again')}")


def _axes_of(path: Path, record: Record, samples: int) -> tuple[str, tuple[int, ...]]:
    count = int(record["dim"][0])
    lengths = [int(length) for length in record["dim"][1 : count + 1]]
    if min(lengths) < 1:
        raise InputError(f"{path}: its header states lengths {lengths}; save it again")
    if math.prod(lengths[5:]) > 1:
        raise InputError(f"{path}: has {count} axes {lengths}; x, y, z, time and channels are read: save a part of it")
    sizes = {**dict(zip(_LETTERS, [*lengths, 1, 1, 1, 1][:5], strict=True)), "S": samples}
    axes = "".join(letter for letter in "TCZYXS" if letter in "YX" or sizes[letter] > 1)
    return axes, tuple(sizes[letter] for letter in axes)


def _scale_of(record: Record, dtype: np.dtype[Any]) -> tuple[float, float] | None:
    """Slope and intercept; None if the stored values are meant."""
    slope, intercept = float(record["scl_slope"]), float(record["scl_inter"])
    is_scaled = math.isfinite(slope) and slope != 0 and (slope, intercept) != (1.0, 0.0)
    if not is_scaled or dtype.kind == "c" or int(record["datatype"]) in _COLOURS:
        return None
    return slope, intercept if math.isfinite(intercept) else 0.0


def _scaled_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """float32 holds every value of 16 bits, scaled, within half a step of 24 bits."""
    return np.dtype(np.float32 if dtype.itemsize <= 2 or dtype == np.float32 else np.float64)


def _described(
    record: Record, extensions: tuple[tuple[int, bytes], ...], shape: tuple[int, ...], axes: str,
    dtype: np.dtype[Any],
) -> ImageHeader:  # fmt: skip
    tags = NiftiTags(record.tobytes(), extensions)
    units = int(record["xyzt_units"])
    length, time = LENGTHS.get(units & 7), TIMES.get(units & 56)
    sizes = dict(zip(_LETTERS, np.abs(record["pixdim"][1:6]).tolist(), strict=True))
    steps = {letter: known_step(sizes[letter], length) for letter in "ZYX"}
    steps["T"] = known_step(sizes["T"], time)
    depth = steps["Z"] if "Z" in axes else None  # 1 without a unit is a distance too: planes are those of a volume
    start = tags.origin
    origin = {} if start is None else {letter: at for letter, at in zip("XYZ", start, strict=True) if at}
    if np.isfinite(record["toffset"]) and record["toffset"] and "T" in axes:
        origin["T"] = float(record["toffset"])
    low, high = float(record["cal_min"]), float(record["cal_max"])
    metadata: dict[str, Any] = {"nifti": tags}
    if record["intent_code"] == LABELS_INTENT:
        metadata[LABELS] = {}
    return ImageHeader(
        shape=shape,
        axes=axes,
        dtype=dtype,
        metadata=metadata,
        calibration=Calibration({**steps_of(**steps), **({} if depth is None else {"Z": depth})}, origin),
        notes=Notes(
            description=text_of(bytes(record["descrip"])).strip(),
            display=((low, high),) if math.isfinite(low) and math.isfinite(high) and low < high else (),
        ),
    )


# Writing


def nifti_head(header: ImageHeader) -> bytes:
    """The header before the samples: that of a NIfTI input, else the known facts of the image."""
    tags, sizes = header.metadata.get("nifti"), dict(zip(header.axes, header.shape, strict=True))
    lengths = [sizes.get(letter, 1) for letter in _LETTERS]
    if isinstance(tags, NiftiTags):
        record, extensions = tags.record, tags.extensions
        known = int(record["dim"][0])  # with those of length one
    else:
        record, extensions, known = blank(NIFTI2 if max(lengths) > _LONGEST_AXIS else NIFTI1), (), 2
        _put_calibration(record, header.calibration)
        record["intent_code"] = LABELS_INTENT if LABELS in header.metadata else 0
    record["dim"] = [max(known, *(n for n, length in enumerate(lengths, 1) if length > 1), 2), *lengths, 1, 1]
    colours = {samples: code for code, samples in _COLOURS.items()}
    record["datatype"] = colours.get(header.samples_per_pixel, CODES[header.dtype])
    record["bitpix"] = 8 * header.dtype.itemsize * header.samples_per_pixel
    record["scl_slope"], record["scl_inter"] = 1, 0
    record["descrip"] = header.notes.description.encode()[:_LONGEST_TEXT].decode(errors="ignore").encode()
    shown = header.notes.display if len(header.notes.display) == 1 else ((0.0, 0.0),)
    record["cal_min"], record["cal_max"] = shown[0]
    tail = _packed(extensions)
    record["vox_offset"] = record.dtype.itemsize + len(tail)
    return bytes(record.tobytes()) + tail


def _packed(extensions: tuple[tuple[int, bytes], ...]) -> bytes:
    """The extender and the extensions, each padded to a multiple of 16 bytes."""
    tail = bytes([1 if extensions else 0, 0, 0, 0])
    for code, content in extensions:
        content = content.ljust(-(-(len(content) + 8) // 16) * 16 - 8, b"\0")
        tail += struct.pack("<2i", len(content) + 8, code) + content
    return tail + bytes(-(len(tail) - EXTENDER_BYTES) % 16)


def _length_unit(known: Calibration) -> str | None:
    """One of NIfTI's units that fits the pixel sizes; "" if they have no unit, None if they cannot be stated."""
    units = {known.steps[letter].unit for letter in "ZYX" if letter in known.steps}
    if units <= {None}:
        return ""
    wanted = next((unit for unit in LENGTHS.values() if unit in units), None)
    wanted = wanted or ("millimeter" if units & {"centimeter", "inch", "foot", "decimeter"} else "micrometer")
    return wanted if all(in_unit(1.0, unit, wanted) is not None for unit in units) else None


def _interval(known: Calibration) -> Step | None:
    """In one of NIfTI's units; None if it is unknown."""
    step = known.steps.get("T")
    if step is None or step.unit in TIMES.values():
        return step
    seconds = in_unit(step.size, step.unit, "second")
    return None if seconds is None else Step(seconds, "second")


def _put_calibration(record: Record, known: Calibration) -> None:
    unit, steps = _length_unit(known), {}
    for letter in "XYZ" if unit is not None else "":
        step = known.steps.get(letter)
        if step is not None:
            steps[letter] = step.size if not unit else in_unit(step.size, step.unit, unit) or 1.0
    units = {name: code for code, name in LENGTHS.items()}.get(unit or "", 0)
    interval = _interval(known)
    if interval is not None and interval.unit is not None:
        record["pixdim"][4], units = interval.size, units + {name: code for code, name in TIMES.items()}[interval.unit]
        record["toffset"] = known.origin.get("T", 0.0) * (interval.size / known.steps["T"].size)
    record["xyzt_units"] = units
    sizes = [steps.get(letter, 1.0) for letter in "XYZ"]
    record["pixdim"][1:4] = sizes
    if any(known.origin.get(letter) for letter in steps):
        affine = np.diag([*sizes, 1.0])
        for axis, letter in enumerate("XYZ"):
            step = known.steps.get(letter)
            if step is not None and letter in steps:
                affine[axis, 3] = known.origin.get(letter, 0.0) * (steps[letter] / step.size)
        put_affine(record, affine, SCANNER)
