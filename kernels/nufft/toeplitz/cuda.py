"""The Toeplitz convolution on CUDA: pad, FFT, multiply, inverse FFT, crop; the first and last step apply coil maps."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from kernels.nufft.exact.structs import NULL
from kernels.nufft.gridding.cuda import Plan
from kernels.nufft.gridding.lines import twiddles
from kernels.nufft.gridding.plan import THREADS, launch, rows_grid, three
from kernels.nufft.toeplitz.kernel import LINES, kernel_from_spread
from kernels.nufft.tuning import MAX_CELLS_AT_ONCE, MAX_WORK
from kernels.runtime.ladder import Variant
from kernels.runtime.launch import blocks_of, on_stream, shared_bytes_a_block

INTERLEAVED = 8
COMPILED = (128, 640, 768, 1024)  # sizes that between them have passes of every radix


class DoubledStruct(ctypes.Structure):
    """struct Doubled of toeplitz.cuh."""

    _fields_ = [("size", ctypes.c_int * 3), ("image", ctypes.c_int * 3), ("coils", ctypes.c_int)]


def at_front(sizes: tuple[int, ...]) -> tuple[int, int, int]:
    """Sizes along x, y, z as toeplitz.cuh takes them; a 2-D image has no x."""
    return (1, sizes[0], sizes[1]) if len(sizes) == 2 else (sizes[0], sizes[1], sizes[2])


class LinesStruct(ctypes.Structure):
    """struct Lines of lines.cuh."""

    _fields_ = [("image", ctypes.c_int * 3), ("padded", ctypes.c_int * 3), ("coils", ctypes.c_int)]


@dataclass(frozen=True, kw_only=True)
class Task:
    """One application: images [coils, *shape] to images; or with maps one image to one, which may be added to."""

    body: Convolution
    image: Any
    maps: Any
    out: Any
    stream: Any
    add: bool = False


class Convolution:
    """The CUDA body of kernels.nufft.Toeplitz."""

    def __init__(self, kernel: Any, shape: tuple[int, ...], beside: Convolution | None = None) -> None:
        import cupy

        self.kernel = cupy.ascontiguousarray(kernel)
        self.shape, self.padded = shape, kernel.shape
        self.device = kernel.device
        self._spaces: dict[tuple[int, ...], tuple[Any, Any]] = {} if beside is None else beside._spaces
        self._work: dict[tuple[int, ...], Any] = {} if beside is None else beside._work
        with self.device:
            fits = crossing_bytes(max(self.padded)) <= shared_bytes_a_block()
        doubled = self.padded != self.shape
        self.variant = "lines" if doubled and fits and all(n in LINES for n in self.padded) else "convolve"

    def apply(self, image: Any, out: Any, stream: Any, variant: str | None = None) -> Any:
        import cupy

        with self.device:
            stream = cupy.cuda.get_current_stream() if stream is None else stream
            with stream:
                image = cupy.ascontiguousarray(image)
                out = cupy.empty(image.shape, image.dtype) if out is None else out
                flat, result = image.reshape(-1, *self.shape), out.reshape(-1, *self.shape)
                for part in self.coil_parts(len(flat)):
                    task = Task(body=self, image=flat[part], maps=None, out=result[part], stream=stream)
                    VARIANTS[variant or self.variant].run(task)
        return out

    def apply_sense(
        self, image: Any, maps: Any, out: Any, stream: Any, variant: str | None = None, *, add: bool = False
    ) -> Any:
        import cupy

        with self.device:
            stream = cupy.cuda.get_current_stream() if stream is None else stream
            with stream:
                image, maps = cupy.ascontiguousarray(image), cupy.ascontiguousarray(maps)
                out = cupy.empty(image.shape, image.dtype) if out is None else out
                if not len(maps):
                    if not add:
                        out.fill(0)
                    return out
                task = Task(body=self, image=image, maps=maps, out=out, stream=stream, add=add)
                VARIANTS[variant or self.variant].run(task)
        return out

    def coil_parts(self, coils: int) -> list[slice]:
        step = max(MAX_CELLS_AT_ONCE // math.prod(self.padded), 1)
        return [slice(begin, min(begin + step, coils)) for begin in range(0, coils, step)]

    def space(self, coils: int) -> tuple[Any, Any]:
        """The cached grid for a number of coils, and the plan of its FFT."""
        import cupy
        from cupyx.scipy.fft import get_fft_plan

        found = self._spaces.get((coils, *self.padded))
        if found is None:
            grid = cupy.empty((coils, *self.padded), cupy.complex64)
            found = grid, get_fft_plan(grid, axes=tuple(range(1, grid.ndim)), value_type="C2C")
            self._spaces[coils, *self.padded] = found
        return found

    def work(self, coils: int) -> Any:
        """The array between the passes of our own FFTs, for a number of coils.

        A volume's is kept, since CuPy's pool would split it. Those of slices are from the pool: operators that follow
        one another get the same memory, which is in the cache still.
        """
        import cupy

        shape = (coils, self.shape[0], *self.padded[1:])
        if len(self.shape) == 2:
            return cupy.empty(shape, cupy.complex64)
        found = self._work.get(shape)
        if found is None:
            found = self._work[shape] = cupy.empty(shape, cupy.complex64)
        return found

    def work_bytes(self, coils: int) -> int:
        """Bytes for the coils computed together; includes cuFFT's own work space, at most as large as the grid."""
        if self.variant == "lines":
            a_coil = 8 * three(self.shape)[0] * math.prod(three(self.padded)[1:])
            return a_coil * min(coils, lines_at_once(self.shape, self.padded))
        parts = self.coil_parts(coils)
        return 16 * math.prod(self.padded) * (parts[0].stop - parts[0].start) if parts else 0

    def struct(self, coils: int) -> DoubledStruct:
        return DoubledStruct(size=at_front(self.padded), image=at_front(self.shape), coils=coils)


