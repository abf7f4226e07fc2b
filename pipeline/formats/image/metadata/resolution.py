"""Pixel sizes as TIFF's resolution tags state them: samples in an inch or a centimetre, as fractions.

Source: TIFF 6.0, section 8.
"""

from __future__ import annotations

from fractions import Fraction

from pipeline.formats.image.metadata.calibration import Calibration, Step, steps_of
from pipeline.formats.image.metadata.units import in_unit

Rational = tuple[int, int]
NO_UNIT, INCH, CENTIMETER = 1, 2, 3
_NAMES = {INCH: "inch", CENTIMETER: "centimeter"}
_LARGEST = (1 << 32) - 1
# What programs write that know no size: one, or that of a screen.
_MEANINGLESS = {(1, NO_UNIT), (1, INCH), (72, INCH), (96, INCH), (1, CENTIMETER)}


def from_tags(x: Rational | None, y: Rational | None, unit: int) -> Calibration:
    """From the tags XResolution, YResolution and ResolutionUnit; sizes without a unit are ignored."""
    return Calibration(steps_of(Y=_step(y, unit), X=_step(x, unit)) if unit in _NAMES else {})


def samples_apart(resolution: Rational | None) -> float | None:
    """The distance that a resolution means, in its unit."""
    if resolution is None or not all(resolution) or resolution[0] == resolution[1]:
        return None
    return resolution[1] / resolution[0]


def tags(calibration: Calibration) -> tuple[Rational, Rational, int] | None:
    """The values of XResolution, YResolution and ResolutionUnit; None if they cannot hold the pixel sizes."""
    steps = [calibration.steps.get(letter) for letter in "XY"]
    unit = INCH if all(step is not None and step.unit == "inch" for step in steps) else CENTIMETER
    found = []
    for step in steps:
        size = None if step is None else in_unit(step.size, step.unit, _NAMES[unit])
        fraction = None if size is None else per(size)
        if fraction is None:
            return None
        found.append(fraction)
    return found[0], found[1], unit


def per(size: float) -> Rational | None:
    """Samples in one unit, as the closest fraction that the tag holds; None beyond its range."""
    exact = 1 / Fraction(size)
    if not Fraction(1, _LARGEST) <= exact <= _LARGEST:
        return None
    most = _LARGEST if exact <= 1 else int(_LARGEST / exact)
    found = exact.limit_denominator(max(most, 1))
    return (found.numerator, found.denominator) if 0 < found.numerator <= _LARGEST else None


def _step(resolution: Rational | None, unit: int) -> Step | None:
    if resolution is None or not all(resolution) or (resolution[0] / resolution[1], unit) in _MEANINGLESS:
        return None
    return Step(resolution[1] / resolution[0], _NAMES[unit])
