"""The interface of image formats: headers without pixels, reading and writing of regions, atomic publishing."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.block_cache import Box
from pipeline.codecs.packed import PackedBlocks
from pipeline.errors import ParameterError, counted
from pipeline.formats import Reader
from pipeline.formats.image.metadata import Calibration
from pipeline.formats.image.metadata.notes import Notes
from pipeline.storage.partial import Callback, Opening, PartialFile, PartialFolder, no_callback
from pipeline.storage.partial_objects import PartialObjects

# The order of axes: time points, channels, planes, rows, columns, and the samples of a pixel (gray, RGB, alpha, inks).
# Every image has rows and columns.
AXES = "TCZYXS"
# Supported by TIFF, Zarr and NPY; the other formats have narrower limits.
DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64"),
)

OF_COMPLEX = (
    "complex samples are not filtered: save the magnitude, or the real and the imaginary part, as float32 or float64"
)

# Values of a TIFF's metadata: of "photometric", and of the last of "extra_samples".
WHITE_IS_ZERO, INKS = 0, 5
STRAIGHT_ALPHA = 2


@dataclass(frozen=True)
class Region:
    """A box of samples: `start` inclusive, `stop` exclusive, one entry for each axis of the image."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Self:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))


Place = tuple[int, ...]

# A region's part in one block along one axis: the block's number, the part's place in the region, and in the block.
Part = tuple[int, slice, slice]


