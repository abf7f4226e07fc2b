"""Test inputs of smoothing with their expected results, for the tests and benchmarks of all devices.

Two oracles compute them by other methods than the code under test. `exact` is the definition in real numbers: it
gathers every window from the extended image, in int64 for boxes of integers, float64 otherwise. `bits` follows the
contract of `kernels.smoothing` operation by operation, with each fused multiply-add computed exactly and rounded once,
and exact Gaussians in integers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.smoothing import DTYPES, MODES, byte_sums, gaussian_filter, uniform_filter, words
from kernels.smoothing.borders import border_indices
from kernels.smoothing.window import RUN, Window, box_window, gaussian_windows

Array = NDArray[Any]

CONTENTS = ("random", "constant", "extreme", "checkerboard", "impulse")
# 0.5 for rounding to integers, 0.1 for quantised weights and float32 sums: the contract's bound.
INTEGER_GAUSSIAN_TOLERANCE = 0.6
# Decimated Gaussians of floats, relative to the largest magnitude.
DECIMATED_TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of `box` (sizes) or `gaussian` (sigmas) on a generated image."""

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[int, ...]
    sizes: tuple[int, ...] | None = None  # box: samples along each of `axes`
    sigmas: tuple[float, ...] | None = None  # Gaussian: standard deviation along each of `axes`
    orders: tuple[int, ...] | None = None  # Gaussian: derivatives, which the oracles do not know
    modes: tuple[str, ...]
    cval: float = 0
    content: str = "random"

    @property
    def name(self) -> str:
        what = f"box{'x'.join(map(str, self.sizes))}" if self.sizes else f"sigma{'x'.join(map(str, self.sigmas or ()))}"
        where = f"{'x'.join(map(str, self.shape))}@{','.join(map(str, self.axes))}"
        return f"{what}-{self.dtype}-{where}-{'+'.join(dict.fromkeys(self.modes))}-{self.content}"

    def image(self) -> Array:
        """The input, C-contiguous, identical in every call."""
        return _content(self.content, self.shape, np.dtype(self.dtype))

    def apply(self, image: Any, **options: Any) -> Any:
        """The public function on `image`, an array of any supported library."""
        common = {"mode": self.modes, "cval": self.cval, "axes": self.axes, **options}
        if self.sizes is not None:
            return uniform_filter(image, self.sizes, **common)
        assert self.sigmas is not None
        return gaussian_filter(image, self.sigmas, order=self.orders or 0, **common)

    def windows(self) -> list[Window]:
        if self.sizes is not None:
            made = [box_window(a, s, m) for a, s, m in zip(self.axes, self.sizes, self.modes, strict=True)]
        else:
            made = gaussian_windows(
                self.axes, self.sigmas or (), self.modes, np.dtype(self.dtype), orders=self.orders
            )  # fmt: skip
        return sorted((window for window in made if window.taps > 1), key=lambda window: window.axis)

    def exact(self) -> Array:
        """Boxes of integers: the result, int64. All others: the real number, rounded only to float64."""
        values = _extended(self.image(), self.windows(), self.cval)
        integers = values.dtype.kind != "f" and self.sizes is not None
        values = values.astype(np.int64 if integers else np.float64)
        count = 1
        for window in self.windows():
            weights = self._real_weights(window)
            values = sum(weights[k] * _shifted(values, window, k) for k in range(window.taps))
            count *= window.taps
        if integers:
            return (2 * values + count) // (2 * count)
        return np.asarray(values / count if self.sizes is not None else values)

    def _real_weights(self, window: Window) -> Array:
        if self.sizes is not None:
            return np.ones(window.taps, np.int64)
        assert self.sigmas is not None
        sigma = self.sigmas[self.axes.index(window.axis)]
        distance = np.arange(-window.before, window.after + 1)
        weights = np.exp(-(distance**2) / (2 * sigma**2)) if sigma else 1.0 * (distance == 0)
        return np.asarray(weights / weights.sum())

    def bits(self) -> Array:
        """The expected bits, in the image's dtype."""
        image, windows, dtype = self.image(), self.windows(), np.dtype(self.dtype)
        if self.sizes is not None and dtype.kind != "f":
            return self.exact().astype(dtype)
        values = _extended(image, windows, self.cval)
        if not windows:
            return values
        if self.sizes is not None:
            for window in windows:
                values = _in_runs(values, window) if window.is_long_box else _doubled(values, window, window.taps)
            return np.asarray(values * dtype.type(1 / np.prod([float(window.taps) for window in windows])))
        if windows[0].exact:
            return _weighted_in_bytes(values, windows).astype(dtype)
        if windows[0].words:
            return _weighted_in_words(values, windows).astype(dtype)
        values = _smoothed(values.astype(np.float64 if dtype == np.float64 else np.float32), windows)
        return values if dtype.kind == "f" else np.rint(values).astype(dtype)

    def tolerance(self) -> float:
        """Largest difference of a correct result from `exact`."""
        dtype = np.dtype(self.dtype)
        windows = self.windows()
        if dtype.kind != "f" and self.sizes is not None:
            return 0
        if dtype.kind != "f":
            return INTEGER_GAUSSIAN_TOLERANCE
        largest = max(float(np.abs(self.image()).max()), abs(float(self.cval)))
        if any(window.decimation for window in windows):
            return DECIMATED_TOLERANCE * largest
        roundings = sum(window.taps for window in windows) + 2
        return roundings * float(np.finfo(dtype).eps) * largest

    def check(self, result: Array) -> None:
        """AssertionError unless every bit of the result, a NumPy array, is right."""
        expected = self.exact()
        assert result.shape == expected.shape, f"{self.name}: shape {result.shape}, expected {expected.shape}"
        assert result.dtype == np.dtype(self.dtype), f"{self.name}: dtype {result.dtype}"
        error = np.abs(result.astype(np.float64) - expected)
        worst = np.unravel_index(int(np.argmax(np.where(np.isnan(error), np.inf, error))), error.shape)
        story = f"{self.name}: at {tuple(map(int, worst))} got {result[worst]}, expected {expected[worst]}"
        assert error[worst] <= self.tolerance(), story
        np.testing.assert_array_equal(result, self.bits(), err_msg=self.name, strict=True)

    def bytes(self) -> int:
        """Least traffic: the image read once and the result written once."""
        lengths = list(self.shape)
        for window in self.windows():
            lengths[window.axis] = window.output_length(lengths[window.axis])
        samples = int(np.prod(self.shape)) + int(np.prod(lengths))
        return samples * np.dtype(self.dtype).itemsize

    def flops(self) -> int:
        """Operations of the definition, per axis: taps - 1 adds (box) or radius × (add, multiply, add) + 1."""
        samples = int(np.prod(self.shape))
        if self.sizes is not None:
            return samples * (sum(window.taps - 1 for window in self.windows()) + 1)
        return samples * sum(3 * window.after + 1 for window in self.windows())


