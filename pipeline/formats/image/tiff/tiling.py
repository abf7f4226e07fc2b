"""The tiles of a compressed TIFF and their encoding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.scratch import scratch
from pipeline.formats.image.base import ImageHeader

# By name: the scheme, imagecodecs' encoder and its level, and by how much it may at most enlarge, in 256ths.
_SCHEMES: dict[str, tuple[int, str, int | None, int]] = {
    "none": (1, "none", None, 0),
    "deflate": (8, "deflate", 1, 4),
    "lzw": (5, "lzw", None, 136),  # codes of 12 bits
    "zstd": (50000, "zstd", 1, 4),
    "jpeg2000": (34712, "jpeg2k", 0, 256),  # level 0 is lossless; noise grows by up to a fifth
}
_OPTIONS: dict[str, dict[str, Any]] = {"jpeg2k": {"codecformat": "j2k", "reversible": True, "planar": False}}
COMPRESSIONS = tuple(_SCHEMES)
_NO_PREDICTOR, _HORIZONTAL, _OF_FLOATS = 1, 2, 3
_FURTHER_BYTES = 4096


def holds(compression: str, header: ImageHeader) -> bool:
    """Whether a scheme stores the header's samples. JPEG 2000 is lossless for up to 16 bits."""
    return compression != "jpeg2000" or (
        header.dtype.kind in "iu" and header.dtype.itemsize <= 2 and header.samples_per_pixel <= 4
    )


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Tiles of all samples of one plane, `rows` × `columns`, both multiples of 16."""

    rows: int
    columns: int
    compression: str

    @property
    def scheme(self) -> int:
        """The value of the tag Compression."""
        return _SCHEMES[self.compression][0]

    @property
    def codec(self) -> tuple[str, int | None]:
        """The scheme's name, and the level of encoding."""
        return self.compression, _SCHEMES[self.compression][2]

    def predictor(self, header: ImageHeader) -> int:
        """The value of the tag Predictor."""
        if self.compression in ("none", "jpeg2000") or header.dtype.kind == "b":
            return _NO_PREDICTOR
        return _OF_FLOATS if header.dtype.kind == "f" else _HORIZONTAL

    def grid(self, header: ImageHeader) -> tuple[int, int]:
        """Tiles down and across a plane."""
        sizes = dict(zip(header.axes, header.shape, strict=True))
        return -(-sizes["Y"] // self.rows), -(-sizes["X"] // self.columns)

    def shape(self, header: ImageHeader) -> tuple[int, int, int]:
        """Rows, columns and samples per pixel of a tile."""
        return self.rows, self.columns, header.samples_per_pixel

    def slot_bytes(self, header: ImageHeader) -> int:
        """The most bytes of an encoded tile."""
        nbytes = math.prod(self.shape(header)) * header.dtype.itemsize
        return nbytes + nbytes * _SCHEMES[self.compression][3] // 256 + _FURTHER_BYTES

    def encoded(self, header: ImageHeader, samples: NDArray[Any]) -> NDArray[np.uint8]:
        """The bytes of a tile, valid until this thread's next call.

        samples : (rows, columns, samples), which may lack rows and columns beyond the image
        """
        import imagecodecs

        _, name, level, _ = _SCHEMES[self.compression]
        shape, dtype = self.shape(header), header.dtype.newbyteorder("<")
        nbytes = math.prod(shape) * dtype.itemsize
        tile: Any = scratch("samples", nbytes).view(dtype).reshape(shape)
        predicted: Any = scratch("predicted", nbytes).view(dtype).reshape(shape)
        room: Any = scratch("encoded", self.slot_bytes(header))
        if samples.shape != shape:
            tile[...] = 0
        tile[: samples.shape[0], : samples.shape[1]] = samples
        predictor = self.predictor(header)
        if header.dtype.kind == "b":
            predicted = np.packbits(tile.reshape(self.rows, -1), axis=1)
        elif predictor == _NO_PREDICTOR:
            predicted = tile
        else:
            predict: Any = imagecodecs.floatpred_encode if predictor == _OF_FLOATS else imagecodecs.delta_encode
            predict(tile, axis=-2, out=predicted)
        if name == "none":
            return np.asarray(predicted.reshape(-1).view(np.uint8))
        encode = getattr(imagecodecs, f"{name}_encode")
        levels = () if level is None else (level,)
        found = encode(predicted, *levels, out=room, **_OPTIONS.get(name, {}))
        encoded: NDArray[np.uint8] = room[: len(found)]
        return encoded
