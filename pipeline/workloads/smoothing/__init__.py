"""Smoothing of images and volumes: `millrace run smooth IN OUT`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kernels.smoothing import box, gaussian
from kernels.smoothing.window import Window, box_window, gaussian_windows
from pipeline.config import format_bytes
from pipeline.errors import InputError, OutputError, ParameterError
from pipeline.formats import image as images
from pipeline.formats.image.base import ImageWriter, Region
from pipeline.storage.partial import Opening
from pipeline.workloads.common.halo import read_with_borders
from pipeline.workloads.common.statistics import ImageStatistics
from pipeline.workloads.common.tiling import best_tiling
from pipeline.workloads.paths import refuse_same_file
from pipeline.workloads.protocol import ArraySpec, Budget, Chunk, JobSpec, JobSummary, Plan
from pipeline.workloads.smoothing.audit import SmoothingAudit
from pipeline.workloads.smoothing.parameters import DEFAULT_SIZE, SmoothingParameters

# Each chunk of a plan takes 700 bytes of memory and 10 µs: of more, chunks are made larger.
MOST_CHUNKS = 1 << 18


class Smoothing:
    """Smoothing with a box or a Gaussian, as a `Workload`."""

    name = "smooth"
    summary = "Smooth an image or a volume with a box or a Gaussian."
    unit = "pixels"
    Parameters = SmoothingParameters

    def check_output(self, path: Path) -> None:
        images.format_for_output(path)

    def open(self, spec: JobSpec) -> SmoothingJob:
        return SmoothingJob(spec)


class SmoothingJob:
    """Each chunk is smoothed on its own from a read that includes its halo: map, no communication."""

    def __init__(self, spec: JobSpec) -> None:
        assert isinstance(spec.parameters, SmoothingParameters)
        self.spec = spec
        self.parameters = spec.parameters
        output_format = images.format_for_output(spec.output)
        self._reader = images.open_image(spec.input)
        try:
            refuse_same_file(spec)
            self.header = self._reader.header
            refusal = output_format.refusal(self.header, spec.output)
            if refusal is not None:
                raise OutputError(refusal)
            self._check_cval()
            sigmas = self._values("sigma") if self.parameters.filter == "gaussian" else ()
            self._statistics = ImageStatistics(self.header) if self.parameters.statistics else None
            self._audit = SmoothingAudit(self._reader, self._windows, sigmas, self.parameters, self._statistics)
        except BaseException:
            self._reader.close()
            raise

    @property
    def summary(self) -> JobSummary:
        header, statistics = self.header, self._statistics
        return JobSummary(
            shape=header.shape,
            axes=header.axes,
            dtype=header.dtype.name,
            nbytes=2 * header.nbytes,
            remarks={"statistics": statistics.describe()} if statistics and statistics.is_complete else {},
        )

    # What is asked for

    @cached_property
    def _axes(self) -> tuple[int, ...]:
        """The smoothed axes, in the order the user named them."""
        letters = self.header.axes
        spatial = [axis for axis, letter in enumerate(letters) if letter != "C"]
        if self.parameters.axes is None:
            return tuple(spatial)
        by_name = {name: axis for axis in spatial for name in (letters[axis], str(axis), str(axis - len(letters)))}
        chosen = [by_name.get(name.upper()) for name in self.parameters.axes]
        if None in chosen or len(set(chosen)) != len(chosen):
            known = ", ".join(f"{letters[axis]} ({axis})" for axis in spatial)
            raise ParameterError(
                f"--axes {','.join(self.parameters.axes)}: name each axis once, of those {self.spec.input} has: {known}"
            )
        return tuple(axis for axis in chosen if axis is not None)

    def _values(self, name: Literal["size", "sigma", "radius"]) -> tuple[Any, ...]:
        """A parameter's value for each smoothed axis, in the order of `_axes`."""
        given = getattr(self.parameters, name)
        values = given or {"size": DEFAULT_SIZE, "sigma": (), "radius": (None,)}[name]
        if len(values) == 1:
            return tuple(values) * len(self._axes)
        if len(values) != len(self._axes):
            axes = "".join(self.header.axes[axis] for axis in self._axes)
            raise ParameterError(
                f"--{name} has {len(values)} values; {self.spec.input} is smoothed along {axes}: give 1 or {len(axes)}"
            )
        return tuple(values)

    @cached_property
    def _windows(self) -> tuple[Window, ...]:
        """The filter along each smoothed axis; ParameterError where a parameter does not fit."""
        asked = self.parameters
        try:
            if asked.filter == "box":
                sizes = zip(self._axes, self._values("size"), strict=True)
                return tuple(box_window(axis, size, asked.mode) for axis, size in sizes)
            sigmas, radii = self._values("sigma"), self._values("radius")
            modes = (asked.mode,) * len(self._axes)
            made = gaussian_windows(self._axes, sigmas, modes, self.header.dtype, truncate=asked.truncate, radii=radii)
            return tuple(made)
        except (TypeError, ValueError) as error:
            raise ParameterError(f"--{asked.named(str(error))}: {error}") from error

    def _check_cval(self) -> None:
        dtype, cval = self.header.dtype, self.parameters.cval
        if dtype.kind == "f":
            with np.errstate(over="ignore"):
                stored = float(dtype.type(cval))
            if math.isinf(stored) and not math.isinf(cval):
                raise ParameterError(
                    f"--cval {cval:g} is beyond the {dtype.name} of {self.spec.input}, which ends at "
                    f"{np.finfo(dtype).max:g}: give less, or inf"
                )
            return
        low, high = np.iinfo(dtype).min, self.header.maxval or np.iinfo(dtype).max
        if not (math.isfinite(cval) and cval == int(cval) and low <= cval <= high):
            raise ParameterError(f"--cval must be a whole number in {low} … {high} for {self.spec.input}; got {cval:g}")

    # The plan

    def plan(self, budget: Budget) -> Plan:
        budget_bytes, target_bytes = budget.budget_bytes, budget.target_bytes
        shape, dtype, asked_bytes = self.header.shape, self.header.dtype, budget_bytes
        if self._statistics is not None:
            budget_bytes = min(budget_bytes - self._statistics.spec.nbytes, self._statistics.most_bytes)
        halo = [(0, 0)] * len(shape)
        for window in self._windows:
            halo[window.axis] = (window.before, window.after)
        channel_axis, grain = self.header.channel_axis, self._grain()
        tilings = partial(best_tiling, shape, halo, dtype.itemsize, channel_axis=channel_axis, grain=grain)
        tiling = tilings(budget_bytes=budget_bytes, target_bytes=target_bytes)
        while tiling is not None and tiling.count > MOST_CHUNKS:
            if target_bytes >= budget_bytes:
                too_many = math.ceil(tiling.count / MOST_CHUNKS)
                raise ParameterError(
                    f"--memory is too small for {self.spec.input}, which would be cut into {tiling.count:,} chunks, "
                    f"more than {MOST_CHUNKS:,}: raise it to {too_many} times as much"
                )
            target_bytes = min(2 * target_bytes, budget_bytes)
            tiling = tilings(budget_bytes=budget_bytes, target_bytes=target_bytes)
        if tiling is None:
            needed = max(budget_bytes, 1)
            while tilings(budget_bytes=needed, target_bytes=needed) is None:
                needed += -(-needed // 8)
            times = math.ceil(10 * (needed + asked_bytes - budget_bytes) / max(asked_bytes, 1)) / 10
            raise ParameterError(
                f"--memory is too small for one chunk of {self.spec.input} with its halo, which takes "
                f"{format_bytes(needed)}: raise it to {times:g} times as much"
            )
        regions = enumerate(tiling.regions())
        chunks = tuple(self._chunk(index, region, tiling.chunk_halo) for index, region in regions)
        if self._statistics is not None:
            self._statistics.forget(len(chunks))
        return Plan(chunks=chunks)

    def _grain(self) -> tuple[int, ...]:
        """The blocks of both files along each axis: of the output's alone where no chunk could hold both."""
        shape = self.header.shape
        unit = (1,) * len(shape)
        written = images.format_for_output(self.spec.output).block_shape(self.header) or unit
        read = self._reader.block_shape or unit
        both = (math.lcm(*blocks) for blocks in zip(read, written, strict=True))
        return tuple(one if one <= n else own for one, own, n in zip(both, written, shape, strict=True))

    def _chunk(self, index: int, region: Region, halo: tuple[tuple[int, int], ...]) -> Chunk:
        dtype = self.header.dtype
        return Chunk(
            index=index,
            region=region,
            halo=halo,
            inputs=(ArraySpec(_grown(region, halo).shape, dtype),),
            outputs=(ArraySpec(region.shape, dtype), *((self._statistics.spec,) if self._statistics else ())),
            work=math.prod(n for n, letter in zip(region.shape, self.header.axes, strict=True) if letter != "C"),
        )

    def hold_at_most(self, budget_bytes: int) -> int:
        return self._reader.hold_at_most(budget_bytes)

    # One chunk

    def sink(self, opening: Opening) -> ImageWriter:
        return images.create_image(self.spec.output, self.header, opening)

    def read(self, chunk: Chunk, inputs: Sequence[NDArray[Any]]) -> None:
        region = _grown(chunk.region, chunk.halo)
        read_with_borders(self._reader, region, self.parameters.mode, self.parameters.cval, inputs[0])

    def compute(self, chunk: Chunk, inputs: Sequence[Any], outputs: Sequence[Any], stream: Any) -> None:
        asked = self.parameters
        options: dict[str, Any] = {
            # Along a cut axis the halo was read, borders included; the others still need their border mode.
            "mode": [asked.mode if chunk.halo[axis] == (0, 0) else "valid" for axis in self._axes],
            "cval": asked.cval,
            "axes": self._axes,
            "nan_policy": asked.nan_policy,
            "out": outputs[0],
            "workers": 1,
            "stream": stream,
        }
        try:
            if asked.filter == "box":
                box(inputs[0], self._values("size"), **options)
            else:
                radius = None if asked.radius is None else self._values("radius")
                gaussian(inputs[0], self._values("sigma"), truncate=asked.truncate, radius=radius, **options)
        except ValueError as error:
            where = f"samples {chunk.region.start} to {chunk.region.stop}"
            way_out = "mend them, or choose another --nan-policy"
            raise InputError(f"{self.spec.input}, among {where}: {error}; {way_out}") from error
        if self._statistics is not None:
            self._statistics.compute(outputs[0], outputs[1], stream)

    def note(self, chunk: Chunk, outputs: Sequence[NDArray[Any]]) -> Callable[[], Any] | None:
        return None if self._statistics is None else self._statistics.note(chunk, outputs[1])

    def add_note(self, chunk: int, note: Any) -> None:
        if self._statistics is not None:
            self._statistics.add_note(chunk, note)

    def reference(self) -> SmoothingAudit:
        return self._audit

    def close(self) -> None:
        self._reader.close()


def _grown(region: Region, halo: Sequence[tuple[int, int]]) -> Region:
    return Region(
        tuple(start - before for start, (before, _) in zip(region.start, halo, strict=True)),
        tuple(stop + after for stop, (_, after) in zip(region.stop, halo, strict=True)),
    )
