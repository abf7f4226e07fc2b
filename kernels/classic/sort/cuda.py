"""Sorting and merging on CUDA: the variants of sort.cu; their launches and tuning constants are in passes.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np

from kernels.classic.sort import passes
from kernels.runtime.ladder import Ladder, Variant
from kernels.runtime.launch import kernel, on_stream

OPTIONS = ()

KEYS = {4: "Key32", 8: "Key64"}
NO_VALUE, VALUE, VALUE_BYTES = "NoValue", "Value32", 4
MAX_INDICES = (1 << 32) - 1
KINDS = {"u": 0, "i": 1, "f": 2}


@dataclass(frozen=True, kw_only=True)
class Task:
    """Keys to sort into `out`, with or without values; or, with `second`, two sorted arrays to merge."""

    keys: Any  # CuPy, one axis, C-contiguous, unsigned integers of 4 or 8 bytes: the keys' bits
    kind: int  # of the keys: one of KINDS
    out: Any
    stream: Any
    second: Any = None
    values: Any = None  # unsigned integers of 4 bytes; if None but `out_values` is given: the keys' indices
    out_values: Any = None

    @property
    def key(self) -> str:
        return KEYS[self.keys.dtype.itemsize]

    @property
    def value(self) -> str:
        return NO_VALUE if self.out_values is None else VALUE

    def launch(self, entry: str, blocks: int, threads: int, *args: Any) -> None:
        kernel("sort", entry).launch((blocks,), (threads,), args, stream=self.stream)

    def like(self, array: Any) -> Any:
        import cupy

        return cupy.empty_like(array)

    def empty(self, shape: Any, dtype: Any) -> Any:
        import cupy

        return cupy.empty(shape, dtype)

    def zeros(self, shape: Any, dtype: Any) -> Any:
        import cupy

        return cupy.zeros(shape, dtype)


def sort(keys: Any, values: Any = None, *, stream: Any = None, variant: str | None = None) -> Any:
    """Sorts the keys, and any values with them.

    Values of 4 bytes move with their keys; for others, indices are sorted and the values are gathered.
    """
    import cupy

    with on_stream(keys, stream) as current:
        if values is None:
            return _sorted(keys, None, None, variant, current)
        values = cupy.ascontiguousarray(values, values.dtype.newbyteorder("="))
        carried = values.dtype.itemsize == VALUE_BYTES
        moved = cupy.empty(values.shape, values.dtype if carried else np.uint32)
        ordered = _sorted(keys, _unsigned(values) if carried else None, _unsigned(moved), variant, current)
        return ordered, moved if carried else values[moved]


def argsort(keys: Any, *, stream: Any = None) -> Any:
    """The indices that sort `keys`, int64."""
    import cupy

    with keys.device, cupy.cuda.get_current_stream() if stream is None else stream:
        return sorted_indices(keys, stream=stream)[1].astype(np.int64)


def sorted_indices(keys: Any, *, stream: Any = None) -> tuple[Any, Any]:
    """The sorted keys and their indices in `keys`, uint32."""
    import cupy

    with on_stream(keys, stream) as current:
        indices = cupy.empty(keys.shape, np.uint32)
        return _sorted(keys, None, indices, None, current), indices


def _sorted(keys: Any, values: Any, out_values: Any, variant: str | None, stream: Any) -> Any:
    """The sorted keys, a new array. `out_values` without `values` receives the keys' indices."""
    import cupy

    if out_values is not None and keys.size > MAX_INDICES:
        raise ValueError(f"keys has {keys.size} entries; with values or indices at most {MAX_INDICES} can be sorted")
    bits, out = _bits(keys), cupy.empty(keys.shape, keys.dtype.newbyteorder("="))
    kind, unsigned = KINDS[keys.dtype.kind], out.view(bits.dtype)
    task = Task(keys=bits, kind=kind, out=unsigned, values=values, out_values=out_values, stream=stream)
    _run(PRODUCTION if variant is None else variant, task)
    return out


def merge(first: Any, second: Any, *, stream: Any = None, variant: str | None = None) -> Any:
    """Merges two sorted arrays; see kernels.classic.sort."""
    import cupy

    with on_stream(first, stream) as current:
        out = cupy.empty(first.size + second.size, first.dtype.newbyteorder("="))
        bits = _bits(first)
        _run(
            MERGING if variant is None else variant,
            Task(
                keys=bits,
                second=_bits(second),
                kind=KINDS[first.dtype.kind],
                out=out.view(bits.dtype),
                stream=current,
            ),
        )
    return out


def _bits(keys: Any) -> Any:
    import cupy

    return _unsigned(cupy.ascontiguousarray(keys, keys.dtype.newbyteorder("=")))


def _unsigned(array: Any) -> Any:
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def _run(name: str, task: Task) -> None:
    if task.out_values is not None and name not in WITH_VALUES:
        raise ValueError(f"variant {name!r} sorts keys alone: with values choose {' or '.join(WITH_VALUES)}")
    if (task.second is not None) != (name in MERGES):
        raise ValueError(f"variant {name!r} cannot {'sort' if task.second is None else 'merge two arrays'}")
    if task.out.size > 0:
        VARIANTS[name].run(task)


def _keys(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}<{key}>" for name in names for key in KEYS.values())


def _pairs(*names: str) -> tuple[str, ...]:
    values = (NO_VALUE, VALUE)
    return tuple(f"{name}<{key}, {value}>" for name in names for key in KEYS.values() for value in values)