def cases() -> Iterator[Case]:
    """Every dtype with every mode, odd and even sizes, interleaved channels, single and leading axes, images shorter
    than the window, single samples, extreme values. The images are small, with prime sides: a few milliseconds each."""
    for dtype, mode in itertools.product(DTYPES, MODES):
        yield Case(shape=(37, 53), dtype=dtype, axes=(0, 1), sizes=(4, 7), modes=(mode,) * 2, cval=7)
        yield Case(shape=(23, 29, 3), dtype=dtype, axes=(0, 1), sizes=(5, 2), modes=(mode,) * 2, cval=9)
        yield Case(shape=(37, 31), dtype=dtype, axes=(0, 1), sigmas=(1.0, 2.1), modes=(mode,) * 2, cval=7)
        yield Case(shape=(31, 29, 3), dtype=dtype, axes=(0, 1), sigmas=(2.5, 0.7), modes=(mode,) * 2, cval=9)
    for dtype, content in itertools.product(DTYPES, CONTENTS):
        yield Case(shape=(41, 43), dtype=dtype, axes=(0, 1), sizes=(31, 3), modes=("reflect",) * 2, content=content)
        yield Case(shape=(41, 43), dtype=dtype, axes=(0, 1), sigmas=(3.3, 1.0), modes=("wrap",) * 2, content=content)
    for dtype in DTYPES:
        yield from _shapes(dtype)
        yield from _wide(dtype)
    for dtype, mode in itertools.product(("uint8", "uint16", "int16", "float32"), MODES):
        yield from _volumes(dtype, mode)
    for mode, content in itertools.product(MODES, ("random", "extreme")):
        # uint8: exact up to the longest reach, some with an axis that is not filtered; the last reaches too far.
        for sigmas in ((7.6, 5.0), (3.0, 7.6), (0.1, 2.0), (2.0, 0.1), (1.0, 8.2)):
            yield Case(
                shape=(67, 139), dtype="uint8", axes=(0, 1), sigmas=sigmas, modes=(mode,) * 2, cval=251, content=content
            )


