"""TIFF tags without a meaning here: IPTC, Photoshop's, those of cameras and microscopes.

A TIFF result has them byte for byte, unless they state how or where the input's samples lie.

Sources: TIFF 6.0; the Library of Congress' list of tags; tifffile's names of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

# Of the input's samples: how they are stored, shown from a table, or their largest values.
_OF_SAMPLES = {263, 264, 265, 280, 281, 288, 289, 292, 293, 297, 320, 340, 341, 342, 346, 351, 559, 34022, 50674}
_OF_SAMPLES |= {*range(433, 436), *range(512, 533), 32995, 32996, 32998}
# Offsets in the input file, or what makes readers expect another layout: LSM, MetaMorph, FluoView, SIS, NIH
# Image, MD gels, DNG, NDPI.
_NAMES = {34665: "Exif", 34853: "GPS", 40965: "Interoperability", 33723: "IPTC", 34377: "Photoshop"}
_OF_FILE = {400, 34665, 34853, 40965, 34412, *range(33628, 33632), 34361, 34362, 33560, 43314, *range(33445, 33453)}
_OF_FILE |= {290, 291, 33421, 33422, *range(50706, 50742), *range(65420, 65481)}
_POINTERS = (13, 18)
_RATIONALS_OF_CAMERA = 50844  # GDAL's RPC model: of rows and columns of the whole image
# Bytes of the numbers that a value is made of, by field type.
_NUMBER_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 4, 6: 1, 7: 1, 8: 2, 9: 4, 10: 4, 11: 4, 12: 8, 16: 8, 17: 8}
_MOST_NAMED = 8


@dataclass(frozen=True)
class PrivateTags:
    """values: field type, count and bytes, little-endian, by tag. lost: names of those that a result cannot have."""

    values: Mapping[int, tuple[int, int, bytes]] = field(default_factory=dict)
    lost: tuple[str, ...] = ()

    def facts(self) -> dict[str, str]:
        """As `Calibration.facts`; "lost tags" no format keeps."""
        found = {"tags": _listed([name_of(tag) for tag in self.values]), "lost tags": _listed(self.lost)}
        return {key: f"{words} of the TIFF" for key, words in found.items() if words}

    def cropped(self) -> PrivateTags:
        """The tags of a part of the image."""
        values = {tag: value for tag, value in self.values.items() if tag != _RATIONALS_OF_CAMERA}
        gone = [name_of(tag) for tag in self.values if tag not in values]
        return PrivateTags(values, (*self.lost, *gone))


def is_told(tag: int) -> bool:
    """Whether a tag that is not known by name says anything of the image."""
    return tag not in _OF_SAMPLES


def is_carried(tag: int, kind: int) -> bool:
    return tag not in _OF_FILE and kind in _NUMBER_BYTES and kind not in _POINTERS


def little_endian(kind: int, data: bytes, order: str) -> bytes:
    """A value's bytes from those in the file's byte order."""
    nbytes = _NUMBER_BYTES[kind]
    if order == "<" or nbytes == 1:
        return data
    return np.frombuffer(data, f"V{nbytes}").view(f">u{nbytes}").astype(f"<u{nbytes}").tobytes()


def name_of(tag: int) -> str:
    import tifffile

    return _NAMES.get(tag) or tifffile.TIFF.TAGS.get(tag) or f"tag {tag}"


def _listed(names: Iterable[str]) -> str:
    found: Sequence[str] = list(dict.fromkeys(names))
    more = len(found) - _MOST_NAMED
    return ", ".join(found[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
