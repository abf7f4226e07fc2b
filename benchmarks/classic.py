"""Prefix sums and sorts on a GPU against CCCL's (called from C++) and CuPy's, on arrays in device memory.

CCCL takes part if --cccl names its compiled library. CCCL is a set of headers; with DIR its checkout:
nvcc -O3 -std=c++17 -arch=native -shared -Xcompiler -fPIC -I DIR/cub -I DIR/thrust -I DIR/libcudacxx/include \\
    benchmarks/cccl.cu -o cccl.so
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import Options
from benchmarks.rounds import Rival, band, measure, queued_seconds, ratio
from kernels.classic.scan import inclusive
from kernels.classic.sort import sort

WORKS = (
    ("scan", "float32", 1 << 28), ("scan", "uint32", 1 << 28), ("scan", "uint64", 1 << 27),
    ("sort", "uint32", 1 << 26), ("sort", "uint64", 1 << 25), ("sort", "float32", 1 << 26),
    ("pairs", "uint32", 1 << 26),
)  # fmt: skip


def rivals(kind: str, dtype: str, count: int, cccl: Any) -> Iterator[Rival]:
    """Ours, CuPy's, CCCL's, and a copy of as many bytes as the result has."""
    import cupy

    rng = cupy.random.default_rng(1)
    keys = rng.standard_normal(count, np.float32) if dtype == "float32" else rng.integers(0, 1 << 31, count, dtype)
    indices, out, moved = cupy.arange(count, dtype=np.uint32), cupy.empty_like(keys), cupy.empty(count, np.uint32)
    ours: dict[str, Callable[[], Any]] = {
        "scan": lambda: inclusive(keys, out=out), "sort": lambda: sort(keys), "pairs": lambda: sort(keys, indices),
    }  # fmt: skip

    def sorted_pairs() -> Any:
        order = cupy.argsort(keys)
        return keys[order], indices[order]

    theirs: dict[str, Callable[[], Any]] = {
        "scan": lambda: cupy.cumsum(keys, dtype=dtype, out=out), "sort": lambda: cupy.sort(keys), "pairs": sorted_pairs,
    }  # fmt: skip
    runs = {"millrace": ours[kind], "CuPy": theirs[kind]}
    if cccl is not None:
        arrays = (keys, out, indices, moved) if kind == "pairs" else (keys, out)
        runs["CCCL"] = _cccl(getattr(cccl, "sort_pairs" if kind == "pairs" else f"{kind}_{dtype}"), arrays)
        runs["CCCL"]()
        found = out.copy()
        expected: Any = ours[kind]()
        close = {"rtol": 1e-3, "atol": 1.0} if (kind, dtype) == ("scan", "float32") else {"rtol": 0, "atol": 0}
        if not cupy.allclose(found, expected[0] if kind == "pairs" else expected, **close):
            raise RuntimeError(f"{kind} of {dtype}: CCCL's result differs")
    runs["copy"] = lambda: cupy.copyto(out, keys)
    for name, run in runs.items():
        yield Rival(name=name, device="cuda", run=run, clock=queued_seconds)


def _cccl(function: Any, arrays: tuple[Any, ...]) -> Callable[[], object]:
    """A call with its scratch memory allocated before."""
    import cupy

    pointers = [ctypes.c_void_p(array.data.ptr) for array in arrays]
    count, size = ctypes.c_int64(arrays[0].size), ctypes.c_size_t()

    def call(scratch: int | None) -> None:
        if status := function(ctypes.c_void_p(scratch), ctypes.byref(size), *pointers, count):
            raise RuntimeError(f"CCCL returned CUDA error {status}")

    call(None)
    scratch = cupy.empty(size.value, np.uint8)
    return lambda: call(scratch.data.ptr)


def main() -> None:
    parser = Options("classic", __doc__)
    parser.add_argument("--repeats", type=int, default=5, help="rounds that are timed [default: 5]")
    parser.add_argument("--only", default="", help="only the rows whose name contains this")
    parser.add_argument("--cccl", type=Path, metavar="FILE", help="shared library compiled from benchmarks/cccl.cu")
    parser.add_json()
    options = parser.parse_args()
    cccl = ctypes.CDLL(str(options.cccl)) if options.cccl else None
    if cccl is not None:
        print(f"CCCL {cccl.cccl_version()}")
    report = {}
    for kind, dtype, count in WORKS:
        name = f"{kind}, {dtype}, {count >> 20} Mi"
        if options.only not in name:
            continue
        print(f"\n{name}")
        found = measure(list(rivals(kind, dtype, count, cccl)), options.repeats)
        for rival in found:
            low, high = band(rival.seconds)
            by, least, most = ratio(found[0], rival)
            line = f"  {rival.name:10} {1e3 * rival.median_s:8.3f} ms ({1e3 * low:.3f} – {1e3 * high:.3f})"
            print(f"{line}   ×{by:.2f} ({least:.2f} – {most:.2f})", flush=True)
        report[name] = {rival.name: rival.seconds for rival in found}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
