"""Convolution on CUDA: which kernels of convolution.cu run for which samples, with which grids."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from kernels.runtime.ladder import Ladder, Variant
from kernels.runtime.launch import kernel, on_stream
from kernels.runtime.limits.cuda import torch_stream

OPTIONS: tuple[str, ...] = ()

# Tuned on an H200 (sm_90); block tiles as in the headers.
TILE = (8, 32)  # rows, columns with one thread per result
INPUT_EDGE = 32  # with one thread per sample
LINE_RESULTS = 2048  # of line_registers
REGISTER_TILE = (32, 128)  # of image_registers
UNROLLED = (3, 5, 7, 9, 11, 13, 15)  # sides of square masks for which image_registers is compiled
LAYER_TILE = (64, 128)  # maps and pixels of layer_gemm
FMA_BOUND_WEIGHTS = 54  # masks with fewer weights are bound by memory

MAX_WEIGHTS = 961
LINE, LINE_TAPS = 1 << 28, 9
IMAGE, IMAGE_SIDE = (16384, 16384), 5
LAYER_IMAGES, LAYER_FILTERS = (32, 64, 130, 130), (128, 64, 3, 3)
Operation = Literal["line", "image", "layer"]


class MaskStruct(ctypes.Structure):
    """struct Mask of lines.cuh."""

    _fields_ = (("rows", ctypes.c_int), ("columns", ctypes.c_int), ("weight", ctypes.c_float * MAX_WEIGHTS))


class ImageStruct(ctypes.Structure):
    """struct Image of images.cuh."""

    _fields_ = (("rows", ctypes.c_int), ("columns", ctypes.c_int))


class LayerStruct(ctypes.Structure):
    """struct Layer of layers.cuh."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("channels", "rows", "columns", "maps", "mask_rows", "mask_columns")),
        ("out_rows", ctypes.c_int),
        ("out_columns", ctypes.c_int),
        ("pixels", ctypes.c_longlong),
    )


