"""Numbers as fixed-width text, so that each has a known offset in the file: `1.2345678e+00`, `-1.234567e+00`.

A minus sign replaces the last digit: no padding, and no plus sign that a reader might reject. The digits are those of
C's printf, rounded to nearest from the exact binary value, ties to even.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MOST_DOUBTFUL = 64


@dataclass(frozen=True, kw_only=True)
class NumberStyle:
    """`decimals` after the point, one fewer for negative numbers; a space or a newline follows each number."""

    decimals: int
    letter: str  # e or E
    per_line: int

    @property
    def width(self) -> int:
        """Characters of a number and its separator: digit, point, decimals, exponent (e+00), space or newline."""
        return 2 + self.decimals + 4 + 1

    def text_of(self, value: float) -> str:
        """One number, by Python's own conversion, which `encode` matches and falls back on."""
        negative = bool(np.signbit(value))
        return f"{value:.{self.decimals - negative}e}".replace("e", self.letter)

    def half_unit(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Half a unit in the last digit of each value's text: the most that rounding changed it by."""
        with np.errstate(divide="ignore"):
            exponents = np.floor(np.log10(np.abs(values))) - self.decimals + np.signbit(values)
        return np.asarray(0.5 * 10.0 ** np.where(values == 0, -np.inf, exponents))


def encode(
    values: NDArray[np.float32], out: NDArray[np.uint8], style: NumberStyle, *, first: int, row_length: int
) -> int | None:
    """Write `values` (one axis) as text to `out`, `style.width` bytes each. Runs without the interpreter's lock.

    first      : the index of `values[0]` in the whole map
    row_length : a line ends after every `style.per_line` numbers of a row, and after the row's last

    Returns None, or the index of the first value that is not finite.
    """
    from pipeline.formats.grid.lazy_decimals import TABLES, write_numbers  # slow to load

    bits = values.view(np.uint32)
    doubtful = np.empty(_MOST_DOUBTFUL, np.int64)
    row, style_numbers = (first, row_length), (style.per_line, style.decimals, ord(style.letter))
    start = 0
    while start < len(values):
        done, found = write_numbers(values, bits, out, start, row, style_numbers, doubtful, TABLES)
        for index in doubtful[:found]:
            text = style.text_of(float(values[index])).encode("ascii")
            at = int(index) * style.width
            out[at : at + style.width - 1] = np.frombuffer(text, np.uint8)
        if done < 0:
            return -done - 1
        start = done
    return None
