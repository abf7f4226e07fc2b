"""Matrix products on CUDA: the ladder of gemm.cu, and cuBLAS, the production variant."""

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

# Tuned on an H200 (sm_90), as in outer.cuh and tensor.cuh; other tiles are template arguments in VARIANTS.
OUTER_EDGE, OUTER_THREADS = 128, 256  # of a block's tile of C
TENSOR_SHARED_BYTES = 2 * 4 * (128 * (32 + 4) + 32 * (128 + 8))  # two stages

LADDER_EDGE = 4096


class SizesStruct(ctypes.Structure):
    """struct Sizes of tiles.cuh."""

    _fields_ = (("m", ctypes.c_int), ("n", ctypes.c_int), ("k", ctypes.c_int))


@dataclass(frozen=True, kw_only=True)
class Task:
    """One product to compute; `b` is None for A Aᵀ. All arrays are C-contiguous; the product is not empty."""

    a: Any
    b: Any
    out: Any
    stream: Any

    @property
    def operation(self) -> Literal["gemm", "gram"]:
        return "gram" if self.b is None else "gemm"

    @property
    def aligned(self) -> str:
        """Whether rows of all matrices are whole vectors of 16 bytes, as a template argument."""
        pitches = (self.a.shape[1], self.out.shape[1])
        pointers = [array.data.ptr for array in (self.a, self.b, self.out) if array is not None]
        return str(all(n % 4 == 0 for n in pitches) and all(at % 16 == 0 for at in pointers)).lower()

    def launch(self, entry: str, tile: tuple[int, int], threads: int, *, shared_bytes: int = 0) -> None:
        (m, n), k = self.out.shape, self.a.shape[1]
        blocks = -(-m // tile[0]) * -(-n // tile[1])
        matrices = (self.a, self.out) if self.b is None else (self.a, self.b, self.out)
        kernel("gemm", entry).launch(
            (blocks,), (threads,), (*matrices, SizesStruct(m, n, k)), shared_bytes=shared_bytes, stream=self.stream
        )


def gemm(a: Any, b: Any, out: Any, *, stream: Any = None, variant: str = "cublas") -> Any:
    """A B of CuPy arrays; see kernels.classic.gemm. `variant`: a name in VARIANTS that computes A B."""
    return _computed(a, b, out, (a.shape[0], b.shape[1]), stream, variant)


def gram(a: Any, out: Any, *, stream: Any = None, variant: str = "gram_cublas") -> Any:
    """A Aᵀ of a CuPy array; see kernels.classic.gemm. `variant`: a name in VARIANTS that computes A Aᵀ."""
    return _computed(a, None, out, (a.shape[0], a.shape[0]), stream, variant)


def applies(variant: str, operation: str) -> bool:
    """Whether a variant computes "gemm" or "gram"."""
    return variant.startswith("gram") == (operation == "gram")


def _computed(a: Any, b: Any, out: Any, shape: tuple[int, int], stream: Any, variant: str) -> Any:
    import cupy

    operation = "gram" if b is None else "gemm"
    if not applies(variant, operation):
        raise ValueError(f"variant {variant!r} does not compute {operation}")
    with on_stream(a, stream) as current:
        a = cupy.ascontiguousarray(a, np.float32)
        b = b if b is None else cupy.ascontiguousarray(b, np.float32)
        out = cupy.empty(shape, cupy.float32) if out is None else out
        if out.size:
            VARIANTS[variant].run(Task(a=a, b=b, out=out, stream=current))
    return out


def _tiled(entry: str, tile: tuple[int, int], threads: int) -> Callable[[Task], None]:
    return lambda task: task.launch(entry, tile, threads)


def _run_double_buffered(task: Task) -> None:
    task.launch(f"double_buffered<{task.aligned}>", (OUTER_EDGE, OUTER_EDGE), OUTER_THREADS)


def _tensor(terms: int) -> Callable[[Task], None]:
    def run(task: Task) -> None:
        if int(task.a.device.compute_capability) < 80:
            raise ValueError(
                "tensor cores that take TF32 need compute capability 8.0: choose double_buffered or cublas"
            )
        entry, edges = f"tensor<{task.aligned}, {terms}>", (OUTER_EDGE, OUTER_EDGE)
        task.launch(entry, edges, OUTER_THREADS, shared_bytes=TENSOR_SHARED_BYTES)

    return run


def _run_cublas(task: Task) -> None:
    task.a.dot(task.a.T if task.b is None else task.b, task.out)


# In the order of the source, naive to fast: the last of each operation is the one in production.
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "naive": Variant(
            summary="one thread per number of C, everything from global memory",
            entries=("naive",),
            run=_tiled("naive", (8, 32), 256),
        ),
        "tiles": Variant(
            summary="square tiles in shared memory: 1/16 of the reads from global memory",
            entries=("tiles<16, 16, 16>",),
            run=_tiled("tiles<16, 16, 16>", (16, 16), 256),
        ),
        "rectangular": Variant(
            summary="tiles of 16 × 32, depth 32: whole warps along a row, half the barriers",
            entries=("tiles<16, 32, 32>",),
            run=_tiled("tiles<16, 32, 32>", (16, 32), 512),
        ),
        "coarsened": Variant(
            summary="eight rows per thread: one read of B from shared memory serves all of them",
            entries=("coarsened<8>",),
            run=_tiled("coarsened<8>", (32, 64), 256),
        ),
        "volkov": Variant(
            summary="sixteen rows per thread: B from global memory to registers, only A in shared memory",
            entries=("volkov",),
            run=_tiled("volkov", (16, 64), 64),
        ),
        "double_buffered": Variant(
            summary="8 × 8 results per thread, two buffers: 64 multiply-adds per 16 numbers, loads overlap arithmetic",
            entries=("double_buffered<true>", "double_buffered<false>"),
            run=_run_double_buffered,
        ),
        "tensor_3xtf32": Variant(
            summary="tensor cores, numbers as two TF32: float32 precision from three products",
            entries=("tensor<true, 3>", "tensor<false, 3>"),
            run=_tensor(3),
        ),
        "tensor_tf32": Variant(
            summary="tensor cores, numbers rounded to TF32 (11 bits): relative errors of products up to 2⁻¹⁰",
            entries=("tensor<true, 1>", "tensor<false, 1>"),
            run=_tensor(1),
        ),
        "cublas": Variant(summary="cuBLAS in float32, through CuPy: in production", entries=(), run=_run_cublas),
        "gram_naive": Variant(
            summary="A Aᵀ, one thread per number: neighbouring threads read rows that are far apart",
            entries=("gram_naive",),
            run=_tiled("gram_naive", (8, 32), 256),
        ),
        "gram_tiles": Variant(
            summary="A Aᵀ, one tile transposed while it is copied to shared memory, where 32 writes fall on one bank",
            entries=("gram_tiles<0>",),
            run=_tiled("gram_tiles<0>", (32, 32), 1024),
        ),
        "gram_padded": Variant(
            summary="the same with rows padded to 33 numbers: the writes fall on 32 banks",
            entries=("gram_tiles<1>",),
            run=_tiled("gram_tiles<1>", (32, 32), 1024),
        ),
        "gram_cublas": Variant(
            summary="A Aᵀ by cuBLAS in float32, through CuPy: in production", entries=(), run=_run_cublas
        ),
    }
)

