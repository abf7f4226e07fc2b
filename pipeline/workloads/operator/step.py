"""One operator in a job: its function, called with blocks of a region."""

from __future__ import annotations

import inspect
import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from kernels.runtime.threads import Interrupted
from pipeline.errors import InputError, MillraceError, OperatorError, ParameterError
from pipeline.formats.image.base import ImageHeader, Region
from pipeline.workloads.common.axes import axes_named, usual_axes
from pipeline.workloads.common.extents import in_samples
from pipeline.workloads.common.image_plan import check_cval, grown
from pipeline.workloads.common.nodata import mark_missing, missing_as_nan, missing_is_nan, nodata_in_force
from pipeline.workloads.common.samples import computed_in_floats, module_of, narrow, widened
from pipeline.workloads.operator.edges import Edges
from pipeline.workloads.operator.parameters import OperatorParameters, is_untyped

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
    computes_in: Callable[[np.dtype[Any]], np.dtype[Any]] | None = None
    reference: Callable[..., Any] | None = None
    tolerance: float | Callable[[np.dtype[Any], Any, int], float] | None = None
    keeps_range: bool | Callable[[Any], bool] = False
    given: Mapping[str, Any] = field(default_factory=dict)
    anchored: bool | Callable[[Any], bool] = False
    symmetric: bool | Callable[[Any], bool] = False
    extends: bool = False
    work_floats: float | Callable[[Any], float] = 0
    missing_as_nan: bool | Callable[[Any], bool] = False
    remarks: Callable[..., Mapping[str, str]] | None = None


def _declared(value: Any, parameters: OperatorParameters) -> Any:
    """What was declared as a value, or as a function of the parameters."""
    return value(parameters) if callable(value) else value


