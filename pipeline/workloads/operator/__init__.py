"""A function of a block of an image as a workload: `@image_operator`. The engine does everything but the function."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.formats import image as images
from pipeline.formats.image.base import ImageHeader
from pipeline.workloads.operator.job import OperatorJob
from pipeline.workloads.operator.parameters import OperatorParameters, parameters_of
from pipeline.workloads.operator.step import Definition, Halo, Step
from pipeline.workloads.protocol import JobSpec


class ImageOperator:
    """A decorated function: a `Workload`, and still the function when it is called."""

    unit = "pixels"

    def __init__(self, definition: Definition, summary: str | None = None) -> None:
        self.definition = definition
        self.name = definition.name
        if not re.fullmatch(r"[A-Za-z][\w-]*", self.name):
            raise TypeError(f"operator {self.name}: a name has letters, digits, _ and - alone; give name=")
        function = definition.function
        self.summary = summary or (inspect.getdoc(function) or f"Apply {self.name} to an image.").partition("\n")[0]
        self.Parameters = parameters_of(self.name, function, definition.given)
        self.__doc__, self.__module__, self.__wrapped__ = function.__doc__, function.__module__, function

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.definition.function(*arguments, **options)

    def check_output(self, path: Path) -> None:
        images.format_for_output(path)

    def open(self, spec: JobSpec) -> OperatorJob:
        assert isinstance(spec.parameters, OperatorParameters)
        return single_job(spec, self.definition, spec.parameters, spec.parameters.own())


def single_job(
    spec: JobSpec, definition: Definition, parameters: OperatorParameters, arguments: Mapping[str, Any]
) -> OperatorJob:
    """A job of one operator with these arguments."""

    def step(header: ImageHeader) -> list[Step]:
        return [Step(definition, parameters, arguments, header, spec.input)]

    return OperatorJob(spec, definition, parameters, step)


def image_operator(
    function: Callable[..., Any] | None = None,
    *,
    halo: Halo = 0,
    axes: str | None = None,
    dtype: Any = None,
    computes_in: Callable[[Any], Any] | None = None,
    reference: Callable[..., Any] | None = None,
    tolerance: float | Callable[[Any, Any, int], float] | None = None,
    keeps_range: bool | Callable[[Any], bool] = False,
    anchored: bool | Callable[[Any], bool] = False,
    symmetric: bool | Callable[[Any], bool] = False,
    extends: bool = False,
    work_floats: float | Callable[[Any], float] = 0,
    missing_as_nan: bool | Callable[[Any], bool] = False,
    remarks: Callable[..., Mapping[str, str]] | None = None,
    name: str | None = None,
    given: Mapping[str, Any] | None = None,
    summary: str | None = None,
) -> Any:
    """Make a workload of `f(block, *, parameter: int = 5, xp)`; docs/extending.md has examples.

    block     : C-contiguous array with exactly the declared axes, the halo filled by the border mode; NumPy, or CuPy on
                a GPU. f is called once for each index of the other axes, from several threads, and returns an array of
                the block's shape; the engine trims the halo
    parameter : keyword-only and annotated; becomes an option of the command, the API and the page
    xp        : the module `numpy` or `cupy`, if f asks for it
    out       : if f asks for it, f is called once for the whole chunk, of all axes, and fills `out`: the block without
                its halo. It may then ask for `axes`, the numbers of the axes to work along, for `stream`, the CUDA
                stream (None on a CPU), and for `edges`, where the block lies in the image
                (`pipeline.workloads.operator.edges.Edges`): for functions of several steps, or of absolute positions
    halo      : samples that f looks at on each side: a number (rounded up), a number or a tuple (before, after) for
                each axis, or a function of the parameters that returns either. A function of two arguments also gets
                the number of axes; its ValueError is the user's mistake, such as "size must be odd; got 4"
    axes      : letters of the axes that f works along, such as "YX"; None: Y, X, and Z of volumes. A parameter
                `axes: tuple[str, ...] | None = None` lets the user choose others
    dtype     : of the result, or a function of the input's, and of the parameters if it takes two arguments; None:
                the input's
    computes_in : the dtype of the blocks as a function of the image's, such as float32 for float16; results of the
                image's dtype are rounded back, and saturate. None: the image's
    reference : the definition, called as f is, with float64 NumPy blocks; None: the audit computes parts of the result
                again, cut otherwise
    tolerance : of the audit: in sample values for integers, relative to the largest value for floats; or a function of
                the result's dtype, the parameters and the number of axes; None: see `pipeline.workloads.operator.audit`
    keeps_range : the result has the input's dtype, and its values lie between those of the input; or a function of the
                parameters that returns whether it does
    anchored  : the result depends on where the block lies (`edges.first`), such as that of a decimated filter; or a
                function of the parameters that returns whether it does
    symmetric : the result of a mirrored image is the mirrored result, bit for bit, so that a chain need not extend it
                beyond mirrored edges; or a function of the parameters that returns whether it is
    extends   : a function that fills `out` applies `edges.mode` and `edges.cval` itself along axes where the block has
                no halo, but is the whole image (`pipeline.workloads.filters.window.borders`)
    work_floats : how many float32 numbers (float64 if blocks are) f keeps for each sample of a block, besides the
                block and `out`; or a function of the parameters. On a CPU, chunks are so small that `--memory` holds
                them, too
    missing_as_nan : f gets float blocks with NaN for samples of the nodata value (float64 for integers), and
                `nan_policy` is "omit" then. NaN in its result become the nodata value, unless `dtype` declares other
                values. f has parameters `nan_policy` and `nodata`, and does not get the second. Or a function of the
                parameters that returns whether f can. False: a parameter `nodata` gets the value
    remarks   : for the plan and the receipt: a function of the parameters, the numbers of the axes, the dtype of the
                blocks and the result's header
    name      : of the workload; None: the function's
    given     : parameters of f that are no options, with their values, for operators that share a function; each is
                the attribute of the function's module of its own name, with _ for -
    summary   : one sentence for the help; None: the first line of f's docstring

    Raises TypeError for a signature that cannot become options.
    """

    def decorated(function: Callable[..., Any]) -> ImageOperator:
        options: dict[str, Any] = {"halo": halo, "axes": axes, "dtype": dtype, "computes_in": computes_in}
        audited: dict[str, Any] = {"reference": reference, "tolerance": tolerance, "keeps_range": keeps_range}
        further: dict[str, Any] = {"given": given or {}, "anchored": anchored, "extends": extends}
        further |= {"missing_as_nan": missing_as_nan, "work_floats": work_floats}
        further |= {"symmetric": symmetric, "remarks": remarks}
        made = Definition(name=name or function.__name__, function=function, **options, **audited, **further)
        return ImageOperator(made, summary)

    return decorated if function is None else decorated(function)
