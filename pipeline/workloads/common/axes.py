"""The axes of an image by the names that a user gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import ParameterError


def axes_named(names: Sequence[str], letters: str, path: Path) -> tuple[int, ...]:
    """The numbers of the axes named by letter or number, in that order.

    letters : of the image's axes; C, the channels, cannot be chosen

    Raises ParameterError that lists the axes.
    """
    spatial = [axis for axis, letter in enumerate(letters) if letter != "C"]
    by_name = {name: axis for axis in spatial for name in (letters[axis], str(axis), str(axis - len(letters)))}
    chosen = [by_name.get(name.upper()) for name in names]
    if not chosen or None in chosen or len(set(chosen)) != len(chosen):
        known = ", ".join(f"{letters[axis]} ({axis})" for axis in spatial)
        raise ParameterError(f"--axes {','.join(names)}: name each axis once, of those {path} has: {known}")
    return tuple(axis for axis in chosen if axis is not None)
