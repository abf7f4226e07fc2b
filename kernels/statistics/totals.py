"""The words of a partial, and the sum of partials as the statistics of a whole image."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_SAMPLES = 1 << 30  # of a channel, in one part: no word overflows
INTEGER_BINS = 256
# Words before the bins. Extremes are stored as distances from the other end of the range, plus 1, so that 0 means
# "none": these two combine by maximum, all other words by addition.
LEAST, MOST = 0, 1
SUM, SQUARES = 2, 3
NANS, MINUS_INFINITE, INFINITE = 2, 3, 4
INTEGER_HEAD, FLOAT_HEAD = 4, 5
# Words of a float's bin: counts by sign, then Σ of the mantissa's and of its square's parts.
POSITIVE, NEGATIVE, PARTS = 0, 1, 2
_UNSIGNED = (1 << 64) - 1  # the extremes of float64 take all bits of their words


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A dtype's partial. Integers: minimum `least` of the type and `shift` from u to its bin. Floats: bits and parts.

    mantissa : bits of the fraction
    sums     : exponent of two of each part of Σm
    squares  : the same for Σm²
    """

    bits: int
    least: int = 0
    mantissa: int = 0
    bias: int = 0
    sums: tuple[int, ...] = ()
    squares: tuple[int, ...] = ()

    @property
    def is_float(self) -> bool:
        return self.mantissa > 0

    @property
    def shift(self) -> int:
        return self.bits - 8

    @property
    def bins(self) -> int:
        return 1 << (self.bits - 1 - self.mantissa) if self.is_float else INTEGER_BINS

    @property
    def bin_words(self) -> int:
        return PARTS + len(self.sums) + len(self.squares) if self.is_float else 1

    @property
    def words(self) -> int:
        return (FLOAT_HEAD if self.is_float else INTEGER_HEAD) + self.bins * self.bin_words


LAYOUTS: Mapping[str, Layout] = {
    "uint8": Layout(bits=8),
    "uint16": Layout(bits=16),
    "int16": Layout(bits=16, least=-(1 << 15)),
    # m of 24 bits: m² in two parts of 24.
    "float32": Layout(bits=32, mantissa=23, bias=127, sums=(0,), squares=(0, 24)),
    # m of 53 bits = a × 2²⁷ + b: a², 2ab and b², each in two parts; parts of the same weight are combined.
    "float64": Layout(bits=64, mantissa=52, bias=1023, sums=(0, 27), squares=(0, 27, 54, 81)),
}


