"""The subspace's Toeplitz convolution on CUDA: the coefficients of some coils on the doubled grid at a time."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kernels.nufft.gridding.plan import THREADS, launch, rows_grid, three
from kernels.nufft.toeplitz.cuda import (
    COMPILED,
    INTERLEAVED,
    DoubledStruct,
    Lines,
    LinesStruct,
    at_front,
    crossing_bytes,
    lines_at_once,
    values_of,
)
from kernels.nufft.toeplitz.kernel import LINES, MOST_COEFFICIENTS
from kernels.nufft.tuning import MAX_CELLS_AT_ONCE
from kernels.runtime.ladder import Variant
from kernels.runtime.launch import blocks_of, shared_bytes_a_block

COILS_A_BLOCK = 8
FEWEST_COILS = 2  # at a time, if more than that share the kernels: those are read half as often
# Of a multiprocessor and of a thread; and those that cross_mixed needs besides its values.
REGISTERS, MOST_REGISTERS, REGISTERS_BESIDES = 1 << 16, 255, 40


@dataclass(frozen=True, kw_only=True)
class Task:
    body: SubspaceConvolution
    images: Any
    maps: Any
    out: Any
    stream: Any
    add: bool = False


class SubspaceConvolution:
    """The CUDA body of kernels.nufft.SubspaceToeplitz."""

    def __init__(self, kernels: Any, coefficients: int, shape: tuple[int, ...]) -> None:
        import cupy

        self.kernels = cupy.ascontiguousarray(kernels)
        self.coefficients, self.shape, self.padded = coefficients, shape, kernels.shape[1:]
        self.device = kernels.device
        self._spaces: dict[int, tuple[Any, Any]] = {}
        self._work: dict[int, Any] = {}
        with self.device:
            ours = self.padded != self.shape and all(n in LINES for n in self.padded)
            ours = ours and mixing_fits(self.padded[0], coefficients, shared_bytes_a_block())
        self.variant = "mixed_lines" if ours else "subspace"

    def apply_sense(
        self, images: Any, maps: Any, out: Any, stream: Any, variant: str | None = None, *, add: bool = False
    ) -> Any:
        import cupy

        with self.device:
            stream = cupy.cuda.get_current_stream() if stream is None else stream
            with stream:
                images, maps = cupy.ascontiguousarray(images), cupy.ascontiguousarray(maps)
                out = cupy.empty(images.shape, images.dtype) if out is None else out
                task = Task(body=self, images=images, maps=maps, out=out, stream=stream, add=add)
                VARIANTS[variant or self.variant].run(task)
        return out

    def coil_parts(self, coils: int) -> list[slice]:
        step = max(MAX_CELLS_AT_ONCE // (self.coefficients * math.prod(self.padded)), 1)
        return [slice(begin, min(begin + step, coils)) for begin in range(0, coils, step)]

    def work(self, coils: int) -> Any:
        """The cached array [coefficient, coil, x, padded y, padded z] between the passes of our own FFTs."""
        import cupy

        found = self._work.get(coils)
        if found is None:
            shape = (self.coefficients * coils, self.shape[0], *self.padded[1:])
            found = self._work[coils] = cupy.empty(shape, cupy.complex64)
        return found

    def space(self, coils: int) -> tuple[Any, Any]:
        """The cached grids [coefficient, coil, *padded], and the plan of their FFT."""
        import cupy
        from cupyx.scipy.fft import get_fft_plan

        found = self._spaces.get(coils)
        if found is None:
            grids = cupy.empty((self.coefficients * coils, *self.padded), cupy.complex64)
            found = grids, get_fft_plan(grids, axes=tuple(range(1, grids.ndim)), value_type="C2C")
            self._spaces[coils] = found
        return found


def mixed_bytes(size: int, coefficients: int) -> int:
    """Shared memory of cross_mixed."""
    return coefficients * crossing_bytes(size)


def mixing_fits(size: int, coefficients: int, shared_bytes: int) -> bool:
    """Whether a block of cross_mixed fits a multiprocessor."""
    registers = min(MOST_REGISTERS, REGISTERS // (size // values_of(size) * INTERLEAVED))
    return 2 * coefficients * values_of(size) + REGISTERS_BESIDES <= registers and (
        mixed_bytes(size, coefficients) <= shared_bytes
    )


def _run_lines(task: Task) -> None:
    body, coefficients = task.body, task.body.coefficients
    if not len(task.maps) and not task.add:
        task.out.fill(0)
    image, padded = three(body.shape), three(body.padded)
    step = max(lines_at_once(body.shape, body.padded) // coefficients, FEWEST_COILS)
    for begin in range(0, len(task.maps), step):
        maps = task.maps[begin : begin + step]
        coils = len(maps)
        struct = LinesStruct(image=image, padded=padded, coils=coils)
        work, lines = body.work(coils), Lines(struct=struct, device=body.device.id, stream=task.stream)
        for number, picture in enumerate(task.images):
            lines.forward_rows(picture, maps, work[number * coils :])
        lines.forward_planes(work, coefficients * coils)
        _mix_lines(task, lines, work)
        lines.inverse_planes(work, coefficients * coils)
        for number, into in enumerate(task.out):
            lines.inverse_rows(work[number * coils :], maps, into, first=begin == 0 and not task.add)


def _mix_lines(task: Task, lines: Lines, work: Any) -> None:
    body, struct = task.body, lines.struct
    size = struct.padded[0]
    args = (
        work, body.kernels, lines.twiddles(0), *lines.strides(0), ctypes.c_int(struct.image[0]),
        ctypes.c_int(struct.coils), ctypes.c_longlong(struct.coils * struct.image[0] * math.prod(struct.padded[1:])),
    )  # fmt: skip
    entry = f"cross_mixed<{size}, {body.coefficients}, {_element(body)}>"
    blocks, threads = (lines.stride(0) // INTERLEAVED * struct.coils,), size // values_of(size) * INTERLEAVED
    shared_bytes = mixed_bytes(size, body.coefficients)
    launch(entry, blocks, threads, *args, stream=task.stream, shared_bytes=shared_bytes)


def _element(body: SubspaceConvolution) -> str:
    return "float2" if body.kernels.dtype.kind == "c" else "float"


def _run(task: Task) -> None:
    from cupy.cuda import cufft

    body, stream = task.body, task.stream
    if not len(task.maps) and not task.add:
        task.out.fill(0)
    for part in body.coil_parts(len(task.maps)):
        coils, maps = part.stop - part.start, task.maps[part]
        grids, plan = body.space(coils)
        struct = DoubledStruct(size=at_front(body.padded), image=at_front(body.shape), coils=coils)
        blocks, threads = rows_grid(struct.size[2], coils * struct.size[0] * struct.size[1])
        for number, image in enumerate(task.images):
            grid = grids[number * coils : (number + 1) * coils]
            launch("weigh_coils", blocks, threads, image, maps, grid, struct, stream=stream)
        plan.fft(grids, grids, cufft.CUFFT_FORWARD)
        cells = math.prod(body.padded)
        args = (grids, body.kernels, ctypes.c_longlong(cells), ctypes.c_int(coils))
        entry = _entry(body.coefficients, _element(body))
        launch(entry, (blocks_of(cells, THREADS), blocks_of(coils, COILS_A_BLOCK)), THREADS, *args, stream=stream)
        plan.fft(grids, grids, cufft.CUFFT_INVERSE)
        blocks, threads = rows_grid(struct.image[2], struct.image[0] * struct.image[1])
        first = ctypes.c_bool(part.start == 0 and not task.add)
        for number, into in enumerate(task.out):
            grid = grids[number * coils : (number + 1) * coils]
            launch("combine_coils", blocks, threads, grid, maps, into, first, struct, stream=stream)


def _entry(coefficients: int, element: str) -> str:
    return f"mix_coefficients<{coefficients}, {element}>"


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "subspace": Variant(
            summary="coefficients of a temporal basis: cuFFT, a matrix product at each cell, cuFFT, the coils' sum",
            entries=(
                "weigh_coils",
                "combine_coils",
                *(_entry(k, element) for k in range(1, MOST_COEFFICIENTS + 1) for element in ("float", "float2")),
            ),
            run=_run,
        ),
        "mixed_lines": Variant(
            summary="the same between our own FFTs of lines, which move neither zeros nor unwanted values",
            entries=tuple(f"cross_mixed<{size}, 2, {element}>" for size in COMPILED for element in ("float", "float2")),
            run=_run_lines,
        ),
    }
)
