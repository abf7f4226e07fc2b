"""Several operators one after the other: `millrace run chain IN OUT --step 'median size=3' --step 'tophat size=51'`.

One read, one upload and one write; in between, the steps' results stay on the device.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from pipeline.config import explain
from pipeline.errors import ParameterError, counted
from pipeline.formats import image as images
from pipeline.formats.image.base import ImageHeader
from pipeline.formats.image.file_list import is_list
from pipeline.workloads.many_files import NotTogether
from pipeline.workloads.operator import ImageOperator
from pipeline.workloads.operator.job import OperatorJob
from pipeline.workloads.operator.parameters import OperatorParameters
from pipeline.workloads.operator.step import Definition, Step
from pipeline.workloads.protocol import JobSpec

# Filters of `millrace run smooth`, by the name of a step.
ONLY_STEPS = ("box", "gaussian")


class ChainParameters(OperatorParameters):
    """The steps, and what they share."""

    step: list[str] = Field(
        description="a filter and its options, as 'median size=3' or 'gaussian sigma=2 order=1'; once for each step, "
        "in order"
    )
    keep: int | None = Field(
        None, ge=1, description="also write the result of this step, from 1, beside OUTPUT: out.step2.tif of out.tif"
    )

    @field_validator("step", mode="before")
    @classmethod
    def _steps(cls, value: Any) -> Any:
        """The web form has one field: steps are separated by semicolons there."""
        listed = value if isinstance(value, list | tuple) else [value]
        steps = [part.strip() for each in listed for part in str(each).split(";") if part.strip()]
        if not steps:
            raise ValueError("give at least one, such as 'median size=3'")
        return steps


class Chain:
    """Operators one after the other, as a `Workload`."""

    name = "chain"
    summary = "Run several filters one after the other: one read, one write."
    unit = "pixels"
    examples = ("in.tif out.tif --step 'median size=3' --step 'tophat size=51' --step 'gaussian sigma=2' --keep 1",)
    Parameters = ChainParameters

    def check_output(self, path: Path) -> None:
        images.format_for_output(path)

    def beside(self, spec: JobSpec) -> list[Path]:
        keep = getattr(spec.parameters, "keep", None)
        return [] if keep is None else [_kept_path(spec.output, keep)]

    def open(self, spec: JobSpec) -> OperatorJob:
        asked = spec.parameters
        assert isinstance(asked, ChainParameters)
        calls = [_call(number, text, asked) for number, text in enumerate(asked.step, 1)]
        kept = None
        if asked.keep is not None:
            if is_list(spec.input):
                raise NotTogether(f"{spec.input}: a list has no second result; run the files one after the other")
            if asked.keep >= len(calls):
                raise ParameterError(
                    f"--keep {asked.keep}: name a step before the last, whose result is OUTPUT; the chain has "
                    f"{counted(len(calls), 'step')}"
                )
            kept = asked.keep - 1, _kept_path(spec.output, asked.keep)

        def steps(header: ImageHeader) -> list[Step]:
            made: list[Step] = []
            for number, (operator, parameters) in enumerate(calls, 1):
                try:
                    made.append(Step(operator.definition, parameters, parameters.own(), header, spec.input))
                except ParameterError as error:
                    raise ParameterError(f"--step {number}, {operator.name}: {error}") from error
                header = made[-1].header
            return made

        definition = Definition(name=self.name, function=_call)
        return OperatorJob(spec, definition, asked, steps, kept)


def _call(number: int, text: str, shared: ChainParameters) -> tuple[ImageOperator, OperatorParameters]:
    """A step's operator and its parameters, of 'median size=3'. ParameterError that names the step."""
    where = f"--step {number}, {text!r}"
    try:
        name, *pairs = shlex.split(text)
    except ValueError as error:
        raise ParameterError(f"{where}: {error}") from error
    operator = _operator_named(name, where)
    given: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ParameterError(f"{where}: {pair!r} must be PARAMETER=VALUE, such as size=3")
        key = key.lstrip("-").replace("-", "_")
        if key in OperatorParameters.model_fields:
            raise ParameterError(f"{where}: {key} is the same for all steps: give --{key.replace('_', '-')}")
        if key not in operator.Parameters.model_fields:
            own = ", ".join(
                each for each in operator.Parameters.model_fields if each not in OperatorParameters.model_fields
            )
            raise ParameterError(f"{where}: {name} has no parameter {key}; it has {own}")
        if key in given:
            raise ParameterError(f"{where}: {key} is given twice: give it once")
        given[key] = value
    try:
        return operator, operator.Parameters(mode=shared.mode, cval=shared.cval, **given)
    except ValidationError as error:
        fault = error.errors()[0]
        named = f"{fault['loc'][0]}: " if fault["loc"] else ""
        raise ParameterError(f"{where}: {named}{explain(fault)}") from error


def _operator_named(name: str, where: str) -> ImageOperator:
    from pipeline.workloads import registry
    from pipeline.workloads.filters import composites

    try:
        found = getattr(composites, name) if name in ONLY_STEPS else registry.workload_named(name)
    except KeyError:
        found = None
    if isinstance(found, ImageOperator):
        return found
    operators = [each for each, workload in registry.workloads().items() if isinstance(workload, ImageOperator)]
    steps = ", ".join(sorted([*operators, *ONLY_STEPS]))
    way_out = "give a step box or gaussian" if name == "smooth" else f"there are {steps}"
    raise ParameterError(f"{where}: no operator is called {name}; {way_out}")


def _kept_path(output: Path, number: int) -> Path:
    """out.step2.ome.tif of out.ome.tif."""
    is_double = output.suffixes[-2:-1] == [".ome"] or output.suffix.lower() == ".gz"
    ending = "".join(output.suffixes[-2 if is_double else -1 :])
    return output.with_name(f"{output.name.removesuffix(ending)}.step{number}{ending}")


chain = Chain()