class Step:
    """An operator with its parameters, on images of a known header.

    header : of the result
    axes   : of a block, by their number in the image
    halo   : samples before and after along each axis of the image
    remarks: on what was taken from the image
    whole_shape : of the image, if the header is that of a part; set by the job. Regions are those of the image then
    work_bytes : of the arrays that computing makes, for each sample of a block
    """

    def __init__(
        self,
        definition: Definition,
        parameters: OperatorParameters,
        arguments: Mapping[str, Any],
        source: ImageHeader,
        path: Path,
    ) -> None:
        """`arguments`: the function's, besides the block and what it asks the engine for; `path`: of the input."""
        in_pixels, extents = in_samples(parameters, source, path)
        if in_pixels is not parameters:
            parameters, arguments = in_pixels, in_pixels.own()
        self.definition, self.parameters, self._path = definition, parameters, path
        self.whole_shape = source.shape
        self._arguments = {**definition.given, **arguments}
        self.remarks: dict[str, Any] = dict(extents)
        self._take_nodata(source)
        self.header = source
        # Any number, 0 above all, may be a difference: their missing samples are NaN.
        self._marked = self._nodata
        if not _declared(definition.keeps_range, parameters):
            self.header = source.of_other_values(self._dtype(source.dtype))
            if self._nodata is not None and definition.dtype is not None:
                self.header, self._marked = missing_is_nan(self.header), None
        self._source = source.dtype
        within = source.dtype if definition.computes_in is None else definition.computes_in(source.dtype)
        self._within: np.dtype[Any] = np.dtype(within)
        if self._nodata is not None:
            self._within = computed_in_floats(source.dtype) if source.dtype.kind == "f" else np.dtype(np.float64)
        self.work_bytes: float = _declared(definition.work_floats, self.parameters)
        self.work_bytes *= 8 if self._within == np.float64 else 4
        if self._within != source.dtype:
            self.work_bytes += 2 * self._within.itemsize * (1 if self._nodata is None else 2)
            self.remarks["computed in"] = self._within.name
        if parameters.mode == "constant":
            check_cval(parameters.cval, source, path)
        self.axes = self._chosen_axes(source)
        self.halo = self._declared_halo(len(source.shape))
        if self._arguments.get("size", ()) is None and "footprint" not in self._arguments:
            self.remarks["window"] = ",".join(str(sum(self.halo[axis]) + 1) for axis in self.axes)
        if definition.remarks is not None:
            self.remarks |= definition.remarks(self.parameters, self.axes, self._within, self.header)

    def _take_nodata(self, source: ImageHeader) -> None:
        """How the function gets missing samples: their value as `nodata`, or NaN that it omits."""
        asked, arguments, by_nan = self.parameters, self._arguments, self.definition.missing_as_nan
        given, leaves_out = arguments.get("nodata"), "nodata" in arguments
        nodata = nodata_in_force(given, source, self._path)
        self._nodata: float | None = None  # that the function gets as NaN
        if by_nan:
            del arguments["nodata"]
            policy, is_derived = arguments["nan_policy"], callable(by_nan) and not by_nan(asked)
            options = {
                "--order": is_derived,
                "--nan-policy raise": policy == "raise",
                "--cval nan": math.isnan(asked.cval),
            }
            against = next((option for option, is_given in options.items() if is_given), None)
            if against is not None and (given is not None or policy == "omit"):
                asks = "--nan-policy omit" if given is None else "--nodata"
                raise ParameterError(f"{asks} leaves pixels out, which does not fit {against}: pass one of them")
            leaves_out = against is None
        if nodata is None:
            return
        if not leaves_out:
            self.remarks["nodata"] = f"{nodata:g}, taken by {self.definition.name} like any other value"
            return
        self.remarks["nodata"] = f"{nodata:g}, left out"
        if by_nan:
            self._nodata, arguments["nan_policy"] = nodata, "omit"
            self.parameters = asked.model_copy(update={"nan_policy": "omit"})
        else:
            arguments["nodata"] = nodata

    @property
    def is_anchored(self) -> bool:
        """Whether its result depends on where a block lies."""
        return bool(_declared(self.definition.anchored, self.parameters))

    @property
    def is_symmetric(self) -> bool:
        """Whether the result of a mirrored image is the mirrored result."""
        return bool(_declared(self.definition.symmetric, self.parameters))

    def _dtype(self, source: np.dtype[Any]) -> np.dtype[Any]:
        declared = self.definition.dtype
        if inspect.isfunction(declared):
            asked = (self.parameters,) if len(inspect.signature(declared).parameters) > 1 else ()
            declared = declared(source, *asked)
        try:
            return source if declared is None else np.dtype(declared)
        except TypeError as error:
            raise ParameterError(f"{self.definition.name}: there is no dtype {self.definition.dtype!r}") from error

    def _chosen_axes(self, source: ImageHeader) -> tuple[int, ...]:
        """The axes of a block, by their number in the image."""
        letters = source.axes
        if isinstance(chosen := self._arguments.get("axes"), tuple):
            return axes_named(chosen, letters, self._path)
        if self.definition.axes is None:
            return usual_axes(source)
        wanted = self.definition.axes.upper()
        if not wanted or len(set(wanted)) != len(wanted) or not set(wanted) <= set(letters):
            raise ParameterError(
                f"{self.definition.name} works along the axes {','.join(wanted)}, and {self._path} has "
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
            name, *rest = re.split(r"(?=[ :])", fault, maxsplit=1)
            option = f"--{name.replace('_', '-')}" if name in type(self.parameters).model_fields else name
            raise ParameterError(f"{option}{''.join(rest)} ({self._path} is filtered along {letters})") from error
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
        return declared(self.parameters, *([len(self.axes)] if takes_axes else []))

    def _halo(self, samples: Any, out: Any) -> list[tuple[int, int]]:
        """What `samples` hold before and after the samples of `out`: the halo, except along axes of the same length."""
        lengths = zip(samples.shape, out.shape, strict=True)
        return [(0, 0) if n == m else sides for sides, (n, m) in zip(self.halo, lengths, strict=True)]

    def apply(self, function: Callable[..., Any], samples: Any, region: Region, out: Any, stream: Any = None) -> None:
        """Fill `out` with what the function makes of a region, block by block, or all at once if it fills `out`."""
        is_own = function is self.definition.function
        try:
            if is_own and self._within != self._source:
                samples = widened(samples, self._within, exactly=True)
            if self.definition.missing_as_nan:
                samples = self._with_nan(samples, region, out)
        except InputError as error:
            raise self._about(error, region) from error
        if not is_own or self._within == self._source or out.dtype != self._source:
            # A result of another dtype is computed as it is.
            self._fill(function, samples, region, out, stream)
            if self._marked is not None:
                mark_missing(out, self._marked, stream)
            return
        values = module_of(out).empty(out.shape, self._within)
        self._fill(function, samples, region, values, stream)
        narrow(values, out, nodata=self._marked)

    def _with_nan(self, samples: Any, region: Region, out: Any) -> Any:
        """Samples with NaN for those that are missing. What lies beyond the edges counts."""
        refuses = self._arguments["nan_policy"] == "raise" and samples.dtype.kind == "f"
        if refuses and bool(module_of(samples).isnan(samples).any()):
            raise InputError("image contains NaN; replace them, or choose another --nan-policy")
        if self._nodata is None:
            return samples
        samples = missing_as_nan(samples, self._nodata)
        if self.parameters.mode == "constant":
            self._edges(samples, region, out).extend(samples, range(samples.ndim))
        return samples

    def _edges(self, samples: Any, region: Region, out: Any) -> Edges:
        halo, asked = self._halo(samples, out), self.parameters
        return Edges(
            first=grown(region, halo).start, halo=halo, shape=self.whole_shape, mode=asked.mode, cval=asked.cval
        )

    def _fill(self, function: Callable[..., Any], samples: Any, region: Region, out: Any, stream: Any) -> None:
        asked = _parameters_of(function)
        if fills_out(asked):
            special = {"axes": self.axes, "out": out, "stream": stream, "xp": module_of(out)}
            special["edges"] = self._edges(samples, region, out)
            arguments: Mapping[str, Any] = {
                **self._arguments,
                **{name: special[name] for name in special if name in asked},
            }
            self._call(function, samples, arguments, region)
            return
        others = [axis for axis in range(samples.ndim) if axis not in self.axes]
        blocks, results = (array.transpose(*others, *self.axes) for array in (samples, out))
        halo = self._halo(samples, out)
        kept = tuple(slice(halo[axis][0], halo[axis][0] + region.shape[axis]) for axis in self.axes)
        xp = module_of(samples)
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
        xp = module_of(block)
        theirs = (xp.cuda.memory.OutOfMemoryError, xp.cuda.runtime.CUDARuntimeError) if xp is not np else ()
        try:
            return function(block, **arguments)
        except InputError as error:
            raise self._about(error, region) from error
        except (MillraceError, MemoryError, Interrupted, *theirs):
            raise  # the engine knows what they mean
        except (Exception, SystemExit) as error:
            raise self._failure(function, error, region) from error

    def _about(self, error: InputError, region: Region) -> InputError:
        return InputError(f"{self._path}, among samples {region.start} to {region.stop}: {error}")

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


@lru_cache(maxsize=64)
def _parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a function in C that does not tell
        return {}


def _fault(result: Any, shape: tuple[int, ...], dtype: np.dtype[Any], xp: Any) -> str | None:
    """Why what a function returned cannot be stored; None if it can."""
    if not getattr(result, "shape", ()):
        return f" returns {type(result).__name__}, not an array of the block's shape {shape}"
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
