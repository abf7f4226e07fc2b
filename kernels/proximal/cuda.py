"""Proximal operators on CUDA. Launches on the current stream of the arrays' device; nothing waits for it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kernels.runtime.ladder import Variant
from kernels.runtime.launch import blocks_of, kernel, multiprocessors, on_stream

OPTIONS: tuple[str, ...] = ()
THREADS, MOST_PARTS, PARTS_EACH = 256, 1024, 4


class ExtentStruct(ctypes.Structure):
    """struct Extent of proximal.cu."""

    _fields_ = [("size", ctypes.c_int * 4), ("axes", ctypes.c_int)]


def soft_threshold(values: Any, threshold: Any, vectors: bool) -> Any:
    import cupy

    with on_stream(values) as stream:
        values = cupy.ascontiguousarray(values)
        out, by = cupy.empty_like(values), cupy.asarray(threshold, cupy.float32)
        components, count = _split(values, vectors)
        args = (values, out, by, ctypes.c_int(components), ctypes.c_longlong(count))
        _launch("soft_threshold", count, args, stream)
    return out


def magnitudes(values: Any, vectors: bool) -> Any:
    components, count = _split(values, vectors)
    return _sum("magnitudes", (values,), (ctypes.c_int(components), ctypes.c_longlong(count)), count)


def inner(one: Any, other: Any) -> Any:
    return _sum("inner", (one, other), (ctypes.c_longlong(one.size),), one.size)


def differences(image: Any, axes: tuple[int, ...]) -> Any:
    import cupy

    with on_stream(image) as stream:
        image = cupy.ascontiguousarray(image)
        fields = cupy.empty((len(axes), *image.shape), image.dtype)
        args = (image, fields, _extent(image.shape, axes), ctypes.c_longlong(image.size))
        _launch("differences", image.size, args, stream)
    return fields


def differences_adjoint(fields: Any, axes: tuple[int, ...]) -> Any:
    import cupy

    with on_stream(fields) as stream:
        fields = cupy.ascontiguousarray(fields)
        image = cupy.empty(fields.shape[1:], fields.dtype)
        args = (fields, image, _extent(image.shape, axes), ctypes.c_longlong(image.size))
        _launch("differences_adjoint", image.size, args, stream)
    return image


def _extent(shape: tuple[int, ...], axes: tuple[int, ...]) -> ExtentStruct:
    missing = 4 - len(shape)
    if list(axes) != sorted(set(axes)):
        raise ValueError(f"axes must increase; got {axes}")
    return ExtentStruct(size=(1,) * missing + shape, axes=sum(1 << (axis + missing) for axis in axes))


def _split(values: Any, vectors: bool) -> tuple[int, int]:
    return (values.shape[0], values[0].size) if vectors else (1, values.size)


def _launch(name: str, count: int, args: tuple[Any, ...], stream: Any) -> None:
    if count:
        kernel("proximal", name).launch((blocks_of(count, THREADS),), (THREADS,), args, stream=stream)


def _sum(name: str, arrays: tuple[Any, ...], sizes: tuple[Any, ...], count: int) -> Any:
    import cupy

    with on_stream(arrays[0]) as stream:
        arrays = tuple(cupy.ascontiguousarray(each) for each in arrays)
        blocks = max(min(blocks_of(count, THREADS), PARTS_EACH * multiprocessors(), MOST_PARTS), 1)
        parts, ticket = cupy.empty(blocks, cupy.float64), cupy.zeros((), cupy.uint32)
        total = cupy.empty((), cupy.float64)
        kernel("proximal", name).launch((blocks,), (THREADS,), (*arrays, parts, ticket, total, *sizes), stream=stream)
    return total


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "elements": Variant(
            summary="a thread a value; sums end in the last block, so that no second launch is needed",
            entries=("soft_threshold", "magnitudes", "inner", "differences", "differences_adjoint"),
            run=lambda task: task(),
        )
    }
)
