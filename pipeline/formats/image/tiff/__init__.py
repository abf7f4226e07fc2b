"""TIFF and BigTIFF: recognising, reading (`reader`) and writing (`writer`)."""

from __future__ import annotations

import math
from pathlib import Path

from pipeline.errors import ParameterError
from pipeline.formats.image.base import DTYPES, ImageFormat, ImageHeader, ImageReader, ImageWriter, Storage, along_axes
from pipeline.formats.image.pyramid import chosen_levels
from pipeline.formats.image.tiff.compressed_writer import CompressedTiffWriter
from pipeline.formats.image.tiff.description import OME_DTYPES, is_ome, kept_facts
from pipeline.formats.image.tiff.ifd import MAX_PAGES
from pipeline.formats.image.tiff.reader import TiffReader
from pipeline.formats.image.tiff.tiling import COMPRESSIONS, Tiling, holds
from pipeline.formats.image.tiff.writer import BIG_SUFFIXES, Layout, TiffWriter
from pipeline.storage.partial import Opening

_TILE = 256
_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


class Tiff(ImageFormat):
    """Tagged Image File Format, version 6.0, and BigTIFF."""

    name = "TIFF"
    suffixes = (".tif", ".tiff", *BIG_SUFFIXES)

    def __init__(self, storage: Storage = Storage()) -> None:  # noqa: B008 - it is frozen
        self._storage = storage

    def storing(self, storage: Storage) -> Tiff:
        if storage.compression not in (None, *COMPRESSIONS):
            raise ParameterError(f"--compression {storage.compression}: TIFF takes {', '.join(COMPRESSIONS)}")
        if storage.shards is not None:
            raise ParameterError("--shards: TIFF has none; choose .zarr, or leave it out")
        return Tiff(storage)

    def recognises(self, path: Path, first_bytes: bytes) -> bool:
        return first_bytes[:4] in _STARTS

    def open(self, path: Path) -> ImageReader:
        return TiffReader(path)

    def refusal(self, header: ImageHeader, path: Path) -> str | None:
        if header.dtype.name not in DTYPES:
            return f"{path}: TIFF is written as {', '.join(DTYPES)}, not {header.dtype.name}; choose .zarr"
        sizes = dict(zip(header.axes, header.shape, strict=True))
        if min(header.shape) < 1:
            return f"{path}: an image of {' × '.join(map(str, header.shape))} has no samples; check the input"
        if max(sizes["Y"], sizes["X"]) >= 1 << 32:
            return f"{path}: TIFF holds up to 4,294,967,295 rows and columns; choose .zarr"
        if sizes.get("S", 1) > 65535:
            return f"{path}: TIFF holds up to 65,535 samples in a pixel, not {sizes['S']:,}; choose .zarr"
        if not holds(self._compression(header), header):
            way = "choose another --compression"
            return f"{path}: JPEG 2000 holds integers of 8 and 16 bits, up to 4 samples a pixel; {way}"
        if is_ome(header, path) and header.dtype.name not in OME_DTYPES:
            return f"{path}: OME-TIFF holds {', '.join(sorted(OME_DTYPES))}, not {header.dtype.name}; choose .zarr"
        planes = math.prod(header.planes)
        if planes > MAX_PAGES:
            return f"{path}: {planes:,} planes are more pages than TIFF readers take ({MAX_PAGES:,}); choose .zarr"
        if header.nbytes >= 1 << 62:
            return f"{path}: {header.nbytes:,} bytes are beyond any file; check the input"
        return None

    def keeps(self, header: ImageHeader, path: Path) -> set[str]:
        return kept_facts(header, path)

    def head(self, header: ImageHeader, path: Path) -> bytes | None:
        layout = Layout.of(header, path)
        is_as_in_memory = header.dtype.newbyteorder("<").isnative and layout.order == tuple(range(len(header.shape)))
        if self._tiling(header) is not None or not is_as_in_memory:
            return None
        return b"".join(layout.head()).ljust(layout.head_bytes, b"\0")

    def create(self, path: Path, header: ImageHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        tiling = self._tiling(header)
        if tiling is None:
            return TiffWriter(path, header, opening)
        return CompressedTiffWriter(path, header, opening, tiling, self.levels(header, path))

    def levels(self, header: ImageHeader, path: Path) -> int:
        """By default pyramids stay pyramids, and large tiled images become some."""
        return chosen_levels(self._storage.levels, header, by_default=self._is_tiled(header))

    def block_shape(self, header: ImageHeader) -> tuple[int, ...] | None:
        tiling = self._tiling(header)
        if tiling is None:
            return None
        sizes = {"Y": tiling.rows, "X": tiling.columns, "S": header.shape[-1]}
        return tuple(min(sizes.get(letter, 1), size) for letter, size in zip(header.axes, header.shape, strict=True))

    def _is_tiled(self, header: ImageHeader) -> bool:
        """Files are tiled if they are compressed, if tiles have a size, or if eight samples share a byte."""
        return self._compression(header) != "none" or self._storage.chunks is not None or header.dtype.kind == "b"

    def _compression(self, header: ImageHeader) -> str:
        """As the input, unless another is chosen."""
        found = str(header.metadata.get("compression", "none"))
        is_kept = found in COMPRESSIONS and holds(found, header)
        return self._storage.compression or (found if is_kept else "deflate")

    def _tiling(self, header: ImageHeader) -> Tiling | None:
        """The tiles; None: strips. Pyramids are tiled too. ParameterError if the tiles' size is not allowed."""
        is_pyramid = self._storage.levels is None and header.levels > 1
        if not (self._is_tiled(header) or is_pyramid or (self._storage.levels or 1) > 1):
            return None
        chunks = along_axes(self._storage.chunks or (_TILE,), header, "--chunks")
        sizes = dict(zip(header.axes, chunks, strict=True))
        if sizes["Y"] % 16 or sizes["X"] % 16:
            raise ParameterError(f"--chunks {sizes['Y']},{sizes['X']}: a TIFF's tiles are multiples of 16")
        return Tiling(rows=sizes["Y"], columns=sizes["X"], compression=self._compression(header))
