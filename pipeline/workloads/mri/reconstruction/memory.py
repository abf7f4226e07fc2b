"""The GPU memory that an image needs besides the ring of chunks, known before anything is read; jobs are kept to it."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from kernels.nufft import toeplitz_shape
from kernels.nufft.cuda import chosen
from kernels.nufft.gridding.spreading import grid_shape, kernel_for, lanes_for
from kernels.nufft.toeplitz.cuda import lines_at_once
from kernels.nufft.toeplitz.kernel import LINES, pairs_of
from kernels.nufft.toeplitz.subspace_cuda import FEWEST_COILS, mixing_fits
from kernels.nufft.tuning import MAX_CELLS_AT_ONCE, SLOT_BYTES, TABLE_BYTES
from kernels.proximal import MOST_FRAMES
from kernels.runtime.launch import shared_bytes_a_block
from kernels.sense.coil_groups import group_parts
from pipeline.workloads.mri.parameters import MriParameters
from pipeline.workloads.mri.reconstruction.image import most_cached
from pipeline.workloads.mri.source.images import Image, ImageSource

COMPLEX = 8  # bytes
# Bytes of a sample in a sorted trajectory with its weights, and while it is sorted.
_A_POINT, _SORTING = 40, 96
# Images of the solvers and their temporaries; of each field of a split variable; of a series that cuBLAS shrinks.
_GRIDDING, _CG, _LOW_RANK, _WAVELET, _ADMM, _OF_A_FIELD, _OF_MANY_FRAMES = 3, 7, 12, 14, 14, 8, 15
_ESPIRIT_PATCH, _MATRIX_VALUES = 6, 1 << 22  # of kernels.sense.sensitivities
_SHARED_BYTES = 99 << 10  # of a block, on any GPU from sm_86 on
_TABLES = 32 << 20  # twiddles, work lists, small arrays
_ROUNDED = 1.1  # CuPy's pool hands out blocks that are larger than asked, and splits some


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is solved at a time.

    points  : samples of a coil and time; times: that are solved together
    at_once : channels that are transformed at a time
    copies  : channels whose samples are on the device besides the ring
    cached  : further trajectories and maps that are kept
    coefficients, complex_basis : of a temporal basis; 0 without
    on_grid : the normal operator needs no doubled grid
    """

    shape: tuple[int, ...]
    channels: int
    at_once: int
    points: int
    times: int = 1
    copies: int = 0
    cached: int = 0
    coefficients: int = 0
    complex_basis: bool = False
    on_grid: bool = False

    @property
    def images(self) -> int:
        return self.coefficients or self.times

    @property
    def pixels(self) -> int:
        return math.prod(self.shape)


def largest_problem(
    source: ImageSource,
    parameters: MriParameters,
    groups: Sequence[Sequence[Image]],
    basis: NDArray[Any] | None,
    *,
    in_parts: bool,
) -> Problem:
    """The one of a job that needs the most. groups: of images that are one problem; in_parts: a few coils at a time."""
    shape = source.grid.shape
    at_once = group_parts(source.channels, math.prod(shape))[0].stop if in_parts else source.channels
    # A volume's are streamed into two buffers; others are mixed, those of a basis after they are joined.
    mixed = source.white is not None or parameters.compress is not None
    copies = 2 * at_once if in_parts else source.channels * mixed + source.coils * (basis is not None)
    images = len(groups) * len(groups[0])
    return Problem(
        shape=shape,
        channels=source.channels,
        at_once=at_once,
        copies=copies,
        points=max(image.points for image in source.images),
        times=max(map(len, groups)),
        cached=min(images, most_cached(shape)) - 1 if len(groups) > 1 else 0,
        coefficients=0 if basis is None else basis.shape[1],
        complex_basis=basis is not None and basis.dtype.kind == "c",
        on_grid=source.header.cartesian and math.prod(shape) % 2 == 0,
    )


def bytes_besides_maps(problem: Problem, parameters: MriParameters) -> int:
    """`device_bytes` of a volume less those of its maps, of which only some may stay on the GPU."""
    return device_bytes(problem, parameters) - int(_ROUNDED * COMPLEX * problem.channels * problem.pixels)


def least_bytes(problem: Problem, parameters: MriParameters) -> int:
    """What a volume needs on the GPU if its maps are streamed into two buffers."""
    buffers = COMPLEX * min(problem.channels, 2 * problem.at_once) * problem.pixels
    return bytes_besides_maps(problem, parameters) + buffers


def iterates_bytes(problem: Problem, parameters: MriParameters) -> int:
    """Bytes of a solver's images and its temporary ones, which always stay on the GPU."""
    return COMPLEX * _images(parameters, problem) * problem.images * problem.pixels


