"""How long boxes of floats are cut into blocks on CUDA, without a device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.smoothing.cuda.boxes import runs
from kernels.smoothing.cuda.passes import Axis


@pytest.mark.parametrize(
    ("block", "multiprocessor"), [(64 << 10, 64 << 10), (99 << 10, 100 << 10), (227 << 10, 228 << 10)]
)
@given(
    length=st.integers(1, 40_000),
    taps=st.integers(256, 30_000),
    inner=st.integers(1, 9),
    itemsize=st.sampled_from([4, 8]),
)
def test_the_samples_of_a_block_fit_shared_memory(
    block: int, multiprocessor: int, length: int, taps: int, inner: int, itemsize: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runs, "shared_bytes_a_block", lambda: block)
        patched.setattr(runs, "shared_bytes_a_multiprocessor", lambda: multiprocessor)
        axis = Axis(outer=1, length=length, inner=inner, out_length=length, before=taps // 2, taps=taps)
        outputs = runs._row_outputs(axis, itemsize)
    assert outputs % 16 == 0
    assert outputs == 0 or runs._row_bytes(axis, outputs, itemsize) <= block
    assert outputs > 0 or inner > 8 or (length + 2 * taps) * inner * 35 * itemsize > 16 * (block - 20_000)
