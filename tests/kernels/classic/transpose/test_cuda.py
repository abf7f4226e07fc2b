"""Transposes on a CUDA device: every rung on every case, bit by bit."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from kernels.classic.transpose import transpose
from kernels.classic.transpose.cuda import VARIANTS
from kernels.classic.transpose.cuda import transpose as on_cuda
from tests.kernels.classic.transpose.cases import DTYPES, cases

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


@pytest.mark.sanitize("transpose")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", [None, *(name for name in VARIANTS if name != "copy")])
def test_every_variant_turns_every_case(cupy: Any, variant: str | None, dtype: str) -> None:
    for case in cases((dtype,)):
        array = case.laid_out(cupy)
        out = cupy.zeros((*case.shape[:-2], case.shape[-1], case.shape[-2]), dtype)
        out.view(cupy.uint8)[...] = 0xA5
        assert on_cuda(array, out, variant=variant) is out
        case.check(out.get())


@pytest.mark.parametrize("shape", [(131, 137), (2, 300, 301), (64, 80), (2, 33, 512), (8, 257), (1031, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_begin_anywhere_and_nothing_beside_them_is_written(
    cupy: Any, dtype: str, shape: tuple[int, ...]
) -> None:
    size, most = int(np.prod(shape)), 40 // np.dtype(dtype).itemsize
    values = cupy.random.default_rng(7).integers(0, 256, size * np.dtype(dtype).itemsize, dtype=cupy.uint8).view(dtype)
    expected = values.get().reshape(shape).swapaxes(-1, -2)
    for begin, out_begin in product({0, 1, most // 2, most}, repeat=2):
        array = cupy.empty(begin + size, dtype)[begin:].reshape(shape)
        array.view(cupy.uint8)[...] = values.view(cupy.uint8).reshape(array.view(cupy.uint8).shape)
        around = cupy.empty(out_begin + size + most, dtype)
        around.view(cupy.uint8)[...] = 0xA5
        on_cuda(array, around[out_begin : out_begin + size].reshape(expected.shape))
        found = around.get()
        turned, beside = found[out_begin : out_begin + size], np.delete(found, slice(out_begin, out_begin + size))
        assert turned.tobytes() == expected.tobytes(), (begin, out_begin)
        assert set(beside.tobytes()) <= {0xA5}, (begin, out_begin)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_upper_bound_moves_every_byte(cupy: Any, dtype: str) -> None:
    for case in cases((dtype,)):
        array = cupy.asarray(case.array())
        out = cupy.zeros((*case.shape[:-2], case.shape[-1], case.shape[-2]), dtype)
        on_cuda(array, out, variant="copy")
        assert out.get().tobytes() == case.array().tobytes()


@pytest.mark.parametrize("shape", [(65537, 65539), (3, 40009, 40013), (1 << 31, 2), (2, (1 << 31) + 17)])
@pytest.mark.large
def test_more_than_two_to_the_32_bytes(cupy: Any, shape: tuple[int, ...]) -> None:
    array = cupy.arange(int(np.prod(shape)), dtype=cupy.uint32).view(cupy.uint8)[: int(np.prod(shape))].reshape(shape)
    out = transpose(array)
    rows = max(1, (1 << 28) // shape[-1])
    for first in range(0, shape[-2], rows):
        assert bool((out[..., first : first + rows] == array[..., first : first + rows, :].swapaxes(-1, -2)).all())


def test_many_small_matrices(cupy: Any) -> None:
    array = cupy.arange(3_000_017 * 6, dtype=cupy.uint32).reshape(-1, 2, 3)
    np.testing.assert_array_equal(transpose(array).get(), array.get().swapaxes(1, 2))


def test_work_is_ordered_on_the_stream_given(cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    array = cupy.zeros((4096, 8192), cupy.float32)
    for number in range(5):
        with stream:
            array.fill(number)
        out = transpose(array, stream=stream)
        with stream:
            array.fill(-1)
            assert bool((out == number).all())


def test_mistakes_are_named(cupy: Any) -> None:
    array = cupy.zeros((5, 7), cupy.float32)
    with pytest.raises(ValueError, match="out shares memory with array"):
        transpose(array, out=array.reshape(7, 5))
    with pytest.raises(ValueError, match="out must be a C-contiguous ndarray"):
        transpose(array, out=np.zeros((7, 5), np.float32))
