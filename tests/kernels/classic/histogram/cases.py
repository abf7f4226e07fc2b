"""Test inputs for histograms and their expected results, for the tests and benchmarks of every device.

The oracle sorts the values and searches them for the edges of the bins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.classic.histogram import INTEGER_BINS, histogram

Array = NDArray[Any]

SIZES = (0, 1, 2, 31, 1024, 1031, 16384, 65537, 100003)
CONTENTS = ("uniform", "equal", "narrow", "runs", "ends")
CHANNELS = (((101, 3), 1), ((3, 101, 7), 0), ((67, 2, 31), 1), ((1009, 4), -1), ((331, 7), 1), ((5, 1), 1))
FLOAT_CONTENTS = ("normal", "on edges", "special", "outside")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One array of generated values."""

    dtype: str
    shape: tuple[int, ...]
    content: str = "uniform"
    bins: int = 256  # of floats
    channel_axis: int | None = None

    @property
    def name(self) -> str:
        parts = [self.dtype, "x".join(map(str, self.shape)), self.content.replace(" ", "-")]
        parts += [f"{self.bins}bins"] * (self.edges() is not None)
        return "-".join([*parts, *([f"channels{self.channel_axis}"] * (self.channel_axis is not None))])

    def edges(self) -> Array | None:
        """Unevenly spaced edges, not all representable in float32; None for integers."""
        if self.dtype in INTEGER_BINS:
            return None
        inner = np.sort(np.random.default_rng(self.bins).normal(size=self.bins + 1))
        return inner + np.arange(self.bins + 1) * 1e-6

    def values(self) -> Array:
        """The input; the same for every call."""
        size = int(np.prod(self.shape))
        rng, edges = np.random.default_rng(size), self.edges()
        if edges is None:
            values = self._integers(size, rng)
        else:
            values = rng.normal(size=size)
            if self.content == "on edges":
                values = rng.choice(edges, size)
            elif self.content == "special":
                values[::3] = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, edges[0], edges[-1]], values[::3].size)
            elif self.content == "outside":
                values += 100
        return values.astype(self.dtype).reshape(self.shape)

    def _integers(self, size: int, rng: np.random.Generator) -> Array:
        bins = INTEGER_BINS[self.dtype]
        if self.content == "equal":
            return np.full(size, bins * 3 // 4)
        if self.content == "narrow":
            return rng.integers(7, 10, size)
        if self.content == "runs":
            return np.repeat(rng.integers(0, bins, size // 37 + 1), 37)[:size]
        if self.content == "ends":
            return rng.choice([0, bins - 1], size)
        return rng.integers(0, bins, size)

    def apply(self, values: Any, **options: Any) -> Any:
        """The public function on an array of any supported library."""
        return histogram(values, self.edges(), channel_axis=self.channel_axis, **options)

    def exact(self) -> Array:
        """Counts int64 [bins] or [channels, bins]."""
        values = self.values()
        if self.channel_axis is None:
            return self._counted(values.reshape(-1))
        channels = np.moveaxis(values, self.channel_axis, 0)
        return np.stack([self._counted(channel.reshape(-1)) for channel in channels])

    def _counted(self, values: Array) -> Array:
        edges = self.edges()
        if edges is None:
            ordered = np.sort(values.astype(np.int64))
            below = np.searchsorted(ordered, np.arange(INTEGER_BINS[self.dtype] + 1), side="left")
            return np.diff(below)
        ordered = np.sort(values[~np.isnan(values)].astype(np.float64))
        below = np.searchsorted(ordered, edges, side="left")
        below[-1] = np.searchsorted(ordered, edges[-1], side="right")
        return np.diff(below)

    def check(self, result: Any) -> None:
        """AssertionError unless every count of a result, copied to the host, is right."""
        assert result.dtype == np.int64, f"{self.name}: dtype {result.dtype}"
        np.testing.assert_array_equal(result, self.exact(), err_msg=self.name, strict=True)

    def bytes(self) -> int:
        """Minimum traffic: every value read once."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    def flops(self) -> int:
        return int(np.prod(self.shape))


def cases() -> Iterator[Case]:
    """Every dtype, size and content; one to seven channels on any axis; one to many bins; small."""
    for dtype in INTEGER_BINS:
        for size in SIZES:
            yield Case(dtype=dtype, shape=(size,))
        for content in CONTENTS[1:]:
            yield Case(dtype=dtype, shape=(65537,), content=content)
        for shape, axis in CHANNELS:
            yield Case(dtype=dtype, shape=shape, channel_axis=axis)
            yield Case(dtype=dtype, shape=shape, channel_axis=axis, content="equal")
    for dtype in ("float32", "float64"):
        for size in SIZES:
            yield Case(dtype=dtype, shape=(size,), content="normal")
        for bins in (1, 2, 3, 255, 1000, 70001):
            for content in FLOAT_CONTENTS:
                yield Case(dtype=dtype, shape=(10007,), content=content, bins=bins)
        yield Case(dtype=dtype, shape=(1009, 3), channel_axis=1, content="normal", bins=50)
