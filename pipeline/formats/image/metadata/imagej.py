"""Calibration in ImageJ's TIFF: its description, the resolution tags beside it, and the tag IJMetadata.

Sources: ImageJ's FileInfo, TiffDecoder and TiffEncoder. tifffile reads and writes the tag.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.formats.image.metadata import resolution as tags
from pipeline.formats.image.metadata.calibration import Calibration, Channel, known_channels, known_step, steps_of
from pipeline.formats.image.metadata.resolution import Rational
from pipeline.formats.image.metadata.units import in_unit, kind_of, unit_named

_MOST_LABELS = 1 << 16


def from_description(description: str, x: Rational | None, y: Rational | None, unit: int) -> Calibration:
    """Sizes by the description's unit, else by that of the resolution tags."""
    fields = dict(line.split("=", 1) for line in description.splitlines() if "=" in line)
    named = unit_named(fields.get("unit", ""))
    interval = known_step(fields.get("finterval"), unit_named(fields.get("tunit", "s")))
    if named is None:  # "pixel", or none
        found = tags.from_tags(x, y, unit)
        step = known_step(fields.get("spacing"), found.steps["X"].unit if "X" in found.steps else None)
        return Calibration(steps_of(T=interval, Z=step, **found.steps))
    depth = known_step(fields.get("spacing"), unit_named(fields.get("zunit", "")) or named)
    height = known_step(tags.samples_apart(y), unit_named(fields.get("yunit", "")) or named)
    return Calibration(steps_of(T=interval, Z=depth, Y=height, X=known_step(tags.samples_apart(x), named)))


def from_tag(
    data: bytes, counts: tuple[int, ...], order: str, channels: int, planes: int
) -> tuple[tuple[Channel, ...], str]:
    """The channels, colours from the lookup tables, names from labels that repeat with the channels, and the info
    text; each empty if it is unknown."""
    import tifffile

    try:
        found = tifffile.tifffile.imagej_metadata(data, counts, order)
    except Exception:  # the tag does not matter: damaged ones are left out
        return (), ""
    labels, tables = found.get("Labels", []), found.get("LUTs", [])
    labels = [labels] if isinstance(labels, str) else labels
    tables = tables if isinstance(tables, list) else [tables]
    names = [""] * channels
    if len(labels) == planes and labels == [*labels[:channels]] * (planes // channels):
        names = [str(label).strip("\0 ") for label in labels[:channels]]
    colours: list[str | None] = [None] * channels
    if len(tables) == channels and all(np.shape(table) == (3, 256) for table in tables):
        colours = ["".join(f"{int(part):02X}" for part in table[:, 255]) for table in tables]
    return known_channels(tuple(map(Channel, names, colours)), channels), str(found.get("Info", ""))


def unit_for(calibration: Calibration) -> str | None:
    """The one unit of length of an ImageJ file: that of X, else of Y, else of Z; None if it has none."""
    for letter in "XYZ":
        step = calibration.steps.get(letter)
        if step is not None and kind_of(step.unit) == "length":
            return step.unit
    return None


def holds(calibration: Calibration) -> set[str]:
    """The facts (`Calibration.facts`) that an ImageJ file holds of it."""
    kept = {"names", "colours"}
    if _plane(calibration) is not None:
        kept.add("plane")
    if _in_unit(calibration, "Z") is not None:
        kept.add("depth")
    return kept | ({"time"} if _interval(calibration) is not None else set())


def description_fields(calibration: Calibration) -> dict[str, Any]:
    """What the description states besides sizes in samples."""
    unit, depth, interval = unit_for(calibration), _in_unit(calibration, "Z"), _interval(calibration)
    found: dict[str, Any] = {}
    if unit is not None:
        found["unit"] = "micron" if unit == "micrometer" else unit
    if depth is not None:
        found["spacing"] = depth
    if interval is not None:
        found["finterval"] = interval
    return found


def resolution(calibration: Calibration) -> tuple[Rational, Rational, int] | None:
    """The resolution tags, in samples per unit of the description."""
    plane = _plane(calibration)
    return None if plane is None else (*plane, tags.NO_UNIT)


def metadata_tag(calibration: Calibration, channels: int, planes: int, info: str) -> dict[int, tuple[int, int, bytes]]:
    """The tags of names, colours and the info text: field type, count, bytes by tag; empty if none is known."""
    import tifffile

    described = calibration.channels
    found: dict[str, Any] = {"Info": info} if info else {}
    if len(described) == channels and any(channel.name for channel in described) and planes <= _MOST_LABELS:
        found["Labels"] = [channel.name for channel in described] * (planes // channels)
    if len(described) == channels and all(channel.colour for channel in described):
        found["LUTs"] = [_table(channel.colour) for channel in described if channel.colour]
    made = tifffile.tifffile.imagej_metadata_tag(found, "<") if found else ()
    return {int(tag): (kind, count, data) for tag, kind, count, data, _ in made}


def _table(colour: str) -> Any:
    """A lookup table from black to the colour."""
    full = np.frombuffer(bytes.fromhex(colour), np.uint8)
    return np.rint(np.outer(full, np.arange(256)) / 255).astype(np.uint8)


def _in_unit(calibration: Calibration, letter: str) -> float | None:
    step, unit = calibration.steps.get(letter), unit_for(calibration)
    if step is None or unit is None:
        return None if step is None or step.unit is not None else step.size
    return in_unit(step.size, step.unit, unit)


def _plane(calibration: Calibration) -> tuple[Rational, Rational] | None:
    if unit_for(calibration) is None:
        return None
    sizes = [_in_unit(calibration, letter) for letter in "XY"]
    fractions = [None if size is None else tags.per(size) for size in sizes]
    return None if fractions[0] is None or fractions[1] is None else (fractions[0], fractions[1])


def _interval(calibration: Calibration) -> float | None:
    step = calibration.steps.get("T")
    return None if step is None else in_unit(step.size, step.unit, "second")
