"""Histograms on CUDA: which kernels of histogram.cu run for an array, with which grids."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.classic.histogram import INTEGER_BINS
from kernels.runtime.ladder import Ladder, Variant
from kernels.runtime.launch import kernel, multiprocessors, on_stream, shared_bytes_a_block
from kernels.runtime.limits.cuda import random_values

OPTIONS: tuple[str, ...] = ()

# Tuned on an H200 (sm_90); block sizes as in atomics.cuh.
THREADS, LANES_THREADS = 256, 1024
THREADS_A_MULTIPROCESSOR = 2048

MAX_VALUES_A_BLOCK = 1 << 31  # counters of a block have 32 bits
C_TYPES = {"uint8": "unsigned char", "uint16": "unsigned short", "float32": "float", "float64": "double"}


class SamplesStruct(ctypes.Structure):
    """struct Samples of atomics.cuh."""

    _fields_ = (("n", ctypes.c_longlong), ("channels", ctypes.c_int), ("aligned", ctypes.c_int))


def _edges_struct(real: Any, c_type: str) -> type[ctypes.Structure]:
    class Edges(ctypes.Structure):
        __doc__ = f"struct Edges<{c_type}> of edges.cuh."
        _fields_ = (("at", ctypes.c_void_p), ("bins", ctypes.c_int), ("top", ctypes.c_int), ("last", real))

    return Edges


EDGES_STRUCTS = {
    "float32": _edges_struct(ctypes.c_float, "float"),
    "float64": _edges_struct(ctypes.c_double, "double"),
}


@dataclass(frozen=True, kw_only=True)
class Task:
    """One array to count."""

    values: Any  # CuPy [n], contiguous, channels interleaved, n > 0
    channels: int
    bins: int  # a channel
    edges: Any  # NumPy float64, or None
    counts: Any  # CuPy uint64 [channels, bins], zero
    stream: Any

    @property
    def samples(self) -> SamplesStruct:
        aligned = self.values.data.ptr % 16 == 0
        return SamplesStruct(n=self.values.size, channels=self.channels, aligned=aligned)

    def launch(
        self, entry: str, threads: int, *args: Any, shared_bytes: int = 0, parts: int = 1, most: int | None = None
    ) -> None:
        """Launches a grid that fills the device, or `most` blocks per multiprocessor."""
        each = most or max(1, THREADS_A_MULTIPROCESSOR // threads)
        useful = -(-self.values.nbytes // (threads * 16))
        blocks = max(min(each * multiprocessors(), useful), -(-self.values.size // MAX_VALUES_A_BLOCK))
        every = (self.values, self.counts, self.samples, *args)
        kernel("histogram", entry).launch(
            (blocks, parts), (threads,), every, shared_bytes=shared_bytes, stream=self.stream
        )


def histogram(
    values: Any,
    edges: Any,
    *,
    channel_axis: int | None,
    channels: int,
    bins: int,
    stream: Any = None,
    variant: str | None = None,
) -> Any:
    """Counts [channels, bins] of a CuPy array; see kernels.classic.histogram.

    variant : a name in `VARIANTS`; default the fastest that applies

    Raises ValueError where the variant named does not apply.
    """
    import cupy

    with on_stream(values, stream) as current:
        counts = cupy.zeros((channels, bins), cupy.uint64)
        task = Task(
            values=_interleaved(values, channel_axis), channels=channels, bins=bins, edges=edges, counts=counts,
            stream=current,
        )  # fmt: skip
        name = _production(task) if variant is None else variant
        if not _APPLIES[name](task):
            raise ValueError(f"variant {name!r} cannot count {channels} channels of {values.dtype}")
        if values.size:
            VARIANTS[name].run(task)
    return counts.view(cupy.int64)


def _interleaved(values: Any, channel_axis: int | None) -> Any:
    import cupy

    if channel_axis is not None:
        values = cupy.moveaxis(values, channel_axis, -1)
    return cupy.ascontiguousarray(values, values.dtype.newbyteorder("=")).reshape(-1)


def _production(task: Task) -> str:
    return [name for name, applies in _APPLIES.items() if applies(task)][-1]


def _shared_bytes(task: Task, copies: int) -> int:
    return 4 * task.channels * task.bins * copies


def _of_bytes(copies: int) -> Callable[[Task], bool]:
    """Applies to uint8 if `copies` private histograms fit the shared memory of a block."""
    return lambda task: task.values.dtype == np.uint8 and _shared_bytes(task, copies) <= shared_bytes_a_block()


def _of_integers(task: Task) -> bool:
    return task.values.dtype.name in INTEGER_BINS


def _run_global(template: str, task: Task) -> None:
    task.launch(template.format(C_TYPES[task.values.dtype.name]), THREADS)


def _run_private(entry: str, threads: int, copies: int, task: Task) -> None:
    task.launch(entry, threads, shared_bytes=_shared_bytes(task, copies))


def _run_halves(task: Task) -> None:
    bins = task.channels * task.bins
    part = min(bins, shared_bytes_a_block() // 4 * 2)
    parts = -(-bins // part)
    args = (ctypes.c_longlong(bins), ctypes.c_int(part))
    task.launch("histogram_halves", LANES_THREADS, *args, shared_bytes=-(-part // 2) * 4, parts=parts, most=1)


def _edges_shared_bytes(task: Task) -> int:
    return -(-task.channels * task.bins // 2) * 8 + task.bins * int(task.values.dtype.itemsize)


def _run_edges(task: Task) -> None:
    import cupy

    name = task.values.dtype.name
    at, last = rounded_edges(task.edges, task.values.dtype)
    on_device = cupy.empty(at.size, at.dtype)
    on_device.set(at, stream=task.stream)
    top = 1 << (task.bins - 1).bit_length() - 1 if task.bins > 1 else 0
    struct = EDGES_STRUCTS[name](at=on_device.data.ptr, bins=task.bins, top=top, last=last)
    shared = _edges_shared_bytes(task)
    if shared <= shared_bytes_a_block():
        task.launch(f"histogram_edges<{C_TYPES[name]}>", LANES_THREADS, struct, shared_bytes=shared)
    else:
        task.launch(f"histogram_edges_global<{C_TYPES[name]}>", LANES_THREADS, struct)


_INTEGERS = ("unsigned char", "unsigned short")
_WARPS = THREADS // 32
# In the order of the source, naive to fast; production is the last that applies to an array.
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "global": Variant(
            summary="one thread per section of neighbours, atomics in device memory",
            entries=tuple(f"histogram_sections<{c_type}>" for c_type in _INTEGERS),
            run=partial(_run_global, "histogram_sections<{}>"),
        ),
        "strided": Variant(
            summary="neighbouring threads take neighbouring samples: coalesced loads",
            entries=tuple(f"histogram_strided<{c_type}>" for c_type in _INTEGERS),
            run=partial(_run_global, "histogram_strided<{}>"),
        ),
        "shared": Variant(
            summary="a private histogram per block in shared memory",
            entries=("histogram_shared",),
            run=partial(_run_private, "histogram_shared", THREADS, 1),
        ),
        "copies": Variant(
            summary="one per warp: fewer additions collide",
            entries=("histogram_copies",),
            run=partial(_run_private, "histogram_copies", THREADS, _WARPS),
        ),
        "runs": Variant(
            summary="equal neighbours counted in a register first, 16 bytes per load",
            entries=("histogram_runs",),
            run=partial(_run_private, "histogram_runs", THREADS, _WARPS),
        ),
        "lanes": Variant(
            summary="one per lane, each in its own bank: no conflicts for any data",
            entries=("histogram_lanes",),
            run=partial(_run_private, "histogram_lanes", LANES_THREADS, 32),
        ),
        "halves": Variant(
            summary="16-bit samples: runs, and 16-bit counters, as many as shared memory holds",
            entries=("histogram_halves",),
            run=_run_halves,
        ),
        "edges": Variant(
            summary="floats between edges: binary search; edges and counters in shared memory if they fit",
            entries=tuple(
                f"{name}<{real}>"
                for name in ("histogram_edges", "histogram_edges_global")
                for real in ("float", "double")
            ),
            run=_run_edges,
        ),
    }
)  # fmt: skip
_APPLIES: Mapping[str, Callable[[Task], bool]] = MappingProxyType(
    {
        "global": _of_integers,
        "strided": _of_integers,
        "shared": _of_bytes(1),
        "copies": _of_bytes(_WARPS),
        "runs": _of_bytes(_WARPS),
        "lanes": _of_bytes(32),
        "halves": lambda task: task.values.dtype == np.uint16,
        "edges": lambda task: task.edges is not None,
    }
)

_BYTE_RUNGS = ("global", "strided", "shared", "copies", "runs", "lanes")


def ladders() -> tuple[Ladder, ...]:
    """Uniform and constant bytes on every rung; the other inputs in production."""
    return (
        _ladder("uint8, uniform", "uint8", 1 << 30, _BYTE_RUNGS),
        _ladder("uint8, all equal", "uint8", 1 << 30, _BYTE_RUNGS, constant=True),
        _ladder("uint8, 3 channels, uniform", "uint8", 3 << 28, _BYTE_RUNGS[2:], channels=3),
        _ladder("uint16, uniform", "uint16", 1 << 29, ("strided", "halves")),
        _ladder("float32, 256 equal bins, uniform", "float32", 1 << 28, ("edges",)),
    )


def _ladder(
    name: str, dtype: str, count: int, variants: tuple[str, ...], *, channels: int = 1, constant: bool = False
) -> Ladder:
    edges = np.linspace(0, 1, 257) if dtype.startswith("float") else None

    @cache
    def values() -> Any:
        import cupy

        return cupy.full(count, 77, dtype) if constant else random_values(count, dtype)

    bins = 256 if edges is not None else INTEGER_BINS[dtype]

    def prepare(rung: str) -> Callable[[], Any]:
        array = values().reshape(-1, channels)
        return lambda: histogram(array, edges, channel_axis=1, channels=channels, bins=bins, variant=rung)

    def libraries() -> Mapping[str, Callable[[], Any]]:
        import cupy

        array = values()
        if channels > 1:
            return {}
        if edges is not None:
            on_device = cupy.asarray(edges)
            return {"CuPy (histogram)": lambda: cupy.histogram(array, on_device)}
        return {"CuPy (bincount)": lambda: cupy.bincount(array, minlength=bins)}

    return Ladder(
        name=f"{name}, {count / 2**30:g} Gi samples", variants=variants, flops=count,
        limit="read", bytes=count * np.dtype(dtype).itemsize, prepare=prepare, libraries=libraries,
    )  # fmt: skip


def rounded_edges(edges: NDArray[np.float64], dtype: Any) -> tuple[NDArray[Any], float]:
    """(lower edges of the bins, largest counted value) in the dtype.

    Every comparison gives the same result as with the exact edges: a float32 x is >= e if and only if it is >= the
    smallest float32 that is not below e.
    """
    with np.errstate(over="ignore"):
        near = edges.astype(dtype)
    infinity = np.array(np.inf, dtype)
    up = np.where(near < edges, np.nextafter(near, infinity), near)
    down = np.where(near > edges, np.nextafter(near, -infinity), near)
    return up[:-1].astype(dtype), float(down[-1])
