"""numpy.ma arrays: every operation refuses them, since it would ignore their masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kernels.classic.bfs import levels
from kernels.classic.convolution import convolve, layer
from kernels.classic.gemm import gemm, gram
from kernels.classic.histogram import histogram
from kernels.classic.quadtree import build
from kernels.classic.reduce import total
from kernels.classic.scan import inclusive, segmented
from kernels.classic.sort import argsort, merge, sort
from kernels.classic.spmv import Csr, spmv
from kernels.classic.stencil import stencil
from kernels.classic.tessellation import tessellate
from kernels.classic.transpose import transpose
from kernels.coulomb import Grid, direct
from kernels.nufft import Nufft, Toeplitz, toeplitz_kernel
from kernels.proximal import soft_threshold
from kernels.runtime.arrays import check_out
from kernels.smoothing import gaussian_filter, uniform_filter
from kernels.statistics import summarise
from kernels.wavelet import Wavelet

LINE, PLANE = np.arange(12, dtype=np.float32), np.arange(12, dtype=np.float32).reshape(3, 4)
GRID = Grid(origin=(0, 0, 0), spacing=(1, 1, 1), shape=(2, 2, 2))
POINTS = np.random.default_rng(1).uniform(-2, 2, (9, 2))
PLAN, NORMAL = Nufft(POINTS, (4, 4)), Toeplitz(toeplitz_kernel(POINTS, None, (4, 4)), (4, 4))
SPARSE = Csr(values=np.ones(2, np.float32), columns=np.arange(2, dtype=np.int32),
             starts=np.arange(3, dtype=np.int32), shape=(2, 2))  # fmt: skip
# The name of the parameter, its value, and the call.
CALLS: dict[str, tuple[str, np.ndarray, Callable[[Any], Any]]] = {
    "transpose": ("array", PLANE, transpose),
    "reduce": ("values", LINE, total),
    "scan": ("values", LINE, inclusive),
    "segments": ("heads", np.zeros(12, np.uint8), lambda heads: segmented(LINE, heads)),
    "histogram": ("values", LINE, lambda values: histogram(values, [0.0, 5.0])),
    "edges": ("edges", np.array([0.0, 5.0]), lambda edges: histogram(LINE, edges)),
    "gemm": ("b", PLANE, lambda b: gemm(PLANE.T, b)),
    "gram": ("a", PLANE, gram),
    "convolution": ("samples", LINE, lambda samples: convolve(samples, np.ones(3, np.float32))),
    "weights of a convolution": ("mask", np.ones(3, np.float32), lambda mask: convolve(LINE, mask)),
    "layer": ("filters", PLANE[None, None], lambda filters: layer(PLANE[None, None], filters)),
    "stencil": ("field", LINE.reshape(3, 2, 2), lambda field: stencil(field, centre=1, neighbour=0)),
    "sort": ("keys", LINE, sort),
    "argsort": ("keys", LINE, argsort),
    "merge": ("second", LINE, lambda second: merge(LINE, second)),
    "quadtree": ("points", LINE.reshape(6, 2), build),
    "tessellation": ("curves", LINE.reshape(2, 3, 2), lambda curves: tessellate(curves, 0.1)),
    "box": ("image", PLANE, uniform_filter),
    "gaussian": ("image", PLANE, lambda image: gaussian_filter(image, 1)),
    "samples that count": ("mask", np.ones((3, 4), bool), lambda mask: uniform_filter(PLANE, mask=mask)),
    "statistics": ("image", PLANE, summarise),
    "bfs": ("columns", np.array([1, 0], np.int32), lambda columns: levels(np.arange(3, dtype=np.int32), columns, 0)),
    "spmv": ("x", np.ones(2, np.float32), lambda x: spmv(SPARSE, x)),
    "matrix": ("values", SPARSE.values,
               lambda values: Csr(values=values, columns=SPARSE.columns, starts=SPARSE.starts, shape=(2, 2))),
    "coulomb": ("atoms", PLANE, lambda atoms: direct(atoms, GRID)),
    "trajectory": ("trajectory", POINTS, lambda trajectory: Nufft(trajectory, (4, 4))),
    "forward": ("images", np.ones((4, 4), np.complex64), PLAN.forward),
    "adjoint": ("samples", np.ones(9, np.complex64), PLAN.adjoint),
    "weights": ("weights", np.ones(9), lambda weights: PLAN.adjoint(np.ones(9, np.complex64), weights)),
    "wavelet": ("image", np.ones((4, 4), np.complex64), Wavelet((4, 4)).forward),
    "prox": ("values", np.ones((4, 4), np.complex64), lambda values: soft_threshold(values, 0.5)),
    "normal": ("image", np.ones((4, 4), np.complex64), NORMAL.apply),
}  # fmt: skip


@pytest.mark.parametrize(("name", "array", "call"), CALLS.values(), ids=CALLS)
def test_a_mask_is_not_ignored(name: str, array: np.ndarray, call: Callable[[Any], Any]) -> None:
    call(array)
    masked = np.ma.masked_array(array, mask=np.arange(array.size).reshape(array.shape) % 3 == 0)
    with pytest.raises(TypeError, match=rf"^{name} is a numpy.ma array, whose mask would be ignored: give {name}.fill"):
        call(masked)


def test_no_result_is_masked() -> None:
    with pytest.raises(ValueError, match="out must be a C-contiguous ndarray"):
        check_out(np.ma.zeros(12, np.float32), (12,), np.float32, apart_from={"values": LINE})
