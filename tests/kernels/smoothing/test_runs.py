"""How long boxes of floats are cut into blocks on CUDA, without a device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.smoothing.cuda.axis import Axis
from kernels.smoothing.cuda.boxes import runs
from kernels.smoothing.window import RUN

BLOCK_BYTES = [64 << 10, 99 << 10, 227 << 10]


@pytest.mark.parametrize("block", BLOCK_BYTES)
@given(
    length=st.integers(1, 40_000),
    taps=st.integers(65, 30_000),
    inner=st.integers(1, 9),
    itemsize=st.sampled_from([4, 8]),
)
def test_the_samples_of_a_tile_fit_a_block(block: int, length: int, taps: int, inner: int, itemsize: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runs, "shared_bytes_a_block", lambda: block)
        axis = Axis(outer=1, length=length, inner=inner, out_length=length, before=taps // 2, taps=taps)
        outputs, threads = runs.row_tile(axis, itemsize)
    most = min(
        runs.ROW_SHAPES[itemsize][-1][0],
        (block - runs.row_bytes(taps, 0, itemsize)) // (runs.RUN_WORDS * itemsize),
    )
    if outputs == 0:
        assert 2 * ((most - 32) * RUN - taps - RUN) < min(taps, 2 * length)
        return
    assert outputs % RUN == threads % 32 == 0
    assert threads <= most
    assert runs.row_bytes(taps, threads, itemsize) <= block
    assert threads * RUN >= RUN - 1 + outputs + taps - 1


@given(taps=st.integers(65, 20_000), itemsize=st.sampled_from([4, 8]), step=st.sampled_from([8, 16]))
def test_a_block_keeps_the_sums_that_its_levels_add(taps: int, itemsize: int, step: int) -> None:
    """A ring is a power of two; it holds the runs that its level adds, those of a step and one more."""
    whole, kept = (taps - 1) // RUN - 1, 4 * step  # of M
    for level in range(whole.bit_length() - 1):
        reach = whole >> whole.bit_length() - 1 - level
        kept += max(4 * step, 1 << (reach + step).bit_length())
    tails = 2 * (step + 1) * RUN * runs.COLUMNS
    assert runs.column_bytes(taps, itemsize, step) >= (tails + kept * (runs.COLUMNS + 32 // step)) * itemsize
    assert runs.column_bytes(taps, itemsize, step) <= (tails + 2 * kept * (runs.COLUMNS + 32 // step)) * itemsize
