"""Calibration in OME-Zarr: scales, translations and units of a multiscale image, names and colours in omero.

Source: OME-Zarr 0.4 and 0.5, sections "multiscales" and "omero".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.formats.image.metadata.calibration import Calibration, Channel, Step, known_channels, known_step, steps_of
from pipeline.formats.image.metadata.units import unit_named

_SPACED = "TZYX"
_COLOUR = re.compile(r"#?([0-9a-fA-F]{6})")
_NO_COLOUR = "FFFFFF"


def from_multiscales(
    image: Mapping[str, Any], level: Mapping[str, Any], omero: Any, letters: str, shape: Sequence[int]
) -> Calibration:
    """`letters`: of the array's axes; a scale of 1 without a unit stands for an unknown one."""
    found = _transformed(image, level, len(letters))
    units = _units(image, letters)
    scale = zip(letters, found.get("scale", []), strict=False)
    steps = steps_of(**{letter: known_step(size, units.get(letter)) for letter, size in scale if letter in _SPACED})
    origin = {
        letter: first
        for letter, first in zip(letters, found.get("translation", []), strict=False)
        if letter in _SPACED and first
    }
    count = shape[letters.index("C")] if "C" in letters else 1
    return Calibration(steps, origin, known_channels(_channels(omero), count))


def axes(calibration: Calibration, stored: str) -> list[dict[str, str]]:
    """The axes of a multiscale image."""
    kinds = {"T": "time", "C": "channel"}
    found = []
    for letter in stored:
        step = calibration.steps.get(letter)
        axis = {"name": letter.lower(), "type": kinds.get(letter, "space")}
        found.append(axis | ({"unit": step.unit} if step is not None and step.unit is not None else {}))
    return found


def transformations(calibration: Calibration, stored: str, level: int = 0) -> list[dict[str, Any]]:
    """The transformations of a level. Its samples lie at the centres of boxes of 2 ** level rows and columns."""
    boxes = [1 << level if letter in "YX" else 1 for letter in stored]
    sizes = [calibration.steps.get(letter, Step(1.0)).size for letter in stored]
    scale = [size * box for size, box in zip(sizes, boxes, strict=True)]
    found: list[dict[str, Any]] = [{"type": "scale", "scale": scale}]
    first = [
        calibration.origin.get(letter, 0.0) + size * (box - 1) / 2
        for letter, size, box in zip(stored, sizes, boxes, strict=True)
    ]
    return [*found, {"type": "translation", "translation": first}] if any(first) else found


def omero(
    channels: Sequence[Channel], display: Sequence[tuple[float, float]], dtype: np.dtype[Any]
) -> dict[str, Any] | None:
    """Names and colours, shown over `display`, by default the range of the samples' type; None if nothing is known."""
    if not channels and not display:
        return None
    low, high = (0.0, 1.0) if dtype.kind in "bf" else (float(np.iinfo(dtype).min), float(np.iinfo(dtype).max))
    channels, display = channels or [Channel()] * len(display), display or [(low, high)] * len(channels)
    described = []
    for channel, (start, end) in zip(channels, display, strict=False):
        window = {"min": min(low, start), "max": max(high, end), "start": start, "end": end}
        described.append(
            {"label": channel.name, "color": channel.colour or _NO_COLOUR, "active": True, "window": window}
        )
    return {"channels": described}


def cropped_omero(found: Mapping[str, Any], channels: slice, count: int) -> dict[str, Any]:
    """The rendering settings of some of an image's channels."""
    described = found.get("channels")
    fits = isinstance(described, list) and len(described) == count
    return {**found, "channels": described[channels]} if fits and isinstance(described, list) else dict(found)


def has_display(found: Any) -> bool:
    """Whether omero states more of a channel than its name and colour."""
    described = found.get("channels") if isinstance(found, Mapping) else None
    channels = [each for each in described if isinstance(each, Mapping)] if isinstance(described, list) else []
    return any(each.keys() - {"label", "color"} for each in channels)


def _channels(found: Any) -> tuple[Channel, ...]:
    described = found.get("channels") if isinstance(found, Mapping) else None
    if not isinstance(described, list):
        return ()
    channels = []
    for each in described:
        if not isinstance(each, Mapping):
            return ()
        stated, label = _COLOUR.fullmatch(str(each.get("color", ""))), each.get("label")
        label, colour = label if isinstance(label, str) else "", stated[1].upper() if stated else None
        # Files have to state a colour: white alone says nothing.
        channels.append(Channel(label, colour if label or colour != _NO_COLOUR else None))
    return tuple(channels)


def _units(image: Mapping[str, Any], letters: str) -> dict[str, str]:
    """Units by axis letter; a unit that is not in our table is kept as it is."""
    return {
        letter: unit_named(axis["unit"]) or axis["unit"]
        for letter, axis in zip(letters, image.get("axes", ()), strict=False)
        if isinstance(axis, Mapping) and isinstance(axis.get("unit"), str)
    }


def _transformed(image: Mapping[str, Any], level: Mapping[str, Any], ndim: int) -> dict[str, list[float]]:
    """`scale` (the size of a sample along each axis) and `translation` (the position of the first one), from the
    transformations of level 0 followed by those of the whole image. Each is omitted unless stated."""
    scale, first = [1.0] * ndim, [0.0] * ndim
    stated = set()
    for place in (level, image):
        steps = place.get("coordinateTransformations")
        for step in steps if isinstance(steps, list) else []:
            for kind in ("scale", "translation"):
                sizes = step.get(kind) if isinstance(step, Mapping) else None
                if not isinstance(sizes, list) or len(sizes) != ndim:
                    continue
                if not all(isinstance(size, int | float) and math.isfinite(size) for size in sizes):
                    continue
                stated.add(kind)
                if kind == "scale":
                    scale = [float(size) * so_far for size, so_far in zip(sizes, scale, strict=True)]
                    first = [float(size) * so_far for size, so_far in zip(sizes, first, strict=True)]
                else:
                    first = [float(size) + so_far for size, so_far in zip(sizes, first, strict=True)]
    found = {"scale": scale, "translation": first}
    return {kind: sizes for kind, sizes in found.items() if kind in stated and all(map(math.isfinite, sizes))}
