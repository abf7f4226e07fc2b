"""Test images and their expected statistics, for the tests and benchmarks of every device.

The oracle computes sample by sample with Python's integers and fractions; it shares no code with the partials.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.statistics import DTYPES, Totals, summarise

Array = NDArray[Any]

SHAPES: tuple[tuple[tuple[int, ...], int | None], ...] = (
    ((1,), None), ((0, 3), 1), ((53, 31), None), ((13, 17, 3), 2), ((4, 31, 7), 0), ((5, 2, 41), 1), ((1031,), None),
)  # fmt: skip
CONTENTS = ("random", "constant", "extreme", "few", "special")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One generated image."""

    shape: tuple[int, ...]
    channel_axis: int | None
    dtype: str
    content: str = "random"

    @property
    def name(self) -> str:
        return f"{'x'.join(map(str, self.shape))}-{self.channel_axis}-{self.dtype}-{self.content}"

    def image(self) -> Array:
        """The input; the same for every call."""
        return made(self.content, self.shape, np.dtype(self.dtype))

    @property
    def channels(self) -> int:
        return 1 if self.channel_axis is None else self.shape[self.channel_axis]

    def apply(self, image: Any, **options: Any) -> Any:
        """The public function on `image`, an array of any supported library."""
        return summarise(image, channel_axis=self.channel_axis, **options)

    def exact(self) -> list[dict[str, Any]]:
        image = self.image()
        rows = [image.reshape(-1)] if self.channel_axis is None else np.moveaxis(image, self.channel_axis, 0)
        return [exact(np.asarray(row).reshape(-1)) for row in rows]

    def check(self, partial: Array, expected: Sequence[dict[str, Any]] | None = None) -> None:
        """AssertionError unless a partial, copied to the host, gives exactly the definition's statistics."""
        totals = Totals(self.dtype, self.channels)
        totals.add(partial)
        found, wanted = totals.describe(), self.exact() if expected is None else expected
        assert repr(found) == repr(wanted), f"{self.name}: {_difference(found, wanted)}"

    def bytes(self) -> int:
        """Least traffic: the image read once."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def flops(self) -> int:
        """Two extremes, two sums, a square and a bin for each sample."""
        return 6 * math.prod(self.shape)


def _difference(found: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]]) -> str:
    for channel, (one, other) in enumerate(zip(found, wanted, strict=True)):
        for name, value in other.items():
            if repr(one[name]) != repr(value):
                return f"channel {channel}, {name}: got {one[name]}, expected {value}"
    return "another shape"


def made(content: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    rng = np.random.default_rng([len(shape), dtype.itemsize, *map(ord, content)])
    count = math.prod(shape)
    if dtype.kind != "f":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        integers: dict[str, Callable[[], Array]] = {
            "random": lambda: rng.integers(low, high, count, dtype, endpoint=True),
            "constant": lambda: np.full(count, high - 1, dtype),
            "extreme": lambda: rng.choice(np.array([low, high], dtype), count),
            "few": lambda: rng.integers(3, 9, count).astype(dtype),
            "special": lambda: np.full(count, high, dtype),
        }
        return integers[content]().reshape(shape)
    limits = np.finfo(dtype)
    with np.errstate(over="ignore"):
        bits = rng.integers(0, 1 << (8 * dtype.itemsize), count, f"u{dtype.itemsize}", endpoint=False)
    made_by: dict[str, Callable[[], Array]] = {
        "random": lambda: rng.standard_normal(count) * 2.0 ** rng.integers(-12, 12, count),
        "constant": lambda: np.full(count, -0.1),
        "extreme": lambda: rng.choice([limits.max, -limits.max, limits.tiny, limits.smallest_subnormal], count),
        "few": lambda: rng.uniform(1, 2, count),
        "special": lambda: bits.view(dtype),  # NaN, infinite, subnormal, every power of two
    }
    floats = np.asarray(made_by[content]()).astype(dtype)
    if content == "special" and count:
        floats[:: max(1, count // 7)] = np.resize(
            [0.0, -0.0, np.nan, np.inf, -np.inf], len(floats[:: max(1, count // 7)])
        )
    return floats.reshape(shape)


def exact(samples: Array) -> dict[str, Any]:
    """The definition, of one channel."""
    finite = [
        Fraction(x) if samples.dtype.kind != "f" else Fraction(float(x)) for x in samples.tolist() if math.isfinite(x)
    ]
    low = min(finite, default=None)
    high = max(finite, default=None)
    mean = sum(finite, Fraction(0)) / len(finite) if finite else None
    variance = sum(((x - mean) ** 2 for x in finite), Fraction(0)) / len(finite) if mean is not None else None
    moments = {
        "mean": None if mean is None else float(mean),
        "standard_deviation": None if variance is None else root(variance),
    }
    if samples.dtype.kind != "f":
        limits = np.iinfo(samples.dtype)
        width = (limits.max - limits.min + 1) // 256
        places = Counter((int(x) - limits.min) // width for x in samples.tolist())
        counts = [places[place] for place in range(256)]
        extremes = {"min": None if low is None else int(low), "max": None if high is None else int(high)}
        histogram = {"from": int(limits.min), "bin_width": int(width), "counts": counts}
        return {"samples": len(finite), **extremes, **moments, "histogram": histogram}
    with np.errstate(invalid="ignore"):
        wide = samples.astype(np.float64)
    ordered = sorted(wide[np.isfinite(wide)].tolist(), key=lambda x: (x, math.copysign(1, x)))
    bins: Counter[tuple[int | None, bool]] = Counter()
    for x in ordered:
        exponent = math.frexp(x)[1] - 1 if abs(x) >= np.finfo(samples.dtype).smallest_normal else None
        bins[exponent, math.copysign(1, x) > 0] += 1
    exponents = sorted({exponent for exponent, _ in bins}, key=lambda e: -(10**6) if e is None else e)
    return {
        "samples": len(finite),
        "nan": int(np.isnan(wide).sum()),
        "infinite": [int(np.isneginf(wide).sum()), int(np.isposinf(wide).sum())],
        "min": ordered[0] if ordered else None,
        "max": ordered[-1] if ordered else None,
        **moments,
        "histogram": {
            "bins": "[exponent of 2, negative, positive]; null: zero and subnormal",
            "counts": [[e, bins[e, False], bins[e, True]] for e in exponents],
        },
    }


def root(value: Fraction) -> float:
    """The float nearest to a square root, by bisection."""
    if value == 0:
        return 0.0
    exponent = (value.numerator.bit_length() - value.denominator.bit_length()) // 2
    low, high = Fraction(2) ** (exponent - 2), Fraction(2) ** (exponent + 2)
    for _ in range(90):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * middle <= value else (low, middle)
    return float(low)


def cases() -> Iterator[Case]:
    for shape, axis in SHAPES:
        for dtype in DTYPES:
            yield Case(shape=shape, channel_axis=axis, dtype=dtype)
    for dtype in DTYPES:
        for content in CONTENTS[1:]:
            yield Case(shape=(11, 37, 3), channel_axis=2, dtype=dtype, content=content)
