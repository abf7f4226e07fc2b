"""A thousand million random samples smoothed on a CUDA device: every result is the CPU's to the bit, and right.

Right by another method than either body's: the filter along an axis is a matrix, borders and all, and both axes are two
matrix products in float64. The sums of a box of whole numbers stay below 2**53 there, so they are exact in any order;
Gaussians take real weights, not the kernels' quantised ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from kernels.smoothing import MODES
from kernels.smoothing.borders import border_indices
from kernels.smoothing.cases import Case
from kernels.smoothing.cuda import smooth
from kernels.smoothing.window import Window
from tests.kernels.large_images import LEAST_SAMPLES, OFFSETS, at_offset, poisoned, prime_from

pytestmark = pytest.mark.gpu

Array = Any

DTYPES = ("uint8", "uint16", "int16", "float32")
# Box sizes, and reaches of Gaussians that end at 4 sigma: they cover every kernel in production.
BANDS = {"box": ((2, 9), (10, 63), (64, 255)), "gaussian": ((1, 8), (9, 32), (33, 127))}
IMAGES = 3  # of each dtype, number of channels and band
PARAMETERS = [
    (dtype, channels, kind, band)
    for dtype, channels in product(DTYPES, range(1, 5))
    for kind in BANDS
    for band in range(3)
]


def _cases(dtype: str, channels: int, kind: str, band: int) -> Iterator[Case]:
    """Images of prime sides, odd and even sizes, each pair of border modes over and over; the same in every run."""
    place = PARAMETERS.index((dtype, channels, kind, band))
    rng = np.random.default_rng(place)
    low, high = BANDS[kind][band]
    for number in range(IMAGES):
        pair = (IMAGES * place + number) * 7 % len(MODES) ** 2
        modes = (MODES[pair // len(MODES)], MODES[pair % len(MODES)])
        columns = prime_from(int(rng.integers(600, 3200)))
        rows = prime_from(-(-LEAST_SAMPLES // (columns * channels)))
        shape = (rows, columns, channels) if channels > 1 else (rows, columns)
        reaches = tuple(int(reach) for reach in rng.integers(low, high + 1, 2))
        if number == 0:
            reaches = (reaches[0], reaches[0])  # which some kernels need
        what: dict[str, Any] = {"sizes": reaches}
        if kind == "gaussian":
            what = {"sigmas": tuple((reach + float(rng.uniform(-0.4, 0.4))) / 4 for reach in reaches)}
        yield Case(shape=shape, dtype=dtype, axes=(0, 1), modes=modes, cval=int(rng.integers(0, 256)), **what)


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


def test_it_is_a_thousand_million() -> None:
    cases = [case for parameters in PARAMETERS for case in _cases(*parameters)]
    results = sum((case.bytes() - _samples(case.shape) * _itemsize(case)) // _itemsize(case) for case in cases)
    assert results >= 10**9
    assert {case.modes for case in cases} == set(product(MODES, MODES))
    lengths = {size for case in cases for size in case.sizes or ()}
    assert {size % 2 for size in lengths} == {0, 1}
    assert min(lengths) <= 3
    assert max(lengths) >= 250


def _samples(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape))


def _itemsize(case: Case) -> int:
    return np.dtype(case.dtype).itemsize


@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize(("dtype", "channels", "kind", "band"), PARAMETERS)
def test_bits_of_the_cpu_and_exact_values(cupy: Any, dtype: str, channels: int, kind: str, band: int) -> None:
    for number, case in enumerate(_cases(dtype, channels, kind, band)):
        values = case.image()
        expected = cupy.asarray(case.apply(values))
        image = at_offset(cupy, cupy.asarray(values), (3 * number + channels) % OFFSETS)
        holder, out = poisoned(cupy, expected.shape, expected.dtype, (5 * number + band) % OFFSETS)
        bits = f"u{out.itemsize}"
        for call in ("first", "second"):  # the second may repeat the recorded launches of the first
            out.view(np.uint8)[...] = 0xA5
            case.apply(image, out=out)
            wrong = int(cupy.count_nonzero(out.view(bits) != expected.view(bits)))
            assert wrong == 0, f"{case.name}, {call} call: {wrong} of {out.size} results differ from the CPU's"
        _check_exact(cupy, case, image, out)
        out.view(np.uint8)[...] = 0xA5
        assert bool((holder == 0xA5).all()), f"{case.name}: something was written outside of the result"


def _check_exact(cupy: Any, case: Case, image: Array, result: Array) -> None:
    exact = _exact(cupy, case, image)
    if case.sizes is not None and result.dtype.kind != "f":
        samples = int(np.prod([window.taps for window in case.windows()]))
        exact = (2 * cupy.rint(exact).astype(np.int64) + samples) // (2 * samples)
    elif case.sizes is not None:
        exact /= np.prod([float(window.taps) for window in case.windows()])
    right = cupy.abs(result.astype(np.float64) - exact) <= case.tolerance()
    wrong = result.size - int(cupy.count_nonzero(right))
    assert wrong == 0, f"{case.name}: {wrong} of {result.size} results are wrong"


def _exact(cupy: Any, case: Case, image: Array) -> Array:
    """Sums over the window (unweighted for a box) in float64. For mode "constant", cval is subtracted from the image
    first, so that zeros lie beyond the edge, and its share is added last."""
    planes = image.astype(np.float64).reshape(*image.shape[:2], -1).transpose(2, 0, 1) - case.cval
    share = float(case.cval)
    for window in case.windows():
        weights = case._real_weights(window).astype(np.float64)
        matrix = _matrix(cupy, window, weights, image.shape[window.axis])
        planes = matrix @ planes if window.axis == 0 else cupy.ascontiguousarray(planes) @ matrix.T
        share *= float(weights.sum())
    return (planes.transpose(1, 2, 0) + share).reshape(*planes.shape[1:], *image.shape[2:])


def _matrix(cupy: Any, window: Window, weights: Array, length: int) -> Array:
    """The window as a matrix: result = matrix @ line."""
    outputs = window.output_length(length)
    first = 0 if window.mode == "valid" else -window.before
    at = np.arange(outputs)[:, None] + np.arange(first, first + window.taps)
    if window.mode != "valid":
        at = border_indices(at, length, window.mode)
    inside = np.nonzero(at >= 0)
    matrix = cupy.zeros((outputs, length))
    places = cupy.asarray(inside[0]), cupy.asarray(at[inside])
    cupy.add.at(matrix, places, cupy.asarray(weights[inside[1]]))
    return matrix


def test_the_oracle_is_the_definition() -> None:
    """On the host, small: the matrices against cases.py, which gathers windows."""
    for modes in product(MODES, MODES):
        for what in ({"sizes": (4, 7)}, {"sigmas": (0.6, 1.3)}):
            case = Case(shape=(17, 19, 2), dtype="int16", axes=(0, 1), modes=modes, cval=9, **what)
            _check_exact(np, case, case.image(), case.exact().round().astype(np.int16))
            right = case.apply(case.image())
            _check_exact(np, case, case.image(), right)
            right[3, 4, 1] += 2
            with pytest.raises(AssertionError, match="1 of"):
                _check_exact(np, case, case.image(), right)


@pytest.mark.parametrize("variant", ["tiled", "padded", "pitched", "pitched_tiled"])
def test_the_ladder_reaches_past_two_to_the_31(cupy: Any, variant: str) -> None:
    """RGB of more samples than a 32-bit offset reaches, and a third more once padded."""
    rows, columns = (1 << 31) // 65535 + 9, 21845
    image = cupy.zeros((rows, columns, 3), np.uint8)
    image[-12:] = cupy.random.default_rng(6).integers(0, 256, (12, columns, 3), dtype=np.uint8)
    tail = cupy.asnumpy(image[-20:])
    case = Case(shape=image.shape, dtype="uint8", axes=(0, 1), sizes=(3, 3), modes=("nearest",) * 2)
    result = smooth(image, case.windows(), 0, None, variant=variant)
    np.testing.assert_array_equal(cupy.asnumpy(result[-18:]), case.apply(tail)[-18:], strict=True)
    assert not result[:-14].any()
    del image, result
    cupy.get_default_memory_pool().free_all_blocks()
