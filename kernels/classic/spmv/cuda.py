"""Sparse products on CUDA: which kernels of spmv.cu run for which format, with which grids."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

from kernels.classic.spmv.formats import Coo, Csr, Ell, Hybrid, Jds, Matrix, to_coo, to_csr, to_ell, to_hybrid, to_jds
from kernels.classic.spmv.matrices import mesh, mesh_nonzeros, scattered, scattered_lengths
from kernels.runtime.ladder import Ladder, Variant
from kernels.runtime.launch import blocks_of, kernel, on_stream

OPTIONS: tuple[str, ...] = ()  # FMA is allowed: the error bound holds with and without it

# Tuned on an H200 (sm_90); block sizes as in the headers.
THREADS = 256
LANES, BATCH = (2, 4, 8, 16, 32), 4  # of csr_lanes: lanes per row, nonzeros that a lane reads at a time
REGULAR = 4  # csr_lanes is used if the longest row takes at most this many batches, merge otherwise
TILE_STEPS = THREADS * 8  # of a block of merge_tiles
CHUNK = 512  # nonzeros of a warp of coo_segments

REALS = {"float32": "float", "float64": "double"}
OFFSETS = {"int32": "int", "int64": "long long"}
MESH_EDGE, SCATTERED_ROWS = 160, 1 << 21


@dataclass(frozen=True, kw_only=True)
class Task:
    """One product to compute, with a matrix that has rows."""

    matrix: Any  # the format that the variant takes
    x: Any
    out: Any
    stream: Any

    @property
    def real(self) -> str:
        return REALS[self.out.dtype.name]

    @property
    def csr(self) -> str:
        """Template arguments of kernels with row starts."""
        return f"{self.real}, {OFFSETS[self.matrix.starts.dtype.name]}"

    def launch(self, entry: str, threads: int, *args: Any) -> None:
        """Launches `threads` threads, rounded up to whole blocks."""
        kernel("spmv", entry).launch((blocks_of(threads, THREADS),), (THREADS,), args, stream=self.stream)


def spmv(matrix: Matrix, x: Any, out: Any, *, stream: Any = None, variant: str | None = None) -> Any:
    """y = A x of CuPy arrays; see kernels.classic.spmv.

    variant : a name in VARIANTS that takes the matrix's format; default the production variant for it
    """
    import cupy

    with on_stream(x, stream) as current:
        name = variant or production(matrix)
        if not takes(name, matrix):
            kind = type(matrix).__name__
            raise ValueError(f"variant {name!r} does not take a {kind}: convert it with {FORMATS[name]}")
        out = cupy.empty(matrix.shape[0], x.dtype) if out is None else out
        if out.size:
            VARIANTS[name].run(Task(matrix=matrix, x=x, out=out, stream=current))
    return out


def production(matrix: Matrix) -> str:
    """The variant that the public function runs."""
    if isinstance(matrix, Csr):
        return "csr_lanes" if matrix.longest <= REGULAR * BATCH * _lanes(matrix) else "merge"
    if isinstance(matrix, Coo):
        return "coo_segments" if matrix.by_rows else "coo_atomic"
    if isinstance(matrix, Jds):
        return "jds_transposed" if matrix.transposed else "jds"
    return "ell" if isinstance(matrix, Ell) else "hybrid"


def takes(variant: str, matrix: Matrix) -> bool:
    """Whether a variant takes a matrix of this format."""
    if isinstance(matrix, Jds):
        return variant == production(matrix)
    if isinstance(matrix, Coo):
        return variant == "coo_atomic" or (variant == "coo_segments" and matrix.by_rows)
    return isinstance(matrix, _TYPES[variant.partition("_")[0]])


def converted(matrix: Matrix, variant: str) -> Matrix:
    """The matrix in the format that a variant takes."""
    kind = variant.partition("_")[0]
    if kind == "jds":
        return to_jds(matrix, transposed=variant == "jds_transposed")
    convert: Mapping[str, Callable[[Matrix], Matrix]] = {"coo": to_coo, "ell": to_ell, "hybrid": to_hybrid}
    return convert.get(kind, to_csr)(matrix)


def _run_csr_thread(task: Task) -> None:
    _launch_csr(task, f"csr_thread<{task.csr}>", task.out.size)


def _run_csr_warp(task: Task) -> None:
    _launch_csr(task, f"csr_lanes<{task.csr}, 32, 1>", 32 * task.out.size)


def _lanes(csr: Csr) -> int:
    """The fewest lanes that read an average row in two batches."""
    mean = csr.nonzeros / max(csr.shape[0], 1)
    return next((lanes for lanes in LANES if 2 * BATCH * lanes >= mean), LANES[-1])


def _run_csr_lanes(task: Task) -> None:
    lanes = _lanes(task.matrix)
    _launch_csr(task, f"csr_lanes<{task.csr}, {lanes}, {BATCH}>", lanes * task.out.size)


def _launch_csr(task: Task, entry: str, threads: int) -> None:
    csr: Csr = task.matrix
    rows = ctypes.c_int(csr.shape[0])
    task.launch(entry, threads, csr.values, csr.columns, csr.starts, task.x, task.out, rows)


def _run_ell(task: Task) -> None:
    _launch_ell(task, task.matrix)


def _launch_ell(task: Task, ell: Ell) -> None:
    slots, rows = ell.values.shape
    sizes = ctypes.c_int(rows), ctypes.c_int(slots)
    task.launch(f"ell<{task.real}>", rows, ell.values, ell.columns, task.x, task.out, *sizes)


def _run_coo_atomic(task: Task) -> None:
    coo: Coo = task.matrix
    task.out.fill(0)
    if coo.nonzeros:
        args = (coo.values, coo.rows, coo.columns, task.x, task.out, ctypes.c_longlong(coo.nonzeros))
        task.launch(f"coo_atomic<{task.real}>", coo.nonzeros, *args)


def _run_coo_segments(task: Task) -> None:
    task.out.fill(0)
    _add_segments(task, task.matrix)


def _run_hybrid(task: Task) -> None:
    hybrid: Hybrid = task.matrix
    _launch_ell(task, hybrid.ell)
    _add_segments(task, hybrid.coo)


def _add_segments(task: Task, coo: Coo) -> None:
    if not coo.nonzeros:
        return
    warps = blocks_of(coo.nonzeros, CHUNK)
    carry_rows, carries = _carries(task, 2 * warps)
    args = (coo.values, coo.rows, coo.columns, task.x, task.out, ctypes.c_longlong(coo.nonzeros), carry_rows, carries)
    task.launch(f"coo_segments<{task.real}>", 32 * warps, *args)
    _add_carries(task, carry_rows, carries)


def _carries(task: Task, count: int) -> tuple[Any, Any]:
    import cupy

    return cupy.empty(count, cupy.int32), cupy.empty(count, task.out.dtype)


def _add_carries(task: Task, carry_rows: Any, carries: Any) -> None:
    sizes = ctypes.c_int(task.out.size), ctypes.c_longlong(carries.size)
    task.launch(f"add_carries<{task.real}>", carries.size, carry_rows, carries, task.out, *sizes)


def _run_jds(task: Task) -> None:
    jds: Jds = task.matrix
    args = (jds.values, jds.columns, jds.starts, jds.order, task.x, task.out, ctypes.c_int(jds.shape[0]))
    if jds.transposed:
        diagonals = ctypes.c_int(jds.starts.size - 1)
        task.launch(f"jds_transposed<{task.real}>", jds.shape[0], *args, diagonals)
    else:
        task.launch(f"jds<{task.real}>", jds.shape[0], *args)


def _run_merge(task: Task) -> None:
    csr: Csr = task.matrix
    parts = blocks_of(csr.shape[0] + csr.nonzeros, TILE_STEPS)
    rows, nonzeros = ctypes.c_int(csr.shape[0]), ctypes.c_longlong(csr.nonzeros)
    carry_rows, carries = _carries(task, parts)
    args = (csr.values, csr.columns, csr.starts, task.x, task.out, rows, nonzeros, carry_rows, carries)
    task.launch(f"merge_tiles<{task.csr}>", parts * THREADS, *args)
    _add_carries(task, carry_rows, carries)


def _reals(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}<{real}>" for name in names for real in REALS.values())


def _csr(name: str, *last: str) -> tuple[str, ...]:
    kinds = itertools.product(REALS.values(), OFFSETS.values(), last or ("",))
    return tuple(f"{name}<{real}, {offset}{', ' * bool(end)}{end}>" for real, offset, end in kinds)


_SEGMENTS = _reals("coo_segments", "add_carries")
_TYPES: Mapping[str, type] = MappingProxyType(
    {"csr": Csr, "merge": Csr, "coo": Coo, "ell": Ell, "hybrid": Hybrid, "jds": Jds}
)

# In the order of the source, naive to fast.
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "csr_thread": Variant(
            summary="CSR, one thread per row: strided reads, and a warp waits for its longest row",
            entries=_csr("csr_thread"),
            run=_run_csr_thread,
        ),
        "csr_warp": Variant(
            summary="CSR, one warp per row: coalesced reads, but lanes idle in rows shorter than 32",
            entries=_csr("csr_lanes", "32, 1"),
            run=_run_csr_warp,
        ),
        "csr_lanes": Variant(
            summary="CSR, 2 to 32 lanes per row, by the mean row length, four nonzeros per lane in flight",
            entries=_csr("csr_lanes", *(f"{lanes}, {BATCH}" for lanes in LANES)),
            run=_run_csr_lanes,
        ),
        "ell": Variant(
            summary="ELL, one thread per row, slot by slot: coalesced reads, all rows padded to the longest",
            entries=_reals("ell"),
            run=_run_ell,
        ),
        "coo_atomic": Variant(
            summary="COO, one thread per nonzero: equal work, one atomic addition each, in no fixed order",
            entries=_reals("coo_atomic"),
            run=_run_coo_atomic,
        ),
        "coo_segments": Variant(
            summary="COO by rows, segmented sums in a warp: no atomics, the same bits every time",
            entries=_SEGMENTS,
            run=_run_coo_segments,
        ),
        "hybrid": Variant(
            summary="ELL for what a third of the rows fill, COO for the rest",
            entries=(*_reals("ell"), *_SEGMENTS),
            run=_run_hybrid,
        ),
        "jds": Variant(
            summary="JDS, rows sorted by length, one thread per row: a warp's rows have about equal length",
            entries=_reals("jds"),
            run=_run_jds,
        ),
        "jds_transposed": Variant(
            summary="JDS by diagonals: coalesced reads without padding",
            entries=_reals("jds_transposed"),
            run=_run_jds,
        ),
        "merge": Variant(
            summary="CSR, rows and nonzeros merged and split into equal parts: good for any row lengths",
            entries=(*_csr("merge_tiles"), *_reals("add_carries")),
            run=_run_merge,
        ),
    }
)

# The conversion to the format that a variant takes.
FORMATS: Mapping[str, str] = MappingProxyType(
    {name: f"to_{'csr' if name == 'merge' else name.partition('_')[0]}" for name in VARIANTS}
)


def ladders() -> tuple[Ladder, ...]:
    """A regular matrix from a mesh, and one with rows of very different lengths."""
    even_rows = (*(name for name in VARIANTS if name != "csr_lanes"), "csr_lanes")
    long_rows = tuple(name for name in VARIANTS if name != "ell")  # its slots would not fit into memory
    nonzeros = int(scattered_lengths(SCATTERED_ROWS).sum())
    return (
        _ladder(
            "27-point operator on a cubic mesh", mesh, MESH_EDGE, MESH_EDGE**3, mesh_nonzeros(MESH_EDGE), even_rows
        ),
        _ladder("rows' lengths by a power law", scattered, SCATTERED_ROWS, SCATTERED_ROWS, nonzeros, long_rows),
    )


def _ladder(
    what: str, make: Callable[[Any, int], Csr], size: int, rows: int, nonzeros: int, variants: tuple[str, ...]
) -> Ladder:
    def prepare(variant: str) -> Callable[[], Any]:
        import cupy

        csr = make(cupy, size)
        matrix, x = converted(csr, variant), _vector(csr.shape[1])
        y = cupy.empty(csr.shape[0], cupy.float32)
        return lambda: spmv(matrix, x, y, variant=variant)

    def libraries() -> Mapping[str, Callable[[], Any]]:
        import cupy

        sparse, cusparse = import_module("cupyx.scipy.sparse"), import_module("cupyx.cusparse")
        csr = make(cupy, size)
        matrix = sparse.csr_matrix((csr.values, csr.columns, csr.starts), shape=csr.shape)
        matrix.has_canonical_format = True  # otherwise CuPy sorts the columns first; both get the same input
        x, y = _vector(csr.shape[1]), cupy.empty(csr.shape[0], cupy.float32)
        return {"cuSPARSE": lambda: cusparse.spmv(matrix, x, y)}

    return Ladder(
        name=f"{what}, {rows} rows, {nonzeros} float32 nonzeros",
        variants=variants,
        bytes=8 * nonzeros + 4 * (rows + 1) + 4 * rows + 4 * rows,
        flops=2 * nonzeros,
        limit="read",
        prepare=prepare,
        libraries=libraries,
    )


def _vector(size: int) -> Any:
    import cupy

    return cupy.random.default_rng(2).standard_normal(size, dtype=cupy.float32)
