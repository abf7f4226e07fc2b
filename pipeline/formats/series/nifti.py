"""NIfTI-1 (.nii, .nii.gz): one file, little-endian, x fastest, then y, z and time.

Source: https://nifti.nimh.nih.gov/pub/dist/src/niftilib/nifti1.h. A known affine is written twice: as the matrix
(sform) and, if its axes are at right angles, as a quaternion (qform).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.deflate import gzipped_bands
from pipeline.formats.image.array_reader import ArrayReader, file_array
from pipeline.formats.image.base import ImageReader, ImageWriter
from pipeline.formats.image.contiguous import ContiguousSamples
from pipeline.formats.image.positional_writer import PositionalWriter
from pipeline.formats.image.spooled_writer import SpooledWriter
from pipeline.formats.series.base import SeriesFormat, SeriesHeader
from pipeline.storage.partial import Opening

_HEADER_BYTES, _OFFSET = 348, 352
_LONGEST_AXIS = (1 << 15) - 1
_DATATYPES = {"float32": (16, 32), "complex64": (32, 64)}  # code, bits
_MILLIMETRES = 2  # without a unit of time: the interval between images is unknown
_SCANNER = 1  # coordinates of the scanner
_BAND_BYTES = 1 << 20
# The largest deviation from right angles of a rotation's axes.
_ORTHOGONAL = 1e-4


class Nifti(SeriesFormat):
    """float32 or complex64; axes of up to 32,767."""

    name = "NIfTI"
    suffixes = (".nii", ".nii.gz")

    def refusal(self, header: SeriesHeader, path: Path) -> str | None:
        if max(header.shape) > _LONGEST_AXIS:
            return (
                f"{path}: NIfTI-1 holds up to {_LONGEST_AXIS:,} along an axis, not {max(header.shape):,}; choose .zarr"
            )
        return None

    def create(self, path: Path, header: SeriesHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        if path.name.lower().endswith(".gz"):
            return NiftiGzWriter(path, header, opening)
        dtype = header.dtype.newbyteorder("<")
        samples = ContiguousSamples(shape=header.shape, dtype=dtype, offset=_OFFSET)
        return PositionalWriter(path, header.image, opening, samples=samples, head=[nifti_header(header)])

    def open(self, path: Path, header: SeriesHeader) -> ImageReader:
        array = file_array(path, header.dtype.newbyteorder("<"), header.shape, offset=_OFFSET)
        return ArrayReader(path, header.image, array)


class NiftiGzWriter(SpooledWriter):
    """Compresses the file from first to last, once all images are present."""

    def __init__(self, path: Path, header: SeriesHeader, opening: Opening) -> None:
        super().__init__(path, header.image, opening)
        self._head = nifti_header(header)

    def _encoded(self) -> Iterator[bytes]:
        total = self._samples.nbytes
        bands = [(first, min(first + _BAND_BYTES, total)) for first in range(0, total, _BAND_BYTES)]
        return gzipped_bands(self._band, bands)

    def _band(self, first: int, stop: int) -> bytes:
        band = np.empty(stop - first, np.uint8)
        self._scratch.read_at(first, band.data)
        return (self._head if first == 0 else b"") + band.tobytes()


def nifti_header(header: SeriesHeader) -> bytes:
    """The header's 348 bytes, and 4 that mark the absence of extensions."""
    times, slices, rows, columns = header.shape
    code, bits = _DATATYPES[header.dtype.name]
    dimensions = 4 if times > 1 else 3
    affine = header.affine
    voxel = header.voxel_mm or (1.0, 1.0, 1.0)
    quaternion, qfac = (None, 1.0) if affine is None else quaternion_of(affine)
    b, c, d = quaternion or (0.0, 0.0, 0.0)
    offsets = (0.0, 0.0, 0.0) if quaternion is None or affine is None else tuple(affine[:3, 3])
    rows_of_affine = np.zeros((3, 4)) if affine is None else affine[:3]
    title = header.title.encode("ascii", "replace")[:79]
    head = b"".join(
        (
            struct.pack("<i36x", _HEADER_BYTES),  # dim_info: the readout axis is unknown
            struct.pack("<8h", dimensions, columns, rows, slices, times, 1, 1, 1),
            struct.pack("<3fh", 0, 0, 0, 0),
            struct.pack("<3h", code, bits, 0),
            struct.pack("<8f", qfac, *voxel, 1, 1, 1, 1),
            struct.pack("<3f", _OFFSET, 1, 0),  # values are stored unscaled
            struct.pack("<hBB", 0, 0, _MILLIMETRES if header.voxel_mm else 0),
            struct.pack("<4f2i", 0, 0, 0, 0, 0, 0),
            title.ljust(80, b"\0"),
            b"\0" * 24,
            struct.pack("<2h", _SCANNER if quaternion else 0, _SCANNER if affine is not None else 0),
            struct.pack("<6f", b, c, d, *offsets),
            struct.pack("<12f", *rows_of_affine.reshape(-1)),
            b"\0" * 16,
            b"n+1\0",
        )
    )
    assert len(head) == _HEADER_BYTES
    return head + b"\0\0\0\0"


def quaternion_of(affine: NDArray[Any]) -> tuple[tuple[float, float, float] | None, float]:
    """b, c and d of the rotation (None if the axes are not at right angles), and −1 if z is mirrored, else 1."""
    lengths = np.linalg.norm(affine[:3, :3], axis=0)
    if not (lengths > 0).all():
        return None, 1.0
    rotation = affine[:3, :3] / lengths
    if np.abs(rotation.T @ rotation - np.eye(3)).max() > _ORTHOGONAL:
        return None, 1.0
    qfac = 1.0 if np.linalg.det(rotation) > 0 else -1.0
    rotation = rotation * np.array([1.0, 1.0, qfac])
    # The eigenvector of the largest eigenvalue (Bar-Itzhack, J. Guid. Control Dyn. 23, 2000) needs no special cases.
    (xx, xy, xz), (yx, yy, yz), (zx, zy, zz) = rotation
    matrix = np.array(
        [
            [xx + yy + zz, zy - yz, xz - zx, yx - xy],
            [zy - yz, xx - yy - zz, xy + yx, xz + zx],
            [xz - zx, xy + yx, yy - xx - zz, yz + zy],
            [yx - xy, xz + zx, yz + zy, zz - xx - yy],
        ]
    )
    _, vectors = np.linalg.eigh(matrix)
    a, b, c, d = vectors[:, -1]
    sign = 1.0 if a >= 0 else -1.0
    return (float(sign * b), float(sign * c), float(sign * d)), qfac
