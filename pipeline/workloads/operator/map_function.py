"""`millrace run map IN OUT --function package.module:function`: a plain function, on this machine only."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from pipeline.config import explain
from pipeline.errors import ParameterError
from pipeline.formats import image as images
from pipeline.workloads.operator import ImageOperator, single_job
from pipeline.workloads.operator.job import OperatorJob
from pipeline.workloads.operator.parameters import FROM_ENGINE, OperatorParameters
from pipeline.workloads.operator.step import Definition, fills_out
from pipeline.workloads.protocol import JobSpec


class MapParameters(OperatorParameters):
    """The function, and what a decorator would declare with it."""

    function: str = Field(
        json_schema_extra={"unit": "MODULE:FUNCTION"},
        description="package.module:function, installed or in the working folder",
    )
    halo: tuple[float, ...] | None = Field(
        None, description="pixels that it looks at on each side, for all axes or for each: 3 or 3,5 [default: 0]"
    )
    axes: str | None = Field(
        None,
        json_schema_extra={"unit": "AXES"},
        description="axes that it works along, such as YX [default: Y, X, and Z of volumes]",
    )
    dtype: str | None = Field(
        None, json_schema_extra={"unit": "DTYPE"}, description="data type of the result [default: the input's]"
    )
    param: dict[str, Any] = Field(
        {}, description="a parameter of the function, read as JSON, else as text; may be repeated"
    )

    @field_validator("param", mode="before")
    @classmethod
    def _from_pairs(cls, value: Any) -> Any:
        """Takes ["radius=3", …] of the command."""
        if isinstance(value, dict):
            return value
        named = [pair.partition("=") for pair in value]
        for name, equals, _ in named:
            if not name or not equals:
                raise ValueError("must be NAME=VALUE, such as radius=3")
        return {name: _from_json(text) for name, _, text in named}


class MapFunction:
    """A plain function that takes the block first and its parameters by keyword, or an operator, as a `Workload`."""

    name = "map"
    summary = "Run a Python function of your own on blocks of an image, on this machine."
    unit = "pixels"
    examples = (
        "in.tif out.tif --function mine:sharper --halo 3",
        "in.zarr out.zarr --function mine:edges --param width=5",
    )
    Parameters = MapParameters

    def check_output(self, path: Path) -> None:
        images.format_for_output(path)

    def open(self, spec: JobSpec) -> OperatorJob:
        asked = spec.parameters
        assert isinstance(asked, MapParameters)
        function = _function_named(asked.function)
        if isinstance(function, ImageOperator):
            if declared := [name for name in ("halo", "axes", "dtype") if getattr(asked, name) is not None]:
                raise ParameterError(f"--{declared[0]}: the operator {asked.function} declares its own; leave it out")
            try:
                parameters = function.Parameters(mode=asked.mode, cval=asked.cval, **asked.param)
            except TypeError as error:
                raise ParameterError(f"--param: {error}") from error
            except ValidationError as error:
                fault = error.errors()[0]
                where = " ".join(["--param", *map(str, fault["loc"][:1])])
                raise ParameterError(f"{where}: {explain(fault)}") from error
            return single_job(spec, function.definition, parameters, parameters.own())
        _check_arguments(function, asked)
        halo = asked.halo or (0.0,)
        definition = Definition(
            name=asked.function, function=function, axes=asked.axes, dtype=asked.dtype,
            halo=halo[0] if len(halo) == 1 else halo,
        )  # fmt: skip
        return single_job(spec, definition, asked, asked.param)


def _function_named(name: str) -> Any:
    """What a module holds under that name. ParameterError if it cannot be imported or called."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    module, _, attributes = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except Exception as error:
        said, misnamed = (
            " ".join(str(error).split()),
            isinstance(error, AttributeError | ModuleNotFoundError | ValueError),
        )
        way_out = "name it as package.module:function" if misnamed else "correct the module"
        raise ParameterError(f"--function {name}: {type(error).__name__}: {said}; {way_out}") from error
    if not callable(found):
        raise ParameterError(f"--function {name}: is {type(found).__name__}, which cannot be called")
    return found


def _check_arguments(function: Any, asked: MapParameters) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # of a function in C that does not tell
    try:
        filled = ("xp", "axes", *FROM_ENGINE) if fills_out(signature.parameters) else ("xp",)
        given = {name: None for name in filled if name in signature.parameters and name not in asked.param}
        signature.bind(None, **asked.param, **given)
    except TypeError as error:
        raise ParameterError(f"--param: {asked.function} has {error}") from error


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
