"""What people and instruments noted of an image: text, a date, marks, and OME-XML beyond sizes and channels.

Sources: TIFF 6.0, section 8 (DateTime is YYYY:MM:DD HH:MM:SS); OME schema 2016-06 (AcquisitionDate is ISO 8601).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple
from xml.etree.ElementTree import fromstring

import numpy as np

from pipeline.formats.image.metadata import imagej, ome_xml
from pipeline.formats.image.metadata.private_tags import PrivateTags

BYTE, ASCII = 1, 2
XMP = 700
# TIFF's text tags that stay true of a filtered image, so a TIFF result keeps them.
TAGS = {269: "DocumentName", 271: "Make", 272: "Model", 315: "Artist", 316: "HostComputer", 33432: "Copyright"}
_TIFF_DATE = re.compile(r"(\d{4}):(\d\d):(\d\d) ")


class PngText(NamedTuple):
    """A text chunk as it is stored."""

    keyword: str
    kind: bytes
    data: bytes


@dataclass(frozen=True, repr=False)
class Notes:
    """
    name        : of the image, if it is not that of its file; empty if there is none
    description : free text; empty if there is none
    acquired    : when the image was taken, as a TIFF's DateTime or OME-XML's AcquisitionDate states it
    tags        : the values of `TAGS` that a TIFF has, by tag
    xmp         : Adobe's XML of what cameras and editors noted, as it is
    ome         : the OME-XML of the image, if it states more than other fields hold
    display     : the values shown black and white, for each channel; empty if they are not stated
    labels      : of each plane, in the order of the axes T, C and Z; empty if there are none
    imagej      : ImageJ's selection, overlays and properties, by tifffile's names
    png         : the text chunks of a PNG
    png_alone   : the keywords of those that no other field holds
    private     : a TIFF's tags that have no meaning here
    left_out    : what the input has and no result of it, in words
    """

    name: str = ""
    description: str = ""
    acquired: datetime | None = None
    tags: Mapping[int, bytes] = field(default_factory=dict)
    xmp: bytes = b""
    ome: str = ""
    display: tuple[tuple[float, float], ...] = ()
    labels: tuple[str, ...] = ()
    imagej: Mapping[str, Any] = field(default_factory=dict)
    png: tuple[PngText, ...] = ()
    png_alone: tuple[str, ...] = ()
    private: PrivateTags = field(default_factory=PrivateTags)
    left_out: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Files that differ in their notes alone are of one kind, see `file_list`."""
        return f"Notes({self != Notes()})"

    def facts(self) -> dict[str, str]:
        """As `Calibration.facts`."""
        found = {
            "name": "image name" if self.name else "",
            "description": "description" if self.description else "",
            "acquired": "" if self.acquired is None else "acquisition date",
            **{TAGS[tag]: TAGS[tag] for tag in sorted(self.tags)},
            "xmp": "XMP" if self.xmp else "",
            "display": "display settings" if self.display else "",
            "labels": "labels of planes" if self.labels else "",
            "imagej": f"{', '.join(self.imagej)} of ImageJ" if self.imagej else "",
            "png": f"{', '.join(self.png_alone)} of the PNG" if self.png_alone else "",
            "ome": f"{', '.join(self._further)} of the OME-XML" if self._further else "",
            "whole": ", ".join(self.left_out),
            **self.private.facts(),
        }
        return {key: words for key, words in found.items() if words}

    def cropped(self, boxes: Mapping[str, range], sizes: Mapping[str, int]) -> Notes:
        """The notes of a part, which keeps these samples along each axis. Marks at places in the image are left out."""
        placed = [key for key in imagej.PLACED if key in self.imagej]
        letters = [letter for letter in "TCZ" if letter in boxes]
        labels = np.array(self.labels, object)
        if self.labels:
            labels = labels.reshape([sizes[letter] for letter in letters])
            labels = labels[np.ix_(*(boxes[letter] for letter in letters))] if letters else labels
        channels = boxes.get("C", range(1)) if len(self.display) > 1 else range(len(self.display))
        part = replace(
            self,
            ome=ome_xml.cropped(self.ome, boxes) if self.ome else "",
            display=tuple(self.display[number] for number in channels),
            labels=tuple(labels.ravel()),
            imagej={key: value for key, value in self.imagej.items() if key not in imagej.PLACED},
            private=self.private.cropped(),
        )
        gone = [name for name in self._further if name not in part._further]
        lost = (", ".join(placed), "of ImageJ"), (", ".join(gone), "of the OME-XML")
        return replace(part, left_out=(*self.left_out, *(f"{names} {of}" for names, of in lost if names)))

    @property
    def _further(self) -> list[str]:
        """The elements and attributes that only OME-XML holds."""
        return ome_xml.further(fromstring(self.ome)) if self.ome else []

    def fields(self) -> dict[int, tuple[int, int, bytes]]:
        """The tags of text and XMP: field type, count and bytes by tag."""
        found = {tag: (ASCII, len(data), data) for tag, data in self.tags.items()}
        return found | ({XMP: (BYTE, len(self.xmp), self.xmp)} if self.xmp else {})


def text_of(data: bytes) -> str:
    """The first string of a TIFF's tag: UTF-8, or else Latin-1."""
    data = data.split(b"\0")[0]
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def date_of(text: str) -> datetime | None:
    """The date in TIFF's form or ISO 8601; None for other text."""
    try:
        return datetime.fromisoformat(_TIFF_DATE.sub(r"\1-\2-\3 ", text.strip()))
    except ValueError:
        return None


def tiff_date(date: datetime) -> bytes:
    """The tag DateTime, which has neither fractions of a second nor a time zone."""
    return date.isoformat(" ", "seconds")[:19].replace("-", ":").encode() + b"\0"
