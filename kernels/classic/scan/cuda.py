"""Prefix sums on CUDA: which kernels of scan.cu run for an array, with which grids."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np

from kernels.runtime.ladder import Ladder, Variant
from kernels.runtime.launch import blocks_of, kernel, on_stream, pointer
from kernels.runtime.limits.cuda import random_values

OPTIONS: tuple[str, ...] = ()

# Tuned on an H200 (sm_90), as in the headers.
THREADS, SECTION, LONG_SECTION = 256, 1024, 4096
TILE_BYTES = 16 * 11 * THREADS

MAILBOX_BYTES = 32
MAX_BLOCKS = (1 << 31) - 1
# Signed and unsigned integers of one size share kernels, since sums are modulo a power of two.
C_TYPES = {
    "int32": "unsigned", "uint32": "unsigned", "int64": "unsigned long long", "uint64": "unsigned long long",
    "float32": "float", "float64": "double",
}  # fmt: skip
TYPES = tuple(dict.fromkeys(C_TYPES.values()))
CLASSIC_TYPES = ("unsigned", "float")  # summed by the intermediate rungs, in their own type


class SectionStruct(ctypes.Structure):
    """struct Section<float> of sections.cuh, as for all types."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "out", "totals")),
        ("n", ctypes.c_longlong),
        ("exclusive", ctypes.c_int),
    )


