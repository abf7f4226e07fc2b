"""Calibration in OME-XML: read from its Pixels element, written as the attributes that tifffile's OmeXml takes.

Source: OME schema 2016-06. Elements come from a standard XML parser: tifffile's `xml2dict` would turn names such as
007 into numbers.
"""

from __future__ import annotations

import re
from typing import Any
from xml.etree.ElementTree import Element

from pipeline.formats.image.metadata.calibration import Calibration, Channel, known_channels, known_step, steps_of
from pipeline.formats.image.metadata.units import kind_of, symbol_of, unit_named

_NO_UNIT = "reference frame"
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def from_pixels(pixels: Element, samples: int) -> Calibration:
    """`samples`: of a page, which OME counts as channels too."""
    found = {letter: _step(pixels, f"PhysicalSize{letter}", "µm") for letter in "ZYX"}
    channels = tuple(
        Channel(element.get("Name", "").strip(), _colour(element.get("Color")))
        for element in pixels.findall("{*}Channel")
    )
    try:
        count = max(int(pixels.get("SizeC", "1")) // samples, 1)
    except ValueError:
        count = 0
    return Calibration(
        steps_of(T=_step(pixels, "TimeIncrement", "s"), **found), channels=known_channels(channels, count)
    )


def holds(calibration: Calibration) -> set[str]:
    """The facts (`Calibration.facts`) that OME-XML holds of it."""
    kept = {"names", "colours"} | ({"plane", "depth"} if _all_written(calibration, "ZYX") else set())
    return kept | ({"time"} if _all_written(calibration, "T") else set())


def attributes(calibration: Calibration, axes: str, channels: int) -> dict[str, Any]:
    """Of Pixels, and as lists those of its channels."""
    found: dict[str, Any] = {}
    for letter in "ZYX":
        step = calibration.steps.get(letter)
        if step is not None and letter in axes and _is_written(step.unit, letter):
            found[f"PhysicalSize{letter}"] = step.size
            found[f"PhysicalSize{letter}Unit"] = symbol_of(step.unit) if step.unit else _NO_UNIT
    interval = calibration.steps.get("T")
    if interval is not None and interval.unit is not None and _is_written(interval.unit, "T"):
        found |= {"TimeIncrement": interval.size, "TimeIncrementUnit": symbol_of(interval.unit)}
    if len(calibration.channels) == channels:
        described = calibration.channels
        each: dict[str, Any] = {}
        if any(channel.name for channel in described):
            each["Name"] = [_NOT_IN_XML.sub("", channel.name) for channel in described]
        if all(channel.colour for channel in described):
            each["Color"] = [_signed(channel.colour) for channel in described if channel.colour]
        if each:
            found["Channel"] = each
    return found


def _all_written(calibration: Calibration, letters: str) -> bool:
    return all(_is_written(calibration.steps[each].unit, each) for each in letters if each in calibration.steps)


def _is_written(unit: str | None, letter: str) -> bool:
    if letter == "T":
        return kind_of(unit) == "time"
    return unit is None or kind_of(unit) == "length"


def _step(pixels: Element, name: str, usual: str) -> Any:
    unit = pixels.get(f"{name}Unit", usual)
    return known_step(pixels.get(name), unit_named(unit))


def _colour(text: str | None) -> str | None:
    """RRGGBB of a signed number of 32 bits, red first, alpha last."""
    try:
        return None if text is None else f"{(int(text) & 0xFFFFFFFF) >> 8:06X}"
    except ValueError:
        return None


def _signed(colour: str) -> int:
    value = int(colour, 16) << 8 | 0xFF
    return value - (1 << 32) if value >= 1 << 31 else value
