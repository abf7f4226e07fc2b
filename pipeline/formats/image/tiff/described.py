"""What a TIFF states about its image besides samples: tags for a new TIFF, the calibration, and notes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.errors import InputError
from pipeline.formats.image.metadata import Calibration, geotiff, imagej, ome_xml, private_tags, resolution
from pipeline.formats.image.metadata.notes import ASCII, TAGS, Notes, date_of, text_of
from pipeline.formats.image.metadata.private_tags import PrivateTags
from pipeline.formats.image.tiff.ifd import Directory, Tag
from pipeline.formats.image.tiff.page import COMPRESSIONS, UNCOMPRESSED, Page
from pipeline.formats.image.tiff.stack import Stack

_MOST_LABELS = 1 << 17
# Those that are written.
_SCHEMES = {"LZW": "lzw", "deflate": "deflate", "Zstandard": "zstd", "JPEG 2000": "jpeg2000"}


def described(stack: Stack, directories: Sequence[Directory]) -> tuple[dict[str, Any], Calibration, Notes]:
    """The metadata, the calibration and the notes of its `ImageHeader`; `directories`: of all pages."""
    directory, text = stack.first, stack.first.text(Tag.IMAGE_DESCRIPTION)
    found = {tag: value for tag in TAGS if (value := directory.raw(Tag(tag))) is not None}
    xmp, further = b"", {page.index for page in stack.pages[1:]}
    with suppress(InputError):  # a damaged one does not matter
        xmp = directory.blob(Tag.XMP)
    notes = Notes(
        xmp=xmp,
        private=_private(stack.first, [each for each in directories if each.index in further]),
        description=stack.free_text,
        acquired=date_of(text_of(directory.blob(Tag.DATE_TIME))),
        tags={tag: data for tag, (kind, data) in found.items() if kind == ASCII and data.strip(b"\0 ")},
    )
    metadata = _carried(directory, stack.pages[0])
    tags = directory.rational(Tag.X_RESOLUTION), directory.rational(Tag.Y_RESOLUTION)
    unit = directory.number(Tag.RESOLUTION_UNIT, resolution.INCH)
    if stack.ome is not None:
        known = ome_xml.from_xml(stack.ome, stack.pages[0].shape[2])
        name, description, date = ome_xml.noted(stack.ome)
        name = "" if name == directory.file.path.name.partition(".")[0] else name
        notes = replace(notes, name=name, description=description, acquired=date_of(date) or notes.acquired)
        if ome_xml.further(stack.ome):
            notes = replace(notes, ome=text)
        return metadata | {"dialect": "OME"}, known, notes
    if text.startswith("ImageJ="):
        tag = _imagej_tag(stack)
        display = tag.display or (imagej.display_range(text) if "C" not in stack.axes else ())
        known = replace(imagej.from_description(text, *tags, unit), channels=tag.channels)
        notes = replace(notes, description=tag.description, display=display, labels=tag.labels, imagej=tag.marks)
        return metadata | {"dialect": "ImageJ"}, known, notes
    return metadata, resolution.from_tags(*tags, unit), notes


def _private(first: Directory, others: Sequence[Directory]) -> PrivateTags:
    values, lost = {}, []
    for tag in filter(private_tags.is_told, first.private):
        found = first.private_value(tag)
        if found is None or not private_tags.is_carried(tag, found[0]):
            lost.append(private_tags.name_of(tag))
        else:
            kind, count, data = found
            values[tag] = kind, count, private_tags.little_endian(kind, data, first.encoding.order)
    here = set(first.private)
    further = {tag for each in others for tag in each.private if tag not in here or each.differs(tag, first)}
    names = [private_tags.name_of(tag) for tag in sorted(further) if private_tags.is_told(tag)]
    return PrivateTags(values, (*lost, *(f"{name} of further pages" for name in names)))


def _imagej_tag(stack: Stack) -> imagej.Tagged:
    directory = stack.first
    if Tag.IJ_METADATA not in directory:
        return imagej.Tagged()
    counts = directory.all_numbers(Tag.IJ_METADATA_BYTE_COUNTS, _MOST_LABELS)
    sizes = dict(zip(stack.axes, stack.shape, strict=True))
    pages = np.array([page.index for page in stack.pages]).reshape([sizes.get(letter, 1) for letter in "TCZ"])
    return imagej.from_tag(directory.blob(Tag.IJ_METADATA), counts, directory.encoding.order, pages)


def _carried(directory: Directory, page: Page) -> dict[str, Any]:
    """The values that a new TIFF takes over, as the tags hold them; those unknown to TIFF 6.0 are dropped."""
    found: dict[str, Any] = {"photometric": page.photometric}
    if page.compression != UNCOMPRESSED:
        found["compression"] = _SCHEMES.get(COMPRESSIONS[page.compression], "other")
    extra = directory.all_numbers(Tag.EXTRA_SAMPLES, page.shape[2])
    if extra and max(extra) <= 2:
        found["extra_samples"] = extra
    orientation = directory.number(Tag.ORIENTATION, 1)
    if 2 <= orientation <= 8:
        found["orientation"] = orientation
    sizes = (directory.rational(Tag.X_RESOLUTION), directory.rational(Tag.Y_RESOLUTION))
    unit = directory.number(Tag.RESOLUTION_UNIT, 2)
    if None not in sizes and 1 <= unit <= 3:
        found["resolution"] = sizes
        found["resolution_unit"] = unit
    profile = directory.blob(Tag.ICC_PROFILE)
    if profile:
        found["icc_profile"] = profile
    stated = {tag: value for tag in geotiff.TAGS if (value := directory.raw(Tag(tag))) is not None}
    place = geotiff.from_values(stated, directory.encoding.order)
    if place.values:
        found["geo"] = place
    return found
