"""One job of an operator: the function, called with each chunk's blocks."""

from __future__ import annotations

import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.threads import Interrupted
from pipeline.errors import InputError, MillraceError, OperatorError, OutputError, ParameterError
from pipeline.formats import image as images
from pipeline.formats.image.base import ImageHeader, ImageWriter, Region
from pipeline.storage.partial import Opening
from pipeline.workloads.common.axes import axes_named, usual_axes
from pipeline.workloads.common.extents import in_samples
from pipeline.workloads.common.halo import read_with_borders
from pipeline.workloads.common.image_plan import check_cval, grown, plan_image, remarks
from pipeline.workloads.common.nodata import declared_nodata
from pipeline.workloads.operator.audit import RecomputedAudit, ReferenceAudit
from pipeline.workloads.operator.parameters import OperatorParameters, is_untyped
from pipeline.workloads.paths import refuse_same_file
from pipeline.workloads.protocol import Budget, Chunk, JobSpec, JobSummary, Plan

# Samples on each side, or (before, after); for all axes, or for each.
Reach = float | Sequence[float | tuple[int, int]]
Halo = Reach | Callable[..., Reach]


@dataclass(frozen=True, kw_only=True)
class Definition:
    """A function and what was declared with it: see `image_operator`."""

    name: str
    function: Callable[..., Any]
    halo: Halo = 0
    axes: str | None = None
    dtype: Any = None
    reference: Callable[..., Any] | None = None
    tolerance: float | None = None
    keeps_range: bool = False


