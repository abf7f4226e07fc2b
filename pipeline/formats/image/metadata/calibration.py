"""What an image's samples stand for: immutable, and the same for every format."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_MOST_CHANNELS = 1 << 16


@dataclass(frozen=True)
class Step:
    """The distance between samples along an axis. `unit`: OME-Zarr's name, as micrometer or second; None: unknown."""

    size: float
    unit: str | None = None

    def __str__(self) -> str:
        return f"{self.size:g} {self.unit}" if self.unit else f"{self.size:g}"


@dataclass(frozen=True)
class Channel:
    """A channel's name, empty if unknown, and its colour as RRGGBB."""

    name: str = ""
    colour: str | None = None


@dataclass(frozen=True)
class Calibration:
    """Known facts only: an axis of unknown step is left out.

    steps    : by axis letter: T, Z, Y, X
    origin   : position of the first sample, by axis letter, in the unit of the axis' step
    channels : of the axis C, one for each, or one if the image lacks that axis; empty if nothing is known
    """

    steps: Mapping[str, Step] = field(default_factory=dict)
    origin: Mapping[str, float] = field(default_factory=dict)
    channels: tuple[Channel, ...] = ()

    def facts(self, axes: str) -> dict[str, str]:
        """The known facts of an image with these axes: a short key, and words for people."""
        colours = any(channel.colour for channel in self.channels)
        known = {
            "plane": ("pixel size", "Y" in self.steps or "X" in self.steps),
            "depth": ("Z step", "Z" in axes and "Z" in self.steps),
            "time": ("time increment", "T" in axes and "T" in self.steps),
            "origin": ("position", any(self.origin.get(letter, 0.0) for letter in axes)),
            "names": ("channel names", any(channel.name for channel in self.channels)),
            "colours": ("channel colours", colours and "S" not in axes),
        }
        return {key: words for key, (words, is_known) in known.items() if is_known}

    def cropped(self, first: Mapping[str, int], channels: slice) -> Calibration:
        """The calibration of a part that begins at these samples along the axes."""
        moved = {
            letter: self.origin.get(letter, 0.0) + start * self.steps[letter].size
            for letter, start in first.items()
            if letter in self.steps and (start or letter in self.origin)
        }
        # Without a step a position has no meaning.
        return Calibration(self.steps, moved, self.channels[channels] if len(self.channels) > 1 else self.channels)


def known_step(size: Any, unit: str | None) -> Step | None:
    """A step, if the size is a positive, finite number."""
    try:
        number = float(size)
    except (TypeError, ValueError, OverflowError):
        return None
    return Step(number, unit) if math.isfinite(number) and number > 0 else None


def steps_of(**found: Step | None) -> Mapping[str, Step]:
    """The steps that are known, by axis letter; 1 without a unit stands for an unknown one."""
    return {letter: step for letter, step in found.items() if step is not None and step != Step(1.0)}


def known_channels(channels: tuple[Channel, ...], count: int) -> tuple[Channel, ...]:
    """The channels, if there are as many as the image has, and anything is known of them."""
    fits = len(channels) == count <= _MOST_CHANNELS
    return channels if fits and any(channel != Channel() for channel in channels) else ()
