"""The memory of captured graphs, on a CUDA device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.runtime.repeated import Captured, CaptureSpace

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
    with cupy.cuda.using_allocator(outside.malloc), pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        CaptureSpace().captured(lambda _stream: cupy.empty(1 << 20, np.float32))


def test_solvers_one_after_the_other_take_no_more_memory(cupy: Any) -> None:
    """Each has a graph of its own, on a stream of its own."""
    outside, taken = cupy.cuda.MemoryPool(), []
    with cupy.cuda.using_allocator(outside.malloc):
        made = cupy.zeros(1 << 20, np.float32)
        for _ in range(4):
            step = Captured(lambda: cupy.add(made * 2, 1, out=made))
            for _ in range(3):
                step()
            cupy.cuda.get_current_stream().synchronize()
            taken.append(outside.total_bytes())
    assert len(set(taken[1:])) == 1
    assert made.get().tolist() == [2.0**12 - 1] * (1 << 20)


def test_a_step_like_an_earlier_one_is_a_graph_from_the_start(cupy: Any) -> None:
    """The host runs the first one twice, plainly and for its graph, and later ones only for their graphs."""
    runs: list[str] = []
    key = object()
    for name, given, expected in (("first", key, 2), ("like it", key, 1), ("other", object(), 2), ("none", None, 2)):
        made = cupy.zeros(5, np.float32)

        def add(name: str = name, made: Any = made) -> None:
            runs.append(name)
            cupy.add(made, 1, out=made)

        step = Captured(add, given)
        for _ in range(4):
            step()
        assert runs.count(name) == expected
        np.testing.assert_array_equal(made.get(), 4)
