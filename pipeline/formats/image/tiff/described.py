"""What a TIFF states about its image besides samples: tags for a new TIFF, the calibration, and notes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.formats.image.metadata import Calibration, Channel, geotiff, imagej, ome_xml, resolution
from pipeline.formats.image.metadata.notes import ASCII, TAGS, Notes, date_of, text_of
from pipeline.formats.image.tiff.ifd import Directory, Tag
from pipeline.formats.image.tiff.page import COMPRESSIONS, UNCOMPRESSED, Page
from pipeline.formats.image.tiff.stack import Stack

_MOST_LABELS = 1 << 17
_SCHEMES = {"LZW": "lzw", "deflate": "deflate", "Zstandard": "zstd"}  # those that are written


def described(stack: Stack) -> tuple[dict[str, Any], Calibration, Notes]:
    """The metadata, the calibration and the notes of its `ImageHeader`."""
    directory, text = stack.first, stack.first.text(Tag.IMAGE_DESCRIPTION)
    found = {tag: value for tag in TAGS if (value := directory.raw(Tag(tag))) is not None}
    notes = Notes(
        description=stack.free_text,
        acquired=date_of(text_of(directory.blob(Tag.DATE_TIME))),
        tags={tag: data for tag, (kind, data) in found.items() if kind == ASCII and data.strip(b"\0 ")},
    )
    metadata = _carried(directory, stack.pages[0])
    tags = directory.rational(Tag.X_RESOLUTION), directory.rational(Tag.Y_RESOLUTION)
    unit = directory.number(Tag.RESOLUTION_UNIT, resolution.INCH)
    if stack.ome is not None:
        known = ome_xml.from_image(stack.ome, stack.pages[0].shape[2])
        description, date = ome_xml.noted(stack.ome)
        notes = replace(notes, description=description, acquired=date_of(date) or notes.acquired, ome=text)
        return metadata | {"dialect": "OME"}, known, notes
    if text.startswith("ImageJ="):
        channels, info = _imagej_tag(stack)
        known = replace(imagej.from_description(text, *tags, unit), channels=channels)
        return metadata | {"dialect": "ImageJ"}, known, replace(notes, description=info)
    return metadata, resolution.from_tags(*tags, unit), notes


def _imagej_tag(stack: Stack) -> tuple[tuple[Channel, ...], str]:
    """The channels and the info text."""
    directory, planes = stack.first, len(stack.pages)
    if Tag.IJ_METADATA not in directory:
        return (), ""
    channels = stack.shape[stack.axes.index("C")] if "C" in stack.axes else 1
    counts = directory.all_numbers(Tag.IJ_METADATA_BYTE_COUNTS, _MOST_LABELS)
    return imagej.from_tag(directory.blob(Tag.IJ_METADATA), counts, directory.encoding.order, channels, planes)


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
