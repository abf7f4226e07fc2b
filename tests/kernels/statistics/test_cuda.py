"""Every case in every variant on a GPU: the words of the CPU's partial, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.statistics import DTYPES, _blocks, partial_shape, summarise
from kernels.statistics.cuda import VARIANTS
from kernels.statistics.cuda import summarise as summarise_on_cuda
from tests.kernels.statistics.cases import Case, cases, made

pytestmark = pytest.mark.gpu


@pytest.mark.sanitize("statistics")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", [*cases()], ids=lambda case: case.name)
def test_the_words_of_the_cpu(case, variant):
    import cupy

    image = case.image()
    out = cupy.full(partial_shape(case.dtype, case.channels), -1, np.int64)
    found = summarise_on_cuda(cupy.asarray(image), _blocks(image.shape, case.channel_axis), out, variant=variant)
    assert found is out
    np.testing.assert_array_equal(found.get(), case.apply(image))


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_blocks(dtype):
    import cupy

    case = Case(shape=(1501, 1403, 3), channel_axis=2, dtype=dtype)
    image = made("random", case.shape, np.dtype(dtype))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        found = summarise(cupy.asarray(image), channel_axis=2, stream=stream).get()
    np.testing.assert_array_equal(found, summarise(image, channel_axis=2))