class Totals:
    """The sum of the partials of one image's parts, the same for any division and order."""

    def __init__(self, dtype: Any, channels: int) -> None:
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.layout = LAYOUTS[self.dtype.name]
        # Python's integers, since a whole image may exceed 64 bits; partials that still fit are summed in an array.
        self._words = [[0] * self.layout.words for _ in range(channels)]
        self._recent = np.zeros((channels, self.layout.words), np.int64)
        self._recent_samples = 0

    def add(self, partial: NDArray[np.int64], samples: int = MAX_SAMPLES) -> None:
        """Adds a partial [channels, words] of at most `samples` samples per channel."""
        if self._recent_samples + samples > MAX_SAMPLES:
            self._settle()
        self._recent_samples += samples
        extremes = self._recent[:, : MOST + 1].view(np.uint64)
        largest = np.maximum(extremes, partial[:, : MOST + 1].view(np.uint64))
        self._recent += partial
        extremes[...] = largest

    def add_sparse(self, partial: Iterable[Mapping[str, int]]) -> None:
        """The same, as `sparse` made it."""
        for words, row in zip(self._words, partial, strict=True):
            _add(words, ((int(place), value) for place, value in row.items()))

    def _settle(self) -> None:
        for words, row in zip(self._words, self._recent, strict=True):
            _add(words, ((int(place), int(row[place])) for place in np.flatnonzero(row)))
        self._recent[...] = 0
        self._recent_samples = 0

    def describe(self) -> list[dict[str, Any]]:
        """By channel: minimum, maximum, mean and standard deviation (of all finite samples, each rounded once), and the
        histogram; ready for JSON. None stands for what no finite sample has."""
        self._settle()
        return [
            self._describe_floats(row) if self.layout.is_float else self._describe_integers(row) for row in self._words
        ]

    def _describe_integers(self, words: list[int]) -> dict[str, Any]:
        layout = self.layout
        counts = words[INTEGER_HEAD:]
        count, top = sum(counts), (1 << layout.bits) - 1
        mean, deviation = _moments(count, Fraction(words[SUM]), Fraction(words[SQUARES]), layout.least)
        return {
            "samples": count,
            "min": top - (words[LEAST] - 1) + layout.least if count else None,
            "max": words[MOST] - 1 + layout.least if count else None,
            "mean": mean,
            "standard_deviation": deviation,
            "histogram": {"from": layout.least, "bin_width": 1 << layout.shift, "counts": counts},
        }

    def _describe_floats(self, words: list[int]) -> dict[str, Any]:
        layout = self.layout
        total, squares, count, bins = 0, 0, 0, []  # the sums in units of the smallest subnormal, and of its square
        for exponent in range(layout.bins - 1):
            at = FLOAT_HEAD + exponent * layout.bin_words
            row = words[at : at + layout.bin_words]
            inside = row[POSITIVE] + row[NEGATIVE]
            if not inside:
                continue
            count += inside
            parts, scale = row[PARTS:], max(exponent, 1) - 1
            sums, second = parts[: len(layout.sums)], parts[len(layout.sums) :]
            total += sum(part << shift for part, shift in zip(sums, layout.sums, strict=True)) << scale
            squares += sum(part << shift for part, shift in zip(second, layout.squares, strict=True)) << 2 * scale
            bins.append([exponent - layout.bias if exponent else None, row[NEGATIVE], row[POSITIVE]])
        unit = Fraction(2) ** (1 - layout.bias - layout.mantissa)
        mean, deviation = _moments(count, total * unit, squares * unit**2, 0)
        most = (1 << layout.bits) - 1
        return {
            "samples": count,
            "nan": words[NANS],
            "infinite": [words[MINUS_INFINITE], words[INFINITE]],
            "min": self._from_key(most - (words[LEAST] - 1)) if count else None,
            "max": self._from_key(words[MOST] - 1) if count else None,
            "mean": mean,
            "standard_deviation": deviation,
            "histogram": {"bins": "[exponent of 2, negative, positive]; null: zero and subnormal", "counts": bins},
        }

    def _from_key(self, key: int) -> float:
        """The float of an order-preserving key: its bits, all flipped if negative, otherwise with the sign bit set."""
        bits = self.layout.bits
        sign = 1 << (bits - 1)
        pattern = key ^ sign if key & sign else key ^ ((1 << bits) - 1)
        return float(np.array(pattern, f"u{bits // 8}").view(self.dtype))


def _add(words: list[int], row: Iterable[tuple[int, int]]) -> None:
    for place, value in row:
        if place in (LEAST, MOST):
            words[place] = max(words[place], value & _UNSIGNED)
        else:
            words[place] += value


def sparse(partial: NDArray[np.int64]) -> list[dict[str, int]]:
    """The nonzero words of each channel by index, ready for JSON."""
    return [{str(place): int(row[place]) for place in np.flatnonzero(row)} for row in partial]


def _moments(count: int, total: Fraction, squares: Fraction, offset: int) -> tuple[float | None, float | None]:
    """Mean and standard deviation from exact sums, each rounded once."""
    if not count:
        return None, None
    mean = total / count
    return float(mean + offset), _square_root(squares / count - mean * mean)


def _square_root(value: Fraction) -> float:
    """Computed to more than 53 bits, then rounded."""
    if value == 0:
        return 0.0
    shift = max(0, 80 + (value.denominator.bit_length() - value.numerator.bit_length()) // 2 + 1)
    root = math.isqrt((value.numerator << 2 * shift) // value.denominator)
    return float(Fraction(root, 1 << shift))