def device_bytes(problem: Problem, parameters: MriParameters) -> int:
    """Bytes at the worst moment: of what is kept, and of the greediest of set-up, right-hand side and iterations."""
    pixels, points = problem.pixels, problem.points * problem.times
    convolved = parameters.method == "cg-sense" and parameters.field_map is None
    padded = problem.shape if problem.on_grid else toeplitz_shape(problem.shape, host=False)
    kernel, maps = 4 * math.prod(padded) * convolved, COMPLEX * problem.channels * pixels
    kernels = problem.times
    if problem.coefficients:
        kernels = len(pairs_of(problem.coefficients)) * (1 + problem.complex_basis)
    kept = (_A_POINT + COMPLEX * problem.coefficients) * points + kernel * kernels + maps
    kept += COMPLEX * problem.copies * points
    right = COMPLEX * _right(problem, parameters)
    iterations = iterates_bytes(problem, parameters)
    work = COMPLEX * _work(problem, padded) if convolved else right
    if problem.cached:
        kept += problem.cached * (_A_POINT * problem.points + kernel + maps)
        if convolved and problem.images == 1 and not parameters.has_penalties:  # the graph, for the next image
            kept, iterations, work = kept + maps + iterations + work, 0, 0
    setup = _SORTING * points + COMPLEX * _kernel_values(problem, parameters.eps) * (convolved and not problem.on_grid)
    if not problem.cached:  # before there are maps and samples
        setup -= maps + COMPLEX * problem.copies * points
    greediest = max(setup, _calibration(problem, parameters), right, iterations + work)
    return int(_ROUNDED * (kept + greediest)) + _TABLES


def _kernel_values(problem: Problem, eps: float) -> int:
    """Complex values while a Toeplitz kernel is made."""
    doubled = tuple(2 * n for n in problem.shape)
    return math.prod(doubled) + max(_grid(doubled, eps), 4 * math.prod(toeplitz_shape(problem.shape, host=False)))


def _calibration(problem: Problem, parameters: MriParameters) -> int:
    """Bytes while the maps are made, besides them."""
    fine = 2 * COMPLEX * problem.at_once * problem.pixels
    if parameters.sensitivities not in ("walsh", "espirit"):
        return fine
    axes, channels = len(problem.shape), problem.channels
    coarse = math.prod(min(math.ceil(2.2 * parameters.calibration), n) for n in problem.shape)
    images = COMPLEX * channels * coarse * (4 + 2 ** (axes + 1))  # with those of the normal operator
    matrices = 3 * 16 * min(_MATRIX_VALUES, channels**2 * coarse)
    if parameters.sensitivities == "espirit":
        matrices += 5 * 16 * int(channels * _ESPIRIT_PATCH**axes) ** 2
    return max(fine, int(images) + matrices)


def _right(problem: Problem, parameters: MriParameters) -> int:
    """Complex values of the right-hand side's transforms."""
    at_once = problem.at_once
    points = problem.points * (problem.times if problem.coefficients else 1)
    found = at_once * problem.pixels + 2 * problem.images * problem.pixels
    found += at_once * points * (1 + bool(problem.coefficients))
    method = parameters.transform
    if method == "auto":
        method = chosen(points, problem.shape, parameters.eps, at_once)  # type: ignore[assignment]
    if method == "exact":
        slots = min(SLOT_BYTES, (48 << 20) + 3 * COMPLEX * at_once * problem.pixels)
        return found + (TABLE_BYTES + slots) // COMPLEX
    lanes = lanes_for(at_once)
    grid = _grid(problem.shape, parameters.eps)
    if len(problem.shape) == 3:
        found += at_once * points  # parts of crowded tiles
    ordered = -(-at_once // lanes) * lanes * points
    grids = min(at_once * grid, max(MAX_CELLS_AT_ONCE, grid))
    return found + ordered + grids * (1 if len(problem.shape) == 2 or _only_2_and_3(grid) else 2)


def _work(problem: Problem, padded: tuple[int, ...]) -> int:
    """Complex values of the normal operator's work space."""
    coefficients, at_once, cells = max(problem.coefficients, 1), problem.at_once, math.prod(padded)
    grids = coefficients * min(at_once, max(MAX_CELLS_AT_ONCE // (coefficients * cells), 1)) * cells
    grids *= 1 if all(_only_2_and_3(n) for n in padded) else 2  # cuFFT's own work space
    if problem.on_grid or not all(n in LINES for n in padded):
        return grids
    step = lines_at_once(problem.shape, padded)
    if problem.coefficients:
        step = max(step // coefficients, FEWEST_COILS)
    lines = coefficients * min(step, at_once) * problem.shape[0] * math.prod(padded[1:])
    surely = not problem.coefficients or mixing_fits(padded[0], coefficients, _shared_bytes())
    return lines if surely else max(lines, grids)


def _shared_bytes() -> int:
    """Shared memory of a block on this machine's GPU if it is in use, else the least of all."""
    if "cupy" in sys.modules:
        with suppress(RuntimeError):  # CUDA's
            return shared_bytes_a_block()
    return _SHARED_BYTES


def _only_2_and_3(n: int) -> bool:
    return 6**32 % n == 0


def _grid(shape: tuple[int, ...], eps: float) -> int:
    return math.prod(grid_shape(shape, kernel_for(eps, len(shape)).oversampling))


def _images(parameters: MriParameters, problem: Problem) -> int:
    """Arrays as large as the images that a solver has at once."""
    if parameters.method == "gridding":
        return _GRIDDING
    if not parameters.has_penalties:
        return _CG
    names = set(parameters.penalty_names) - {"l2"}
    found = _OF_MANY_FRAMES if "llr" in names and problem.images > MOST_FRAMES else 0
    if len(names) == 1 and names <= {"l1-wavelet", "llr"}:
        return found + (_LOW_RANK if "llr" in names else _WAVELET)
    fields = sum(len(problem.shape) if name == "tv" else 1 for name in names)
    return found + _ADMM + _OF_A_FIELD * fields