_ORDER = _keys("order_keys")
_MERGES = {
    "merge_ranks": "two sorted arrays: one thread per key, placed by its rank in the other array",
    "merge_ranges": "16 outputs per thread, found by co-ranks: one search for 16 keys, but strided accesses",
    "merge_tiles": "stages of both arrays in shared memory: coalesced reads, but half of the keys twice",
    "merge_circular": "the stages are ring buffers: no key is read twice",
}
_SORTS = {
    "sort_ranks": ("merge_ranks", "bitonic tiles of 2048, then passes of merge_ranks"),
    "sort_ranges": ("merge_ranges", "bitonic tiles, then passes of merge_ranges"),
    "sort_stages": ("merge_tiles", "bitonic tiles, then passes of merge_tiles"),
    "sort_circular": ("merge_circular", "bitonic tiles, then passes of merge_circular"),
}


def _merging(entry: str) -> Callable[[Any], None]:
    return lambda task: passes.run_merge(task, entry)


def _passing(entry: str) -> Callable[[Any], None]:
    return lambda task: passes.run_passes(task, entry)


# Naive to fast: first merging, then sorting.
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        **{
            name: Variant(summary=summary, entries=(*_ORDER, *_keys(name)), run=_merging(name))
            for name, summary in _MERGES.items()
        },
        "merge_paths": Variant(
            summary="one block per tile of the output, merged in registers: each key is read once, coalesced",
            entries=(*_ORDER, *_keys("find_corners"), *(f"merge_paths<{key}, NoValue>" for key in KEYS.values())),
            run=passes.run_merge_paths,
        ),
        **{
            name: Variant(summary=summary, entries=(*_ORDER, *_keys("sort_bitonic", entry)), run=_passing(entry))
            for name, (entry, summary) in _SORTS.items()
        },
        "sort_paths": Variant(
            summary="tiles of 3840 sorted in registers, then passes of merge_paths; carries values",
            entries=(*_keys("find_corners"), *_pairs("sort_tiles", "merge_paths")),
            run=passes.run_paths,
        ),
        "sort_radix": Variant(
            summary="radix sort, one pass per byte with look-back: a third of a merge sort's traffic; carries values",
            entries=(*_keys("count_digits"), "place_digits", *_pairs("move_digits", "sort_tiles")),
            run=passes.run_radix,
        ),
    }
)
MERGES = ("merge_ranks", "merge_ranges", "merge_tiles", "merge_circular", "merge_paths")
WITH_VALUES = ("sort_paths", "sort_radix")
PRODUCTION, MERGING = "sort_radix", "merge_paths"


def ladders() -> tuple[Ladder, ...]:
    """Merging two arrays; sorting keys of 4 and 8 bytes, with and without values. CuPy's sorts are CUB's."""
    sorts = tuple(name for name in VARIANTS if name not in MERGES)
    return (
        _merging_ladder("two sorted arrays of 2²⁵ uint32 keys", 1 << 25),
        _sorting_ladder("2²⁶ uint32 keys", "uint32", 1 << 26, None, sorts),
        _sorting_ladder("2²⁶ uint32 keys with uint32 values", "uint32", 1 << 26, "uint32", WITH_VALUES),
        _sorting_ladder("2²⁵ uint64 keys", "uint64", 1 << 25, None, WITH_VALUES),
        _sorting_ladder("2²⁶ float32 keys", "float32", 1 << 26, None, WITH_VALUES),
    )


def _random_keys(dtype: str, count: int) -> Any:
    import cupy

    rng = cupy.random.default_rng(1)
    if dtype == "float32":
        return rng.standard_normal(count, np.float32)
    return rng.integers(0, 1 << (8 * np.dtype(dtype).itemsize - 1), count, dtype)


def _merging_ladder(name: str, each: int) -> Ladder:
    @cache
    def inputs() -> tuple[Any, Any]:
        return sort(_random_keys("uint32", each)), sort(_random_keys("uint32", each + 1)[1:])

    def prepare(variant: str) -> Callable[[], Any]:
        return lambda: merge(*inputs(), variant=variant)

    def libraries() -> Mapping[str, Callable[[], Any]]:
        import cupy

        return {"CuPy (joins and sorts)": lambda: cupy.sort(cupy.concatenate(inputs()))}

    return Ladder(
        name=name, variants=MERGES, bytes=16 * each, flops=0, limit="copy", prepare=prepare, libraries=libraries
    )


def _sorting_ladder(name: str, dtype: str, count: int, values: str | None, variants: tuple[str, ...]) -> Ladder:
    @cache
    def inputs() -> tuple[Any, Any]:
        import cupy

        return _random_keys(dtype, count), None if values is None else cupy.arange(count, dtype=values)

    def prepare(variant: str) -> Callable[[], Any]:
        return lambda: sort(*inputs(), variant=variant)

    def libraries() -> Mapping[str, Callable[[], Any]]:
        import cupy

        keys, others = inputs()
        if others is None:
            return {"CuPy sort": lambda: cupy.sort(keys)}

        def taken() -> Any:
            order = cupy.argsort(keys, kind="stable")
            return keys[order], others[order]

        return {"CuPy argsort, and takes": taken}

    size = np.dtype(dtype).itemsize + (0 if values is None else np.dtype(values).itemsize)
    return Ladder(
        name=name,
        variants=variants,
        bytes=2 * count * size,
        flops=0,
        limit="copy",
        prepare=prepare,
        libraries=libraries,
    )