class OperatorJob:
    """Each chunk is computed on its own from a read that includes its halo."""

    def __init__(
        self, spec: JobSpec, definition: Definition, parameters: OperatorParameters, arguments: Mapping[str, Any]
    ) -> None:
        """`arguments`: the function's, besides the block and xp."""
        self.spec, self.definition, self._parameters, self._arguments = spec, definition, parameters, arguments
        output_format = images.format_for_output(spec.output, parameters.storage)
        self._reader = images.open_image(spec.input)
        try:
            refuse_same_file(spec)
            in_pixels, self._extents = in_samples(parameters, ("size",), self._reader.header, spec.input)
            if in_pixels is not parameters:
                self._parameters = parameters = in_pixels
                self._arguments = arguments = parameters.own()
            self._reader = parameters.part(self._reader, spec.input)
            source = self._reader.header
            self.header = source
            if "nodata" in arguments and arguments["nodata"] is None:
                self._arguments = {**arguments, "nodata": declared_nodata(source)}
            if not definition.keeps_range:
                # What PNM says of the input's values does not hold for those of the result.
                metadata = {key: value for key, value in source.metadata.items() if key != "tuple_type"}
                self.header = replace(source, dtype=self._dtype(source.dtype), maxval=None, metadata=metadata)
            refusal = output_format.refusal(self.header, spec.output)
            if refusal is not None:
                raise OutputError(refusal)
            if parameters.mode == "constant":
                check_cval(parameters.cval, source, spec.input)
            self.axes = self._chosen_axes(source)
            along = [source.axes[axis] for axis in self.axes if source.axes[axis] in parameters.chosen - set("ZYX")]
            if along:
                raise ParameterError(f"{definition.name} works along {along[0]}, so it takes no part of that axis")
            self._halo = self._declared_halo(len(source.shape))
            audit = RecomputedAudit if definition.reference is None else ReferenceAudit
            self._audit: RecomputedAudit | ReferenceAudit = audit(self)
        except BaseException:
            self._reader.close()
            raise

    @property
    def summary(self) -> JobSummary:
        header, nbytes = self.header, self._reader.header.nbytes + self.header.nbytes
        said = remarks(self.axes, header, self.spec.output) | self._extents
        if self._arguments.get("nodata") is not None:
            said["nodata"] = f"{self._arguments['nodata']:g}, left out"
        return JobSummary(shape=header.shape, axes=header.axes, dtype=header.dtype.name, nbytes=nbytes, remarks=said)

    def _dtype(self, source: np.dtype[Any]) -> np.dtype[Any]:
        try:
            return source if self.definition.dtype is None else np.dtype(self.definition.dtype)
        except TypeError as error:
            raise ParameterError(f"{self.definition.name}: there is no dtype {self.definition.dtype!r}") from error

    def _chosen_axes(self, source: ImageHeader) -> tuple[int, ...]:
        """The axes of a block, by their number in the image."""
        letters = source.axes
        if isinstance(chosen := self._arguments.get("axes"), tuple):
            return axes_named(chosen, letters, self.spec.input)
        if self.definition.axes is None:
            return usual_axes(source)
        wanted = self.definition.axes.upper()
        if not wanted or len(set(wanted)) != len(wanted) or not set(wanted) <= set(letters):
            raise ParameterError(
                f"{self.definition.name} works along the axes {','.join(wanted)}, and {self.spec.input} has "
                f"{','.join(letters)}"
            )
        return tuple(letters.index(letter) for letter in wanted)

    def _declared_halo(self, ndim: int) -> list[tuple[int, int]]:
        """Samples before and after along each axis of the image."""
        declared, letters = self.definition.halo, ",".join(self.header.axes[axis] for axis in self.axes)
        try:
            given = self._called_halo(declared) if callable(declared) else declared
        except ValueError as error:
            fault = str(error)
            option = "--" if fault.partition(" ")[0] in type(self._parameters).model_fields else ""
            raise ParameterError(f"{option}{fault} ({self.spec.input} is filtered along {letters})") from error
        values = list(given) if isinstance(given, Sequence) else [given] * len(self.axes)
        sides = [value if isinstance(value, tuple) else (value, value) for value in values]
        are_numbers = all(isinstance(each, int | float) and 0 <= each < math.inf for side in sides for each in side)
        if len(sides) != len(self.axes) or not are_numbers or any(len(side) != 2 for side in sides):
            raise ParameterError(
                f"{self.definition.name}: its halo is {given!r}; it must be a number of samples, 0 or more, or one for "
                f"each of {letters}"
            )
        halo = [(0, 0)] * ndim
        for axis, (before, after) in zip(self.axes, sides, strict=True):
            halo[axis] = (math.ceil(before), math.ceil(after))
        return halo

    def _called_halo(self, declared: Callable[..., Reach]) -> Reach:
        takes_axes = len(inspect.signature(declared).parameters) > 1
        return declared(self._parameters, *([len(self.axes)] if takes_axes else []))

    def plan(self, budget: Budget) -> Plan:
        # A function has no border mode of its own: it finds the borders in its halo, however the image is cut.
        plan = plan_image(
            self._reader,
            self.spec,
            budget,
            self._halo,
            header=self.header,
            whole=[axis for axis in self.axes if self.header.axes[axis] in "CS"],
            pads_uncut=True,
            storage=self._parameters.storage,
        )
        self._audit.begin(len(plan.chunks))
        return plan

    def hold_at_most(self, budget_bytes: int) -> int:
        return self._reader.hold_at_most(budget_bytes)

    def sink(self, opening: Opening) -> ImageWriter:
        return images.create_image(self.spec.output, self.header, opening, self._parameters.storage)

    def read(self, chunk: Chunk, inputs: Sequence[NDArray[Any]]) -> None:
        self._read(chunk.region, inputs[0])

    def compute(self, chunk: Chunk, inputs: Sequence[Any], outputs: Sequence[Any], stream: Any) -> None:
        self._apply(self.definition.function, inputs[0], chunk.region, outputs[0], stream)
        self._audit.computed_with(_module_of(inputs[0]))

    def note(self, chunk: Chunk, outputs: Sequence[NDArray[Any]]) -> Callable[[], Any] | None:
        return self._audit.note(chunk, outputs[0])

    def add_note(self, chunk: int, note: Any) -> None:
        self._audit.add_note(chunk, note)

    def reference(self) -> RecomputedAudit | ReferenceAudit:
        return self._audit

    def close(self) -> None:
        self._reader.close()

    # For the audit

    def samples(self, region: Region) -> NDArray[Any]:
        """The input of a region, with its halo."""
        samples = np.empty(grown(region, self._halo).shape, self._reader.header.dtype)
        self._read(region, samples)
        return samples

    def computed(self, samples: Any, region: Region) -> Any:
        """The function's result for a region, of its input with halo, on the device where that is."""
        out = _module_of(samples).empty(region.shape, self.header.dtype)
        self._apply(self.definition.function, samples, region, out)
        return out

    def defined(self, samples: NDArray[np.float64], region: Region) -> NDArray[np.float64]:
        """As `computed`, by the reference."""
        assert self.definition.reference is not None
        out = np.empty(region.shape, np.float64)
        self._apply(self.definition.reference, samples, region, out)
        return out

    def _read(self, region: Region, out: NDArray[Any]) -> None:
        read_with_borders(self._reader, grown(region, self._halo), self._parameters.mode, self._parameters.cval, out)

    def _apply(self, function: Callable[..., Any], samples: Any, region: Region, out: Any, stream: Any = None) -> None:
        """Fill `out` with what the function makes of a region, block by block, or all at once if it fills `out`."""
        asked = _parameters_of(function)
        if fills_out(asked):
            special = {"axes": self.axes, "out": out, "stream": stream, "xp": _module_of(out)}
            arguments: Mapping[str, Any] = {
                **self._arguments,
                **{name: special[name] for name in special if name in asked},
            }
            self._call(function, samples, arguments, region)
            return
        others = [axis for axis in range(samples.ndim) if axis not in self.axes]
        blocks, results = (array.transpose(*others, *self.axes) for array in (samples, out))
        kept = tuple(slice(self._halo[axis][0], self._halo[axis][0] + region.shape[axis]) for axis in self.axes)
        xp = _module_of(samples)
        arguments = {**self._arguments, "xp": xp} if "xp" in asked else self._arguments
        for index in np.ndindex(*blocks.shape[: len(others)]):
            block = xp.ascontiguousarray(blocks[(*index, ...)])
            shape = block.shape
            result = self._call(function, block, arguments, region)
            fault = _fault(result, shape, out.dtype, xp)
            if fault is not None:
                raise OperatorError(f"operator {self.definition.name}{fault}")
            results[(*index, ...)] = result[kept]

    def _call(self, function: Callable[..., Any], block: Any, arguments: Mapping[str, Any], region: Region) -> Any:
        xp = _module_of(block)
        theirs = (xp.cuda.memory.OutOfMemoryError, xp.cuda.runtime.CUDARuntimeError) if xp is not np else ()
        try:
            return function(block, **arguments)
        except InputError as error:
            raise InputError(f"{self.spec.input}, among samples {region.start} to {region.stop}: {error}") from error
        except (MillraceError, MemoryError, Interrupted, *theirs):
            raise  # the engine knows what they mean
        except (Exception, SystemExit) as error:
            raise self._failure(function, error, region) from error

    def _failure(self, function: Callable[..., Any], error: BaseException, region: Region) -> OperatorError:
        source = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_filename", None)
        frames = traceback.extract_tb(error.__traceback__)[1:]
        own = [frame for frame in frames if frame.filename == source] or frames
        at = f"{own[-1].filename}:{own[-1].lineno}, " if own else ""
        said = " ".join(str(error).split())
        return OperatorError(
            f"operator {self.definition.name}: {type(error).__name__}: {said} "
            f"({at}samples {region.start} to {region.stop})",
            "".join(traceback.format_exception(error)),
        )


def fills_out(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether a function of these parameters fills `out`. NumPy's own take one too, but need none."""
    out = parameters.get("out")
    return out is not None and (out.kind, out.default) == (out.KEYWORD_ONLY, out.empty) and is_untyped(out)


def _parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a function in C that does not tell
        return {}


def _module_of(array: Any) -> Any:
    """The module `numpy` or `cupy`, without importing it."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def _fault(result: Any, shape: tuple[int, ...], dtype: np.dtype[Any], xp: Any) -> str | None:
    """Why what a function returned cannot be stored; None if it can."""
    if not isinstance(result, xp.ndarray):
        return f" returns {type(result).__name__} for a block that is a {xp.__name__}.ndarray: let it use xp"
    if result.shape != shape:
        return (
            f" returns an array of {result.shape} for a block of {shape}: return all of the block, halo included; "
            "the engine trims it"
        )
    # Floats may be rounded to shorter floats; every integer must fit.
    if not np.can_cast(result.dtype, dtype, "same_kind" if dtype.kind == "f" else "safe"):
        return f" returns {result.dtype}, which {dtype} does not hold: declare dtype=, or return the block's own dtype"
    return None
