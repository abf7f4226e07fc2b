"""Marks on previews: a scale bar if the pixel size is known, and the names of channels in their colours.

Labels are ASCII, since Pillow's own font has little else; µ is drawn as a u with a stem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.formats.image.metadata import Calibration, Channel, in_unit

_TEXT = 13  # pixels, of the font
_GAP = 8
_THICKNESS = 4
_SMALLEST = (48, 96)  # rows and columns of a picture that has room for marks
_SHARE = 0.25  # of the width that the bar takes at most
_UNITS = {"nanometer": "nm", "micrometer": "µm", "millimeter": "mm", "meter": "m", "kilometer": "km"}
_WHITE = "FFFFFF"


def marked(pixels: NDArray[np.uint8], known: Calibration, step: int, channels: Sequence[Channel]) -> NDArray[np.uint8]:
    """The picture (rows × columns, or × 1 to 4 samples) with its marks, as far as there is room for them.

    step     : pixels of the image along each side of one of the picture
    channels : those of the picture, with their colours there
    """
    names = [channel for channel in channels if channel.name]
    bar = scale_bar(known, step, pixels.shape[1])
    if pixels.shape[0] < _SMALLEST[0] or pixels.shape[1] < _SMALLEST[1] or not (names or bar):
        return pixels
    marks = pixels.copy()
    rows, columns = pixels.shape[:2]
    if bar is not None:
        length, text = bar
        bottom = rows - _GAP
        line = np.zeros((rows, columns), bool)
        line[bottom - _THICKNESS : bottom, columns - _GAP - length : columns - _GAP] = True
        label = _written((rows, columns), text, (columns - _GAP - length // 2, bottom - _THICKNESS - 4), "mb")
        _paint(marks, line | label, _WHITE)
    for number, channel in enumerate(names):
        place = _GAP, _GAP + number * (_TEXT + 3)
        if place[1] + _TEXT < rows - 2 * _GAP - _TEXT:
            _paint(marks, _written((rows, columns), _ascii(channel.name), place, "lt"), channel.colour or _WHITE)
    return marks


def lettered(pixels: NDArray[np.uint8], texts: Sequence[tuple[str, tuple[int, int], str]]) -> NDArray[np.uint8]:
    """A grey picture with texts in white on it: each with its place (x, y) and Pillow's anchor."""
    marks = pixels.copy()
    for text, place, anchor in texts:
        _paint(marks, _written((pixels.shape[0], pixels.shape[1]), _ascii(text), place, anchor), _WHITE)
    return marks


def scale_bar(known: Calibration, step: int, columns: int) -> tuple[int, str] | None:
    """The length in pixels of the picture, and the text; None if the pixels are not square, or of unknown size."""
    x, y = known.steps.get("X"), known.steps.get("Y")
    if x is None or y is None or x.unit is None or x.unit == "inch":  # inches are those of a print
        return None
    height = in_unit(y.size, y.unit, x.unit)
    metres = in_unit(x.size * step, x.unit, "meter")
    if metres is None or height is None or not math.isclose(height, x.size, rel_tol=0.01):
        return None
    most = metres * columns * _SHARE
    power = 10.0 ** math.floor(math.log10(most))
    length = max(factor * power for factor in (1, 2, 5) if factor * power <= most * (1 + 1e-9))
    unit = next(
        (name for name in reversed(_UNITS) if float(in_unit(length, "meter", name) or 0) >= 1 - 1e-9), "nanometer"
    )
    return round(length / metres), f"{in_unit(length, 'meter', unit):g} {_UNITS[unit]}"


def _paint(pixels: NDArray[np.uint8], mask: NDArray[np.bool_], colour: str) -> None:
    """Draw in a colour with a dark outline; gray pictures get white, and alpha becomes opaque."""
    wide = np.zeros_like(mask)
    for down in (-1, 0, 1):
        for right in (-1, 0, 1):
            wide |= np.roll(mask, (down, right), (0, 1))
    samples = 1 if pixels.ndim == 2 else pixels.shape[2]
    ink: Any = list(bytes.fromhex(colour)) if samples in (3, 4) else [255]
    outline: Any = [0] * len(ink)
    if samples in (2, 4):
        ink, outline = [*ink, 255], [*outline, 255]
    pixels[wide] = outline if pixels.ndim == 3 else 0
    pixels[mask] = ink if pixels.ndim == 3 else 255


def _written(shape: tuple[int, int], text: str, place: tuple[int, int], anchor: str) -> NDArray[np.bool_]:
    """A mask of the text's letters."""
    from PIL import Image, ImageDraw, ImageFont

    page = Image.new("L", shape[::-1], 0)
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(_TEXT)
    before, micro, _ = text.partition("µ")
    letters = text.replace(micro, "u") if micro else text
    draw.text(place, letters, 255, font=font, anchor=anchor)
    if micro:
        left, _, _, base = draw.textbbox(place, letters, font=font, anchor=anchor)
        stem = round(left + font.getlength(before)) + 1
        draw.line((stem, base - 1, stem, base + 2), 255)
    return np.asarray(page) > 127


def _ascii(text: str) -> str:
    return "".join(each if " " <= each <= "~" else "?" for each in text)
