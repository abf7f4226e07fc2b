"""A small 8-bit PNG of a result, to look at."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline import formats
from pipeline.formats.base import ImageHeader, ImageReader, Region

LONGEST_SIDE = 1024
BAND_BYTES = 16 << 20


def write_preview(image: Path, preview: Path, longest_side: int = LONGEST_SIDE) -> None:
    """Average the image (of a volume the middle plane) down to at most `longest_side` pixels and write it as PNG.

    8-bit samples keep their values; all others are stretched so that the darkest pixel is black and the brightest
    white, alpha (a second or fourth channel) excepted. More than four channels: the first is shown.
    """
    with formats.open_image(image) as reader:
        small = _averaged(reader, longest_side)
        pixels = _as_bytes(small, reader.header)
    write_pixels(preview, pixels)


def write_pixels(preview: Path, pixels: NDArray[np.uint8]) -> None:
    """Rows × columns (× channels) as a PNG."""
    axes = "YXC" if pixels.ndim == 3 else "YX"
    header = ImageHeader(shape=pixels.shape, axes=axes, dtype=np.dtype(np.uint8))
    writer = formats.create_image(preview, header)
    try:
        writer.write(Region.whole(pixels.shape), np.ascontiguousarray(pixels))
        writer.publish()
    finally:
        writer.discard()


def _averaged(reader: ImageReader, longest_side: int) -> NDArray[np.float64]:
    """Rows × columns (× channels): the mean of each `step` × `step` block, NaN left out."""
    header = reader.header
    rows, columns = (header.shape[header.axes.index(letter)] for letter in "YX")
    step = math.ceil(max(rows, columns) / longest_side)
    row_bytes = header.nbytes // math.prod(header.shape[: header.axes.index("X")])
    band_rows = max(1, BAND_BYTES // row_bytes // step) * step
    bands = [
        _block_means(_plane_rows(reader, top, min(top + band_rows, rows)), step) for top in range(0, rows, band_rows)
    ]
    return np.concatenate(bands)


def _plane_rows(reader: ImageReader, top: int, bottom: int) -> NDArray[np.float64]:
    header = reader.header
    start, stop = [0] * len(header.shape), list(header.shape)
    for axis, letter in enumerate(header.axes):
        if letter == "Z":
            start[axis], stop[axis] = header.shape[axis] // 2, header.shape[axis] // 2 + 1
        if letter == "Y":
            start[axis], stop[axis] = top, bottom
    region = Region(tuple(start), tuple(stop))
    samples = np.empty(region.shape, header.dtype)
    reader.read(region, samples)
    plane = samples[0] if "Z" in header.axes else samples
    return plane.astype(np.float64)


def _block_means(rows: NDArray[np.float64], step: int) -> NDArray[np.float64]:
    missing = np.isnan(rows)
    sums, counts = np.where(missing, 0.0, rows), (~missing).astype(np.float64)
    for axis in (0, 1):
        edges = np.arange(0, rows.shape[axis], step)
        sums, counts = np.add.reduceat(sums, edges, axis), np.add.reduceat(counts, edges, axis)
    with np.errstate(invalid="ignore"):
        means: NDArray[np.float64] = sums / counts
    return means


def _as_bytes(pixels: NDArray[np.float64], header: ImageHeader) -> NDArray[np.uint8]:
    if pixels.ndim == 3 and not 1 <= pixels.shape[2] <= 4:
        pixels = pixels[..., :1]
    if header.dtype == np.uint8 and header.maxval in (None, 255):
        return np.rint(pixels).astype(np.uint8)
    channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    colours = pixels if channels in (1, 3) else pixels[..., :-1]
    shown = colours[np.isfinite(colours)]
    low, high = (shown.min(), shown.max()) if shown.size else (0.0, 1.0)
    stretched = _stretched(pixels, low, high)
    if channels in (2, 4):
        stretched[..., -1] = _stretched(pixels[..., -1], 0, _opaque(header))
    return stretched


def _opaque(header: ImageHeader) -> float:
    return header.maxval or (1.0 if header.dtype.kind == "f" else float(np.iinfo(header.dtype).max))


def _stretched(values: NDArray[np.float64], low: float, high: float) -> NDArray[np.uint8]:
    scaled = (np.nan_to_num(values, nan=low, posinf=high, neginf=low) - low) * (255 / ((high - low) or 1))
    return np.rint(np.clip(scaled, 0, 255)).astype(np.uint8)
