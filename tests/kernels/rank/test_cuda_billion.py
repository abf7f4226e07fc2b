"""A thousand million random samples through rank filters and morphology on a CUDA device: each result is right.

A result of rank k is right if it is larger than at most k samples of its window, and not smaller than more than k of
them: so counting shows it without sorting. Minima and maxima are taken sample by sample of the window.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from kernels import morphology, rank
from kernels.rank import MODES
from kernels.smoothing.borders import border_indices
from tests.kernels.large_images import LEAST_SAMPLES, OFFSETS, at_offset, poisoned, prime_from

Array = Any

DTYPES = ("uint8", "uint16", "int16", "float32")
# Percentile and window: they cover every kernel of boxes in production, and footprints.
RANKS: list[tuple[float, tuple[int, ...] | Array]] = [
    *((50.0, (side, side)) for side in (3, 5, 7, 9, 11, 13, 15, 21, 31)),
    *((50.0, (side, side, side)) for side in (3, 5)),
    *((50.0, size) for size in ((4, 6), (12, 25))),
    *((20.0, size) for size in ((5, 7), (17, 17))),
    (50.0, rank.disk(3)),
    (90.0, rank.disk(7)),
]
EXTREMES = [(3, 3), (7, 15), (51, 51), (101, 65), (255, 255)]  # of minima, then of maxima
MORPHOLOGY = [
    ("grey_opening", (5, 5)),
    ("grey_closing", (31, 31)),
    ("white_tophat", (15, 15)),
    ("white_tophat", (101, 65)),
    ("black_tophat", (4, 7)),
]
FILTERS = [*RANKS, *(((0.0, size)) for size in EXTREMES), *((100.0, size) for size in EXTREMES), *MORPHOLOGY]
IMAGES = 3  # of each dtype and filter
each_filter = pytest.mark.parametrize("place", range(len(FILTERS)))


def _shape(place: int, number: int) -> tuple[int, ...]:
    rng, size = np.random.default_rng((place, number)), np.shape(_window(place))
    if len(size) == 3:
        sides = [prime_from(int(rng.integers(60, 200))) for _ in range(2)]
        return (*sides, prime_from(-(-LEAST_SAMPLES // (sides[0] * sides[1]))))
    channels = (1, 1, 2, 3, 4)[(place + number) % 5]
    columns = prime_from(int(rng.integers(600, 3200)))
    rows = prime_from(-(-LEAST_SAMPLES // (columns * channels)))
    return (rows, columns, channels) if channels > 1 else (rows, columns)


def _window(place: int) -> Array:
    window = FILTERS[place][1]
    return window if isinstance(window, np.ndarray) else np.ones(window, bool)


def _modes(place: int, number: int) -> tuple[str, ...]:
    """Each pair of border modes over and over; steps one after the other take no "valid"."""
    listed = MODES if place < len(FILTERS) - len(MORPHOLOGY) else MODES[:-1]
    pair = (IMAGES * place + number) * 7 % len(listed) ** 2
    return (listed[pair // len(listed)], listed[pair % len(listed)], "mirror")[: _window(place).ndim]


def _image(shape: tuple[int, ...], dtype: str, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    if dtype == "float32":
        return rng.standard_normal(shape, np.float32)
    held = np.iinfo(dtype)
    return rng.integers(held.min, held.max, shape, dtype, endpoint=True)


def _function(place: int, modes: tuple[str, ...]) -> Callable[..., Array]:
    what, window = FILTERS[place]
    options: dict[str, Any] = {"mode": modes, "cval": 9, "axes": tuple(range(len(modes)))}
    options |= {"footprint": window} if isinstance(window, np.ndarray) else {"size": window}
    if isinstance(what, str):
        return lambda image, **out: getattr(morphology, what)(image, **options, **out)
    return lambda image, **out: rank.percentile_filter(image, what, **options, **out)


def _extended(xp: Any, image: Array, axis: int, before: int, taps: int, mode: str) -> Array:
    if mode == "valid":
        return image
    length = image.shape[axis]
    at = border_indices(np.arange(-before, length + taps - 1 - before), length, mode)
    found = xp.take(image, xp.asarray(np.maximum(at, 0)), axis)
    found[(slice(None),) * axis + (xp.asarray(at < 0),)] = 9
    return found


def _part(whole: Array, at: Any, window: tuple[int, ...]) -> Array:
    """The sample at one place of every window."""
    return whole[tuple(slice(k, n - (taps - 1 - k)) for k, taps, n in zip(at, window, whole.shape, strict=False))]


def _wrong_ranks(xp: Any, image: Array, found: Array, percentile: float, mask: Array, modes: tuple[str, ...]) -> int:
    for axis, (taps, mode) in enumerate(zip(mask.shape, modes, strict=True)):
        image = _extended(xp, image, axis, taps // 2, taps, mode)
    below, upto = xp.zeros(found.shape, np.uint16), xp.zeros(found.shape, np.uint16)
    for at in np.argwhere(mask).tolist():
        part = _part(image, at, mask.shape)
        below += part < found
        upto += part <= found
    wanted = int(mask.sum() * percentile / 100)
    return int(xp.count_nonzero((below > wanted) | (upto <= wanted)))


def _extreme(
    xp: Any, image: Array, sizes: tuple[int, ...], modes: tuple[str, ...], *, most: bool, turned: bool
) -> Array:
    """The largest or smallest sample of each window, or of each mirrored window."""
    choose = xp.maximum if most else xp.minimum
    for axis, (taps, mode) in enumerate(zip(sizes, modes, strict=True)):
        image = _extended(xp, image, axis, (taps - turned) // 2, taps, mode)
        window = tuple(taps if each == axis else 1 for each in range(len(sizes)))
        parts = [_part(image, [k if each == axis else 0 for each in range(len(sizes))], window) for k in range(taps)]
        image = parts[0].copy()
        for part in parts[1:]:
            choose(image, part, out=image)
    return image


def _defined(xp: Any, image: Array, name: str, sizes: tuple[int, ...], modes: tuple[str, ...]) -> Array:
    closes = name in ("grey_closing", "black_tophat")
    found = _extreme(xp, image, sizes, modes, most=closes, turned=closes)
    found = _extreme(xp, found, sizes, modes, most=not closes, turned=not closes)
    if name.startswith("grey"):
        return found
    over, under = (found, image) if closes else (image, found)
    if image.dtype.kind == "f":
        return over - under
    ends = np.iinfo(image.dtype)
    return (over.astype(np.int32) - under).clip(ends.min, ends.max).astype(image.dtype)


def _wrong(xp: Any, place: int, image: Array, found: Array, modes: tuple[str, ...]) -> int:
    what, window = FILTERS[place]
    if isinstance(what, str):
        return int(xp.count_nonzero(found != _defined(xp, image, what, window, modes)))
    if what in (0.0, 100.0):
        return int(xp.count_nonzero(found != _extreme(xp, image, window, modes, most=what > 0, turned=False)))
    return _wrong_ranks(xp, image, found, what, _window(place), modes)


def test_it_is_a_thousand_million() -> None:
    listed = list(product(range(len(FILTERS)), range(IMAGES)))
    lost = [[taps - 1 if mode == "valid" else 0 for taps, mode in zip(_window(p).shape, _modes(p, n), strict=True)]
            for p, n in listed]  # fmt: skip
    results = sum(
        int(np.prod(_shape(*case)) * np.prod([1 - gone / n for gone, n in zip(each, _shape(*case), strict=False)]))
        for case, each in zip(listed, lost, strict=True)
    )
    assert results * len(DTYPES) >= 10**9
    assert {mode for case in listed for mode in _modes(*case)} == set(MODES)


@pytest.mark.parametrize("place", [4, 10, 12, 15, 18, 24, len(FILTERS) - 4, len(FILTERS) - 2, len(FILTERS) - 1])
def test_the_oracle_is_the_definition(place: int) -> None:
    """On the host, small."""
    modes = _modes(place, 1)
    image = _image((41, 37, 35)[: len(modes)], "uint8", 1)
    modes = tuple("reflect" if mode == "valid" else mode for mode in modes)
    found = _function(place, modes)(image)
    assert _wrong(np, place, image, found, modes) == 0
    found.flat[77] ^= 128
    assert _wrong(np, place, image, found, modes) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@each_filter
def test_every_result_is_right(place: int, dtype: str) -> None:
    import cupy

    for number in range(IMAGES):
        modes, shape = _modes(place, number), _shape(place, number)
        function, image = _function(place, modes), _image(shape, dtype, place * IMAGES + number)
        on_device = at_offset(cupy, cupy.asarray(image), (3 * number + place) % OFFSETS)
        expected = function(on_device)
        holder, out = poisoned(cupy, expected.shape, dtype, (5 * number + place) % OFFSETS)
        story = f"{FILTERS[place]} of {dtype} {shape}, {modes}"
        for call in ("first", "second"):  # the second may repeat the recorded launches of the first
            out.view(np.uint8)[...] = 0xA5
            function(on_device, out=out)
            assert bool((out == expected).all()), f"{story}: the {call} call differs from a call without out"
        wrong = _wrong(cupy, place, on_device, out, modes)
        assert wrong == 0, f"{story}: {wrong} of {out.size} results are wrong"
        out.view(np.uint8)[...] = 0xA5
        assert bool((holder == 0xA5).all()), f"{story}: something was written outside of the result"
