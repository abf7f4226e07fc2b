"""Transposes on a CUDA device: every rung on every case, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.transpose import transpose
from kernels.transpose.cases import DTYPES, cases
from kernels.transpose.cuda import VARIANTS
from kernels.transpose.cuda import transpose as on_cuda

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", [None, *(name for name in VARIANTS if name != "copy")])
def test_every_variant_turns_every_case(cupy: Any, variant: str | None, dtype: str) -> None:
    for case in cases((dtype,)):
        array = case.laid_out(cupy)
        out = cupy.zeros((*case.shape[:-2], case.shape[-1], case.shape[-2]), dtype)
        out.view(cupy.uint8)[...] = 0xA5
        assert on_cuda(array, out, variant=variant) is out
        case.check(out.get())


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
    with pytest.raises(ValueError, match="out must not share memory with array"):
        transpose(array, out=array.reshape(7, 5))
    with pytest.raises(ValueError, match="out must be a C-contiguous ndarray"):
        transpose(array, out=np.zeros((7, 5), np.float32))
