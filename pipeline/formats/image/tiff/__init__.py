"""TIFF and BigTIFF: recognising, reading (`reader`) and writing (`writer`)."""

from __future__ import annotations

from pathlib import Path

from pipeline.formats.image.base import AXES, DTYPES, ImageFormat, ImageHeader, ImageReader, ImageWriter
from pipeline.formats.image.tiff.ifd import MAX_PAGES
from pipeline.formats.image.tiff.reader import TiffReader
from pipeline.formats.image.tiff.writer import BIG_SUFFIXES, TiffWriter
from pipeline.storage.partial import Opening

_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


class Tiff(ImageFormat):
    """Tagged Image File Format, version 6.0, and BigTIFF."""

    name = "TIFF"
    suffixes = (".tif", ".tiff", *BIG_SUFFIXES)

    def recognises(self, path: Path, first_bytes: bytes) -> bool:
        return first_bytes[:4] in _STARTS

    def open(self, path: Path) -> ImageReader:
        return TiffReader(path)

    def refusal(self, header: ImageHeader, path: Path) -> str | None:
        if header.axes not in AXES:
            return f"{path}: TIFF holds the axes {', '.join(AXES)}, not {header.axes}; choose .zarr"
        if header.dtype.name not in DTYPES:
            return f"{path}: TIFF is written as {', '.join(DTYPES)}, not {header.dtype.name}; choose .zarr"
        sizes = dict(zip(header.axes, header.shape, strict=True))
        if min(header.shape) < 1:
            return f"{path}: an image of {' × '.join(map(str, header.shape))} has no samples; check the input"
        if max(sizes["Y"], sizes["X"]) >= 1 << 32:
            return f"{path}: TIFF holds up to 4,294,967,295 rows and columns; choose .zarr"
        if sizes.get("C", 1) > 65535:
            return f"{path}: TIFF holds up to 65,535 channels, not {sizes['C']:,}; choose .zarr"
        if sizes.get("Z", 1) > MAX_PAGES:
            return f"{path}: {sizes['Z']:,} planes are more pages than TIFF readers take ({MAX_PAGES:,}); choose .zarr"
        if header.nbytes >= 1 << 62:
            return f"{path}: {header.nbytes:,} bytes are beyond any file; check the input"
        return None

    def create(self, path: Path, header: ImageHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        return TiffWriter(path, header, opening)
