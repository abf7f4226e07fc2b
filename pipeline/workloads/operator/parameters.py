"""A function's keyword parameters as the parameters of a workload."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import Field, ValidationInfo, create_model, field_validator, model_validator

from pipeline.config import Settings
from pipeline.workloads.common.crop import RegionParameters
from pipeline.workloads.protocol import BETWEEN_NUMBERS

# Options of `millrace run` and `submit`, which no parameter of a workload can be called.
RESERVED = {*Settings.model_fields, "input", "output", "config", "preview", "checksum", "resume", "dry_run", "json"} | {
    "no_clobber", "group",
    "as_json", "quiet", "help", "priority", "after", "after_any", "array", "key", "wait", "timeout",
    "template", "time", "gpu_memory", "gpus", "webhook",
}  # fmt: skip

FROM_ENGINE = ("out", "stream", "edges")  # untyped parameters of functions that fill `out`


class OperatorParameters(RegionParameters):
    """What every operator takes besides its own parameters."""

    mode: Literal["reflect", "mirror", "nearest", "wrap", "constant"] = Field(
        "reflect", description="values beyond the edge"
    )
    cval: float = Field(0.0, description="the value beyond the edge with mode constant")

    @field_validator("*", mode="before")
    @classmethod
    def _from_text(cls, value: Any, info: ValidationInfo) -> Any:
        """Takes "3,5" for a tuple, and "3" for a 3 among choices: the command and the page know text alone."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        for kind in (annotation, *get_args(annotation)):
            if get_origin(kind) is Literal and isinstance(value, str):
                return next((choice for choice in get_args(kind) if str(choice) == value), value)
            if tuple in (kind, get_origin(kind)) and isinstance(value, str):
                return tuple(part.strip() for part in BETWEEN_NUMBERS.sub(",", value).split(","))
            if tuple in (kind, get_origin(kind)) and isinstance(value, int | float):
                return (value,)
        return value

    @model_validator(mode="after")
    def _of_one_mode(self) -> OperatorParameters:
        if self.mode != "constant" and self.cval != 0:
            raise ValueError(f"--cval belongs to --mode constant, and the mode is {self.mode}")
        return self

    def in_force(self) -> dict[str, Any]:
        return {name: value for name, value in super().in_force().items() if name != "cval" or self.mode == "constant"}

    def own(self) -> dict[str, Any]:
        """The function's own parameters, as it takes them."""
        common = OperatorParameters.model_fields
        return {name: getattr(self, name) for name in type(self).model_fields if name not in common}


def is_untyped(parameter: inspect.Parameter) -> bool:
    """Whether a parameter states no type, so cannot become an option."""
    return parameter.annotation in (parameter.empty, Any, "Any")


def parameters_of(
    operator: str, function: Callable[..., Any], given: Mapping[str, Any] = MappingProxyType({})
) -> type[OperatorParameters]:
    """The model of a function's keyword parameters, but for those given. TypeError for a signature that cannot become
    options."""
    signature = [*inspect.signature(function).parameters.values()]
    if not signature or signature[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        raise TypeError(f"operator {operator}: its first parameter must be the block")
    hints, fields = get_type_hints(function, include_extras=True), {}
    for each in signature[1:]:
        if each.name in given:
            continue
        fault = None
        if each.kind is not each.KEYWORD_ONLY:
            fault = "must be keyword-only: put * after the block"
        elif each.name == "xp" or (each.name in FROM_ENGINE and is_untyped(each)):
            continue
        elif each.name in {*RESERVED, *OperatorParameters.model_fields} or hasattr(OperatorParameters, each.name):
            fault = "is called like something that every workload has: rename it"
        elif each.name.startswith("_"):
            fault = "must not begin with _: it becomes an option"
        elif each.name not in hints:
            fault = "has no annotation, such as : int"
        elif hints[each.name] is bool and each.default is not False:
            fault = "is a flag, which is off unless given: let its default be False"
        if fault is not None:
            raise TypeError(f"operator {operator}: parameter {each.name} {fault}")
        fields[each.name] = (hints[each.name], ... if each.default is each.empty else each.default)
    made = create_model("Parameters", __base__=OperatorParameters, __module__=function.__module__, **fields)  # type: ignore[call-overload]
    # By this name pickle finds the class: worker processes get a job's parameters as an object.
    made.__qualname__ = f"{operator.replace('-', '_') if given else function.__qualname__}.Parameters"
    return made  # type: ignore[no-any-return]
