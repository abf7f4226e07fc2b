"""A function of a block of an image as a workload: `@image_operator`. The engine does everything but the function."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.formats import image as images
from pipeline.workloads.operator.job import Definition, Halo, OperatorJob
from pipeline.workloads.operator.parameters import OperatorParameters, parameters_of
from pipeline.workloads.protocol import JobSpec


class ImageOperator:
    """A decorated function: a `Workload`, and still the function when it is called."""

    unit = "pixels"

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.name = definition.name
        if not re.fullmatch(r"[A-Za-z][\w-]*", self.name):
            raise TypeError(f"operator {self.name}: a name has letters, digits, _ and - alone; give name=")
        function = definition.function
        self.summary = (inspect.getdoc(function) or f"Apply {self.name} to an image.").partition("\n")[0]
        self.Parameters = parameters_of(self.name, function)
        self.__doc__, self.__module__, self.__wrapped__ = function.__doc__, function.__module__, function

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.definition.function(*arguments, **options)

    def check_output(self, path: Path) -> None:
        images.format_for_output(path)

    def open(self, spec: JobSpec) -> OperatorJob:
        assert isinstance(spec.parameters, OperatorParameters)
        return OperatorJob(spec, self.definition, spec.parameters, spec.parameters.own())


def image_operator(
    function: Callable[..., Any] | None = None,
    *,
    halo: Halo = 0,
    axes: str | None = None,
    dtype: Any = None,
    reference: Callable[..., Any] | None = None,
    tolerance: float | None = None,
    keeps_range: bool = False,
    name: str | None = None,
) -> Any:
    """Make a workload of `f(block, *, parameter: int = 5, xp)`; docs/extending.md has examples.

    block     : C-contiguous array with exactly the declared axes, the halo filled by the border mode; NumPy, or CuPy on
                a GPU. f is called once for each index of the other axes, from several threads, and returns an array of
                the block's shape; the engine trims the halo
    parameter : keyword-only and annotated; becomes an option of the command, the API and the page
    xp        : the module `numpy` or `cupy`, if f asks for it
    out       : if f asks for it, f is called once for the whole chunk, of all axes, and fills `out`: the block without
                its halo. It may then ask for `axes`, the numbers of the axes to work along, and for `stream`, the CUDA
                stream (None on a CPU)
    halo      : samples that f looks at on each side: a number (rounded up), a number or a tuple (before, after) for
                each axis, or a function of the parameters that returns either. A function of two arguments also gets
                the number of axes; its ValueError is the user's mistake, such as "size must be odd; got 4"
    axes      : letters of the axes that f works along, such as "YX"; None: Y, X, and Z of volumes. A parameter
                `axes: tuple[str, ...] | None = None` lets the user choose others
    dtype     : of the result; None: the input's
    reference : the definition, called as f is, with float64 NumPy blocks; None: the audit computes parts of the result
                again, cut otherwise
    tolerance : of the audit: in sample values for integers, relative to the largest value for floats; None: see
                `pipeline.workloads.operator.audit`
    keeps_range : the result has the input's dtype, and its values lie between those of the input
    name      : of the workload; None: the function's

    Raises TypeError for a signature that cannot become options.
    """

    def decorated(function: Callable[..., Any]) -> ImageOperator:
        options: dict[str, Any] = {"halo": halo, "axes": axes, "dtype": dtype}
        audited: dict[str, Any] = {"reference": reference, "tolerance": tolerance, "keeps_range": keeps_range}
        return ImageOperator(Definition(name=name or function.__name__, function=function, **options, **audited))

    return decorated if function is None else decorated(function)