@dataclass(frozen=True, kw_only=True)
class Task:
    """One convolution with a result that is not empty. Device arrays are C-contiguous."""

    samples: Any
    mask: Any  # lines and images: a flipped NumPy array; layers: the filters, on the device
    out: Any
    stream: Any

    @property
    def operation(self) -> Operation:
        names: dict[int, Operation] = {1: "line", 2: "image", 4: "layer"}
        return names[self.samples.ndim]

    def launch(self, entry: str, blocks: int, threads: int, *args: Any, shared_bytes: int = 0) -> None:
        kernel("convolution", entry).launch((blocks,), (threads,), args, shared_bytes=shared_bytes, stream=self.stream)

    def mask_struct(self) -> MaskStruct:
        rows, columns = np.atleast_2d(self.mask).shape
        struct = MaskStruct(rows, columns)
        struct.weight[: rows * columns] = self.mask.ravel().tolist()
        return struct

    def size(self) -> Any:
        """The samples' shape as a kernel argument."""
        if self.operation == "line":
            return ctypes.c_longlong(self.samples.size)
        return ImageStruct(*self.samples.shape)

    def tiles(self, rows: int, columns: int) -> int:
        height, width = map(int, self.samples.shape)
        return -(-height // rows) * -(-width // columns)


def convolve(samples: Any, mask: Any, out: Any, *, stream: Any = None, variant: str | None = None) -> Any:
    """The convolution of a CuPy array. `variant`: a name in VARIANTS; default the fastest."""
    turned = np.ascontiguousarray(np.flip(mask), np.float32)
    return _computed(samples, turned, out, samples.shape, stream, variant)


def layer(
    images: Any, filters: Any, out: Any, shape: tuple[int, ...], *, stream: Any = None, variant: str | None = None
) -> Any:
    """The maps of a layer over CuPy arrays. `variant`: a name in VARIANTS; default the fastest."""
    import cupy

    with on_stream(images, stream):
        filters = cupy.ascontiguousarray(filters, np.float32)
    return _computed(images, filters, out, shape, stream, variant)


def applies(variant: str, operation: str) -> bool:
    """Whether a variant computes a "line", an "image" or a "layer"."""
    return variant.startswith(operation)


def production(operation: str) -> str:
    """The variant that the public function runs."""
    return [name for name in VARIANTS if applies(name, operation)][-1]


def _computed(samples: Any, mask: Any, out: Any, shape: tuple[int, ...], stream: Any, variant: str | None) -> Any:
    import cupy

    with on_stream(samples, stream) as current:
        samples = cupy.ascontiguousarray(samples, np.float32)
        out = cupy.empty(shape, cupy.float32) if out is None else out
        task = Task(samples=samples, mask=mask, out=out, stream=current)
        name = variant or production(task.operation)
        if not applies(name, task.operation):
            raise ValueError(f"variant {name!r} cannot compute what is asked for: {task.operation}")
        if out.size:
            VARIANTS[name].run(task)
    return out


def _run_direct(task: Task) -> None:
    """Runs with the mask in global memory."""
    import cupy

    mask = cupy.asarray(task.mask)
    if task.operation == "line":
        blocks, size = -(-task.out.size // 256), ctypes.c_int(task.mask.size)
        task.launch("line_direct", blocks, 256, task.samples, mask, task.out, task.size(), size)
    else:
        args = (task.samples, mask, task.out, task.size(), ImageStruct(*task.mask.shape))
        task.launch("image_direct", task.tiles(*TILE), 256, *args)


def _launch(task: Task, entry: str, blocks: int, threads: int, shared_bytes: int = 0) -> None:
    args = (task.samples, task.out, task.size(), task.mask_struct())
    task.launch(entry, blocks, threads, *args, shared_bytes=shared_bytes)


def _line(entry: str) -> Callable[[Task], None]:
    return lambda task: _launch(task, entry, -(-task.out.size // 256), 256)


def _image(entry: str) -> Callable[[Task], None]:
    return lambda task: _launch(task, entry, task.tiles(*TILE), 256)


def _run_line_steps(task: Task) -> None:
    _launch(task, "line_steps", -(-task.out.size // 256), 256, 4 * (256 + task.mask.size - 1))


def _run_image_steps(task: Task) -> None:
    staged = [tile + side - 1 for tile, side in zip(TILE, task.mask.shape, strict=True)]
    _launch(task, "image_steps", task.tiles(*TILE), 256, 4 * staged[0] * staged[1])


def _run_line_inputs(task: Task) -> None:
    results = 1024 - (task.mask.size - 1)
    _launch(task, "line_inputs", -(-task.out.size // results), 1024)


def _run_image_inputs(task: Task) -> None:
    rows, columns = (INPUT_EDGE - (side - 1) for side in task.mask.shape)
    _launch(task, "image_inputs", task.tiles(rows, columns), INPUT_EDGE**2)


def _run_line_registers(task: Task) -> None:
    taps = task.mask.size
    vectors = (LINE_RESULTS + taps - 1 + 3) // 4 + 2
    entry, blocks = f"line_registers<{-(taps // 2) % 4}>", -(-task.out.size // LINE_RESULTS)
    _launch(task, entry, blocks, 256, 16 * vectors)


def _run_image_registers(task: Task) -> None:
    rows, columns = task.mask.shape
    size = rows if rows == columns and rows in UNROLLED else 0
    pitch = (REGISTER_TILE[1] + columns - 1 + 3) // 4 * 4 + 8
    shared_bytes = 4 * (REGISTER_TILE[0] + rows - 1) * pitch
    _launch(task, f"image_registers<{size}>", task.tiles(*REGISTER_TILE), 256, shared_bytes)


def _layer_args(task: Task) -> tuple[Any, Any, Any, LayerStruct]:
    _, channels, rows, columns = task.samples.shape
    maps, _, mask_rows, mask_columns = task.mask.shape
    images, _, out_rows, out_columns = task.out.shape
    pixels = images * out_rows * out_columns
    struct = LayerStruct(channels, rows, columns, maps, mask_rows, mask_columns, out_rows, out_columns, pixels)
    return task.samples, task.mask, task.out, struct


def _run_layer_direct(task: Task) -> None:
    args = _layer_args(task)
    task.launch("layer_direct", -(-args[-1].pixels // 256) * args[-1].maps, 256, *args)


def _run_layer_gemm(task: Task) -> None:
    args = _layer_args(task)
    blocks = -(-args[-1].pixels // LAYER_TILE[1]) * -(-args[-1].maps // LAYER_TILE[0])
    task.launch("layer_gemm", blocks, 128, *args)


# In the order of the source, naive to fast: the last of each operation is the one in production.
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "line_direct": Variant(
            summary="a line, one thread per result: mask and samples from global memory",
            entries=("line_direct",),
            run=_run_direct,
        ),
        "line_constant": Variant(
            summary="the mask from constant memory: one read per warp",
            entries=("line_constant",),
            run=_line("line_constant"),
        ),
        "line_steps": Variant(
            summary="strategy 1: tile and halo in shared memory, the halo loaded in further steps",
            entries=("line_steps",),
            run=_run_line_steps,
        ),
        "line_inputs": Variant(
            summary="strategy 2: one thread per sample, loaded in one step; threads of the halo compute nothing",
            entries=("line_inputs",),
            run=_run_line_inputs,
        ),
        "line_inner": Variant(
            summary="strategy 3: only the tile in shared memory, the halo from L2",
            entries=("line_inner",),
            run=_line("line_inner"),
        ),
        "line_registers": Variant(
            summary="eight results per thread: a read of 16 bytes serves sixteen multiply-adds",
            entries=tuple(f"line_registers<{shift}>" for shift in range(4)),
            run=_run_line_registers,
        ),
        "image_direct": Variant(
            summary="an image, one thread per result: mask and pixels from global memory",
            entries=("image_direct",),
            run=_run_direct,
        ),
        "image_constant": Variant(
            summary="the mask from constant memory: one read per warp",
            entries=("image_constant",),
            run=_image("image_constant"),
        ),
        "image_steps": Variant(
            summary="strategy 1: tile and halo in shared memory, the halo loaded in further steps",
            entries=("image_steps",),
            run=_run_image_steps,
        ),
        "image_inputs": Variant(
            summary="strategy 2: one thread per pixel, loaded in one step; threads of the halo compute nothing",
            entries=("image_inputs",),
            run=_run_image_inputs,
        ),
        "image_inner": Variant(
            summary="strategy 3: only the tile in shared memory, the halo from the caches",
            entries=("image_inner",),
            run=_image("image_inner"),
        ),
        "image_registers": Variant(
            summary="4 × 4 results per thread: a read of 16 bytes serves 64 multiply-adds, loops unrolled to 15 × 15",
            entries=tuple(f"image_registers<{size}>" for size in (0, *UNROLLED)),
            run=_run_image_registers,
        ),
        "layer_direct": Variant(
            summary="a layer, one thread per result: every window read from the caches",
            entries=("layer_direct",),
            run=_run_layer_direct,
        ),
        "layer_gemm": Variant(
            summary="a matrix product of filters and windows, gathered while they are copied to shared memory",
            entries=("layer_gemm",),
            run=_run_layer_gemm,
        ),
    }
)


def ladders() -> tuple[Ladder, ...]:
    """A line and an image bound by memory, an image bound by arithmetic, and a layer."""
    shapes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
        ((LINE,), (LINE_TAPS,)),
        (IMAGE, (IMAGE_SIDE, IMAGE_SIDE)),
        (IMAGE, (4 * IMAGE_SIDE - 5, 4 * IMAGE_SIDE - 5)),
    )
    made = [_mask_ladder(*pair) for pair in shapes]
    images, channels, rows, columns = LAYER_IMAGES
    maps, _, mask_rows, mask_columns = LAYER_FILTERS
    shape = (images, maps, rows - mask_rows + 1, columns - mask_columns + 1)
    sizes = [int(np.prod(each)) for each in (LAYER_IMAGES, LAYER_FILTERS, shape)]
    layers = Ladder(
        name=f"layer of {maps} maps, {channels} channels, {mask_rows} × {mask_columns}, {images} images of "
        f"{rows} × {columns}",
        variants=tuple(name for name in VARIANTS if applies(name, "layer")),
        bytes=4 * sum(sizes),
        flops=2 * sizes[2] * channels * mask_rows * mask_columns,
        limit="fma",
        prepare=lambda variant: _prepared_layer(variant, shape),
        libraries=lambda: {"cuDNN (PyTorch)": _cudnn()} if find_spec("torch") else {},
    )
    return (*made, layers)


def _mask_ladder(shape: tuple[int, ...], mask_shape: tuple[int, ...]) -> Ladder:
    operation, results, weights = "line" if len(shape) == 1 else "image", int(np.prod(shape)), int(np.prod(mask_shape))

    def prepare(variant: str) -> Callable[[], Any]:
        import cupy

        samples, mask = _made(shape, mask_shape)
        out = cupy.empty(shape, cupy.float32)
        return lambda: convolve(samples, mask, out, variant=variant)

    def library() -> Mapping[str, Callable[[], Any]]:
        import cupy

        ndimage = import_module("cupyx.scipy.ndimage")
        samples, mask = _made(shape, mask_shape)
        weights, out = cupy.asarray(mask), cupy.empty(shape, cupy.float32)
        return {"cupyx.scipy.ndimage": lambda: ndimage.convolve(samples, weights, output=out, mode="constant")}

    return Ladder(
        name=f"{operation} of {' × '.join(map(str, shape))} with a mask of {' × '.join(map(str, mask_shape))}",
        variants=tuple(name for name in VARIANTS if applies(name, operation)),
        bytes=8 * results,
        flops=2 * weights * results,
        limit="copy" if weights < FMA_BOUND_WEIGHTS else "fma",
        prepare=prepare,
        libraries=library,
    )


def _made(shape: tuple[int, ...], mask_shape: tuple[int, ...]) -> tuple[Any, Any]:
    import cupy

    samples = cupy.random.default_rng(1).standard_normal(shape, dtype=cupy.float32)
    return samples, np.random.default_rng(2).standard_normal(mask_shape).astype(np.float32)


def _layer_arrays() -> tuple[Any, Any]:
    import cupy

    rng = cupy.random.default_rng(1)
    images, filters = (rng.standard_normal(shape, dtype=cupy.float32) for shape in (LAYER_IMAGES, LAYER_FILTERS))
    return images, filters


def _prepared_layer(variant: str, shape: tuple[int, ...]) -> Callable[[], Any]:
    import cupy

    (images, filters), out = _layer_arrays(), cupy.empty(shape, cupy.float32)
    return lambda: layer(images, filters, out, shape, variant=variant)


def _cudnn() -> Callable[[], Any]:
    """In float32; by default PyTorch may use TF32."""
    torch = import_module("torch")
    images, filters = (torch.as_tensor(array, device="cuda") for array in _layer_arrays())

    def run() -> Any:
        with torch.cuda.stream(torch_stream()), torch.backends.cudnn.flags(allow_tf32=False, benchmark=True):
            return torch.nn.functional.conv2d(images, filters)

    return run