def _shapes(dtype: str) -> Iterator[Case]:
    for first, second in itertools.product(MODES, MODES):
        yield Case(shape=(17, 19), dtype=dtype, axes=(0, 1), sizes=(3, 6), modes=(first, second), cval=5)
    for mode in MODES[:-1]:
        yield Case(shape=(3, 5), dtype=dtype, axes=(0, 1), sizes=(9, 16), modes=(mode,) * 2, cval=3)
        yield Case(shape=(5, 2), dtype=dtype, axes=(0, 1), sigmas=(4.0, 3.0), modes=(mode,) * 2, cval=3)
        yield Case(shape=(1, 1), dtype=dtype, axes=(0, 1), sizes=(5, 255), modes=(mode,) * 2, cval=3)
    for channels in (2, 4, 5, 8, 11):
        yield Case(shape=(7, 13, channels), dtype=dtype, axes=(0, 1), sizes=(3, 4), modes=("mirror", "wrap"))
        yield Case(shape=(13, channels), dtype=dtype, axes=(0,), sizes=(3,), modes=("mirror",))
        yield Case(shape=(13, channels), dtype=dtype, axes=(0,), sigmas=(1.0,), modes=("mirror",))
    yield Case(shape=(211,), dtype=dtype, axes=(0,), sizes=(255,), modes=("reflect",))
    yield Case(shape=(211,), dtype=dtype, axes=(0,), sizes=(2,), modes=("nearest",))
    yield Case(shape=(211,), dtype=dtype, axes=(0,), sigmas=(5.0,), modes=("mirror",))
    yield Case(shape=(9, 17), dtype=dtype, axes=(1,), sizes=(1,), modes=("reflect",))


def _wide(dtype: str) -> Iterator[Case]:
    """Long boxes, and decimated Gaussians of one, two and three stages."""
    for mode in MODES[:-1]:
        yield Case(shape=(5, 3, 2), dtype=dtype, axes=(0, 1), sizes=(301, 400), modes=(mode,) * 2, cval=3)
        yield Case(shape=(19, 311), dtype=dtype, axes=(0, 1), sizes=(127, 113), modes=(mode, "mirror"), cval=3)
        yield Case(shape=(4, 3), dtype=dtype, axes=(0, 1), sizes=(127, 65), modes=(mode, "mirror"), cval=3)
    yield Case(shape=(9, 4, 5), dtype=dtype, axes=(0, 1), sizes=(70, 81), modes=("mirror", "reflect"), cval=3)
    for sizes in ((7, 70), (104, 7)):  # a short box and a long one of floats
        yield Case(shape=(23, 37, 3), dtype=dtype, axes=(0, 1), sizes=sizes, modes=("wrap", "constant"), cval=3)
    yield Case(shape=(1029, 5), dtype=dtype, axes=(0, 1), sizes=(1023, 2), modes=("valid", "wrap"))
    if dtype == "float64":  # the oracle's exact float64 arithmetic is slow
        yield Case(shape=(3, 2), dtype=dtype, axes=(0, 1), sigmas=(9.0, 1.0), modes=("wrap", "constant"), cval=3)
        return
    for mode, content in itertools.product(MODES[:-1], ("random", "extreme")):
        common: dict[str, Any] = {"dtype": dtype, "axes": (0, 1), "modes": (mode,) * 2, "cval": 3, "content": content}
        yield Case(shape=(17, 13, 2), sigmas=(9.0, 13.0), **common)
        yield Case(shape=(29, 37), sigmas=(1.5, 55.0), **common)
        yield Case(shape=(37, 29), sigmas=(30.0, 0.0), **common)
    yield Case(shape=(229, 191), dtype=dtype, axes=(0, 1), sigmas=(14.0, 9.0), modes=("valid",) * 2)
    yield Case(shape=(1, 7), dtype=dtype, axes=(1,), sigmas=(450.0,), modes=("reflect",))
    yield Case(
        shape=(5, 4, 3), dtype=dtype, axes=(0, 1, 2), sigmas=(9.0, 2.0, 10.0), modes=("mirror", "constant", "wrap"),
        cval=7,
    )  # fmt: skip


