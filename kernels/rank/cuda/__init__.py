"""Rank filters on CUDA: the choice and launch of the kernels of rank.cu."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from kernels.rank.cuda import bitsets, cube, extremes, gather, ordered, rows, square, tile
from kernels.rank.task import Difference, Task
from kernels.runtime.launch import Repeat, on_stream, record

OPTIONS = ("--fmad=false",)  # ranks are computed as on the CPU


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to filter, with its kernels."""

    summary: str
    entries: tuple[str, ...]
    run: Callable[[Any, Task, Any, Any], list[Any] | None]  # (image, task, out, stream); arrays between launches
    applies: Callable[[Task], bool] = lambda task: True


def filtered(
    image: Any,
    task: Task,
    out: Any,
    *,
    stream: Any = None,
    variant: str | None = None,
    difference: Difference | None = None,
) -> Any:
    """The task's rank of each window of a CuPy array, in the task's shape.

    out        : C-contiguous array for the result, or None for a new one
    stream     : the cupy.cuda.Stream to launch on; default CuPy's current one
    variant    : a name in `VARIANTS`; default the fastest that applies
    difference : to take where `variant` is not given and the fastest can; None is returned if it cannot open

    Nothing waits for the device. Raises ValueError where the variant named does not apply.
    """
    import cupy

    opens = difference is not None and difference.opens
    if opens and not extremes.applies(task):
        return None
    given = out is not None and variant is None and image.flags.c_contiguous
    layout = _layout(image, task, out, difference) if given else None
    known = None if layout is None else _repeats.get(layout)
    if opens and layout in _repeats and known is None:
        return None
    if known is not None and cupy.cuda.runtime.getDevice() == image.data.device_id:
        current = cupy.cuda.get_current_stream() if stream is None else stream
        with current:  # the pool hands freed memory to later work on the same stream only
            made = [cupy.cuda.alloc(size) for size in known.made_bytes]
        pointers = [array.data.ptr for array in _arrays(image, out, difference)]
        known.launch([*pointers, *(memory.ptr for memory in made)], current.ptr)
        if difference is not None:
            difference.is_done = True
        return out
    with on_stream(image, stream) as current:
        source = cupy.ascontiguousarray(image)
        if out is None:
            out = cupy.empty(task.out_shape, task.dtype)
        if variant is not None and not VARIANTS[variant].applies(task):
            raise ValueError(f"variant {variant!r} cannot filter {task.dtype} with windows of {task.taps}")
        takes = variant is None and difference is not None and (opens or extremes.applies(task))
        run: Callable[[], list[Any] | None]
        if takes:
            run = partial(extremes.run, source, task, out, current, difference)
        else:
            applicable = [each for each in VARIANTS.values() if each.applies(task)]
            chosen = applicable[-1] if variant is None else VARIANTS[variant]
            run = partial(chosen.run, source, task, out, current)
        if layout is None or takes != (difference is not None):
            run()
        else:
            repeat = record(run, _arrays(image, out, difference))
            if repeat is not None:
                if len(_repeats) >= MAX_REPEATS:
                    _repeats.clear()
                _repeats[layout] = repeat if difference is None or difference.is_done else None
    return out if difference is None or difference.is_done or not opens else None


MAX_REPEATS = 256
ALIGNMENT = 256  # bytes; launches depend on a pointer's remainder only
# Of earlier calls: choosing kernels and grids takes longer than many chunks. None: it could not open.
_repeats: dict[Any, Repeat | None] = {}


def _arrays(image: Any, out: Any, difference: Difference | None) -> tuple[Any, ...]:
    if difference is None or difference.image is None:
        return image, out
    # An opening is subtracted from its own image, or from a part of it.
    is_same = difference.opens and difference.image.data.ptr == image.data.ptr
    return (image, out) if is_same else (image, out, difference.image)


def _layout(image: Any, task: Task, out: Any, difference: Difference | None) -> Any:
    """All that the launches depend on, except the arrays; None if they cannot be repeated."""
    arrays = _arrays(image, out, difference)
    pointers = [array.data.ptr for array in arrays]
    if task.footprint is not None or len({*pointers}) < len(pointers):
        return None
    aligned = tuple(pointer % ALIGNMENT for pointer in pointers)
    subtracted = None
    if difference is not None:
        subtracted = difference.opens, difference.reverse, getattr(difference.image, "strides", None)
    return task, repr(task.cval), repr(task.nodata), aligned, subtracted, image.data.device_id


# In the order of the source, naive to fast: production uses the last that applies.
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "gather": Variant(
            summary="one thread per result, by counting the samples of the window for each bit",
            entries=gather.ENTRIES,
            run=gather.run,
        ),
        "ordered": Variant(
            summary="a moving window over the sorted samples of a tile",
            entries=ordered.ENTRIES,
            run=ordered.run,
            applies=ordered.applies,
        ),
        "bitsets": Variant(
            summary="boxes of medium size, by bits over the sorted samples of a tile",
            entries=bitsets.ENTRIES,
            run=bitsets.run,
            applies=bitsets.applies,
        ),
        "tile": Variant(
            summary="medians of squares of 9 to 15, by networks in registers, tiles within tiles",
            entries=tile.ENTRIES,
            run=tile.run,
            applies=tile.applies,
        ),
        "square": Variant(
            summary="medians of small squares, by networks in registers that neighbours share",
            entries=square.ENTRIES,
            run=square.run,
            applies=square.applies,
        ),
        "rows": Variant(
            summary="medians of 3 × 3, in one pass down rows of registers",
            entries=rows.ENTRIES,
            run=rows.run,
            applies=rows.applies,
        ),
        "cube": Variant(
            summary="medians of small cubes, by networks in registers that neighbours share",
            entries=cube.ENTRIES,
            run=cube.run,
            applies=cube.applies,
        ),
        "extremes": Variant(
            summary="minima and maxima of boxes, along two axes in one pass",
            entries=extremes.ENTRIES,
            run=extremes.run,
            applies=extremes.applies,
        ),
    }
)
