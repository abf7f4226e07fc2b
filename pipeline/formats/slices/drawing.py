"""A plane of an image, map or series as a small PNG: a part of it, averaged, of the level of a pyramid that suffices.

What is read for one picture is bounded. Of a larger part without a pyramid only every m-th block is read; in between,
the picture shows the mean of the nearest block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ParameterError
from pipeline.formats.image.base import ImageHeader, ImageReader, Region
from pipeline.formats.image.metadata import Channel, Step
from pipeline.formats.image.metadata.units import kind_of, symbol_of
from pipeline.formats.image.png import png_pieces
from pipeline.formats.image.preview import (
    BLOCKS_BYTES,
    TILE_SAMPLES,
    as_light,
    block_sums,
    composed,
    contrast,
    shades,
    shown_channels,
)
from pipeline.formats.slices.stacks import open_stack

LONGEST_SIDE = 2048
# Bytes of samples that are read and decoded for one picture.
MOST_READ_BYTES = 512 << 20
Part = Literal["magnitude", "phase", "real", "imaginary"]  # of complex samples
_PAGE_BYTES = 4096  # what reading one sample among others costs
_RUN_BYTES = 64 << 10  # read at a time, at least
_MOST_COLOURS = 4

Span = tuple[int, int]  # start, stop


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Which picture to draw.

    plane         : the letters of the axes that are its rows and columns; None: Y and X, or the last two
    at            : by the letter of any other axis, the index along it; else the middle along Z, X or Y, 0 elsewhere
    rows, columns : the part of the plane to show; None: all
    size          : of the longest side in pixels, at most; a sample is never shown by several pixels
    low, high     : the values that are black and white; None: percentiles of the picture, or 8-bit samples as they are
    part          : of complex samples
    composite     : show the channels together, each in its colour
    limits        : of a composite, low and high of each channel; empty: as `low` and `high`
    """

    plane: str | None = None
    at: Mapping[str, int] = field(default_factory=dict)
    rows: Span | None = None
    columns: Span | None = None
    size: int = 1024
    low: float | None = None
    high: float | None = None
    part: Part = "magnitude"
    composite: bool = False
    limits: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A PNG, and how it was made.

    level         : of the pyramid
    one_of        : only one in so many blocks was read, along each axis
    limits        : the values that are black and white, of a composite those of each channel
    rows, columns : start and stop of what the picture shows of the plane, which may pass its edge by less than a pixel
    """

    png: bytes
    level: int
    one_of: int
    limits: tuple[tuple[float, float], ...]
    rows: tuple[float, float]
    columns: tuple[float, float]

    @property
    def low(self) -> float:
        return min(low for low, _ in self.limits)

    @property
    def high(self) -> float:
        return max(high for _, high in self.limits)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """An image, a map or a series, as far as choosing a picture needs it.

    axes     : letter and length of each, except the colours of a pixel
    plane    : the letters of the rows and columns that are shown unless others are chosen
    at       : the index along each other axis that is shown first
    samples  : of a pixel: 1 for gray
    levels   : of the pyramid
    channels : names of the axis C, as far as they are known
    colours  : of the channels that a composite shows, as RRGGBB; empty if there is none
    steps    : the distance of samples along an axis, with its unit, as far as it is known
    """

    axes: tuple[tuple[str, int], ...]
    plane: str
    at: Mapping[str, int]
    dtype: str
    samples: int
    levels: int
    channels: tuple[str, ...]
    colours: tuple[str, ...]
    steps: Mapping[str, str]


def describe(path: Path) -> Stack:
    """The axes of a file, its pyramid and its channels. InputError if it cannot be shown."""
    with open_stack(path) as reader:
        header = reader.header
        colours, plane = _colours(header), _plane(header, None)
        seen = [(letter, n) for letter, n in zip(header.axes, header.shape, strict=True)
                if not (letter == "S" and colours)]  # fmt: skip
        return Stack(
            axes=tuple(seen), plane=plane, at={each: _first(each, n) for each, n in seen if each not in plane},
            dtype=header.dtype.name, samples=colours or 1, levels=header.levels,
            channels=tuple(each.name for each in header.calibration.channels),
            colours=tuple(str(each.colour) for each in _composed_channels(header)),
            steps={letter: _said(step) for letter, step in header.calibration.steps.items() if letter in header.axes},
        )  # fmt: skip


def draw(path: Path, cut: Cut) -> Picture:
    """The picture. InputError if the file cannot be shown; ParameterError if `cut` asks for what it does not have."""
    with ExitStack() as stack:
        whole = stack.enter_context(open_stack(path))
        letters = _plane(whole.header, cut.plane)
        place, spans = _place(whole.header, cut, letters), _spans(whole.header, cut, letters)
        level, reader = _sufficient(stack, whole, letters, _step(spans, cut.size))
        rows, columns = (_factor(whole, reader, letter) for letter in letters)
        spans = _at_level(spans[0], rows, reader, letters[0]), _at_level(spans[1], columns, reader, letters[1])
        place = {
            letter: _at_level((index, index + 1), _factor(whole, reader, letter), reader, letter)[0]
            for letter, index in place.items()
        }
        step = _step(spans, cut.size)
        channels = _asked_channels(whole.header, cut, letters)
        grays, limits = [], []
        for number in range(len(channels) or 1):
            at = {**place, "C": number} if channels else place
            plane = _Plane(reader, letters, at, spans, cut.part, MOST_READ_BYTES // (len(channels) or 1))
            pixels = as_light(plane.averaged(step), plane.header)
            limits.append(cut.limits[number] if cut.limits else _limits(cut, pixels, plane.header))
            grays.append(shades(pixels, plane.header, *limits[-1]))
        extents = ((span[0], span[0] + step * n) for span, n in zip(spans, grays[0].shape[:2], strict=True))
        (top, bottom), (left, right) = extents
        return Picture(
            png=_png(composed(grays, channels) if channels else grays[0]), level=level, one_of=plane.one_of,
            limits=tuple(limits),
            rows=(float(top * rows), float(bottom * rows)), columns=(float(left * columns), float(right * columns)),
        )  # fmt: skip


def _limits(cut: Cut, pixels: NDArray[np.float64], header: ImageHeader) -> tuple[float, float]:
    """The values that are black and white."""
    low, high = contrast(pixels, header) if cut.low is None or cut.high is None else (0.0, 0.0)
    return low if cut.low is None else cut.low, high if cut.high is None else cut.high


def _composed_channels(header: ImageHeader) -> list[Channel]:
    """The channels of a composite; none if the image has one channel, or colours."""
    channels = shown_channels(header)
    return channels if len(channels) > 1 else []


def _asked_channels(header: ImageHeader, cut: Cut, plane: str) -> list[Channel]:
    if not cut.composite:
        return []
    channels = [] if "C" in plane else _composed_channels(header)
    if not channels:
        raise ParameterError(f"composite: there are no channels beside the plane {plane}")
    if cut.limits and len(cut.limits) != len(channels):
        raise ParameterError(f"limits: name low and high of each of the {len(channels)} channels")
    return channels


def _said(step: Step) -> str:
    """A step for people."""
    known = step.unit is not None and kind_of(step.unit) is not None
    return f"{step.size:g} {symbol_of(step.unit)}" if known and step.unit else str(step)


def _step(spans: tuple[Span, Span], size: int) -> int:
    return max(-(-(stop - start) // size) for start, stop in spans)


def _sufficient(stack: ExitStack, whole: ImageReader, letters: str, step: int) -> tuple[int, ImageReader]:
    """The coarsest level of the pyramid, at most by halves, with a sample for each `step` samples, and its reader."""
    for number in range(min(step.bit_length(), whole.header.levels) - 1, 0, -1):
        smaller = stack.enter_context(whole.at_level(number))
        if all(_factor(whole, smaller, letter) <= step for letter in letters):
            return number, smaller
    return 0, whole


def _factor(whole: ImageReader, smaller: ImageReader, letter: str) -> Fraction:
    """How many samples of the whole image one of a level stands for along an axis; the last one may stand for fewer."""
    axis = whole.header.axes.index(letter)
    length, there = whole.header.shape[axis], smaller.header.shape[axis]
    factor = round(Fraction(length, there))
    return Fraction(factor) if there in (length // factor, -(-length // factor)) else Fraction(length, there)


def _at_level(span: Span, factor: Fraction, smaller: ImageReader, letter: str) -> Span:
    """The span of a level that holds this one, as far as the level does."""
    length = smaller.header.shape[smaller.header.axes.index(letter)]
    start = min(math.floor(span[0] / factor), length - 1)
    return start, max(min(math.ceil(span[1] / factor), length), start + 1)


class _Plane:
    """A part of one plane of an image.

    header : of the plane's samples, rows × columns (× colours)
    one_of : only one in so many blocks is read, along each axis with several
    """

    def __init__(
        self, reader: ImageReader, letters: str, place: Mapping[str, int], spans: tuple[Span, Span], part: Part,
        most_bytes: int,
    ) -> None:  # fmt: skip
        self._reader, self._letters, self._place, self._spans, self._part = reader, letters, place, spans, part
        reader.hold_at_most(BLOCKS_BYTES)
        header = reader.header
        self._colours = _colours(header)
        self._is_phase = part == "phase" and header.dtype.kind == "c"
        self._channels = 2 if self._is_phase else self._colours or 1
        self._may_be_nan = header.dtype.kind in "fc"
        dtype = np.dtype(np.float64) if header.dtype.kind == "c" else header.dtype
        self.header = ImageHeader(
            shape=(), axes="YXS" if self._colours else "YX", dtype=dtype, maxval=header.maxval, metadata=header.metadata
        )
        self._blocks, block_bytes = self._costs()
        counts = [-(-b // n) - a // n for (a, b), n in zip(spans, self._blocks, strict=True)]
        self.one_of = 1
        while math.prod(-(-count // self.one_of) for count in counts) * block_bytes > most_bytes:
            if self.one_of >= max(counts):
                break  # one block is as much
            self.one_of += 1 + self.one_of // 8

    def _costs(self) -> tuple[tuple[int, int], int]:
        """Rows and columns of a block of the file, and the bytes that are read and decoded for it."""
        header, block = self._reader.header, self._reader.block_shape
        axes = [header.axes.index(letter) for letter in self._letters]
        if block is not None:
            rows, columns = (block[axis] for axis in axes)
            block_bytes = math.prod(block) * header.dtype.itemsize
            together = max(_RUN_BYTES // block_bytes, 1)  # each read has a cost of its own
            across = min(math.isqrt(together), -(-header.shape[axes[1]] // columns))
            down = together // across
            return (rows * down, columns * across), block_bytes * down * across
        strides = [math.prod(header.shape[axis + 1 :]) * header.dtype.itemsize for axis in axes]
        width = self._spans[1][1] - self._spans[1][0]
        sample_bytes = min(*strides, _PAGE_BYTES)
        rows = max(_RUN_BYTES // (width * sample_bytes), 1)
        return (rows, header.shape[axes[1]]), rows * width * sample_bytes

    def averaged(self, step: int) -> NDArray[np.float64]:
        """Rows × columns (× colours): the mean of each `step` × `step` box, NaN excluded."""
        shape = tuple(-(-(b - a) // step) for a, b in self._spans)
        sums = np.zeros((*shape, self._channels))
        counts = np.zeros_like(sums)
        tiles = self._tiles()
        for rows, columns in self._pieces(tiles):
            samples = self._read(rows, columns)
            boxes = tuple(slice(start // step, -(-stop // step)) for start, stop in (rows, columns))
            missing = np.isnan(samples) if self._may_be_nan else None
            if missing is not None and missing.any():
                samples[missing] = 0
                counts[boxes] -= block_sums(missing, rows, columns, step)
            with np.errstate(invalid="ignore", over="ignore"):
                sums[boxes] += block_sums(samples, rows, columns, step)
            lengths = [block_sums(np.ones((b - a, 1)), (a, b), (0, 1), step) for a, b in (rows, columns)]
            counts[boxes] += (lengths[0] * lengths[1].T)[..., None]
        with np.errstate(invalid="ignore"):
            means: NDArray[np.float64] = sums / counts
        if self.one_of > 1:
            _fill(means, sums, counts, tiles, step)
        if self._is_phase:
            return np.asarray(np.arctan2(means[..., 1], means[..., 0]))
        return means if self._colours else means[..., 0]

    def _tiles(self) -> tuple[list[Span], list[Span]]:
        """The spans of rows and of columns that are read: blocks of the file, several at once if all are. They count
        from the start of the part."""
        sizes, room = self._blocks, TILE_SAMPLES // self._channels
        if self.one_of == 1:
            width = max(room // math.prod(sizes), 1) * sizes[1]
            within = min(width, self._spans[1][1] - self._spans[1][0])
            sizes = max(room // (sizes[0] * within), 1) * sizes[0], width
        rows, columns = (self._chosen(span, size) for span, size in zip(self._spans, sizes, strict=True))
        return rows, columns

    def _chosen(self, span: Span, size: int) -> list[Span]:
        start, stop = span
        first, last = start // size, -(-stop // size) - 1
        numbers = (min(number + self.one_of // 2, last) for number in range(first, last + 1, self.one_of))
        return [(max(n * size, start) - start, min((n + 1) * size, stop) - start) for n in numbers]

    def _pieces(self, tiles: tuple[list[Span], list[Span]]) -> Iterator[tuple[Span, Span]]:
        """The tiles, those of large blocks in bands of rows."""
        for (top, bottom), columns in itertools.product(*tiles):
            height = max(TILE_SAMPLES // self._channels // (columns[1] - columns[0]), 1)
            for start in range(top, bottom, height):
                yield (start, min(start + height, bottom)), columns

    def _read(self, rows: Span, columns: Span) -> NDArray[np.float64]:
        """Rows × columns × channels of the part."""
        spans = {letter: (index, index + 1) for letter, index in self._place.items()}
        for letter, (first, _), (start, stop) in zip(self._letters, self._spans, (rows, columns), strict=True):
            spans[letter] = first + start, first + stop
        header = self._reader.header
        if self._colours:
            spans["S"] = 0, self._colours
        region = Region(*zip(*(spans[letter] for letter in header.axes), strict=True))
        samples = np.empty(region.shape, header.dtype)
        self._reader.read(region, samples)
        axes = [header.axes.index(letter) for letter in self._letters]
        if axes[0] > axes[1]:
            samples = np.swapaxes(samples, *axes)
        return self._real(samples.reshape(rows[1] - rows[0], columns[1] - columns[0], -1))

    def _real(self, samples: NDArray[Any]) -> NDArray[np.float64]:
        if samples.dtype.kind != "c":
            return samples.astype(np.float64)
        if self._is_phase:  # the phase of the mean
            return np.concatenate([samples.real, samples.imag], axis=-1, dtype=np.float64)
        chosen: Any = {"magnitude": np.abs, "real": np.real, "imaginary": np.imag}[self._part]
        return np.asarray(chosen(samples), np.float64)


def _fill(
    means: NDArray[np.float64], sums: NDArray[np.float64], counts: NDArray[np.float64],
    tiles: tuple[list[Span], list[Span]], step: int,
) -> None:  # fmt: skip
    """Pixels of blocks that were not read get the mean of the nearest one."""
    seen, nearest = [], []
    for axis, spans in enumerate(tiles):
        first, last = np.array(spans).T
        mask = np.zeros(means.shape[axis], bool)
        for start, stop in spans:
            mask[start // step : -(-stop // step)] = True
        seen.append(mask)
        centres = (np.arange(means.shape[axis]) + 0.5) * step
        nearest.append(np.searchsorted(((first + last) / 2)[:-1] + np.diff((first + last) / 2) / 2, centres))
        sums, counts = (np.add.reduceat(each, first // step, axis) for each in (sums, counts))
    with np.errstate(invalid="ignore"):
        coarse = sums / counts
    unread = ~np.logical_and.outer(*seen)
    means[unread] = coarse[np.ix_(*nearest)][unread]


def _colours(header: ImageHeader) -> int:
    """The samples of a pixel that are shown together; 0 if there is one, or more than a PNG has."""
    samples = header.samples_per_pixel
    return samples if header.axes.endswith("S") and samples <= _MOST_COLOURS else 0


def _plane(header: ImageHeader, asked: str | None) -> str:
    letters = [each for each in header.axes if each != "S"]
    if asked is None:
        return "YX" if {"Y", "X"} <= set(letters) else "".join(letters[-2:])
    if len(set(asked)) != 2 or not set(asked) <= set(letters):
        raise ParameterError(f"plane {asked}: name two of the axes {', '.join(letters)}")
    return asked


def _first(letter: str, length: int) -> int:
    return length // 2 if letter in "XYZ" else 0


def _place(header: ImageHeader, cut: Cut, plane: str) -> dict[str, int]:
    colours = "S" if _colours(header) else ""
    lengths = {letter: n for letter, n in zip(header.axes, header.shape, strict=True) if letter not in plane + colours}
    for letter, index in cut.at.items():
        if letter not in lengths:
            raise ParameterError(f"at {letter}: the axes beside the plane {plane} are {', '.join(lengths) or 'none'}")
        if not 0 <= index < lengths[letter]:
            raise ParameterError(f"at {letter}:{index}: indices along {letter} go from 0 to {lengths[letter] - 1}")
    return {letter: cut.at.get(letter, _first(letter, n)) for letter, n in lengths.items()}


def _spans(header: ImageHeader, cut: Cut, letters: str) -> tuple[Span, Span]:
    found = []
    for name, letter, asked in zip(("rows", "columns"), letters, (cut.rows, cut.columns), strict=True):
        length = header.shape[header.axes.index(letter)]
        start, stop = asked or (0, length)
        if not 0 <= start < stop <= length:
            raise ParameterError(f"{name} {start}:{stop}: choose a part of 0:{length} along {letter}")
        found.append((start, stop))
    return found[0], found[1]


def _png(pixels: NDArray[np.uint8]) -> bytes:
    header = ImageHeader(shape=pixels.shape, axes="YXS"[: pixels.ndim], dtype=pixels.dtype)
    return b"".join(png_pieces(header, lambda first, stop: np.ascontiguousarray(pixels[first:stop])))
