"""Transforms on CUDA: the choice between the two methods, one trajectory's plan, and every kernel of nufft.cu."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from kernels.nufft import tuning
from kernels.nufft.exact import PRECISIONS
from kernels.nufft.exact import cuda as exact
from kernels.nufft.gridding import cuda as gridding
from kernels.nufft.gridding.lines import LARGEST, SMALLEST
from kernels.nufft.gridding.spreading import grid_shape, kernel_for
from kernels.nufft.toeplitz import cuda as toeplitz
from kernels.nufft.toeplitz import subspace_cuda
from kernels.runtime.ladder import Variant

OPTIONS: tuple[str, ...] = ()

VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {**exact.VARIANTS, **gridding.VARIANTS, **toeplitz.VARIANTS, **subspace_cuda.VARIANTS}
)


def terms_for(eps: float) -> Literal[1, 3] | None:
    """The number of terms of the exact product that reaches eps; None if neither does."""
    if eps >= PRECISIONS[1]:
        return 1
    return 3 if eps >= PRECISIONS[3] else None


def chosen(points: int, shape: tuple[int, ...], eps: float, coils: int) -> str:
    """The faster method by the cost model."""
    terms = terms_for(eps)
    if terms is None:
        return "gridding"
    grid = grid_shape(shape, kernel_for(eps, len(shape)).oversampling)
    cells = math.prod(grid)
    in_graph = min(grid) >= SMALLEST and max(grid) <= LARGEST and coils * cells <= tuning.MAX_CAPTURED_CELLS
    exact_s = tuning.EXACT_CALL_S + coils * points * math.prod(shape) / tuning.EXACT_PAIRS_A_S[terms]
    gridding_s = tuning.GRIDDING_GRAPH_S if in_graph else tuning.GRIDDING_CALL_S
    gridding_s += coils * (points * tuning.GRIDDING_SAMPLE_S[len(shape)] + cells * tuning.GRIDDING_CELL_S)
    return "exact" if exact_s < gridding_s else "gridding"


class Plan:
    """One trajectory's transforms; see kernels.nufft.Nufft."""

    def __init__(self, trajectory: Any, shape: tuple[int, ...], eps: float, method: str, coils: int) -> None:
        self.method = chosen(len(trajectory), shape, eps, coils) if method == "auto" else method
        self._shape, self._device = shape, trajectory.device
        self._points = len(trajectory)
        if self.method == "exact":
            terms = terms_for(eps)
            if terms is None:
                raise ValueError(f'method "exact" is good to {min(PRECISIONS.values()):g} on CUDA: eps is {eps:g}')
            self._body: Any = exact.Plan(trajectory, shape, terms)
        else:
            self._body = gridding.Plan(trajectory, shape, eps)

    def forward(self, images: Any, out: Any, stream: Any) -> Any:
        import cupy

        with self._device:
            stream = cupy.cuda.get_current_stream() if stream is None else stream
            with stream:
                images = cupy.ascontiguousarray(images)
                leading = images.shape[: -len(self._shape)]
                out = cupy.empty((*leading, self._points), cupy.complex64) if out is None else out
                flat = images.reshape(-1, *self._shape)
                self._body.forward(flat, out.reshape(len(flat), self._points), stream)
        return out

    def adjoint(self, samples: Any, weights: Any, out: Any, stream: Any) -> Any:
        import cupy

        with self._device:
            stream = cupy.cuda.get_current_stream() if stream is None else stream
            with stream:
                samples = cupy.ascontiguousarray(samples)
                weights = None if weights is None else cupy.ascontiguousarray(weights, cupy.float32)
                leading = samples.shape[:-1]
                out = cupy.empty((*leading, *self._shape), cupy.complex64) if out is None else out
                flat = out.reshape(-1, *self._shape)
                self._body.adjoint(samples.reshape(len(flat), self._points), weights, flat, stream)
        return out
