"""The compiled conversion behind `fixed_decimals`, which defines the format.

Imported on first use, since it needs LLVM or Numba, which are slow to load.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kernels.runtime.compiled import compiled

_SPACE, _NEWLINE, _MINUS, _PLUS, _POINT, _ZERO = (ord(letter) for letter in " \n-+.0")
# The powers of ten that scale a float32, 1.4e-45 to 3.4e38, to 8 digits; those up to 1e22 are exact.
_POWERS = np.array([float(f"1e{power}") for power in range(56)])
# The decimal exponent of the smallest number with each of float32's binary exponents (0: subnormal).
_FIRST_EXPONENTS = np.array([-45, *(math.floor(math.log10(2.0 ** (code - 127))) for code in range(1, 256))])
_PAIRS = np.frombuffer("".join(f"{pair:02d}" for pair in range(100)).encode("ascii"), np.uint8).reshape(100, 2)
TABLES = (_FIRST_EXPONENTS, _POWERS, _PAIRS)


@compiled
def write_numbers(
    values: Any, bits: Any, out: Any, start: int, row: Any, style: Any, doubtful: Any, tables: Any
) -> tuple[int, int]:
    """`fixed_decimals.encode` from the value `start` on.

    bits     : the values' bits; tables: TABLES, as an argument since constants would be compiled in
    row      : the index of `values[0]` in the whole map, and the length of a row
    style    : numbers per line, decimals, and the code of the exponent's letter
    doubtful : (k,) filled with indices of values

    Returns the index after the last value written (or -1 - index of one that is not finite), and the number of doubtful
    values, which the caller writes again by exact arithmetic. Stops when `doubtful` is full.
    """
    first_exponents, powers, pairs = tables
    first, row_length = row
    per_line, decimals, letter = style
    width = decimals + 7
    found = 0
    column = (first + start) % row_length
    in_line = column % per_line
    for index in range(start, len(values)):
        binary_exponent = (bits[index] >> 23) & 255
        if binary_exponent == 255:
            return -1 - index, found
        if found == len(doubtful):
            return index, found
        negative = int(bits[index] >> 31)
        kept = decimals - negative
        digits, exponent, is_doubtful = _rounded(
            abs(np.float64(values[index])), kept, int(first_exponents[binary_exponent]), powers
        )
        if is_doubtful:
            doubtful[found] = index
            found += 1
        at = index * width
        if negative:
            out[at] = _MINUS
        _put(out, at + negative, digits, kept, exponent, letter, pairs)
        column += 1
        in_line += 1
        ends = column == row_length
        out[at + width - 1] = _SPACE
        if ends or in_line == per_line:
            out[at + width - 1] = _NEWLINE
            in_line = 0
        if ends:
            column = 0
    return len(values), found


@compiled
def _rounded(size: float, kept: int, exponent: int, powers: Any) -> tuple[int, int, bool]:
    """`size` as kept + 1 digits and the exponent of the first; whether the last digit may be off by one.

    `exponent`: a lower bound, usually the right one.
    """
    if size == 0.0:
        return 0, 0, False
    limit = powers[kept + 1]
    scaled = _shifted(size, kept - exponent, powers)
    while scaled >= limit:
        exponent += 1
        scaled = _shifted(size, kept - exponent, powers)
    digits = int(scaled)
    rest = scaled - digits
    # Times at most 10^12, a float32 is exact in float64 (24 + 28 bits). Otherwise the error stays below 10^8 · 2^-51.
    is_doubtful = not 0 <= kept - exponent <= 12 and abs(rest - 0.5) < 1e-6
    if rest > 0.5 or (rest == 0.5 and digits % 2 == 1):
        digits += 1
    if digits >= limit:
        digits //= 10
        exponent += 1
    return digits, exponent, is_doubtful


@compiled
def _shifted(size: float, power: int, powers: Any) -> Any:
    return size * powers[power] if power >= 0 else size / powers[-power]


@compiled
def _put(out: Any, at: int, digits: int, kept: int, exponent: int, letter: int, pairs: Any) -> None:
    rest = np.uint32(digits)  # faster to divide by a constant than signed or 64-bit integers
    place = at + kept + 1
    for _ in range(kept >> 1):
        hundredth = rest // np.uint32(100)
        pair = np.uintp(rest - hundredth * np.uint32(100))
        out[place - 1] = pairs[pair, 0]
        out[place] = pairs[pair, 1]
        rest = hundredth
        place -= 2
    if kept & 1:
        tenth = rest // np.uint32(10)
        out[place] = _ZERO + (rest - tenth * np.uint32(10))
        rest = tenth
    out[at + 1] = _POINT
    out[at] = _ZERO + rest
    out[at + kept + 2] = letter
    out[at + kept + 3] = _MINUS if exponent < 0 else _PLUS
    size = np.uintp(abs(exponent))
    out[at + kept + 4] = pairs[size, 0]
    out[at + kept + 5] = pairs[size, 1]