def _apart(task: Task, in_parts: bool) -> Task:
    """The task with a copied image, if the result of the first part of the coils would overwrite it."""
    if in_parts and task.maps is not None and task.out.data.ptr == task.image.data.ptr:
        return replace(task, image=task.image.copy())
    return task


def _run_convolve(task: Task) -> None:
    """One part of the coils after the other."""
    body = task.body
    parts = body.coil_parts(len(task.image if task.maps is None else task.maps))
    task = _apart(task, len(parts) > 1)
    for part in parts:
        coils = part.stop - part.start
        grid, plan = body.space(coils)
        struct = body.struct(coils)
        maps = None if task.maps is None else task.maps[part]
        _convolve(task, grid, plan, struct, maps, task.image[part] if maps is None else task.image)
        if maps is None:
            blocks, threads = rows_grid(struct.image[2], coils * struct.image[0] * struct.image[1])
            launch("crop_coils", blocks, threads, grid, task.out[part], struct, stream=task.stream)
        else:
            blocks, threads = rows_grid(struct.image[2], struct.image[0] * struct.image[1])
            first = ctypes.c_bool(part.start == 0 and not task.add)
            launch("combine_coils", blocks, threads, grid, maps, task.out, first, struct, stream=task.stream)


def _convolve(task: Task, grid: Any, plan: Any, struct: DoubledStruct, maps: Any, image: Any) -> None:
    from cupy.cuda import cufft

    coils, stream = struct.coils, task.stream
    blocks, threads = rows_grid(struct.size[2], coils * struct.size[0] * struct.size[1])
    launch("weigh_coils", blocks, threads, image, NULL if maps is None else maps, grid, struct, stream=stream)
    plan.fft(grid, grid, cufft.CUFFT_FORWARD)
    pairs = math.prod(struct.size) // 2
    args = (grid, task.body.kernel, ctypes.c_longlong(pairs), ctypes.c_int(coils))
    launch("multiply", (blocks_of(pairs, THREADS), min(coils, 8)), THREADS, *args, stream=stream)
    plan.fft(grid, grid, cufft.CUFFT_INVERSE)


def values_of(size: int) -> int:
    """Values of a line that a thread holds; Line of lines.cuh."""
    return 20 if size % 5 == 0 else 12 if size == 768 else 24 if size % 3 == 0 else 8


def row_threads(size: int) -> int:
    return 256 if values_of(size) <= 12 else 128 if values_of(size) <= 24 else 64


def crossing_bytes(size: int) -> int:
    """Shared memory of cross_lines."""
    return size * 9 // 8 * INTERLEAVED * 8


