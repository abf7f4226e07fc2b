"""The memory of captured graphs, on a CUDA device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.runtime.repeated import CaptureSpace

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


def test_graphs_keep_their_memory_if_their_pool_gives_back_the_rest(cupy: Any) -> None:
    """The memory counts in the pool outside, and no later array gets it."""
    outside = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(outside.malloc):
        source = cupy.arange(1 << 20, dtype=np.float32)
        made = cupy.zeros_like(source)
        space = CaptureSpace()

        def run(_stream: Any) -> None:
            cupy.multiply(source * 2, 3, out=made)

        run(None)
        before = outside.used_bytes()
        graph = space.captured(run)
        assert outside.used_bytes() >= before + source.nbytes
        space._pool.free_all_blocks()
        outside.free_all_blocks()
        others = [cupy.full(source.shape, 7, np.float32) for _ in range(4)]
        graph.launch(cupy.cuda.get_current_stream())
        np.testing.assert_array_equal(made.get(), source.get() * 6)
        for other in others:
            assert (other.get() == 7).all()


def test_a_bound_outside_holds_for_graphs(cupy: Any) -> None:
    outside = cupy.cuda.MemoryPool()
    outside.set_limit(size=1 << 20)
    space = CaptureSpace()
    with (
        cupy.cuda.using_allocator(outside.malloc),
        pytest.raises(cupy.cuda.memory.OutOfMemoryError),
        space.allocating(),
    ):
        cupy.zeros(1 << 20, np.float32)
