"""A part of an image as a job's input: `--crop` and `--times`.

The part's result equals the part of the whole image's result bit by bit: halos are read from around it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from pipeline.errors import ParameterError
from pipeline.formats.image.base import ImageHeader, ImageReader, Region
from pipeline.formats.image.metadata import Calibration, Step
from pipeline.formats.image.metadata.geotiff import GeoTags
from pipeline.formats.image.metadata.ome_zarr import cropped_omero
from pipeline.formats.image.volumes.mrc import MrcTags
from pipeline.formats.image.volumes.nifti_header import NiftiTags
from pipeline.workloads.common.index_range import IndexRange
from pipeline.workloads.common.storage import StorageParameters

_ALONG = re.compile(r"\s*([A-Za-z])\s*=\s*([^=]+)")
_WITH_STEP = "TC"


class RegionParameters(StorageParameters):
    """Base of the parameters of workloads that filter images, or parts of them."""

    crop: str | None = Field(
        None,
        json_schema_extra={"unit": "Z=A:B,…"},
        description="a part of the image, as Z=10:20,Y=0:4096,X=100:900 (stop not included); T and C also with a step",
    )
    times: str | None = Field(
        None, json_schema_extra={"unit": "A:B:STEP"}, description="time points, start:stop:step, as --crop T=…"
    )

    @field_validator("crop")
    @classmethod
    def _parts(cls, value: str | None) -> str | None:
        return None if value is None else ",".join(f"{axis}={chosen}" for axis, chosen in _parsed(value).items())

    @field_validator("times")
    @classmethod
    def _points(cls, value: str | None) -> str | None:
        return None if value is None else str(IndexRange.parse(value))

    @model_validator(mode="after")
    def _named_once(self) -> RegionParameters:
        if self.crop is not None and self.times is not None and "T" in _parsed(self.crop):
            raise ValueError("--times and --crop T= both choose time points: give one")
        return self

    @property
    def chosen(self) -> set[str]:
        """The axes along which a part is taken."""
        return {*_parsed(self.crop or ""), *("T" if self.times is not None else "")}

    def part(self, reader: ImageReader, path: Path) -> ImageReader:
        """The part of the image that is asked for, as an image. ParameterError if the image has no such part."""
        ranges = _parsed(self.crop or "")
        header, options = reader.header, dict.fromkeys(ranges, "--crop")
        if self.times is not None:
            ranges["T"], options["T"] = IndexRange.parse(self.times), "--times"
        if not ranges:
            return reader
        chosen = {}
        for letter, given in ranges.items():
            if letter not in header.axes:
                raise ParameterError(
                    f"{options[letter]}: {path} has the axes {','.join(header.axes)}, and not {letter}"
                )
            option = "--times" if options[letter] == "--times" else f"--crop {letter}="
            chosen[letter] = given.of(header.shape[header.axes.index(letter)], option, path)
        stepped = {letter: each for letter, each in chosen.items() if each.step > 1}
        if stepped:
            reader = _Picked(reader, stepped)
        return CroppedReader(reader, {letter: each for letter, each in chosen.items() if letter not in stepped})


class CroppedReader(ImageReader):
    """A box of an image. `whole` and `start`: for reading around it."""

    def __init__(self, whole: ImageReader, chosen: Mapping[str, range]) -> None:
        header = whole.header
        boxes = [chosen.get(letter, range(n)) for letter, n in zip(header.axes, header.shape, strict=True)]
        self.whole, self.path = whole, whole.path
        self.start = tuple(each.start for each in boxes)
        self.header = _part_header(header, dict(zip(header.axes, boxes, strict=True)))
        if whole.block_shape is not None:
            self.block_shape = tuple(map(min, whole.block_shape, self.header.shape))

    def moved(self, region: Region) -> Region:
        """The region by its place in the whole image."""
        return Region(*(tuple(np.add(ends, self.start).tolist()) for ends in (region.start, region.stop)))

    def read(self, region: Region, out: NDArray[Any]) -> None:
        self.whole.read(self.moved(region), out)

    @property
    def packs(self) -> bool:
        return self.whole.packs

    def expect(self, spans: Sequence[Sequence[tuple[int, int]]]) -> None:
        moved = [[(a + first, b + first) for a, b in each] for each, first in zip(spans, self.start, strict=True)]
        self.whole.expect(moved)

    def hold_at_most(self, budget_bytes: int) -> int:
        return self.whole.hold_at_most(budget_bytes)

    def close(self) -> None:
        self.whole.close()


def cropped_axes(reader: ImageReader) -> set[int]:
    """The axes along which it is a part of an image, which goes on beyond that."""
    if not isinstance(reader, CroppedReader):
        return set()
    both = zip(reader.header.shape, reader.whole.header.shape, strict=True)
    return {axis for axis, (part, whole) in enumerate(both) if part != whole}


class _Picked(ImageReader):
    """Every so many time points or channels of an image."""

    def __init__(self, whole: ImageReader, chosen: Mapping[str, range]) -> None:
        header = whole.header
        self._whole, self._axes = whole, [(header.axes.index(letter), each) for letter, each in chosen.items()]
        self.path = whole.path
        boxes = {letter: chosen.get(letter, range(n)) for letter, n in zip(header.axes, header.shape, strict=True)}
        self.header = _part_header(header, boxes)
        if whole.block_shape is not None:
            picked = {axis for axis, _ in self._axes}
            self.block_shape = tuple(1 if axis in picked else n for axis, n in enumerate(whole.block_shape))

    def read(self, region: Region, out: NDArray[Any]) -> None:
        for within in np.ndindex(*(region.shape[axis] for axis, _ in self._axes)):
            start, stop, into = list(region.start), list(region.stop), [slice(None)] * len(region.start)
            for (axis, chosen), n in zip(self._axes, within, strict=True):
                start[axis] = chosen[region.start[axis] + n]
                stop[axis] = start[axis] + 1
                into[axis] = slice(n, n + 1)
            part = Region(tuple(start), tuple(stop))
            samples = np.empty(part.shape, out.dtype)
            self._whole.read(part, samples)
            out[tuple(into)] = samples

    def hold_at_most(self, budget_bytes: int) -> int:
        return self._whole.hold_at_most(budget_bytes)

    def close(self) -> None:
        self._whole.close()


def _parsed(text: str) -> dict[str, IndexRange]:
    """The parts by axis letter. ValueError for text of another form."""
    ranges: dict[str, IndexRange] = {}
    for part in text.split(",") if text.strip() else ():
        found = _ALONG.fullmatch(part)
        letter = "" if found is None else found[1].upper()
        if found is None or letter in ranges or letter not in "TCZYX":
            raise ValueError(f"'{part}' is not clear: name each of T, C, Z, Y, X at most once, as in Z=10:20,Y=0:4096")
        ranges[letter] = IndexRange.parse(found[2])
        if ranges[letter].step > 1 and letter not in _WITH_STEP:
            raise ValueError(f"'{part}' has a step: only time points and channels are taken with one")
    return ranges


def _part_header(header: ImageHeader, boxes: Mapping[str, range]) -> ImageHeader:
    """The header of a part, with the positions and channels that it has."""
    first = {letter: each.start for letter, each in boxes.items() if letter in "TZYX"}
    sizes, channels = dict(zip(header.axes, header.shape, strict=True)), boxes.get("C", range(1))
    picked = slice(channels.start, channels.stop, channels.step)
    known, metadata = header.calibration.cropped(first, picked), dict(header.metadata)
    notes = header.notes.cropped(boxes, sizes)
    if "T" in boxes and boxes["T"].step > 1 and "T" in known.steps:
        step = known.steps["T"]
        longer = {"T": Step(step.size * boxes["T"].step, step.unit)}
        known = Calibration({**known.steps, **longer}, known.origin, known.channels)
    if isinstance(metadata.get("geo"), GeoTags):
        metadata["geo"] = metadata["geo"].cropped(first["Y"], first["X"])
    for name, tags in metadata.items():
        if isinstance(tags, NiftiTags | MrcTags):
            metadata[name] = part = tags.cropped(boxes)
            lost = [words for key, words in tags.facts().items() if key not in part.facts()]
            notes = replace(notes, left_out=(*notes.left_out, *lost))
    if isinstance(metadata.get("omero"), Mapping) and "C" in boxes:
        metadata["omero"] = cropped_omero(metadata["omero"], picked, header.shape[header.axes.index("C")])
    return replace(
        header, shape=tuple(len(boxes[letter]) if letter in boxes else n
                            for letter, n in zip(header.axes, header.shape, strict=True)),
        calibration=known, metadata=metadata, notes=notes,
    )  # fmt: skip
