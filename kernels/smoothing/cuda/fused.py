"""The kernel `fused` of smoothing.cu, which filters both axes of an image at once: when it applies, its view of the
image, and its launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.runtime.launch import blocks_a_multiprocessor, kernel, multiprocessors, shared_bytes_a_block
from kernels.smoothing.borders import MODES
from kernels.smoothing.cuda import tuning
from kernels.smoothing.cuda.block_partition import BlockPartition, PieceCost, factored, mostly_short, up_to
from kernels.smoothing.window import Window

C_TYPES = {"uint8": "unsigned char", "uint16": "unsigned short", "int16": "short", "float32": "float"}
# Reaches of the compiled kernels; other windows use the next larger, except Gaussians of floats, which need their own.
# (Gaussians of uint8 with these reaches are exact: other kernels.)
BOX_RADII, GAUSS_RADII, FLOAT_GAUSS_RADII = (1, 4), (4, 8), (1, 2, 3, 4, 5, 6, 7, 8)
SQUARE_RADII = (1, 2, 3, 4)  # boxes over integers that reach equally far in all four directions
MAX_CHANNELS, MAX_RADIUS = 4, 8
MAX_LENGTH = 1 << 30  # positions along either axis are 32-bit numbers; offsets are not
MAX_BLOCKS = (1 << 31) - 1
MIN_BAND_ROWS = 8
VECTOR_BYTES = 16  # of a thread's loads and stores
SECTOR_BYTES = 32  # unit of writes to memory; blocks write whole ones
THREADS = 128
WIDTH = 4 * THREADS  # samples of a row that a block loads
TINY = 2.0**126  # factor of the weights if samples are the bits of floats: TINY in windows.cuh


def _radii(kind: str, dtype: str) -> tuple[int, ...]:
    if kind == "SQUARE":
        return SQUARE_RADII if dtype != "float32" else ()
    if kind == "BOX":
        return BOX_RADII
    return {"float32": FLOAT_GAUSS_RADII, "uint8": ()}.get(dtype, GAUSS_RADII)


def _entry(c_type: str, channels: int, radius: int, kind: str, aligned: bool) -> str:
    return f"fused<{c_type}, {channels}, {radius}, {kind}, {str(aligned).lower()}>"


ENTRIES = tuple(
    _entry(c_type, channels, radius, kind, aligned)
    for aligned in (True, False)
    for kind in ("SQUARE", "BOX", "GAUSS")
    for dtype, c_type in C_TYPES.items()
    for radius in _radii(kind, dtype)
    for channels in range(1, MAX_CHANNELS + 1)
)


class Picture(ctypes.Structure):
    """struct Picture of smoothing.cu."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("planes", "rows", "out_rows", "bands", "tiles")),
        *((name, ctypes.c_int) for name in ("columns", "row_samples", "out_row_samples", "centre_y", "centre_x")),
        *((name, ctypes.c_int) for name in ("mode_y", "mode_x", "aligned_in", "aligned_out")),
        ("fill", ctypes.c_uint),
    )

    @property
    def aligned(self) -> bool:
        return bool(self.aligned_in and self.aligned_out)


class Filter(ctypes.Structure):
    """struct Filter of smoothing.cu."""

    _fields_ = (
        ("y", ctypes.c_float * 17),
        ("x", ctypes.c_float * 17),
        ("scale", ctypes.c_float),
        ("bias", ctypes.c_float),
        ("taps_y", ctypes.c_int),
        ("taps_x", ctypes.c_int),
    )


@dataclass(frozen=True, kw_only=True)
class View:
    """The image as [planes, rows, columns, channels], with the windows down the rows and across the columns, if any."""

    planes: int
    rows: int
    columns: int
    channels: int
    down: Window | None
    across: Window | None


