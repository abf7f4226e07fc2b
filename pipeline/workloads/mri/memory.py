"""The GPU memory that an image needs besides the ring of chunks: an upper bound, known before anything is read."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernels.nufft import toeplitz_shape
from kernels.nufft.cuda import chosen
from kernels.nufft.gridding.spreading import grid_shape, kernel_for
from kernels.nufft.toeplitz.kernel import pairs_of
from kernels.nufft.tuning import MAX_CELLS_AT_ONCE, MAX_WORK, SLOT_BYTES, TABLE_BYTES
from kernels.proximal import MOST_FRAMES
from pipeline.workloads.mri.parameters import MriParameters

COMPLEX = 8  # bytes
# Bytes of a sample in a sorted trajectory with its weights, and while it is sorted.
_A_POINT, _SORTING = 96, 96
# Images of the solvers and their temporaries; of each field of a split variable.
_GRIDDING, _CG, _FISTA, _ADMM, _OF_A_FIELD = 3, 6, 14, 14, 8
_TABLES = 64 << 20  # twiddles, work lists, maps' coarse images
_ROUNDED = 1.15  # CuPy's pool hands out blocks that are larger than asked


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is solved at a time.

    points  : samples of a coil and time; times: that are solved together
    at_once : channels that are transformed at a time
    cached  : further trajectories and maps that are kept
    coefficients, complex_basis : of a temporal basis; 0 without
    on_grid : the normal operator needs no doubled grid
    """

    shape: tuple[int, ...]
    channels: int
    at_once: int
    points: int
    times: int = 1
    cached: int = 0
    coefficients: int = 0
    complex_basis: bool = False
    on_grid: bool = False

    @property
    def images(self) -> int:
        return self.coefficients or self.times


def bytes_besides_maps(problem: Problem, parameters: MriParameters) -> int:
    """`device_bytes` of a volume less those of its maps, of which only some may stay on the GPU."""
    return device_bytes(problem, parameters) - int(_ROUNDED * COMPLEX * problem.channels * math.prod(problem.shape))


def device_bytes(problem: Problem, parameters: MriParameters) -> int:
    """Bytes at the worst moment: of what is kept, and of the greediest of set-up, right-hand side and iterations."""
    shape, eps, at_once = problem.shape, parameters.eps, problem.at_once
    pixels, points = math.prod(shape), problem.points * problem.times
    convolved = parameters.method == "cg-sense" and parameters.field_map is None
    padded = shape if problem.on_grid else toeplitz_shape(shape, host=False)
    cells, grid = math.prod(padded), _grid(shape, eps)
    kernel, maps = 4 * cells * convolved, COMPLEX * problem.channels * pixels
    kernels = problem.times
    if problem.coefficients:
        kernels = len(pairs_of(problem.coefficients)) * (1 + problem.complex_basis)
    kept = _A_POINT * points + kernel * kernels + maps + problem.cached * (_A_POINT * problem.points + kernel + maps)
    spread = 0
    if convolved and not problem.on_grid:
        doubled = tuple(2 * n for n in shape)
        spread = math.prod(doubled) + max(2 * _grid(doubled, eps), 4 * cells)
    right = at_once * (pixels + 2 * points) + 2 * min(at_once * grid, max(MAX_CELLS_AT_ONCE, grid))
    right += problem.images * pixels
    work = at_once * cells * max(problem.coefficients, 1)
    work = min(2 * work, 2 * MAX_CELLS_AT_ONCE) if problem.on_grid else min(work, max(MAX_WORK, cells))
    iterations = _images(parameters, len(shape), problem.images) * problem.images * pixels
    iterations += work if convolved else right
    greediest = max(_SORTING * points // COMPLEX + spread, 3 * problem.channels * pixels, right, iterations)
    return int(_ROUNDED * (kept + COMPLEX * greediest)) + _TABLES + _exact(problem, parameters)


def _exact(problem: Problem, parameters: MriParameters) -> int:
    """Of the exact sum's tables and partial sums."""
    method = parameters.transform
    if method == "auto":
        method = chosen(problem.points, problem.shape, parameters.eps, problem.at_once)  # type: ignore[assignment]
    return TABLE_BYTES + SLOT_BYTES if method == "exact" else 0


def _grid(shape: tuple[int, ...], eps: float) -> int:
    return math.prod(grid_shape(shape, kernel_for(eps, len(shape)).oversampling))


def _images(parameters: MriParameters, axes: int, images: int) -> int:
    """Arrays as large as the images that a solver has at once."""
    if parameters.method == "gridding":
        return _GRIDDING
    if not parameters.has_penalties:
        return _CG
    names = set(parameters.penalty_names) - {"l2"}
    found = _OF_A_FIELD if "llr" in names and images > MOST_FRAMES else 0
    if len(names) == 1 and names <= {"l1-wavelet", "llr"}:
        return found + _FISTA
    return found + _ADMM + _OF_A_FIELD * sum(axes if name == "tv" else 1 for name in names)
