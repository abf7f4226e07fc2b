"""Smoothing of images and volumes: `millrace run smooth IN OUT`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kernels.smoothing import gaussian_filter, uniform_filter
from kernels.smoothing.window import Window, box_window, gaussian_windows
from pipeline.codecs.packed import PackedBlocks
from pipeline.errors import InputError, OutputError, ParameterError
from pipeline.formats import image as images
from pipeline.formats.image.base import ImageWriter
from pipeline.formats.image.metadata.geotiff import nodata_of
from pipeline.storage.partial import Opening
from pipeline.workloads.common.axes import axes_named, usual_axes
from pipeline.workloads.common.crop import CroppedReader, cropped_axes
from pipeline.workloads.common.extents import in_samples
from pipeline.workloads.common.gaussians import definition_of
from pipeline.workloads.common.halo import pack_with_borders, read_with_borders
from pipeline.workloads.common.image_plan import check_cval, grown, plan_image, remarks
from pipeline.workloads.common.nodata import MissingAsNan, mark_missing, nodata_in_force
from pipeline.workloads.common.samples import computed_in, computed_in_floats, module_of, narrow, widened
from pipeline.workloads.common.statistics import ImageStatistics
from pipeline.workloads.paths import refuse_same_file
from pipeline.workloads.protocol import Budget, Chunk, JobSpec, JobSummary, Plan
from pipeline.workloads.smoothing.audit import SmoothingAudit
from pipeline.workloads.smoothing.parameters import DEFAULT_SIZE, SmoothingParameters


class Smoothing:
    """Smoothing with a box or a Gaussian, as a `Workload`."""

    name = "smooth"
    summary = "Smooth an image or a volume with a box or a Gaussian."
    unit = "pixels"
    examples = (
        "cells.tif smooth.tif --size 9",
        "stack.zarr smooth.zarr --filter gaussian --sigma 2 --preview smooth.png",
    )
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
        output_format = images.format_for_output(spec.output, spec.parameters.storage)
        self._reader = images.open_image(spec.input)
        try:
            refuse_same_file(spec)
            self.header = self._reader.header
            self.parameters, self._extents = in_samples(self.parameters, self.header, spec.input)
            stored = self.header
            self._stored = stored.dtype
            self._nodata = self._missing()
            self._reader = self.parameters.part(self._reader, spec.input)
            self.header = replace(self._reader.header, dtype=self._stored)
            if any(self.parameters.order or ()) and self._stored.kind != "f":
                dtype = np.dtype(np.float64 if self._within == np.float64 else np.float32)
                self.header = self.header.of_other_values(dtype)
            refusal = output_format.refusal(self.header, spec.output)
            if refusal is not None:
                raise OutputError(refusal)
            check_cval(self.parameters.cval, stored, spec.input)
            sigmas = self._values("sigma") if self.parameters.filter == "gaussian" else ()
            counted = self.header if self._missing_integer is None else replace(self.header, dtype=np.dtype(np.float64))
            self._statistics = ImageStatistics(counted) if self.parameters.statistics else None
            orders = self._values("order") if self.parameters.filter == "gaussian" else ()
            self._audit = SmoothingAudit(
                self._reader, self.header, self._within, self._windows, sigmas, orders, self.parameters,
                self._statistics, self._nodata,
            )  # fmt: skip
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
            nbytes=self._reader.header.nbytes + header.nbytes,
            remarks=remarks(self._axes, header, self.spec.output)
            | self._definition
            | self._nodata_remark
            | self._extents
            | ({"statistics": statistics.describe()} if statistics and statistics.is_complete else {}),
        )

    def _missing(self) -> float | None:
        """The nodata value in force: samples that have it are left out, as NaN are then too."""
        asked = self.parameters
        nodata = nodata_in_force(asked.nodata, self.header, self.spec.input)
        cannot = any(asked.order or ()) or asked.nan_policy == "raise" or math.isnan(asked.cval)
        if nodata is None or cannot:
            return None
        self.parameters = asked.model_copy(update={"nan_policy": "omit"})
        self._reader = MissingAsNan(self._reader, nodata)
        return nodata

    @property
    def _missing_integer(self) -> float | None:
        """The nodata value in force of integers, which have no NaN."""
        return None if self._stored.kind == "f" else self._nodata

    @property
    def _nodata_remark(self) -> dict[str, str]:
        if self._nodata is not None:
            return {"nodata": f"{self._nodata:g}, left out"}
        declared = nodata_of(self.header.metadata, self.header.dtype)
        return {} if declared is None else {"nodata": f"{declared:g}, smoothed like any other value"}

    @property
    def _definition(self) -> dict[str, str]:
        """Which definition of the Gaussian holds, see `kernels.smoothing`, and the dtype if it is not the image's."""
        within = {} if self._within == self._stored else {"computed in": self._within.name}
        if self.parameters.filter == "box":
            return within
        letters = [self.header.axes[axis] for axis in self._axes]
        return within | {"gaussian": definition_of(self._windows, letters, self._within, self.header.dtype)}

    # What is asked for

    @cached_property
    def _within(self) -> np.dtype[Any]:
        """The dtype that is computed in."""
        source = self._reader.header.dtype
        return computed_in(source) if self.parameters.filter == "box" else computed_in_floats(source)

    @property
    def _truncate(self) -> float | None:
        """Decimation errs by 1e-5 of the largest value, many steps of integers that need float64."""
        asked = self.parameters
        is_wide = self._within == np.float64 and self._stored.kind != "f"
        return 4.0 if is_wide and asked.truncate is None and asked.radius is None else asked.truncate

    @cached_property
    def _axes(self) -> tuple[int, ...]:
        """The smoothed axes, in the order the user named them."""
        if self.parameters.axes is None:
            return usual_axes(self.header)
        return axes_named(self.parameters.axes, self.header.axes, self.spec.input)

    def _values(self, name: Literal["size", "sigma", "radius", "order"]) -> tuple[Any, ...]:
        """A parameter's value for each smoothed axis, in the order of `_axes`."""
        given = getattr(self.parameters, name)
        values = given or {"size": DEFAULT_SIZE, "sigma": (), "radius": (None,), "order": (0,)}[name]
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
            return tuple(
                gaussian_windows(
                    self._axes, sigmas, modes, self._within, truncate=self._truncate, radii=radii,
                    direct=asked.nan_policy == "omit", orders=self._values("order"),
                )
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            raise ParameterError(f"--{asked.named(str(error))}: {error}") from error

    # The plan

    @property
    def work_ratio(self) -> float:
        """Samples and results in the dtype that they are computed in, if it is another."""
        if self._within == self._stored:
            return 0
        return 2 * self._within.itemsize / (self._stored.itemsize + self.header.dtype.itemsize)

    def plan(self, budget: Budget) -> Plan:
        halo = [(0, 0)] * len(self.header.shape)
        for window in self._windows:
            halo[window.axis] = (window.before, window.after)
        counted = self._statistics
        further: dict[str, Any] = {}
        if counted is not None:
            whole = [] if self.header.channel_axis is None else [self.header.channel_axis]
            further = {"further": counted.spec, "whole": whole, "most_bytes": counted.most_bytes}
        plan = plan_image(
            self._reader, self.spec, budget, halo, header=self.header, storage=self.parameters.storage,
            padded=cropped_axes(self._reader), **further,
        )  # fmt: skip
        if counted is not None:
            counted.forget(len(plan.chunks))
        return plan

    def hold_at_most(self, budget_bytes: int) -> int:
        return self._reader.hold_at_most(budget_bytes)

    # One chunk

    def sink(self, opening: Opening) -> ImageWriter:
        return images.create_image(self.spec.output, self.header, opening, self.parameters.storage)

    def read(self, chunk: Chunk, inputs: Sequence[NDArray[Any]]) -> None:
        region = grown(chunk.region, chunk.halo)
        read_with_borders(self._reader, region, self.parameters.mode, self.parameters.cval, inputs[0])

    @property
    def packs(self) -> bool:
        return self._reader.packs

    def read_packed(self, chunk: Chunk, memory: NDArray[np.uint8]) -> PackedBlocks | None:
        region = grown(chunk.region, chunk.halo)
        return pack_with_borders(self._reader, region, self.parameters.mode, self.parameters.cval, memory)

    def compute(self, chunk: Chunk, inputs: Sequence[Any], outputs: Sequence[Any], stream: Any) -> None:
        asked, out = self.parameters, outputs[0]
        samples = widened(inputs[0], self._within)
        is_narrower = (self._within != out.dtype and not any(asked.order or ())) or out.dtype == np.float16
        options: dict[str, Any] = {
            # Along a cut axis the halo was read, borders included; the others still need their border mode.
            "mode": [asked.mode if chunk.halo[axis] == (0, 0) else "valid" for axis in self._axes],
            "cval": asked.cval,
            "axes": self._axes,
            "offset": [self._offset(window, chunk) for window in self._windows],
            "nan_policy": asked.nan_policy,
            "out": module_of(out).empty(out.shape, self._within) if is_narrower else out,
            "workers": 1,
            "stream": stream,
        }
        try:
            if asked.filter == "box":
                uniform_filter(samples, self._values("size"), **options)
            else:
                radius = None if asked.radius is None else self._values("radius")
                options["order"] = self._values("order")
                gaussian_filter(samples, self._values("sigma"), truncate=self._truncate, radius=radius, **options)
        except ValueError as error:
            where = f"samples {chunk.region.start} to {chunk.region.stop}"
            way_out = "replace them, or choose another --nan-policy"
            raise InputError(f"{self.spec.input}, among {where}: {error}; {way_out}") from error
        if is_narrower:
            narrow(options["out"], out, nodata=self._missing_integer)
        if self._statistics is not None:
            counted = out
            if self._missing_integer is not None:
                counted = out.astype(np.float64)
                counted[out == self._missing_integer] = np.nan
            self._statistics.compute(counted, outputs[1], stream)
        if self._nodata is not None and self._missing_integer is None:
            mark_missing(out, self._nodata, stream)

    def _offset(self, window: Window, chunk: Chunk) -> int:
        """The place of the chunk's first input sample in the whole image, as far as the window depends on it."""
        first = chunk.region.start[window.axis] - chunk.halo[window.axis][0]
        beyond = self._reader.start[window.axis] if isinstance(self._reader, CroppedReader) else 0
        return (first + beyond) % window.step

    def note(self, chunk: Chunk, outputs: Sequence[NDArray[Any]]) -> Callable[[], Any] | None:
        return None if self._statistics is None else self._statistics.note(chunk, outputs[1])

    def add_note(self, chunk: int, note: Any) -> None:
        if self._statistics is not None:
            self._statistics.add_note(chunk, note)

    def reference(self) -> SmoothingAudit:
        return self._audit

    def close(self) -> None:
        self._reader.close()