def view_of(shape: Sequence[int], windows: Sequence[Window]) -> View | None:
    """None unless one axis is filtered, or two neighbours that are last or followed by few channels."""
    if len(windows) == 2 and windows[1].axis == windows[0].axis + 1:
        down, across = windows
        y = down.axis
        channels = math.prod(shape[y + 2 :])
        if channels > MAX_CHANNELS:
            return None
        return View(
            planes=math.prod(shape[:y]),
            rows=shape[y],
            columns=shape[y + 1],
            channels=channels,
            down=down,
            across=across,
        )
    if len(windows) != 1:
        return None
    axis = windows[0].axis
    before, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    if inner <= MAX_CHANNELS:
        return View(planes=1, rows=before, columns=shape[axis], channels=inner, down=None, across=windows[0])
    return View(planes=before, rows=shape[axis], columns=inner, channels=1, down=windows[0], across=None)


def applies(shape: tuple[int, ...], dtype: np.dtype[Any], windows: Sequence[Window]) -> bool:
    view = view_of(shape, windows)
    if view is None or dtype.name not in C_TYPES or max(view.columns * view.channels, view.rows) > MAX_LENGTH:
        return False
    chosen = _chosen(windows, dtype)
    if chosen is None:
        return False
    tile = _tile(dtype, view.channels, *chosen, aligned=False)  # the narrower
    if tile.shared_bytes > shared_bytes_a_block():
        return False
    tiles = -(-view.columns * view.channels // tile.outputs)
    return view.planes * tiles * -(-view.rows // MIN_BAND_ROWS) <= MAX_BLOCKS


def run(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    view = view_of(image.shape, windows)
    dtype = np.dtype(image.dtype)
    chosen = _chosen(windows, dtype)
    assert view is not None
    assert chosen is not None
    kind, radius = chosen
    picture = picture_of(image, view, cval, out)
    tile = _tile(dtype, view.channels, kind, radius, aligned=picture.aligned)
    bands = _partition(picture, tile)
    blocks = picture.planes * picture.tiles * picture.bands
    entry = _entry(C_TYPES[dtype.name], view.channels, radius, kind, picture.aligned)
    args = (image, out, picture, _filter(view, dtype, kind, radius), bands)
    kernel("smoothing", entry).launch(
        (blocks,), (THREADS,), args, shared_bytes=tile.shared_bytes, stream=stream, dependent_launch=True
    )


def _kind(windows: Sequence[Window]) -> str:
    return "BOX" if windows[0].half_weights is None else "GAUSS"


def _chosen(windows: Sequence[Window], dtype: np.dtype[Any]) -> tuple[str, int] | None:
    """Kind and reach of the kernel for these windows; None if there is none."""
    kind, reaches = _kind(windows), [max(window.before, window.after) for window in windows]
    if kind == "GAUSS" and dtype == np.float32 and (len(windows) < 2 or reaches[0] != reaches[1]):
        return None
    square = len(windows) == 2 and len({reach for window in windows for reach in (window.before, window.after)}) == 1
    if kind == "BOX" and square and reaches[0] in _radii("SQUARE", dtype.name):
        return "SQUARE", reaches[0]
    radius = next((radius for radius in _radii(kind, dtype.name) if radius >= max(reaches)), None)
    return None if radius is None else (kind, radius)


@dataclass(frozen=True, kw_only=True)
class Tile:
    """The tile of a block of `fused`: struct Fused of tiles.cuh."""

    step: int  # rows per step
    outputs: int  # samples of a row that it writes
    shared_bytes: int
    resident: int  # blocks on a multiprocessor
    share: float  # of a factored partition
    waits: bool  # whether it waits for memory


def _tile(dtype: np.dtype[Any], channels: int, kind: str, radius: int, *, aligned: bool) -> Tile:
    size, floats, far = dtype.itemsize, dtype.kind == "f", radius > 4
    step = 8 if floats or far else 16
    stages = 2 if floats and not far else 1
    sector, vector, reach = SECTOR_BYTES // size, VECTOR_BYTES // size, radius * channels
    if aligned:
        halo = up_to(reach, vector if size == 1 else sector)
        outputs, spare = (WIDTH - 2 * halo) // sector * sector, 0
    else:
        halo = up_to(reach, 8)
        outputs = (WIDTH - halo - reach - (step - 1) - (vector // 4 - 1)) // vector * vector
        spare = SECTOR_BYTES
    paired = kind == "SQUARE" and size == 1
    a_word, segment = 2 if paired else 1, 4 * step
    places = WIDTH + 2 * halo + 8
    pitch = up_to(places // segment * (segment // a_word + 4) + places % segment // a_word, 4)
    few = far and (size == 2 or (floats and channels > 1))
    shared_bytes = step * (stages * WIDTH * size + pitch * 4) + stages * spare + (3 + WIDTH) * 4
    return Tile(
        step=step,
        outputs=outputs,
        shared_bytes=shared_bytes,
        resident=min(3 if few else 4, blocks_a_multiprocessor(shared_bytes)),
        share=tuning.FUSED_FAR_SHARE if far else tuning.FUSED_FLOAT_SHARE if floats else tuning.FUSED_SHARE,
        waits=not far and (floats or (size == 2 and kind != "GAUSS")),
    )


def picture_of(image: Any, view: View, cval: float, out: Any) -> Picture:
    down, across = view.down, view.across
    out_columns = view.columns if across is None else across.output_length(view.columns)
    shift = across.before * view.channels if across is not None and across.mode == "valid" else 0
    row_samples, out_row_samples = view.columns * view.channels, out_columns * view.channels
    itemsize = image.dtype.itemsize
    return Picture(
        planes=view.planes,
        rows=view.rows,
        out_rows=view.rows if down is None else down.output_length(view.rows),
        columns=view.columns,
        row_samples=row_samples,
        out_row_samples=out_row_samples,
        centre_y=down.before if down is not None and down.mode == "valid" else 0,
        centre_x=shift,
        mode_y=MODES.index("nearest" if down is None else down.mode),
        mode_x=MODES.index("nearest" if across is None else across.mode),
        aligned_in=(image.data.ptr | row_samples * itemsize | shift * itemsize) % VECTOR_BYTES == 0,
        aligned_out=(out.data.ptr | out_row_samples * itemsize) % VECTOR_BYTES == 0,
        fill=_bits(cval, np.dtype(image.dtype)),
    )


def _bits(value: float, dtype: np.dtype[Any]) -> int:
    return int(np.array(value, dtype).view(f"u{dtype.itemsize}"))


def _partition(picture: Picture, tile: Tile) -> BlockPartition:
    """Partitions the output into tiles of columns, and these into bands of rows."""
    picture.tiles = -(-picture.out_row_samples // tile.outputs)
    line, lines, resident = picture.out_rows, picture.planes * picture.tiles, tile.resident * multiprocessors()
    if tile.waits and line * lines >= tuning.FUSED_SHORT_FROM_ROWS * resident:
        bands = mostly_short(line, lines, resident, tile.step)
    else:
        bands = factored(line, lines, resident, PieceCost(unit=tile.step), tile.share)
    picture.bands = bands.pieces
    return bands


def _filter(view: View, dtype: np.dtype[Any], kind: str, radius: int) -> Filter:
    samples = 1
    parameters = Filter(taps_y=1, taps_x=1)
    for window, weights, axis in ((view.down, parameters.y, "y"), (view.across, parameters.x, "x")):
        if kind == "GAUSS":
            half = (1.0,) if window is None or window.half_weights is None else window.half_weights
            weights[: len(half)] = half
        else:
            before, after = (0, 0) if window is None else (window.before, window.after)
            weights[radius - before : radius + after + 1] = [1.0] * (before + after + 1)
            setattr(parameters, f"taps_{axis}", before + after + 1)
            samples *= before + after + 1
    parameters.scale = float(np.float32(1) / np.float32(samples))
    parameters.bias = 0.5 if samples % 2 == 0 else 0.0
    if dtype.kind == "u" or (dtype.kind == "i" and kind != "GAUSS"):
        parameters.y[:] = [weight * TINY for weight in parameters.y]
        parameters.bias *= 2.0**-23
        if kind == "SQUARE":
            parameters.scale *= TINY
    return parameters