def _volumes(dtype: str, mode: str) -> Iterator[Case]:
    def case(axes: tuple[int, ...], shape: tuple[int, ...] = (11, 13, 17), **what: Any) -> Case:
        return Case(shape=shape, dtype=dtype, axes=axes, modes=(mode,) * len(axes), cval=11, **what)

    yield case((0, 1, 2), sizes=(3, 4, 5))
    yield case((0, 2), sizes=(6, 3))
    yield case((1,), sizes=(5,))
    yield case((0, 1, 2), sigmas=(0.5, 1.0, 1.5))
    yield case((0, 2), sigmas=(1.0, 0.8))
    yield case((0, 1, 2, 3), shape=(5, 4, 7, 6, 2), sizes=(2, 3, 4, 5))
    if mode != "valid":
        yield case((0, 1, 2), shape=(3, 2, 5), sizes=(41, 42, 43))  # more samples than an int32 sum holds


def _content(content: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    rng = np.random.default_rng(len(shape) + sum(shape))
    if dtype.kind == "f":
        low, high = -3.0, 5.0
        random = (rng.standard_normal(shape) * 1000).astype(dtype)
    else:
        low, high = float(np.iinfo(dtype).min), float(np.iinfo(dtype).max)
        random = rng.integers(int(low), int(high), shape, dtype, endpoint=True)
    if content == "random":
        return random
    image = np.full(shape, high, dtype)
    if content == "extreme":
        image = np.where(rng.integers(0, 2, shape) == 1, dtype.type(high), dtype.type(low))
    elif content == "checkerboard":
        image[np.indices(shape).sum(0) % 2 == 1] = low
    elif content == "impulse":
        image[...] = 0
        image[tuple(n // 2 for n in shape)] = high
    return image


def _extended(image: Array, windows: list[Window], cval: float) -> Array:
    """The image extended by what its windows see beyond the edges, along every axis before any is filtered."""
    for window in windows:
        length = image.shape[window.axis]
        if window.mode == "valid":
            continue
        at = border_indices(np.arange(-window.before, length + window.after), length, window.mode)
        image = np.take(image, np.maximum(at, 0), window.axis)
        np.moveaxis(image, window.axis, 0)[at < 0] = cval
    return image


def _shifted(values: Array, window: Window, k: int, taps: int | None = None) -> Array:
    """The samples at tap k of every window of `taps` samples."""
    count = values.shape[window.axis] - (taps or window.taps) + 1
    return np.moveaxis(np.moveaxis(values, window.axis, 0)[k : k + count], 0, window.axis)


def _doubled(values: Array, window: Window, taps: int) -> Array:
    """Sums of `taps` neighbours, built as in the contract."""
    if taps == 1:
        return values
    half = _doubled(values, window, taps // 2)
    count = values.shape[window.axis] - 2 * (taps // 2) + 1
    first, second = (np.take(half, np.arange(k, k + count), window.axis) for k in (0, taps // 2))
    if taps % 2 == 0:
        return np.asarray(first + second)
    odd = np.take(first + second, np.arange(count - 1), window.axis)
    return np.asarray(odd + np.take(values, np.arange(taps - 1, taps - 1 + count - 1), window.axis))


def _in_runs(values: Array, window: Window) -> Array:
    """Sums of a long box's samples: every head, tail and whole run by itself, as in the contract."""
    lines, first = np.moveaxis(values, window.axis, 0), window.lead
    of_runs = replace(window, axis=0)
    sums = []
    for start in range(first, first + len(lines) - window.taps + 1):
        end = start + window.taps - 1
        rest, begin = start // RUN * RUN + RUN, end // RUN * RUN
        head = list(itertools.accumulate(lines[start - first : rest - first][::-1]))[-1]
        tail = list(itertools.accumulate(lines[begin - first : end + 1 - first]))[-1]
        runs = [list(itertools.accumulate(lines[k - first : k + RUN - first]))[-1] for k in range(rest, begin, RUN)]
        fewest = (window.taps - 1) // RUN - 1
        whole = _doubled(np.array(runs[:fewest]), of_runs, fewest)[0]
        sums.append((head + tail) + (whole + runs[fewest] if len(runs) > fewest else whole))
    return np.moveaxis(np.array(sums), 0, window.axis)


def _weighted(values: Array, window: Window) -> Array:
    assert window.half_weights is not None
    total = values.dtype.type(window.half_weights[0]) * _shifted(values, window, window.before)
    for k, weight in enumerate(window.half_weights[1:], start=1):
        pair = _shifted(values, window, window.before - k) + _shifted(values, window, window.before + k)
        fused = _fma_float64 if values.dtype == np.float64 else _fma_float32
        total = fused(weight, pair, total)
    return np.asarray(total)


def _smoothed(values: Array, windows: list[Window]) -> Array:
    """A Gaussian whose sums are floats, from the extended image."""
    grids = []
    for window in windows:
        if window.decimation is None:
            values = _weighted(values, window)
            continue
        first = window.offset + (window.before if window.mode == "valid" else 0)
        last = first + values.shape[window.axis] - window.taps  # of the results
        grid = (window, window.decimation.decimated(first, last), window.decimation.interpolated(first, last))
        values = _level(values, grid, 0, first - window.before)
        grids.append(grid)
    for level, grid in itertools.product(range(1, 9), grids):
        values = _level(values, grid, level, grid[1][level][0]) if level + 1 < len(grid[1]) else values
    for window, _, _ in grids:
        assert window.half_weights is not None
        radius = len(window.half_weights) - 1
        coarse = Window(axis=window.axis, before=radius, after=radius, mode="valid", half_weights=window.half_weights)
        values = _weighted(values, coarse)
    for level, (window, _, spans) in itertools.product(range(8, -1, -1), grids):
        assert window.decimation is not None
        if level + 1 < len(spans):
            stage = window.decimation.stages[level]
            found = range(spans[level][0], spans[level][1] + 1)
            starts = (i // stage.factor - stage.order // 2 + 1 - spans[level + 1][0] for i in found)
            weights = (stage.up[i % stage.factor] for i in found)
            values = _chains(values, window.axis, list(zip(starts, weights, strict=True)))
    return values


def _level(values: Array, grid: tuple[Window, Any, Any], level: int, held: int) -> Array:
    """The next coarser grid; `held` is the coordinate of the first of `values` along the axis."""
    window, spans, _ = grid
    assert window.decimation is not None
    stage = window.decimation.stages[level]
    coarse = range(spans[level + 1][0], spans[level + 1][1] + 1)
    return _chains(values, window.axis, [(j * stage.factor - stage.reach - held, stage.down) for j in coarse])


def _chains(values: Array, axis: int, sums: list[tuple[int, tuple[float, ...]]]) -> Array:
    """Of each (start, weights): w[0] x[start], then fma(w[k], x[start + k], …) for k = 1, 2, …"""
    fused = _fma_float64 if values.dtype == np.float64 else _fma_float32
    lines = np.moveaxis(values, axis, 0)
    starts = np.array([start for start, _ in sums])
    # Of all sums at once, as many for each k: [k, sum, 1 …]
    weights = np.array([each for _, each in sums]).T.reshape(-1, len(sums), *[1] * (values.ndim - 1))
    total = weights[0].astype(values.dtype) * lines[starts]
    for k, weight in enumerate(weights[1:], start=1):
        total = fused(weight, lines[starts + k], total)
    return np.moveaxis(total, 0, axis)


def _weighted_in_bytes(values: Array, windows: list[Window]) -> Array:
    """A Gaussian by the definition in byte_sums.py, in int64."""
    x, weights = values.astype(np.int64), [byte_sums.byte_weights(window.half_weights or ()) for window in windows]
    first = _over_window(x, windows[0], weights[0].whole)
    if len(windows) == 1:
        return (first + (1 << 15)) >> 16
    v, second = first >> 8, weights[1]
    high, low = (
        _over_window(each, windows[1], half) for each, half in ((v >> 8, second.whole), (v & 255, second.upper))
    )
    return (high + low + second.bias) >> 16


def _weighted_in_words(values: Array, windows: list[Window]) -> Array:
    """A Gaussian by the definition in words.py, in int64."""
    middle = words.MIDDLE if values.dtype.kind == "i" else 0
    down, across = windows
    first, second = words.first_weights(down.half_weights or ()), words.second_weights(across.half_weights or ())
    x = values.astype(np.int64) + middle
    v = _over_window(x, down, first.upper) + _over_window(x >> 8, down, first.lower) + first.bias >> 9 + first.finer
    total = _over_window(v >> 7, across, second.upper) + _over_window(v >> 15, across, second.lower)
    return (total + _over_window(v & 127, across, 2 * second.top) + second.bias >> 16 + second.finer) - middle


def _over_window(values: Array, window: Window, half: Array) -> Array:
    whole = np.concatenate((half[:0:-1], half))
    return np.asarray(sum(int(whole[k]) * _shifted(values, window, k) for k in range(window.taps)))


def _fma_float32(weight: float | Array, x: Array, total: Array) -> Array:
    """weight * x + total, rounded once. The product of two float32 is exact in float64; the sum is rounded to odd, so
    that rounding it to float32 is as good as a single rounding."""
    return _odd_sum(weight * x.astype(np.float64), total.astype(np.float64)).astype(np.float32)


def _fma_float64(weight: float | Array, x: Array, total: Array) -> Array:
    """The same, without a wider type: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved
    algorithms using rounding to odd" (2008). Exact unless something overflows or underflows."""
    product = np.asarray(weight * x)
    (a, b), (c, d) = (_halves(np.asarray(each)) for each in (weight, x))
    lost = b * d - (((product - a * c) - b * c) - a * d)  # of the product: Dekker
    high, low = _two_sum(total, lost)
    whole, rest = _two_sum(product, high)
    return np.asarray(whole + _odd_sum(low, rest))


def _halves(x: Array) -> tuple[Array, Array]:
    """Two parts of 26 bits: products of them are exact. Veltkamp."""
    scaled = x * (2.0**27 + 1)
    high = scaled - (scaled - x)
    return high, x - high


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """The rounded sum, and what rounding lost. Knuth."""
    rounded = a + b
    part = rounded - a
    return rounded, (a - (rounded - part)) + (b - part)


def _odd_sum(a: Array, b: Array) -> Array:
    """The sum, rounded to odd: the last bit records a loss."""
    rounded, lost = _two_sum(a, b)
    even = rounded.view(np.int64) % 2 == 0
    return np.where((lost != 0) & even, np.nextafter(rounded, np.where(lost > 0, np.inf, -np.inf)), rounded)
