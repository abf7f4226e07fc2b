"""Reductions on CUDA: which kernels of reduce.cu run for an operation, with which grids."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np

from kernels.classic.reduce.cpu import ROWS, THREADS, columns_of, sum_dtype
from kernels.runtime.ladder import Ladder, Variant
from kernels.runtime.launch import blocks_of, kernel, multiprocessors, on_stream
from kernels.runtime.limits.cuda import random_values

OPTIONS = ("--fmad=false",)  # same bits as on the CPU

# Tuned on an H200 (sm_90); LOADS as in reduce.cu.
LOADS = 8
BLOCKS_A_MULTIPROCESSOR = 32

C_TYPES = {
    "int8": "signed char", "int16": "short", "int32": "int", "int64": "long long",
    "uint8": "unsigned char", "uint16": "unsigned short", "uint32": "unsigned", "uint64": "unsigned long long",
    "float32": "float", "float64": "double",
}  # fmt: skip
CLASSIC_TYPES = ("int32", "float32")  # summed by the classic rungs, in their own type
STATE_BYTES = {"argmax": 16, "mean_variance": 24}
_TEMPLATES = {"minimum": "Min<{}>", "maximum": "Max<{}>", "argmax": "ArgMax<{}>", "mean_variance": "Moments<{}>"}


@dataclass(frozen=True, kw_only=True)
class Task:
    """One reduction."""

    operation: str
    values: Any  # CuPy [n], contiguous, native byte order, n > 0
    stream: Any
    states: list[Any]  # a run appends the partial states of each launch; the last holds the result


def reduced(operation: str, values: Any, ddof: int, *, stream: Any = None, variant: str | None = None) -> Any:
    """The reduction of a CuPy array; see kernels.classic.reduce.

    variant : a name in `VARIANTS`; default the fastest. The classic rungs sum int32 in int32 and float32 in float32.

    Raises ValueError if the named variant does not apply.
    """
    import cupy

    if variant not in (None, PRODUCTION) and (operation != "total" or values.dtype.name not in CLASSIC_TYPES):
        raise ValueError(f"variant {variant!r} cannot compute {operation} of {values.dtype}")
    with on_stream(values, stream) as current:
        flat = cupy.ascontiguousarray(values).reshape(-1)
        if flat.size == 0:
            return cupy.zeros((), sum_dtype(values.dtype))
        task = Task(operation=operation, values=flat, stream=current, states=[])
        VARIANTS[variant or PRODUCTION].run(task)
        return _finished(task, ddof)


def _finished(task: Task, ddof: int) -> Any:
    import cupy

    state = task.states[-1]
    if task.operation == "argmax":
        return state.view(cupy.int64)[1]
    if task.operation == "mean_variance":
        result = cupy.empty(2)
        args = (state, result, ctypes.c_double(ddof))
        kernel("reduce", "finish_moments").launch((1,), (1,), args, stream=task.stream)
        return result
    return state.reshape(())


def operation_of(operation: str, dtype: Any) -> str:
    """The C++ type of an operation on values of a dtype."""
    name = np.dtype(dtype).name
    if operation == "total":
        # Signed and unsigned sums modulo 2⁶⁴ are the same, but widening is not.
        return f"Sum<{C_TYPES[name]}, {C_TYPES[sum_dtype(dtype).name]}>"
    return _TEMPLATES[operation].format(C_TYPES[name])


def merging_of(operation: str, dtype: Any) -> str:
    """The C++ type of an operation on its own partial results."""
    if operation == "total":
        return operation_of(operation, sum_dtype(dtype))
    if operation in ("minimum", "maximum"):
        return operation_of(operation, dtype)
    # Partial results of the other operations are the same for all dtypes.
    return f"Partials<{operation_of(operation, np.float64)}>"


def _empty_states(task: Task, count: int) -> Any:
    import cupy

    if task.operation in STATE_BYTES:
        return cupy.empty(count * STATE_BYTES[task.operation], cupy.uint8)
    dtype = sum_dtype(task.values.dtype) if task.operation == "total" else task.values.dtype
    return cupy.empty(count, dtype)


def _run_tiles(task: Task) -> None:
    values, count = task.values, task.values.size
    size, entry = values.dtype.itemsize, operation_of(task.operation, values.dtype)
    while not task.states or count > 1:
        tiles = blocks_of(count, ROWS * THREADS * columns_of(size))
        states = _empty_states(task, tiles)
        aligned = ctypes.c_int(values.data.ptr % 16 == 0)
        blocks = min(tiles, BLOCKS_A_MULTIPROCESSOR * multiprocessors())
        args = (values, states, ctypes.c_longlong(count), aligned)
        kernel("reduce", f"reduce_tiles<{entry}>").launch((blocks,), (THREADS,), args, stream=task.stream)
        task.states.append(states)
        values, count, entry = states, tiles, merging_of(task.operation, task.values.dtype)
        size = STATE_BYTES.get(task.operation, states.dtype.itemsize)


def _run_classic(template: str, loads: int, task: Task) -> None:
    """Launches a classic kernel on the values, then on its partial sums, until one is left."""
    import cupy

    values = task.values
    while not task.states or values.size > 1:
        blocks = blocks_of(values.size, THREADS * loads)
        partials = cupy.empty(blocks, values.dtype)
        entry = template.format(C_TYPES[values.dtype.name])
        args = (values, partials, ctypes.c_longlong(values.size))
        kernel("reduce", entry).launch((blocks,), (THREADS,), args, stream=task.stream)
        task.states.append(partials)
        values = partials


def _classic(summary: str, template: str, loads: int) -> Variant:
    entries = tuple(template.format(C_TYPES[name]) for name in CLASSIC_TYPES)
    return Variant(summary=summary, entries=entries, run=partial(_run_classic, template, loads))


def _production_entries() -> tuple[str, ...]:
    from kernels.classic.reduce import DTYPES, OPERATIONS

    named = {of(operation, dtype) for operation in OPERATIONS for dtype in DTYPES for of in (operation_of, merging_of)}
    return (*(f"reduce_tiles<{name}>" for name in sorted(named)), "finish_moments")


PRODUCTION = "tiles"
# In the order of the source, naive to fast.
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "pairs": _classic("a tree over neighbours: scattered threads, every warp diverges", "reduce_pairs<{}>", 1),
        "contiguous": _classic(
            "the same tree by the first threads: whole warps retire, but banks conflict", "reduce_contiguous<{}>", 1
        ),
        "sequential": _classic("halves instead of neighbours: no bank conflicts", "reduce_sequential<{}>", 1),
        "loads": _classic("a thread adds eight loads before the tree: more in flight", "reduce_loads<{}>", LOADS),
        "last_warp": _classic("the last warp without barriers", "reduce_last_warp<{}>", LOADS),
        "unrolled": _classic("the whole tree unrolled by a template", f"reduce_unrolled<{{}}, {THREADS}>", LOADS),
        "shuffles": _classic("warps add in registers: one barrier", "reduce_shuffles<{}>", LOADS),
        PRODUCTION: Variant(
            summary="blocks stride over tiles, 16 bytes per load, fixed order; floats in float64, any operation",
            entries=_production_entries(),
            run=_run_tiles,
        ),
    }
)


def ladders() -> tuple[Ladder, ...]:
    """The float32 sum on every rung; other operations and dtypes in production."""
    return (
        _ladder("total", "float32", 1 << 28, tuple(VARIANTS)),
        _ladder("maximum", "float32", 1 << 28, (PRODUCTION,)),
        _ladder("argmax", "float32", 1 << 28, (PRODUCTION,)),
        _ladder("mean_variance", "float32", 1 << 28, (PRODUCTION,)),
        _ladder("total", "uint8", 1 << 30, (PRODUCTION,)),
        _ladder("total", "float64", 1 << 27, (PRODUCTION,)),
    )


_TITLES = {"total": "sum", "maximum": "maximum", "argmax": "argmax", "mean_variance": "mean and variance"}
_FLOPS = {"total": 1, "maximum": 1, "argmax": 1, "mean_variance": 6}  # a value


def _ladder(operation: str, dtype: str, count: int, variants: tuple[str, ...]) -> Ladder:
    @cache
    def values() -> Any:
        return random_values(count, dtype)

    def prepare(name: str) -> Callable[[], Any]:
        array = values()
        return lambda: reduced(operation, array, 0, variant=name)

    return Ladder(
        name=f"{_TITLES[operation]} of 2{_power(count)} {dtype}", variants=variants, limit="read",
        bytes=count * np.dtype(dtype).itemsize, flops=count * _FLOPS[operation], prepare=prepare,
        libraries=lambda: _libraries(operation, values()),
    )  # fmt: skip


def _power(count: int) -> str:
    return str(count.bit_length() - 1).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _libraries(operation: str, values: Any) -> Mapping[str, Callable[[], Any]]:
    import cupy

    calls: dict[str, Callable[[], Any]] = {
        "total": lambda: cupy.sum(values),
        "maximum": lambda: cupy.max(values),
        "argmax": lambda: cupy.argmax(values),
        "mean_variance": lambda: cupy.var(values),
    }
    with_cub = calls[operation]

    def call() -> Any:
        with _accelerators(["cub"]):
            return with_cub()

    return {"CuPy (CUB)": call}


def _accelerators(names: list[str]) -> Any:
    """Selects the accelerators of CuPy's reductions, overriding the environment."""
    from contextlib import contextmanager

    @contextmanager
    def chosen() -> Any:
        from cupy import _core as core

        reductions, routines = core.get_reduction_accelerators(), core.get_routine_accelerators()
        core.set_reduction_accelerators(names)
        core.set_routine_accelerators(names)
        try:
            yield
        finally:
            core.set_reduction_accelerators(reductions)
            core.set_routine_accelerators(routines)

    return chosen()
