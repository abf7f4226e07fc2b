"""Extents of filters as a user gives them: in samples, or in a unit of length, for all axes or by name: 3, 0.5um,
Z=2um,Y=0.5um.

A parameter takes them by the types `SampleExtent` and `WholeExtent`, alone or in a tuple, and keeps what has a unit or
a name as text; `in_samples` converts it by the image's pixel size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import PlainSerializer, ValidationError, WithJsonSchema, WrapValidator

from pipeline.config import of_option
from pipeline.errors import ParameterError
from pipeline.formats.image.base import ImageHeader
from pipeline.formats.image.metadata import in_unit, unit_named
from pipeline.workloads.common.axes import axes_named, usual_axes
from pipeline.workloads.protocol import Parameters

_EXTENT = re.compile(
    r"\s*(?:(?P<letter>[A-Za-z])\s*=\s*)?(?P<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(?P<unit>[^\W\d_]*)\s*"
)


def _or_text(value: Any, handler: Callable[[Any], Any]) -> Any:
    found = _EXTENT.fullmatch(value) if isinstance(value, str) else None
    if found is None or not (found["letter"] or found["unit"]):
        return handler(value)
    if found["unit"] and unit_named(found["unit"]) is None:
        raise ValueError(f"'{value}': {found['unit']} is not a unit of length; use nm, um, mm, cm, m or in")
    if not found["unit"]:
        handler(found["number"])
    elif found["number"].startswith("-"):
        raise ValueError(f"'{value}' is negative: give a length above 0")
    return value.strip()


P = TypeVar("P", bound=Parameters)
# Of a type of numbers: also takes the texts of this module.
OR_TEXT = (
    WrapValidator(_or_text),
    PlainSerializer(lambda value: value),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}]}),
)
SampleExtent = Annotated[float, *OR_TEXT]
WholeExtent = Annotated[int, *OR_TEXT]
SAME = 1e-3  # relative: pixel sizes along several axes that count as equal


def is_text(values: Any) -> bool:
    """Whether any of a parameter's extents has a unit or the name of an axis."""
    return any(isinstance(value, str) for value in (values if isinstance(values, tuple) else (values,)))


def in_samples(asked: P, header: ImageHeader, path: Path) -> tuple[P, dict[str, str]]:
    """The parameters with all extents in samples, and remarks that state those that had a unit or a name.

    Raises ParameterError if the image does not state its pixel size, or states it in a unit of another kind.
    """
    changed: dict[str, Any] = {}
    remarks = {}
    for name, is_whole in _extents_of(type(asked)).items():
        values = getattr(asked, name)
        if not is_text(values):
            continue
        several, option = isinstance(values, tuple), f"--{name.replace('_', '-')}"
        axes, numbers = _along(option, values if several else (values,), getattr(asked, "axes", None), header, path)
        rounded = tuple(max(1, round(n)) if is_whole else n for n in numbers)
        if several:
            changed |= {"axes": tuple(axes), name: rounded}
        else:
            _refuse_different(f"{option} {values}", axes, numbers, path)
            changed[name] = rounded[0]
        along = zip(axes, rounded, strict=True)
        remarks[f"{name} in samples"] = ", ".join(f"{letter} {n:g}" for letter, n in along)
    if not changed:
        return asked, {}
    given = {name: getattr(asked, name) for name in asked.model_fields_set}
    try:
        return type(asked)(**{**given, **changed}), remarks
    except ValidationError as error:
        raise ParameterError(of_option(error)) from error


def _refuse_different(option: str, axes: Sequence[str], numbers: Sequence[float], path: Path) -> None:
    """ParameterError if a length that holds along all axes is not the same number of samples along them."""
    if "=" in option:
        raise ParameterError(f"{option}: it is the same along all axes: give the length alone")
    if not math.isclose(min(numbers), max(numbers), rel_tol=SAME):
        sizes = ", ".join(f"{n:g} along {letter}" for letter, n in zip(axes, numbers, strict=True))
        raise ParameterError(f"{option}: in pixels of {path} this is {sizes}: pass a number of pixels")


@cache
def _extents_of(parameters: type[Parameters]) -> Mapping[str, bool]:
    """The parameters of this module's types, and whether they take whole numbers alone."""
    found = {
        name: _is_whole(Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation)
        for name, field in parameters.model_fields.items()
    }
    return {name: whole for name, whole in found.items() if whole is not None}


def _is_whole(annotation: Any) -> bool | None:
    if get_origin(annotation) is Annotated and OR_TEXT[0] in annotation.__metadata__:
        return bool(annotation.__origin__ is int)
    within = (_is_whole(part) for part in get_args(annotation))
    return next((whole for whole in within if whole is not None), None)


def _along(
    option: str, values: Sequence[Any], chosen: tuple[str, ...] | None, header: ImageHeader, path: Path
) -> tuple[list[str], list[float]]:
    """The axes and the samples along each."""
    found = [_EXTENT.fullmatch(str(value)) for value in values]
    option += f" {','.join(map(str, values))}"
    parts = [(each["letter"], float(each["number"]), each["unit"]) for each in found if each is not None]
    letters = [letter.upper() for letter, _, _ in parts if letter]
    if letters and (len(letters) != len(parts) or len(set(letters)) != len(letters)):
        raise ParameterError(f"{option}: name each axis once, or none of them")
    if letters and chosen is None:
        axes_named(letters, header.axes, path, option)  # refuses others than Z, Y and X
        along = letters
    else:
        numbers = usual_axes(header) if chosen is None else axes_named(chosen, header.axes, path)
        along = [header.axes[axis] for axis in numbers]
    if letters and set(letters) != set(along):
        raise ParameterError(f"{option}: --axes chooses {','.join(along)}: name these, or leave --axes out")
    if not letters and len(parts) not in (1, len(along)):
        raise ParameterError(f"{option}: {path} is filtered along {','.join(along)}: give 1 or {len(along)}")
    by_letter = dict(zip(letters, parts, strict=True)) if letters else {}
    of_axis = [by_letter[each] for each in along] if letters else parts * (len(along) // len(parts))
    return along, [_samples(option, *each, header, path) for each in zip(along, of_axis, strict=True)]


def _samples(option: str, letter: str, part: tuple[Any, float, str], header: ImageHeader, path: Path) -> float:
    _, number, unit = part
    if not unit:
        return number
    step, named = header.calibration.steps.get(letter), unit_named(unit)
    if step is None:
        raise ParameterError(f"{option}: {path} has no pixel size along {letter}: pass a number of pixels")
    size = None if named is None else in_unit(number, named, step.unit or "")
    if size is None:
        states = f"in {step.unit}" if step.unit else "without a unit"
        raise ParameterError(
            f"{option}: {path} states its pixel size along {letter} {states}, which {unit} does not fit: "
            "pass a number of pixels"
        )
    return size / step.size
