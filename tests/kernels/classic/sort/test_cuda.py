"""Sorting on a CUDA device: every variant against the order of values; large arrays by the definition of sorting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.classic.sort import DTYPES, argsort, merge, sort
from kernels.classic.sort.cuda import MERGES, VARIANTS, WITH_VALUES
from kernels.classic.sort.cuda import merge as merge_on_cuda
from kernels.classic.sort.cuda import sort as sort_on_cuda
from tests.kernels.classic.sort.cases import Case, cases, check_order, made_keys, order_of

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


def on_host(result: Any) -> Any:
    return tuple(part.get() for part in result) if isinstance(result, tuple) else result.get()


@pytest.mark.sanitize("sort")
@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_every_variant_gives_the_order(cupy: Any, case: Case) -> None:
    expected = case.exact()
    keys, other = (None if array is None else cupy.asarray(array) for array in case.inputs())
    case.check(on_host(case.apply(keys, other)), expected)
    for name in VARIANTS:
        if (case.second_count is not None) != (name in MERGES) or (case.values and name not in WITH_VALUES):
            continue
        run = sort_on_cuda if case.second_count is None else merge_on_cuda
        case.check(on_host(run(keys, other, variant=name)), expected)


@pytest.mark.sanitize("sort")
@pytest.mark.parametrize("dtype", DTYPES)
def test_positions(cupy: Any, dtype: str) -> None:
    for content in ("random", "few", "extremes"):
        keys = made_keys(content, 30011, dtype)
        np.testing.assert_array_equal(argsort(cupy.asarray(keys)).get(), order_of(keys), strict=True)


@pytest.mark.parametrize("content", ["random", "few", "equal", "reversed", "sorted"])
@pytest.mark.parametrize("dtype", ["uint32", "float64"])
def test_many_keys(cupy: Any, dtype: str, content: str) -> None:
    keys = made_keys(content, 3_000_017, dtype)
    order = order_of(keys)
    right = keys[order].tobytes()
    device = cupy.asarray(keys)
    indices = cupy.arange(keys.size, dtype=cupy.uint32)
    for name in VARIANTS:
        if name not in MERGES:
            assert sort_on_cuda(device, variant=name).get().tobytes() == right, name
        if name in WITH_VALUES:
            np.testing.assert_array_equal(sort_on_cuda(device, indices, variant=name)[1].get(), order, name)


def test_every_run_gives_the_same_bits(cupy: Any) -> None:
    keys = cupy.asarray(made_keys("few", 2_000_003, "uint32"))
    first = argsort(keys).get()
    for _ in range(10):
        np.testing.assert_array_equal(argsort(keys).get(), first, strict=True)


def test_work_is_ordered_on_the_stream_given(cupy: Any) -> None:
    host = made_keys("random", 1_000_003, "uint32")
    stream = cupy.cuda.Stream(non_blocking=True)
    keys = cupy.zeros(host.size, cupy.uint32)
    cupy.cuda.Device().synchronize()  # zeroed, on another stream
    results = []
    for shift in range(5):
        keys.set(np.roll(host, shift), stream=stream)
        results.append(sort(keys, keys, stream=stream))
        with stream:
            keys.fill(0)
    stream.synchronize()
    for result in results:
        for part in result:
            np.testing.assert_array_equal(part.get(), np.sort(host), strict=True)


def test_variants_refuse_what_they_cannot_do(cupy: Any) -> None:
    keys = cupy.arange(5, dtype=cupy.uint32)
    with pytest.raises(ValueError, match="'sort_ranks' sorts keys alone"):
        sort_on_cuda(keys, keys, variant="sort_ranks")
    with pytest.raises(ValueError, match="'merge_paths' cannot sort"):
        sort_on_cuda(keys, variant="merge_paths")
    with pytest.raises(ValueError, match="'sort_radix' cannot merge"):
        merge_on_cuda(keys, keys, variant="sort_radix")


@pytest.mark.large
def test_more_than_two_to_the_32_bytes(cupy: Any) -> None:
    """2³⁰ + 2²⁹ + 3 keys: radix sort in three portions, offsets beyond 2³²; the result must contain all keys."""
    count = (3 << 29) + 3
    free, _total = cupy.cuda.runtime.memGetInfo()
    assert free > 24 * count, "this test needs 36 GiB of device memory"
    keys = (cupy.arange(count, dtype=cupy.uint64) * 2654435761 >> 3).astype(cupy.uint32)
    total = keys.sum(dtype=cupy.uint64).item()
    for variant in ("sort_radix", "sort_paths"):
        ordered = sort_on_cuda(keys, variant=variant)
        assert bool((ordered[1:] >= ordered[:-1]).all())
        assert ordered.sum(dtype=cupy.uint64).item() == total
        del ordered
    merged = merge(cupy.arange(0, count, 2, dtype=cupy.uint32), cupy.arange(1, count, 2, dtype=cupy.uint32))
    assert bool((merged == cupy.arange(count, dtype=cupy.uint32)).all())
    del keys, merged
    cupy.get_default_memory_pool().free_all_blocks()


def test_the_order_of_thirty_million_keys(cupy: Any) -> None:
    keys = np.random.default_rng(1).integers(0, 1 << 22, 30_000_001).astype(np.uint32)
    device = cupy.asarray(keys)
    check_order(keys, argsort(device).get(), sort(device).get())
