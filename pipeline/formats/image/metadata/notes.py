"""What people and instruments noted of an image: text, a date, and OME-XML beyond sizes and channels.

Sources: TIFF 6.0, section 8 (DateTime is YYYY:MM:DD HH:MM:SS); OME schema 2016-06 (AcquisitionDate is ISO 8601).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from xml.etree.ElementTree import fromstring

from pipeline.formats.image.metadata import ome_xml

ASCII = 2
# TIFF's text tags that stay true of a filtered image, so a TIFF result keeps them.
TAGS = {269: "DocumentName", 271: "Make", 272: "Model", 315: "Artist", 316: "HostComputer", 33432: "Copyright"}
_TIFF_DATE = re.compile(r"(\d{4}):(\d\d):(\d\d) ")


@dataclass(frozen=True, repr=False)
class Notes:
    """
    description : free text; empty if there is none
    acquired    : when the image was taken, as a TIFF's DateTime or OME-XML's AcquisitionDate states it
    tags        : the values of `TAGS` that a TIFF has, by tag
    ome         : the OME-XML of the image, if it states more than other fields hold
    """

    description: str = ""
    acquired: datetime | None = None
    tags: Mapping[int, bytes] = field(default_factory=dict)
    ome: str = ""

    def __repr__(self) -> str:
        """Files that differ in their notes alone are of one kind, see `file_list`."""
        return f"Notes({self != Notes()})"

    def facts(self) -> dict[str, str]:
        """As `Calibration.facts`."""
        found = {"description": "description"} if self.description else {}
        found |= {"acquired": "acquisition date"} if self.acquired is not None else {}
        found |= {"tags": ", ".join(TAGS[tag] for tag in sorted(self.tags))} if self.tags else {}
        return found | ({"ome": f"{ome_xml.further(fromstring(self.ome))} of the OME-XML"} if self.ome else {})

    def cropped(self, boxes: Mapping[str, range]) -> Notes:
        """Of a part: the samples kept along each axis."""
        return replace(self, ome=ome_xml.cropped(self.ome, boxes)) if self.ome else self

    def fields(self) -> dict[int, tuple[int, int, bytes]]:
        """The tags of text: field type, count and bytes by tag."""
        return {tag: (ASCII, len(data), data) for tag, data in self.tags.items()}


def text_of(data: bytes) -> str:
    """The first string of a TIFF's tag: UTF-8, or else Latin-1."""
    data = data.split(b"\0")[0]
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def date_of(text: str) -> datetime | None:
    """Of TIFF's form or ISO 8601; None if it is neither."""
    try:
        return datetime.fromisoformat(_TIFF_DATE.sub(r"\1-\2-\3 ", text.strip()))
    except ValueError:
        return None


def tiff_date(date: datetime) -> bytes:
    """The tag DateTime, which has neither fractions of a second nor a time zone."""
    return date.isoformat(" ", "seconds")[:19].replace("-", ":").encode() + b"\0"
