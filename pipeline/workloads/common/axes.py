"""The axes of an image by the names that a user gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import ParameterError
from pipeline.formats.image.base import ImageHeader


def usual_axes(header: ImageHeader) -> tuple[int, ...]:
    """The numbers of the axes to filter unless others are chosen: rows and columns, and planes of known distance.

    Planes without time points and channels are taken for a volume even if their distance is unknown.
    """
    is_volume = not {"T", "C"} & set(header.axes) or "Z" in header.calibration.steps
    return tuple(axis for axis, letter in enumerate(header.axes) if letter in "YX" or (letter == "Z" and is_volume))


def named(axes: Sequence[int], letters: str) -> str:
    """The letters of chosen axes, for people: "Y, X"."""
    return ", ".join(letters[axis] for axis in axes)


def axes_named(names: Sequence[str], letters: str, path: Path, option: str | None = None) -> tuple[int, ...]:
    """The numbers of the axes named by letter or number, in that order.

    names   : as given, "YX" also as one
    letters : of the image's axes; T, C and S (time points, channels, samples of a pixel) cannot be chosen
    option  : as given, for the message; default: --axes with the names

    Raises ParameterError that lists the axes.
    """
    if len(names) == 1 and len(names[0]) > 1 and names[0].isalpha():
        names = tuple(names[0])
    spatial = [axis for axis, letter in enumerate(letters) if letter in "ZYX"]
    first = letters.startswith("N")  # of many files: each file's own axes are numbered
    by_name = {name: axis for axis in spatial for name in (letters[axis], str(axis - first), str(axis - len(letters)))}
    chosen = [by_name.get(name.upper()) for name in names]
    if not chosen or None in chosen or len(set(chosen)) != len(chosen):
        known = ", ".join(f"{letters[axis]} ({axis - first})" for axis in spatial)
        option = option or f"--axes {','.join(names)}"
        raise ParameterError(f"{option}: name each axis once, of those {path} has: {known}")
    return tuple(axis for axis in chosen if axis is not None)
