"""MRI series as NIfTI-1 (.nii, .nii.gz): one file, little-endian, x fastest, then y, z and time."""

from __future__ import annotations

from pathlib import Path

from pipeline.formats.image.array_reader import ArrayReader, file_array
from pipeline.formats.image.base import ImageReader, ImageWriter
from pipeline.formats.image.volumes.nifti import CODES, nifti_writer
from pipeline.formats.image.volumes.nifti_header import EXTENDER_BYTES, MILLIMETRES, blank, put_affine
from pipeline.formats.series.base import SeriesFormat, SeriesHeader
from pipeline.storage.partial import Opening

_LONGEST_AXIS = (1 << 15) - 1
_LONGEST_TITLE = 79


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
        return nifti_writer(path, header.image, opening, nifti_head(header))

    def open(self, path: Path, header: SeriesHeader) -> ImageReader:
        array = file_array(path, header.dtype.newbyteorder("<"), header.shape, offset=len(nifti_head(header)))
        return ArrayReader(path, header.image, array)


def nifti_head(header: SeriesHeader) -> bytes:
    """The header's 348 bytes, and 4 that mark the absence of extensions. The interval between images is unknown."""
    times, slices, rows, columns = header.shape
    record = blank()
    record["dim"] = (4 if times > 1 else 3, columns, rows, slices, times, 1, 1, 1)
    record["datatype"], record["bitpix"] = CODES[header.dtype], 8 * header.dtype.itemsize
    record["pixdim"][1:4] = header.voxel_mm or 1.0
    record["xyzt_units"] = MILLIMETRES if header.voxel_mm else 0
    record["descrip"] = header.title.encode("ascii", "replace")[:_LONGEST_TITLE]
    if header.affine is not None:
        put_affine(record, header.affine)
    return bytes(record.tobytes()) + bytes(EXTENDER_BYTES)
