"""The ImageDescription of a TIFF's first page: what its pages are, as OME-XML or in ImageJ's words.

Sources: OME-TIFF specification; ImageJ's TiffDecoder and FileOpener. tifffile writes both texts.
"""

from __future__ import annotations

import math
import uuid
from pathlib import Path

import numpy as np

from pipeline.formats.image.base import ImageHeader
from pipeline.formats.image.metadata import geotiff, imagej, ome_xml, resolution
from pipeline.formats.image.metadata.notes import ASCII, TAGS, tiff_date
from pipeline.formats.image.tiff.ifd import Tag

_OME_SUFFIXES = (".ome.tif", ".ome.tiff", ".ome.tf8", ".ome.btf")
OME_DTYPES = {"bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float32", "float64"}
# ImageJ's own reader takes no others.
_IMAGEJ_DTYPES = {"uint8", "uint16", "float32"}


def is_ome(header: ImageHeader, path: Path) -> bool:
    """Whether the file gets OME-XML: if its name asks for it, if pages are time points or channels, if the input is
    OME-TIFF, or if more is known than TIFF's own tags hold."""
    if path.name.lower().endswith(_OME_SUFFIXES):
        return True
    if is_imagej(header):
        return False
    if {"T", "C"} & set(header.axes):
        return True
    more = {"depth", "time", "names", "colours"} & header.calibration.facts(header.axes).keys()
    return header.dtype.name in OME_DTYPES and (header.metadata.get("dialect") == "OME" or bool(more))


def is_imagej(header: ImageHeader) -> bool:
    """Whether the file gets ImageJ's description: if the input has one, and ImageJ reads such samples."""
    if header.metadata.get("dialect") != "ImageJ":
        return False
    return header.dtype.name in _IMAGEJ_DTYPES and (
        header.samples_per_pixel == 1 or (header.samples_per_pixel == 3 and header.dtype.name == "uint8")
    )


def page_axes(header: ImageHeader, path: Path) -> str:
    """The axes along which pages follow one another, slowest first: ImageJ's channels change from page to page."""
    letters = "TZC" if not is_ome(header, path) and is_imagej(header) else "TCZ"
    return "".join(letter for letter in letters if letter in header.axes)


def description(header: ImageHeader, path: Path) -> bytes:
    """The tag's value, which ends with a null byte; empty if there is nothing to say."""
    if is_ome(header, path):
        return _ome(header, path).encode() + b"\0"
    if is_imagej(header):
        return _imagej(header, path).encode("latin-1", "replace") + b"\0"
    free = header.notes.description
    return free.encode() + b"\0" if free else b""


def _ome(header: ImageHeader, path: Path) -> str:
    import tifffile

    rows, columns = header.shape[header.axes.index("Y") : header.axes.index("X") + 1]
    samples, pages = header.samples_per_pixel, 1
    for size in header.planes:
        pages *= size
    # Of the name and the shape: the same job writes the same bytes.
    name = uuid.uuid5(uuid.NAMESPACE_URL, f"{path.name} {header.axes} {header.shape} {header.dtype}")
    xml = tifffile.OmeXml(UUID=f"urn:uuid:{name}", Creator="Millrace")
    stored = (pages, 1, 1, rows, columns, samples)
    channels = header.shape[header.axes.index("C")] if "C" in header.axes else 1
    known, notes = ome_xml.attributes(header.calibration, header.axes, channels), header.notes
    if notes.acquired is not None:
        known["AcquisitionDate"] = notes.acquired.isoformat()
    if notes.description:
        known["Description"] = ome_xml.text(notes.description)
    title = ome_xml.text(notes.name) or path.name.partition(".")[0]
    xml.addimage(header.dtype, header.shape, stored, axes=header.axes, Name=title, **known)
    made = str(xml.tostring(declaration=True))
    return ome_xml.merged(notes.ome, made) if notes.ome else made


def _imagej(header: ImageHeader, path: Path) -> str:
    import tifffile

    letters = f"{page_axes(header, path)}YX{'S' if header.samples_per_pixel > 1 else ''}"
    shape = tuple(header.shape[header.axes.index(letter)] for letter in letters)
    known = imagej.description_fields(header.calibration)
    shown = header.notes.display
    if "C" in letters and (shown or any(channel.colour for channel in header.calibration.channels)):
        known["mode"] = "composite"
    if shown:
        known["min"], known["max"] = shown[0]
    return str(tifffile.imagej_description(shape, axes=letters, rgb=header.samples_per_pixel == 3, **known))


def further_tags(header: ImageHeader, path: Path) -> dict[int, tuple[int, int, bytes]]:
    """Other tags that describe the image: field type, count, bytes by tag. `FIRST_PAGE`: of the first page alone."""
    found: dict[int, tuple[int, int, bytes]] = {}
    if not is_ome(header, path) and is_imagej(header):
        sizes, notes = dict(zip(header.axes, header.planes, strict=False)), header.notes
        noted = {
            "Info": notes.description,
            "Labels": _in_page_order(notes.labels, header, path),
            "Ranges": [end for ends in notes.display for end in ends] if len(notes.display) > 1 else (),
            **notes.imagej,
        }
        planes = math.prod(header.planes)
        found |= imagej.metadata_tag(header.calibration.channels, sizes.get("C", 1), planes, noted)
    found |= {**header.notes.fields(), **header.notes.private.values}
    if header.notes.acquired is not None:
        date = tiff_date(header.notes.acquired)
        found[Tag.DATE_TIME] = ASCII, len(date), date
    place = header.metadata.get("geo")
    return found | (place.fields() if isinstance(place, geotiff.GeoTags) else {})


def _in_page_order(labels: tuple[str, ...], header: ImageHeader, path: Path) -> list[str]:
    """The labels of planes as the pages follow one another."""
    if not labels:
        return []
    order = [header.axes.index(letter) for letter in page_axes(header, path)]
    found: list[str] = np.array(labels, object).reshape(header.planes).transpose(order).ravel().tolist()
    return found


def resolution_tags(header: ImageHeader, path: Path) -> tuple[tuple[int, int], tuple[int, int], int] | None:
    """XResolution, YResolution and ResolutionUnit: the input's if it has any of this meaning, else the pixel sizes."""
    carried = header.metadata.get("resolution")
    unit = header.metadata.get("resolution_unit", resolution.INCH)
    stated = None if carried is None else (*carried, unit)
    if not is_ome(header, path) and is_imagej(header):
        return stated or imagej.resolution(header.calibration)
    if stated is not None and unit != resolution.NO_UNIT:
        return stated
    return resolution.tags(header.calibration) or stated


def kept_facts(header: ImageHeader, path: Path) -> set[str]:
    """Which known facts the file states, as `ImageFormat.keeps`."""
    found = {"place", "nodata", "description", "acquired", "profile", "orientation", "xmp", "tags", *TAGS.values()}
    if is_ome(header, path):
        found.add("name")
        current = header.notes.ome and ome_xml.is_current(header.notes.ome)
        return found | ome_xml.holds(header.calibration) | ({"ome"} if current else set())
    if is_imagej(header):
        return found | imagej.holds(header.calibration)
    return found | ({"plane"} if resolution.tags(header.calibration) else set())
