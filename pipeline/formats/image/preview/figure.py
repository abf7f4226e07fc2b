"""Labelled pictures, drawn with Pillow: panels with titles and axes beside a colour bar, and line plots.

Labels are ASCII, since Pillow's own font has little else: angstrom and um instead of their signs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

_INK, _PAPER, _FAINT = (30, 30, 30), (255, 255, 255), (222, 222, 222)
_LINE = (5, 80, 200)
_TEXT = 13  # pixels, of the font
_TICK = 5
_GAP = 8
_BAR_WIDTH = 16
_PLOT = (640, 320)  # columns, rows

Pixels = NDArray[np.uint8]  # rows × columns × RGB


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What one side of a panel measures: the values at the middles of its first and last pixel."""

    label: str
    first: float
    last: float

    def place(self, value: float, length: int) -> float:
        """The position of a value along a side of `length` pixels, in pixels from the middle of the first."""
        return (value - self.first) / ((self.last - self.first) or 1.0) * (length - 1)

    def ticks(self, most: int = 6) -> list[tuple[float, str]]:
        """Round values within the axis, with their text."""
        low, high = sorted((self.first, self.last))
        step = _round_step((high - low) / most)
        digits = max(0, -math.floor(math.log10(step)))
        numbers = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
        return [(n * step, f"{n * step:.{digits}f}") for n in numbers]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A picture [rows, columns, RGB] of which `across` runs to the right and `up` upwards."""

    pixels: Pixels
    title: str
    across: Axis
    up: Axis


@dataclass(frozen=True, kw_only=True)
class ColourBar:
    """colours : RGB from the lowest to the highest value, [n, 3]"""

    colours: Pixels
    scale: Axis


def figure(panels: Sequence[Panel], bar: ColourBar) -> Pixels:
    """The panels side by side on a white page, their lower edges in line, and the colour bar to their right."""
    from PIL import Image, ImageDraw

    left = [_label_width(panel.up) for panel in panels]
    height = max(len(panel.pixels) for panel in panels)
    base = _TEXT + 2 * _GAP + height
    right = _BAR_WIDTH + _label_width(bar.scale)
    width = sum(left) + sum(panel.pixels.shape[1] + 2 * _GAP for panel in panels) + right + _GAP
    page = Image.new("RGB", (width, base + _TICK + 2 * (_TEXT + _GAP)), _PAPER)
    draw = ImageDraw.Draw(page)
    x = 0
    for panel, margin in zip(panels, left, strict=True):
        x += margin
        rows, columns, _ = panel.pixels.shape
        page.paste(Image.fromarray(panel.pixels), (x, base - rows))
        _frame(draw, (x, base - rows, x + columns, base), panel.across, panel.up)
        title = max(x + columns // 2, x + _text_width(panel.title) // 2 + _GAP)
        _write(draw, (title, base - rows - _GAP), panel.title, "mb")
        x += columns + 2 * _GAP
    share = np.linspace(len(bar.colours) - 1, 0, height).round().astype(int)
    strip = np.repeat(bar.colours[share][:, None], _BAR_WIDTH, 1)
    page.paste(Image.fromarray(strip), (x, base - height))
    draw.rectangle((x - 1, base - height - 1, x + _BAR_WIDTH, base), outline=_INK)
    for value, text in bar.scale.ticks():
        y = base - 1 - round(bar.scale.place(value, height))
        draw.line((x + _BAR_WIDTH, y, x + _BAR_WIDTH + _TICK, y), _INK)
        _write(draw, (x + _BAR_WIDTH + _TICK + 3, y), text, "lm")
    _write(draw, (min(x, width - _GAP - _text_width(bar.scale.label)), base - height - _GAP), bar.scale.label, "lb")
    return np.asarray(page)


def plot(x: NDArray[Any], y: NDArray[Any], across: str, up: str) -> Pixels:
    """A line through the points (x, y), with labels for both axes; what is not finite leaves a gap."""
    from PIL import Image, ImageDraw

    finite = y[np.isfinite(y)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    spare = 0.05 * (high - low) or max(abs(low), 1.0) * 0.05
    horizontal = Axis(label=across, first=float(x[0]), last=float(x[-1]))
    vertical = Axis(label=up, first=low - spare, last=high + spare)
    (columns, rows), margin = _PLOT, _label_width(vertical)
    top = _TEXT + 2 * _GAP
    page = Image.new("RGB", (margin + columns + 3 * _GAP, top + rows + _TICK + 2 * (_TEXT + _GAP)), _PAPER)
    draw = ImageDraw.Draw(page)
    if vertical.first < 0 < vertical.last:
        zero = top + rows - 1 - vertical.place(0.0, rows)
        draw.line((margin, zero, margin + columns - 1, zero), _FAINT)
    points = [
        (margin + horizontal.place(float(a), columns), top + rows - 1 - vertical.place(float(b), rows))
        if math.isfinite(b) else None
        for a, b in zip(x.tolist(), y.tolist(), strict=True)
    ]  # fmt: skip
    for before, after in pairwise(points):
        if before and after:
            draw.line((*before, *after), _LINE, width=2)
    _frame(draw, (margin, top, margin + columns, top + rows), horizontal, vertical)
    return np.asarray(page)


def _frame(draw: Any, box: tuple[int, int, int, int], across: Axis, up: Axis) -> None:
    """Outline, ticks and labels around the pixels left … right - 1, top … bottom - 1."""
    left, top, right, bottom = box
    draw.rectangle((left - 1, top - 1, right, bottom), outline=_INK)
    for value, text in across.ticks(max(1, min(6, (right - left) // 50))):
        x = left + round(across.place(value, right - left))
        draw.line((x, bottom, x, bottom + _TICK), _INK)
        _write(draw, (x, bottom + _TICK + 2), text, "mt")
    for value, text in up.ticks(max(1, min(6, (bottom - top) // 30))):
        y = bottom - 1 - round(up.place(value, bottom - top))
        draw.line((left - 1 - _TICK, y, left - 1, y), _INK)
        _write(draw, (left - _TICK - 4, y), text, "rm")
    _write(draw, ((left + right) // 2, bottom + _TICK + _TEXT + _GAP), across.label, "mt")
    _write(draw, (left - 1, top - _GAP), up.label, "rb")


def _write(draw: Any, place: tuple[int, int], text: str, anchor: str) -> None:
    from PIL import ImageFont

    draw.text(place, text, _INK, font=ImageFont.load_default(_TEXT), anchor=anchor)


def _text_width(text: str) -> int:
    from PIL import ImageFont

    return math.ceil(ImageFont.load_default(_TEXT).getlength(text))


def _label_width(axis: Axis) -> int:
    """Room for the numbers and the label beside a vertical axis."""
    numbers = [_text_width(text) + _TICK for _, text in axis.ticks()]
    return max([*numbers, _text_width(axis.label)]) + 2 * _GAP


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, at least that."""
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    return (
        next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9)) if least > 0 else 1.0
    )