class ScanStruct(ctypes.Structure):
    """struct Scan<float> of tiles.cuh, as for all types."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "out", "heads")),
        ("n", ctypes.c_longlong),
        ("exclusive", ctypes.c_int),
        ("aligned", ctypes.c_int),
    )


@dataclass(frozen=True, kw_only=True)
class Task:
    """One array to scan."""

    values: Any  # CuPy [n], contiguous, native byte order, n > 0
    heads: Any  # CuPy [n] of bytes, or None
    exclusive: bool
    out: Any
    stream: Any

    @property
    def c_type(self) -> str:
        return C_TYPES[self.values.dtype.name]

    def launch(self, entry: str, blocks: int, threads: int, *args: Any) -> None:
        if blocks > MAX_BLOCKS:
            raise ValueError(f"values has {self.values.size} elements: too many for one scan")
        kernel("scan", entry).launch((blocks,), (threads,), args, stream=self.stream)


def scanned(
    values: Any, heads: Any, exclusive: bool, out: Any, *, stream: Any = None, variant: str | None = None
) -> Any:
    """The prefix sums of a CuPy array; see kernels.classic.scan.

    variant : a name in `VARIANTS`; default the fastest. Those before "hierarchical" sum float32 in float32.

    Raises ValueError if the named variant does not apply.
    """
    import cupy

    if variant not in (None, PRODUCTION) and (C_TYPES[values.dtype.name] not in CLASSIC_TYPES or heads is not None):
        raise ValueError(f"variant {variant!r} cannot scan {'segments of ' * (heads is not None)}{values.dtype}")
    with on_stream(values, stream) as current:
        source = cupy.ascontiguousarray(values, values.dtype.newbyteorder("="))
        if out is None:
            out = cupy.empty_like(source)
        if source.size == 0:
            return out
        heads = None if heads is None else cupy.ascontiguousarray(heads).view(cupy.uint8)
        task = Task(values=source, heads=heads, exclusive=exclusive, out=out, stream=current)
        VARIANTS[variant or PRODUCTION].run(task)
    return out


def _run_sections(template: str, threads: int, section: int, task: Task) -> None:
    """Scans sections, then their totals by the same kernel, and adds the totals."""
    import cupy

    blocks = blocks_of(task.values.size, section)
    totals = cupy.empty(blocks, task.values.dtype) if blocks > 1 else None
    struct = SectionStruct(
        values=pointer(task.values), out=pointer(task.out), totals=pointer(totals),
        n=task.values.size, exclusive=task.exclusive,
    )  # fmt: skip
    # Exclusive sums are written one element later, where a block would overwrite its neighbour's unread input.
    if task.exclusive and task.values.data.ptr == task.out.data.ptr:
        _run_sections(template, threads, section, replace(task, values=task.values.copy()))
        return
    task.launch(template.format(task.c_type), blocks, threads, struct)
    if totals is None:
        return
    _run_sections(template, threads, section, replace(task, values=totals, out=totals, exclusive=False))
    args = (task.out, totals, ctypes.c_longlong(task.values.size), ctypes.c_int(task.exclusive), ctypes.c_int(section))
    task.launch(f"add_totals<{task.c_type}>", blocks_of(task.values.size, THREADS), THREADS, *args)


def _scan_struct(task: Task) -> ScanStruct:
    size = task.values.dtype.itemsize
    aligned = all(array.data.ptr % 16 == 0 for array in (task.values, task.out))
    if task.heads is not None:
        aligned = aligned and task.heads.data.ptr % (16 // size) == 0
    return ScanStruct(
        values=pointer(task.values), out=pointer(task.out), heads=pointer(task.heads), n=task.values.size,
        exclusive=task.exclusive, aligned=aligned,
    )  # fmt: skip


def _run_hierarchical(task: Task) -> None:
    """Totals of tiles, their scan, then the tiles."""
    import cupy

    tiles = blocks_of(task.values.size, TILE_BYTES // task.values.dtype.itemsize)
    struct, totals = _scan_struct(task), None
    if tiles > 1:
        totals = cupy.empty(tiles, np.float64 if task.values.dtype.kind == "f" else np.uint64)
        task.launch(f"sum_tiles<{task.c_type}>", tiles, THREADS, struct, totals)
        _run_hierarchical(replace(task, values=totals, out=totals, exclusive=False))
    args = (struct, ctypes.c_void_p(pointer(totals)))
    task.launch(f"scan_tiles<{task.c_type}>", tiles, THREADS, *args)


def _run_single_pass(task: Task) -> None:
    import cupy

    tiles = blocks_of(task.values.size, TILE_BYTES // task.values.dtype.itemsize)
    mail = cupy.empty(2 * tiles * MAILBOX_BYTES, cupy.uint8)
    mail.data.memset_async(0, mail.nbytes, task.stream)
    segmented = str(task.heads is not None).lower()
    entry = f"scan_single_pass<{task.c_type}, {segmented}>"
    task.launch(entry, tiles + 1, THREADS, _scan_struct(task), mail, ctypes.c_uint(tiles))


def _sections(summary: str, name: str, threads: int, section: int) -> Variant:
    template = f"{name}<{{}}>"
    entries = tuple(each.format(c_type) for c_type in CLASSIC_TYPES for each in (template, "add_totals<{}>"))
    return Variant(summary=summary, entries=entries, run=partial(_run_sections, template, threads, section))


PRODUCTION = "single_pass"
# In the order of the source, naive to fast.
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "kogge_stone": _sections(
            "sections of 1024 in shared memory: ten rounds of two barriers, n log n additions", "scan_kogge_stone",
            SECTION, SECTION,
        ),
        "double_buffered": _sections(
            "two buffers in turn: one barrier per round", "scan_double_buffered", SECTION, SECTION
        ),
        "brent_kung": _sections(
            "up and down a tree: 2 n additions, but twice the rounds", "scan_brent_kung", SECTION // 2, SECTION
        ),
        "three_phase": _sections(
            "a run of 16 per thread, then a scan of the runs' ends: n additions, sections of 4096", "scan_three_phase",
            THREADS, LONG_SECTION,
        ),
        "hierarchical": Variant(
            summary="totals of tiles first, so that sums are written only once; tiles scanned by shuffles",
            entries=tuple(
                f"{name}<{c_type}>" for c_type in TYPES for name in ("sum_tiles", "scan_tiles")
            ),
            run=_run_hierarchical,
        ),
        PRODUCTION: Variant(
            summary="one pass: tiles publish totals, and one block sends each tile its prefix, in a fixed order",
            entries=tuple(f"scan_single_pass<{c_type}, {flag}>" for c_type in TYPES for flag in ("false", "true")),
            run=_run_single_pass,
        ),
    }
)  # fmt: skip


def ladders() -> tuple[Ladder, ...]:
    """Inclusive sums of float32 on every rung; other dtypes and segmented sums in production."""
    few = ("hierarchical", PRODUCTION)
    return (
        _ladder("float32", 1 << 28, tuple(VARIANTS)),
        _ladder("uint32", 1 << 28, few),
        _ladder("uint64", 1 << 27, (PRODUCTION,)),
        _ladder("float32", 1 << 28, (PRODUCTION,), segments=True),
    )


def _ladder(dtype: str, count: int, variants: tuple[str, ...], *, segments: bool = False) -> Ladder:
    @cache
    def arrays() -> tuple[Any, Any, Any]:
        import cupy

        heads = (random_values(count, "uint8", seed=2) < 3).view(cupy.uint8) if segments else None
        return random_values(count, dtype), heads, cupy.empty(count, dtype)

    def prepare(name: str) -> Callable[[], Any]:
        values, heads, out = arrays()
        return lambda: scanned(values, heads, False, out, variant=name)

    def libraries() -> Mapping[str, Callable[[], Any]]:
        import cupy

        values, _heads, out = arrays()
        return {} if segments else {"CuPy (cumsum)": lambda: cupy.cumsum(values, dtype=values.dtype, out=out)}

    kind = "segmented" if segments else "inclusive"
    power = str(count.bit_length() - 1).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return Ladder(
        name=f"{kind}, 2{power} {dtype}", variants=variants, flops=count, limit="copy",
        bytes=count * (2 * np.dtype(dtype).itemsize + segments), prepare=prepare, libraries=libraries,
    )  # fmt: skip
