"""The ImageDescription of a TIFF's first page: what its pages are, as OME-XML or in ImageJ's words.

Sources: OME-TIFF specification; ImageJ's TiffDecoder and FileOpener. tifffile writes both texts.
"""

from __future__ import annotations

import uuid
from pathlib import Path

from pipeline.formats.image.base import ImageHeader

_OME_SUFFIXES = (".ome.tif", ".ome.tiff", ".ome.tf8", ".ome.btf")
OME_DTYPES = {"int8", "int16", "int32", "uint8", "uint16", "uint32", "float32", "float64"}
# ImageJ's own reader takes no others.
_IMAGEJ_DTYPES = {"uint8", "uint16", "float32"}


def is_ome(header: ImageHeader, path: Path) -> bool:
    """Whether the file gets OME-XML: if its name asks for it, or if pages are time points or channels."""
    return path.name.lower().endswith(_OME_SUFFIXES) or (bool({"T", "C"} & set(header.axes)) and not is_imagej(header))


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
    """The tag's value, which ends with a null byte; empty if the pages need no description."""
    if is_ome(header, path):
        return _ome(header, path).encode() + b"\0"
    if is_imagej(header):
        return _imagej(header, path).encode("latin-1", "replace") + b"\0"
    return b""


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
    xml.addimage(header.dtype, header.shape, stored, axes=header.axes, Name=path.name.partition(".")[0])
    return str(xml.tostring(declaration=True))


def _imagej(header: ImageHeader, path: Path) -> str:
    import tifffile

    letters = f"{page_axes(header, path)}YX{'S' if header.samples_per_pixel > 1 else ''}"
    shape = tuple(header.shape[header.axes.index(letter)] for letter in letters)
    return str(tifffile.imagej_description(shape, axes=letters, rgb=header.samples_per_pixel == 3))