# The error bound of each variant below float32: see tests.kernels.classic.gemm.cases.error_bound.
PRECISIONS: Mapping[str, str] = MappingProxyType({"tensor_3xtf32": "3xtf32", "tensor_tf32": "tf32"})


def ladders() -> tuple[Ladder, ...]:
    """A product of large square matrices, and a matrix times its transpose."""
    edge = LADDER_EDGE
    flops = 2 * edge**3
    return (
        Ladder(
            name=f"float32 product of two matrices {edge} × {edge}",
            variants=tuple(name for name in VARIANTS if applies(name, "gemm")),
            bytes=3 * 4 * edge**2,
            flops=flops,
            limit="fma",
            prepare=lambda variant: _prepared(variant, edge),
            libraries=lambda: _libraries(edge),
        ),
        Ladder(
            name=f"float32 product of a matrix {edge} × {edge} with its transpose",
            variants=tuple(name for name in VARIANTS if applies(name, "gram")),
            bytes=2 * 4 * edge**2,
            flops=flops,
            limit="fma",
            prepare=lambda variant: _prepared(variant, edge),
            libraries=lambda: {"cuBLAS": _prepared("gram_cublas", edge)},
        ),
    )


def _matrices(edge: int) -> tuple[Any, Any, Any]:
    import cupy

    rng = cupy.random.default_rng(1)
    a, b = (rng.standard_normal((edge, edge), dtype=cupy.float32) for _ in range(2))
    return a, b, cupy.empty((edge, edge), cupy.float32)


def _prepared(variant: str, edge: int) -> Callable[[], Any]:
    a, b, out = _matrices(edge)
    if applies(variant, "gram"):
        return lambda: gram(a, out, variant=variant)
    return lambda: gemm(a, b, out, variant=variant)


def _libraries(edge: int) -> Mapping[str, Callable[[], Any]]:
    found = {"cuBLAS": _prepared("cublas", edge)}
    if find_spec("torch"):
        found["cuBLAS TF32 (PyTorch)"] = _with_torch(edge)
    return found


def _with_torch(edge: int) -> Callable[[], Any]:
    torch = import_module("torch")
    a, b, out = (torch.as_tensor(matrix, device="cuda") for matrix in _matrices(edge))

    def run() -> Any:
        allowed = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            with torch.cuda.stream(torch_stream()):
                return torch.matmul(a, b, out=out)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = allowed

    return run
