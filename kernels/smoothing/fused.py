"""The kernels that filter both axes of an image at once, `fused` and `box_running` of smoothing.cu: which filters they
take, how they see the image, and their launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.launch import kernel, multiprocessors
from kernels.smoothing.borders import MODES
from kernels.smoothing.window import Window

C_TYPES = {"uint8": "unsigned char", "uint16": "unsigned short", "int16": "short", "float32": "float"}
# Compiled for these reaches: a shorter window takes the next, but for Gaussians of floats, which need their own.
BOX_RADII, GAUSS_RADII, FLOAT_GAUSS_RADII = (1, 4), (4, 8), (1, 2, 3, 4, 5, 6, 7, 8)
MAX_CHANNELS = 4
MAX_LENGTH = 1 << 30  # positions along either axis are 32-bit numbers; offsets are not
MAX_BLOCKS = (1 << 31) - 1
ROWS = 8  # a step down a band
RUNNING_THREADS = 256
MIN_RUNNING_OUTPUTS = 256  # samples of a row a block writes: below a quarter of what it loads it is not worth it
VECTOR_BYTES = 16  # what a thread loads and stores at once
SECTOR_BYTES = 32  # memory is written in these: blocks write whole ones
THREADS = 128


def _radii(kind: str, dtype: str) -> tuple[int, ...]:
    if kind == "BOX":
        return BOX_RADII
    return FLOAT_GAUSS_RADII if dtype == "float32" else GAUSS_RADII


ENTRIES = tuple(
    f"fused<{c_type}, {channels}, {radius}, {kind}>"
    for kind in ("BOX", "GAUSS")
    for dtype, c_type in C_TYPES.items()
    for radius in _radii(kind, dtype)
    for channels in range(1, MAX_CHANNELS + 1)
)

RUNNING_ENTRIES = tuple(
    f"box_running<{C_TYPES[dtype]}, {channels}>"
    for dtype in ("uint8", "uint16", "int16")
    for channels in range(1, MAX_CHANNELS + 1)
)


class Picture(ctypes.Structure):
    """struct Picture of smoothing.cu."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("planes", "rows", "out_rows", "band_rows", "bands", "tiles")),
        *((name, ctypes.c_int) for name in ("columns", "row_samples", "out_row_samples", "centre_y", "centre_x")),
        *((name, ctypes.c_int) for name in ("mode_y", "mode_x", "aligned_in", "aligned_out")),
        ("fill", ctypes.c_uint),
    )


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