def blocks_along(span: tuple[int, int], size: int) -> list[Part]:
    """The blocks of `size` samples that a span (start, stop) along one axis touches."""
    start, stop = span
    found = []
    for number in range(start // size, -(-stop // size)):
        corner = number * size
        first, last = max(start, corner), min(stop, corner + size)
        found.append((number, slice(first - start, last - start), slice(first - corner, last - corner)))
    return found


class Schedule:
    """The blocks of a file that each region of a plan touches, in the plan's order: the last axis changes fastest."""

    def __init__(
        self, spans: Sequence[Sequence[tuple[int, int]]], blocks: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """`spans` (start, stop) along each axis, ascending: the regions are all combinations; `blocks`: samples of one
        block along each axis, `lengths`: of the image."""
        self._numbers = [{span: number for number, span in enumerate(each)} for each in spans]
        self._spans, self._blocks = spans, blocks
        self._touching: list[tuple[list[int], list[int]]] = []  # by axis and block: the first span, and the last + 1
        for each, block, length in zip(spans, blocks, lengths, strict=True):
            starts, stops = np.transpose(each)
            corners = np.arange(0, length, block)
            first = np.searchsorted(stops, corners, "right")
            self._touching.append((first.tolist(), np.searchsorted(starts, corners + block).tolist()))

    def place(self, region: Region) -> Place:
        """The region's place in the order; before all others if it is not of the plan."""
        spans = zip(region.start, region.stop, strict=True)
        return tuple(numbers.get(span, -1) for numbers, span in zip(self._numbers, spans, strict=True))

    def uses(self, block: Sequence[int]) -> int:
        """How many regions touch the block."""
        return math.prod(last - first for first, last in self._ranges(block))

    def next_use(self, block: Sequence[int], after: Place) -> Place | None:
        """The place of the first region after that one which touches the block; `after` (): of all regions."""
        boxes = self._further(block, after)
        return tuple(first for first, _ in boxes[-1]) if boxes else None

    def part(self, block: Sequence[int], after: Place) -> Box:
        """The smallest box of the block's samples that holds those of all regions after that one; empty if none is."""
        boxes = self._further(block, after)
        if not boxes:
            return (slice(0),) * len(block)
        found = []
        for axis, (spans, size, number) in enumerate(zip(self._spans, self._blocks, block, strict=True)):
            first, last = min(box[axis][0] for box in boxes), max(box[axis][1] for box in boxes)
            corner = number * size
            found.append(slice(max(spans[first][0] - corner, 0), min(spans[last - 1][1] - corner, size)))
        return tuple(found)

    def _ranges(self, block: Sequence[int]) -> list[tuple[int, int]]:
        return [(first[at], last[at]) for (first, last), at in zip(self._touching, block, strict=True)]

    def _further(self, block: Sequence[int], after: Place) -> list[list[tuple[int, int]]]:
        """Boxes of places (first, last + 1 along each axis) that make up the regions after that one which touch the
        block, the last ones first."""
        after = after or (-1,) * len(block)
        ranges, boxes = self._ranges(block), []
        for axis, (first, last) in enumerate(ranges):
            further = max(after[axis] + 1, first)
            if further < last:
                boxes.append([*((at, at + 1) for at in after[:axis]), (further, last), *ranges[axis + 1 :]])
            if not first <= after[axis] < last:
                break
        return boxes


@dataclass(frozen=True, kw_only=True)
class ImageHeader:
    """What an image file declares about itself.

    shape    : samples along each axis
    axes     : one letter for each axis, of `AXES` in this order. C: declared channels, as of fluorescence;
               S: colour samples, alpha or others, interleaved in each pixel. The axis N, before all others, counts
               the files of a list
    dtype    : in native byte order
    maxval   : the largest sample value the file allows, if the format states one (PNM, PAM)
    metadata : what a new file of the same format takes over (resolution, tuple type, colour profile, …), and of any
               format whether the samples are compressed: "compression", none, or a scheme by name
    calibration : sizes, units, positions, and channels by name, for files of any format
    notes    : text and dates
    levels   : of the file's pyramid, the image itself included
    """

    shape: tuple[int, ...]
    axes: str
    dtype: np.dtype[Any]
    maxval: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    calibration: Calibration = field(default_factory=Calibration)
    notes: Notes = field(default_factory=Notes)
    levels: int = 1

    def of_other_values(self, dtype: np.dtype[Any]) -> ImageHeader:
        """The header of values of another meaning, as of a derivative: without what the input says of its values."""
        metadata = {key: value for key, value in self.metadata.items() if key not in ("tuple_type", "omero")}
        notes = replace(self.notes, display=())
        return replace(self, dtype=dtype, maxval=None, metadata=metadata, notes=notes)

    @property
    def nbytes(self) -> int:
        """Bytes of the samples, uncompressed."""
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize

    @property
    def misread_elsewhere(self) -> str | None:
        """What a format limited to gray, RGB and straight alpha would show instead; None if the image itself."""
        photometric, extra = self.metadata.get("photometric"), self.metadata.get("extra_samples", ())
        channels = self.samples_per_pixel
        if photometric == WHITE_IS_ZERO:
            return "a negative of this image, in which 0 is white"
        if photometric == INKS and channels <= 4:
            return f"other colours than those of this image, whose {counted(channels, 'channel')} are inks"
        if extra and channels in (2, 4) and extra[-1] != STRAIGHT_ALPHA:
            kind = "multiplied into the colours" if extra[-1] == 1 else "no alpha"
            return f"the last channel of this image as alpha, which it says is {kind}"
        return None

    @property
    def channel_axis(self) -> int | None:
        """The axis of declared channels, else that of a pixel's samples."""
        return next((self.axes.index(letter) for letter in "CS" if letter in self.axes), None)

    @property
    def samples_per_pixel(self) -> int:
        return self.shape[-1] if self.axes.endswith("S") else 1

    @property
    def planes(self) -> tuple[int, ...]:
        """The lengths of the axes before rows and columns."""
        return self.shape[: self.axes.index("Y")]


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How an output stores its samples; None: as the format does by default.

    chunks      : samples of a block along each axis of the image, or one number for rows and columns
    shards      : the same of a file of several blocks
    compression : none, or a scheme by name
    levels      : of its pyramid, the image itself included
    """

    chunks: tuple[int, ...] | None = None
    shards: tuple[int, ...] | None = None
    compression: str | None = None
    levels: int | None = None


def along_axes(sizes: tuple[int, ...], header: ImageHeader, option: str) -> tuple[int, ...]:
    """The extent along each axis that `sizes` means: one number is that of rows and columns, the others being 1.

    ParameterError if there are neither one nor as many as axes, or one is not positive.
    """
    if len(sizes) == 1 and sizes[0] > 0:
        return tuple(sizes[0] if letter in "YX" else 1 for letter in header.axes)
    if len(sizes) != len(header.axes) or min(sizes) < 1:
        given = ",".join(map(str, sizes))
        raise ParameterError(
            f"{option} {given}: give one positive number, for rows and columns, or one for each of "
            f"{','.join(header.axes)}"
        )
    return sizes


class ImageReader(Reader):
    """An open image file. Several threads may call `read` at once."""

    header: ImageHeader
    # The file's blocks (tiles, compressed strips, Zarr chunks): reading along their boundaries decodes nothing twice.
    # None: every region costs the same.
    block_shape: tuple[int, ...] | None = None

    @property
    def run(self) -> tuple[np.dtype[Any], int] | None:
        """The dtype as stored and the offset of samples that are one run of bytes in C order; None if they are not."""
        return None

    # Whether `out` of `read` may have any strides; else it is C-contiguous.
    any_strides = False

    @abstractmethod
    def read(self, region: Region, out: NDArray[Any]) -> None:
        """Fill `out` (the region's shape, the header's dtype) with the region's samples.

        Raises InputError if the file is truncated or corrupt, StorageError if reading fails.
        """

    @property
    def packs(self) -> bool:
        """Whether `read_packed` is of use."""
        return False

    def read_packed(self, region: Region, memory: NDArray[np.uint8]) -> PackedBlocks | None:
        """Gather the region's encoded blocks in `memory`, for a device that decodes them; None if it cannot, or if they
        do not fit: then `read` is called. Raises as `read`.
        """
        return None

    def at_level(self, level: int) -> ImageReader:
        """A reader of a level of the file's pyramid, 1 to `header.levels` - 1; close it too."""
        raise ValueError(f"{self.path} has no level {level}")

    def expect(self, spans: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Announce the regions that will be read, each once: every combination of these (start, stop) along the axes.

        Decoded blocks are kept up to their last use, within the limit of `hold_at_most`.
        """

    def hold_at_most(self, budget_bytes: int) -> int:
        """Keep no more than this in decoded blocks between reads, if possible; returns the limit in force."""
        return 0


class ImageWriter(ABC):
    """An image being written beside its final name. Several threads may call `write`, on disjoint regions.

    The final name does not exist, or keeps its older file, until `publish`. One writer owns the image; writers in other
    processes may join to `write` and `flush` their share.
    """

    path: Path
    header: ImageHeader

    @abstractmethod
    def write(self, region: Region, samples: NDArray[Any]) -> None:
        """Store `samples` (C-contiguous, the region's shape, the header's dtype). StorageError if the disk fails."""

    @abstractmethod
    def flush(self) -> None:
        """Sync what has been written so far."""

    @abstractmethod
    def publish(self, on_sealed: Callback = no_callback) -> None:
        """Sync every byte, call `on_sealed`, then rename to the final name atomically."""

    @abstractmethod
    def keep(self) -> None:
        """Close, and leave what was written in place for a writer opened with RESUME; harmless after `publish`."""

    @abstractmethod
    def discard(self) -> None:
        """Remove what was written; harmless after `publish` or a second time."""


class PartialWriter(ImageWriter):
    """A writer into one partial output; subclasses set `_partial` and implement `write`."""

    _partial: PartialFile | PartialFolder | PartialObjects

    def flush(self) -> None:
        self._partial.flush()

    def publish(self, on_sealed: Callback = no_callback) -> None:
        self._partial.publish(on_sealed)

    def keep(self) -> None:
        self._partial.keep()

    def discard(self) -> None:
        self._partial.discard()


class ImageFormat(ABC):
    """One file format. The registry in `pipeline.formats.image` holds one of each, which stores as by default."""

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]

    @abstractmethod
    def recognises(self, path: Path, first_bytes: bytes) -> bool:
        """Whether the file's first bytes (empty for a folder) are of this format."""

    @abstractmethod
    def open(self, path: Path) -> ImageReader:
        """Read the header alone, and check it against the file's size. InputError names the file and the fault."""

    @abstractmethod
    def refusal(self, header: ImageHeader, path: Path) -> str | None:
        """Why this format cannot hold such an image at this path, and which can; None if it can."""

    def keeps(self, header: ImageHeader, path: Path) -> set[str]:
        """Which known facts (see `not_kept`) a file of this image states; by default none."""
        return set()

    def storing(self, storage: Storage) -> ImageFormat:
        """The format that creates files stored like this. ParameterError if it cannot."""
        for option, given in vars(storage).items():
            if given is not None and (option, given) != ("levels", 1):
                raise ParameterError(
                    f"--{option}: {self.name} leaves no choice of {option}; choose .zarr, or leave it out"
                )
        return self

    def block_shape(self, header: ImageHeader) -> tuple[int, ...] | None:
        """The blocks in which `create` stores such an image; whole blocks are written fastest. None: no preference."""
        return None

    def part_shape(self, header: ImageHeader) -> tuple[int, ...] | None:
        """What is encoded at once, such as the chunks of a shard; by default a whole block."""
        return self.block_shape(header)

    def levels(self, header: ImageHeader, path: Path) -> int:
        """How many levels such an image gets: of a pyramid, regions begin and end at multiples of `pyramid.ALIGNED`
        rows and columns. ParameterError if there cannot be so many."""
        return 1

    def head(self, header: ImageHeader, path: Path) -> bytes | None:
        """The file's bytes before its samples, if such an image is stored as these and then the samples, as they are in
        memory; else None."""
        return None

    @abstractmethod
    def create(self, path: Path, header: ImageHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        """Start a new file beside `path`, or resume or join one of the same header. Call `refusal` first.

        OutputError if the folder is not writable.
        """


def require_fit(header: ImageHeader, region: Region, samples: NDArray[Any], *, any_strides: bool = False) -> None:
    """ValueError unless the region lies in the image and `samples` has its shape, the header's dtype and C order, which
    does not matter with `any_strides`.

    A region may be empty.
    """
    inside = len(region.start) == len(region.stop) == len(header.shape) and all(
        0 <= start <= stop <= size for start, stop, size in zip(region.start, region.stop, header.shape, strict=True)
    )
    if not inside:
        raise ValueError(f"region {region.start} to {region.stop} is not within an image of {header.shape}")
    is_ordered = any_strides or samples.flags.c_contiguous
    if samples.shape != region.shape or samples.dtype != header.dtype or not is_ordered:
        raise ValueError(
            f"an array of {samples.shape} {samples.dtype} does not match the region of {region.shape} {header.dtype}, "
            "or is not C-contiguous"
        )
