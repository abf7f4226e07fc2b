"""Calibration in ImageJ's TIFF: its description, the resolution tags beside it, and the tag IJMetadata.

Sources: ImageJ's FileInfo, TiffDecoder and TiffEncoder. tifffile reads and writes the tag.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.formats.image.metadata import resolution as tags
from pipeline.formats.image.metadata.calibration import Calibration, Channel, known_channels, known_step, steps_of
from pipeline.formats.image.metadata.resolution import Rational
from pipeline.formats.image.metadata.units import in_unit, kind_of, unit_named

_MOST_LABELS = 1 << 16
PLACED = ("ROI", "Overlays")  # the selection and what is drawn over the image
_MARKS = (*PLACED, "Properties")
Ranges = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Tagged:
    """What the tag IJMetadata states; all but the channels as in `Notes`."""

    channels: tuple[Channel, ...] = ()
    description: str = ""
    display: Ranges = ()
    labels: tuple[str, ...] = ()
    marks: Mapping[str, Any] = field(default_factory=dict)


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


def from_tag(data: bytes, counts: tuple[int, ...], order: str, pages: NDArray[np.int64]) -> Tagged:
    """`pages`: the number in the file of each plane, (time points, channels, planes).

    Colours are those of the lookup tables. Labels that repeat with the channels are their names.
    """
    import tifffile

    try:
        found = tifffile.tifffile.imagej_metadata(data, counts, order)
    except Exception:  # the tag does not matter: damaged ones are left out
        return Tagged()
    channels = pages.shape[1]
    stated, tables, ranges = found.get("Labels", []), found.get("LUTs", []), found.get("Ranges", ())
    stated = [stated] if isinstance(stated, str) else stated
    tables = tables if isinstance(tables, list) else [tables]
    labels, names = np.full(pages.shape, "", object), [""] * channels
    if len(stated) == pages.size == pages.max() + 1:
        labels[...] = np.array([str(label).strip("\0 ") for label in stated], object)[pages]
        if np.all(labels == labels[:1, :, :1]):
            names, labels[...] = labels[0, :, 0].tolist(), ""
    colours: list[str | None] = [None] * channels
    if len(tables) == channels and all(np.shape(table) == (3, 256) for table in tables):
        colours = ["".join(f"{int(part):02X}" for part in table[:, 255]) for table in tables]
    return Tagged(
        channels=known_channels(tuple(map(Channel, names, colours)), channels),
        description=str(found.get("Info", "")),
        display=_shown(ranges, channels),
        labels=tuple(labels.ravel()) if np.any(labels != "") else (),
        marks={key: found[key] for key in _MARKS if key in found},
    )


def display_range(description: str) -> Ranges:
    """The display range of the only or the chosen channel; empty if it is not stated."""
    fields = dict(line.split("=", 1) for line in description.splitlines() if "=" in line)
    try:
        return _shown([float(fields["min"]), float(fields["max"])], 1)
    except (KeyError, ValueError):
        return ()


def _shown(ends: Any, channels: int) -> Ranges:
    """Low and high values of each channel; empty unless all are stated."""
    if len(ends) != 2 * channels or not all(map(math.isfinite, ends)) or np.any(np.diff(ends)[::2] <= 0):
        return ()
    return tuple(zip(ends[::2], ends[1::2], strict=True))


def unit_for(calibration: Calibration) -> str | None:
    """The one unit of length of an ImageJ file: that of X, else of Y, else of Z; None if it has none."""
    for letter in "XYZ":
        step = calibration.steps.get(letter)
        if step is not None and kind_of(step.unit) == "length":
            return step.unit
    return None


def holds(calibration: Calibration) -> set[str]:
    """The facts (`Calibration.facts`) that an ImageJ file holds of it."""
    kept = {"names", "colours", "display", "labels", "imagej"}
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


def metadata_tag(
    described: tuple[Channel, ...], channels: int, planes: int, noted: Mapping[str, Any]
) -> dict[int, tuple[int, int, bytes]]:
    """The tags of names and colours, and of what is noted, by tifffile's names: field type, count, bytes by tag; empty
    if nothing is known."""
    import tifffile

    found = {key: value for key, value in noted.items() if value}
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
