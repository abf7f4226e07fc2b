"""Previews: small 8-bit PNGs of results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.formats import image as images
from pipeline.formats.image.base import INKS, STRAIGHT_ALPHA, WHITE_IS_ZERO, ImageHeader, ImageReader, Region
from pipeline.formats.image.metadata import Channel
from pipeline.formats.image.preview.marks import marked

LONGEST_SIDE = 1024
# Samples averaged at a time, 8 MiB of float64, and the limit of cached decoded blocks.
TILE_SAMPLES = 1 << 20
BLOCKS_BYTES = 32 << 20

_FINER = 4  # its means of whole pixels then lose a quarter of the preview's resolution at most

Span = tuple[int, int]  # start, stop
_LARGE_STEP = 64
_DARK_AND_BRIGHT = (0.1, 99.9)  # percentiles that become black and white
_COLOURS = ("00FF00", "FF00FF", "00FFFF", "FFFF00", "FF0000", "0000FF", "FFFFFF")


def write_preview(image: Path, preview: Path, longest_side: int = LONGEST_SIDE) -> None:
    """Average the image down to at most `longest_side` pixels and write it as PNG.

    Of a volume the middle plane is shown, of several time points the first, of declared channels up to seven, each in
    its colour. 8-bit samples keep their values; all others except alpha (a second or fourth sample) are stretched so
    that one pixel in a thousand is black, and one white. Of more than four samples in a pixel, the first is shown.
    A scale bar and the channels' names are drawn as far as they are known.
    """
    with images.open_image(image) as whole:
        level = _fine_level(whole.header, longest_side)
        with whole.at_level(level) if level else nullcontext(whole) as reader:
            reader.hold_at_most(BLOCKS_BYTES)
            header = reader.header
            step = _step(header, longest_side)
            shown = shown_channels(header)
            if len(shown) > 1:
                pixels = _composite(reader, step, shown)
            else:
                pixels = _as_bytes(as_light(_averaged(reader, step), header), header)
    write_pixels(preview, marked(pixels, header.calibration, step << level, shown))


def write_pixels(preview: Path, pixels: NDArray[np.uint8]) -> None:
    """Write rows × columns (× channels) as a PNG."""
    axes = "YXS" if pixels.ndim == 3 else "YX"
    header = ImageHeader(shape=pixels.shape, axes=axes, dtype=np.dtype(np.uint8))
    writer = images.create_image(preview, header)
    try:
        writer.write(Region.whole(pixels.shape), np.ascontiguousarray(pixels))
        writer.publish()
    finally:
        writer.discard()


def _step(header: ImageHeader, longest_side: int) -> int:
    sizes = dict(zip(header.axes, header.shape, strict=True))
    return math.ceil(max(sizes["Y"], sizes["X"]) / longest_side)


def _fine_level(header: ImageHeader, longest_side: int) -> int:
    """The smallest level of a result's pyramid that is at least `_FINER` times as fine as the preview."""
    return max(min(header.levels, (_step(header, longest_side) // _FINER).bit_length()) - 1, 0)


def shown_channels(header: ImageHeader) -> list[Channel]:
    """The declared channels of the picture, with their colours there."""
    count = header.shape[header.axes.index("C")] if "C" in header.axes else 1
    known = header.calibration.channels or (Channel(),) * count
    if "S" in header.axes or count == 1:
        return [Channel(known[0].name, _COLOURS[-1])]
    return [Channel(channel.name, channel.colour or colour) for channel, colour in zip(known, _COLOURS, strict=False)]


def _composite(reader: ImageReader, step: int, channels: Sequence[Channel]) -> NDArray[np.uint8]:
    return composed(
        [_as_bytes(_averaged(reader, step, number), reader.header) for number in range(len(channels))], channels
    )


def composed(grays: Sequence[NDArray[np.uint8]], channels: Sequence[Channel]) -> NDArray[np.uint8]:
    """Rows × columns × RGB: the sum of the channels' rows × columns, each in its colour."""
    colours = np.array([list(bytes.fromhex(str(channel.colour))) for channel in channels], np.float64)
    light = np.tensordot(np.stack(grays, axis=-1) / 255, colours, axes=1)
    return np.asarray(np.rint(np.clip(light, 0, 255)), np.uint8)


def _averaged(reader: ImageReader, step: int, channel: int = 0) -> NDArray[np.float64]:
    """Rows × columns (× samples): the mean of each `step` × `step` block, NaN excluded."""
    header = reader.header
    sizes = dict(zip(header.axes, header.shape, strict=True))
    # If there are more channels than a PNG has, only the first is read.
    channels = sizes.get("S", 1) if sizes.get("S", 1) <= 4 else 1
    sums = np.zeros((-(-sizes["Y"] // step), -(-sizes["X"] // step), channels))
    counts = np.zeros_like(sums)
    for rows, columns in _tiles(reader, sizes["Y"], sizes["X"], channels):
        samples = _tile(reader, rows, columns, channels, channel)
        present = ~np.isnan(samples)
        blocks = tuple(slice(start // step, -(-stop // step)) for start, stop in (rows, columns))
        with np.errstate(invalid="ignore", over="ignore"):
            sums[blocks] += block_sums(np.where(present, samples, 0.0), rows, columns, step)
            counts[blocks] += block_sums(present, rows, columns, step)
    with np.errstate(invalid="ignore"):
        means: NDArray[np.float64] = sums / counts
    return means if "S" in header.axes else means[..., 0]


def _tiles(reader: ImageReader, rows: int, columns: int, channels: int) -> Iterator[tuple[Span, Span]]:
    """The plane in tiles of `TILE_SAMPLES` or fewer: bands of whole blocks of the file, from left to right."""
    at_once = TILE_SAMPLES // channels
    block_rows = 1 if reader.block_shape is None else reader.block_shape[reader.header.axes.index("Y")]
    width = min(columns, max(1, at_once // block_rows))
    height = max(1, at_once // width // block_rows * block_rows)
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            yield (top, min(top + height, rows)), (left, min(left + width, columns))


def _tile(reader: ImageReader, rows: Span, columns: Span, channels: int, channel: int) -> NDArray[np.float64]:
    """Rows × columns × samples of the image: of its first time point, a channel, and a volume's middle plane."""
    sizes = dict(zip(reader.header.axes, reader.header.shape, strict=True))
    middle = sizes.get("Z", 1) // 2
    spans = {"Z": (middle, middle + 1), "Y": rows, "X": columns, "S": (0, channels), "C": (channel, channel + 1)}
    region = Region(*zip(*(spans.get(letter, (0, 1)) for letter in reader.header.axes), strict=True))
    samples = np.empty(region.shape, reader.header.dtype)
    reader.read(region, samples)
    return samples.astype(np.float64).reshape(rows[1] - rows[0], columns[1] - columns[0], channels)


def block_sums(tile: NDArray[Any], rows: Span, columns: Span, step: int) -> NDArray[np.float64]:
    """The sums over the tile's part of each block; blocks begin at the image's multiples of `step`."""
    sums = tile
    for axis, (start, stop) in enumerate((rows, columns)):
        if step > _LARGE_STEP:
            edges = np.maximum(np.arange(start // step * step, stop, step) - start, 0)
            sums = np.add.reduceat(sums, edges, axis, dtype=np.float64)
            continue
        # The samples at the same place in each block at once, which is 20 times as fast for small blocks.
        source = np.moveaxis(sums, axis, 0)
        target = np.zeros((-(-stop // step) - start // step, *source.shape[1:]))
        for place in range(step):
            samples = source[(place - start) % step :: step]
            first = place < start % step
            target[first : first + len(samples)] += samples
        sums = np.moveaxis(target, 0, axis)
    return sums


def as_light(pixels: NDArray[np.float64], header: ImageHeader) -> NDArray[np.float64]:
    """Convert a TIFF's samples to gray or RGB in which 0 is black, with straight alpha or none."""
    photometric, extra = header.metadata.get("photometric"), header.metadata.get("extra_samples", ())
    channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    opaque = _opaque(header)
    if photometric == INKS and channels == 4:
        light = 1 - pixels / opaque
        pixels = opaque * light[..., :3] * light[..., 3:]
    elif extra and channels in (2, 4) and extra[-1] != STRAIGHT_ALPHA:
        pixels = pixels[..., :-1]
    if photometric == WHITE_IS_ZERO:
        gray = pixels if pixels.ndim == 2 else pixels[..., 0]
        np.subtract(opaque, gray, out=gray)
    return pixels


def _as_bytes(pixels: NDArray[np.float64], header: ImageHeader) -> NDArray[np.uint8]:
    return shades(pixels, header, *contrast(pixels, header))


def contrast(pixels: NDArray[np.float64], header: ImageHeader) -> tuple[float, float]:
    """The values that become black and white: 8-bit samples stay as they are."""
    if _is_8_bit(header):
        return 0.0, 255.0
    channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    colours = pixels if channels in (1, 3) else pixels[..., :-1]
    shown = colours[np.isfinite(colours)]
    low, high = np.percentile(shown, _DARK_AND_BRIGHT, method="inverted_cdf") if shown.size else (0.0, 1.0)
    return float(low), float(high)


def shades(pixels: NDArray[np.float64], header: ImageHeader, low: float, high: float) -> NDArray[np.uint8]:
    """Gray or colours between `low`, black, and `high`, white; alpha keeps its values."""
    if _is_8_bit(header) and (low, high) == (0, 255):
        return np.rint(pixels).astype(np.uint8)
    stretched = _stretched(pixels, low, high)
    if pixels.ndim == 3 and pixels.shape[2] in (2, 4):
        stretched[..., -1] = _stretched(pixels[..., -1], 0, _opaque(header))
    return stretched


def _is_8_bit(header: ImageHeader) -> bool:
    return header.dtype == np.uint8 and header.maxval in (None, 255)


def _opaque(header: ImageHeader) -> float:
    return header.maxval or (1.0 if header.dtype.kind in "bf" else float(np.iinfo(header.dtype).max))


def _stretched(values: NDArray[np.float64], low: float, high: float) -> NDArray[np.uint8]:
    largest = max(abs(low), abs(high)) or 1.0  # scaled by it, differences neither overflow nor become subnormal
    low, high = low / largest, high / largest
    shown = np.nan_to_num(values / largest, nan=low, posinf=high, neginf=low)
    return np.rint(np.clip((shown - low) * (255 / ((high - low) or 1)), 0, 255)).astype(np.uint8)