def lines_at_once(shape: tuple[int, ...], padded: tuple[int, ...]) -> int:
    """The number of coils computed together."""
    return max(MAX_WORK // (math.prod(three(padded)[1:]) * three(shape)[0]), 1)


def _run_lines(task: Task) -> None:
    body = task.body
    image, padded = three(body.shape), three(body.padded)
    maps, coils = task.maps, len(task.image if task.maps is None else task.maps)
    step = lines_at_once(body.shape, body.padded)
    task = _apart(task, coils > step)
    for begin in range(0, coils, step):
        count = min(step, coils - begin)
        work, struct = body.work(count), LinesStruct(image=image, padded=padded, coils=count)
        part = slice(begin, begin + count)
        of_part = (task.image[part], None, task.out[part]) if maps is None else (task.image, maps[part], task.out)
        _lines_of(task, work, struct, *of_part, first=begin == 0 and not task.add)


def _lines_of(task: Task, work: Any, struct: LinesStruct, image: Any, maps: Any, out: Any, *, first: bool) -> None:
    lines = Lines(struct=struct, device=task.body.device.id, stream=task.stream)
    lines.forward_rows(image, maps, work)
    lines.forward_planes(work, struct.coils)
    lines.across(0, "CONVOLVE", work, struct.coils, task.body.kernel)
    lines.inverse_planes(work, struct.coils)
    lines.inverse_rows(work, maps, out, first=first)


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Launches of lines.cuh. work: complex64 [images, x, padded y, padded z]."""

    struct: LinesStruct
    device: int
    stream: Any

    def forward_rows(self, image: Any, maps: Any, work: Any) -> None:
        """Along z, of each coil of `struct`."""
        struct, size = self.struct, self.struct.padded[2]
        threads = row_threads(size)
        blocks = blocks_of(struct.image[0] * struct.image[1] * struct.coils, threads // (size // values_of(size)))
        args = (image, NULL if maps is None else maps, work, self.twiddles(2), struct)
        launch(f"forward_rows<{size}>", (blocks,), threads, *args, stream=self.stream)

    def inverse_rows(self, work: Any, maps: Any, out: Any, *, first: bool) -> None:
        struct, size = self.struct, self.struct.padded[2]
        args = (work, NULL if maps is None else maps, out, self.twiddles(2), ctypes.c_bool(first), struct)
        entry = f"inverse_rows<{size}, {'false' if maps is None else 'true'}>"
        launch(entry, (struct.image[0] * struct.image[1],), row_threads(size), *args, stream=self.stream)

    def forward_planes(self, work: Any, images: int) -> None:
        """Along y; in 2-D there is none."""
        if self.struct.padded[1] > 1:
            self.across(1, "FORWARD", work, images * self.struct.image[0])

    def inverse_planes(self, work: Any, images: int) -> None:
        if self.struct.padded[1] > 1:
            self.across(1, "INVERSE", work, images * self.struct.image[0])

    def across(self, axis: int, kind: str, work: Any, outers: int, kernel: Any = NULL) -> None:
        size, stride = self.struct.padded[axis], self.stride(axis)
        args = (
            work,
            kernel,
            self.twiddles(axis),
            *self.strides(axis),
            ctypes.c_int(self.struct.image[axis]),
            ctypes.c_int(outers),
        )
        blocks, threads = (stride // INTERLEAVED * outers,), size // values_of(size) * INTERLEAVED
        shared_bytes = crossing_bytes(size)
        launch(f"cross_lines<{size}, {kind}>", blocks, threads, *args, stream=self.stream, shared_bytes=shared_bytes)

    def stride(self, axis: int) -> int:
        return math.prod(self.struct.padded[axis + 1 :])

    def strides(self, axis: int) -> tuple[ctypes.c_longlong, ctypes.c_longlong]:
        """Between a line's values, and between the outer indices."""
        padded, sizes = self.struct.padded, self.struct.image
        outer = math.prod(padded[1:]) * (sizes[0] if axis == 0 else 1)
        return ctypes.c_longlong(self.stride(axis)), ctypes.c_longlong(outer)

    def twiddles(self, axis: int) -> Any:
        return twiddles(self.struct.padded[axis], self.device)


def combined(images: Any, maps: Any, out: Any) -> Any:
    """Σ_c conj(map_c) image_c of [coils, *shape], complex64: a new array, or added to `out` unless that is None."""
    import cupy

    with on_stream(images) as stream:
        images, maps = cupy.ascontiguousarray(images), cupy.ascontiguousarray(maps)
        first = ctypes.c_bool(out is None)
        out = cupy.empty(images.shape[1:], images.dtype) if out is None else out
        shape = at_front(images.shape[1:])
        struct = DoubledStruct(size=shape, image=shape, coils=len(images))
        blocks, threads = rows_grid(shape[2], shape[0] * shape[1])
        launch("combine_coils", blocks, threads, images, maps, out, first, struct, stream=stream)
    return out


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "convolve": Variant(
            summary="normal operator: the coils' images on the doubled grid, cuFFT, the kernel, cuFFT, their sum",
            entries=("weigh_coils", "multiply", "combine_coils", "crop_coils"),
            run=_run_convolve,
        ),
        "lines": Variant(
            summary="our own FFTs of lines: zeros and unwanted values are not moved, products cost no extra pass",
            entries=tuple(
                entry
                for size in COMPILED
                for entry in (
                    f"forward_rows<{size}>",
                    *(f"cross_lines<{size}, {kind}>" for kind in ("FORWARD", "INVERSE", "CONVOLVE")),
                    *(f"inverse_rows<{size}, {combined}>" for combined in ("false", "true")),
                )
            ),
            run=_run_lines,
        ),
    }
)


def toeplitz_kernel(trajectory: Any, weights: Any, shape: tuple[int, ...], eps: float, stream: Any) -> Any:
    """See kernels.nufft.toeplitz."""
    import cupy

    with on_stream(trajectory, stream) as current:
        doubled = tuple(2 * n for n in shape)
        weights = None if weights is None else cupy.ascontiguousarray(weights, cupy.float32)
        spread = cupy.empty((1, *doubled), cupy.complex64)
        ones = cupy.ones((1, len(trajectory)), cupy.complex64)
        Plan(2 * trajectory, doubled, eps).adjoint(ones, weights, spread, current)
        return kernel_from_spread(spread[0], shape, cupy)