class Mean(ctypes.Structure):
    """struct Mean of smoothing.cu."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("before_y", "taps_y", "before_x", "taps_x")),
        *((name, ctypes.c_uint) for name in ("half", "multiplier", "shift")),
        ("outputs", ctypes.c_int),
    )


@dataclass(frozen=True, kw_only=True)
class View:
    """The image as [planes, rows, columns, channels], with the window along rows and that along columns, if any."""

    planes: int
    rows: int
    columns: int
    channels: int
    down: Window | None
    across: Window | None


def view_of(shape: Sequence[int], windows: Sequence[Window]) -> View | None:
    """None where the filtered axes are not one axis, or two neighbours that are last but for few channels."""
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
    radius = _radius(windows, dtype)
    if radius is None:
        return False
    tiles = -(-view.columns * view.channels // _tile_outputs(dtype, view.channels, radius))
    return view.planes * tiles * -(-view.rows // ROWS) <= MAX_BLOCKS


def run(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    view = view_of(image.shape, windows)
    dtype = np.dtype(image.dtype)
    radius = _radius(windows, dtype)
    assert view is not None
    assert radius is not None
    picture = picture_of(image, view, cval, out)
    picture.aligned_in &= picture.centre_x % 4 == 0
    blocks = _cut(picture, _tile_outputs(dtype, view.channels, radius), 4, 16 * radius)
    entry = f"fused<{C_TYPES[dtype.name]}, {view.channels}, {radius}, {_kind(windows)}>"
    args = (image, out, picture, _filter(view, radius, _kind(windows)))
    kernel("smoothing", entry).launch((blocks,), (THREADS,), args, stream=stream)


def running_applies(shape: tuple[int, ...], dtype: np.dtype[Any], windows: Sequence[Window]) -> bool:
    view = view_of(shape, windows)
    if view is None or dtype.kind == "f" or _kind(windows) != "BOX":
        return False
    outputs = _running_outputs(dtype, view)
    if max(view.columns * view.channels, view.rows) > MAX_LENGTH or outputs < MIN_RUNNING_OUTPUTS:
        return False
    tiles = -(-view.columns * view.channels // outputs)
    return (
        view.planes * tiles * -(-view.rows // ROWS) <= MAX_BLOCKS
        and exact_division(math.prod(window.taps for window in windows), 8 * dtype.itemsize) is not None
    )


def run_running(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    view = view_of(image.shape, windows)
    assert view is not None
    dtype, samples = np.dtype(image.dtype), math.prod(window.taps for window in windows)
    picture, outputs = picture_of(image, view, cval, out), _running_outputs(dtype, view)
    division = exact_division(samples, 8 * dtype.itemsize)
    assert division is not None
    before_y, taps_y = (0, 1) if view.down is None else (view.down.before, view.down.taps)
    before_x, taps_x = (0, 1) if view.across is None else (view.across.before, view.across.taps)
    blocks = _cut(picture, outputs, 2, 8 * taps_y)
    mean = Mean(
        before_y=before_y, taps_y=taps_y, before_x=before_x, taps_x=taps_x,
        half=samples // 2, multiplier=division[0], shift=division[1], outputs=outputs,
    )  # fmt: skip
    entry = f"box_running<{C_TYPES[dtype.name]}, {view.channels}>"
    kernel("smoothing", entry).launch((blocks,), (RUNNING_THREADS,), (image, out, picture, mean), stream=stream)


def exact_division(divisor: int, bits: int) -> tuple[int, int] | None:
    """(multiplier, shift) so that n // divisor == n * multiplier >> 32 + shift for every n < divisor * 2**bits.

    The multiplier exceeds 2**(32 + shift) / divisor by error / divisor, which must not add up to 1 / divisor.
    """
    for shift in range(32):
        multiplier = -(-(1 << 32 + shift) // divisor)
        error = multiplier * divisor - (1 << 32 + shift)
        if multiplier < 1 << 32 and error * (divisor << bits) < 1 << 32 + shift:
            return multiplier, shift
    return None


def _running_outputs(dtype: np.dtype[Any], view: View) -> int:
    distance = view.channels * (1 if view.across is None else view.across.taps)
    sector = SECTOR_BYTES // dtype.itemsize
    return (4 * RUNNING_THREADS - distance - 3) // sector * sector


def _kind(windows: Sequence[Window]) -> str:
    return "BOX" if windows[0].half_weights is None else "GAUSS"


def _radius(windows: Sequence[Window], dtype: np.dtype[Any]) -> int | None:
    """The reach of the kernel for these windows; None where there is none."""
    reaches = [max(window.before, window.after) for window in windows]
    kind = _kind(windows)
    if kind == "GAUSS" and dtype == np.float32 and (len(windows) < 2 or reaches[0] != reaches[1]):
        return None
    return next((radius for radius in _radii(kind, dtype.name) if radius >= max(reaches)), None)


def _tile_outputs(dtype: np.dtype[Any], channels: int, radius: int) -> int:
    halo = -(-radius * channels // 4) * 4
    sector = SECTOR_BYTES // dtype.itemsize
    return (4 * THREADS - 2 * halo) // sector * sector


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
        aligned_in=(image.data.ptr | row_samples * itemsize) % VECTOR_BYTES == 0,
        aligned_out=(out.data.ptr | out_row_samples * itemsize) % VECTOR_BYTES == 0,
        fill=_bits(cval, np.dtype(image.dtype)),
    )


def _bits(value: float, dtype: np.dtype[Any]) -> int:
    return int(np.array(value, dtype).view(f"u{dtype.itemsize}"))


def _cut(picture: Picture, outputs: int, resident: int, tall: int) -> int:
    """Cuts the output into tiles of so many samples and bands of rows; returns the number of blocks.

    Bands are tall, since each also reads the rows of its halo (`tall` makes that negligible), but there are enough of
    them to fill the device in whole rounds of `resident` blocks a multiprocessor.
    """
    picture.tiles = -(-picture.out_row_samples // outputs)
    bands = 1
    for rounds in (12, 8, 6, 4, 3, 2, 1):
        bands = max(rounds * resident * multiprocessors() // (picture.tiles * picture.planes), 1)
        if picture.out_rows // bands >= tall:
            break
    picture.band_rows = max(-(-picture.out_rows // (bands * ROWS)) * ROWS, 4 * ROWS)
    picture.bands = -(-picture.out_rows // picture.band_rows)
    return int(picture.planes) * int(picture.tiles) * int(picture.bands)


def _filter(view: View, radius: int, kind: str) -> Filter:
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
    return parameters
