"""The header of NIfTI-1 and NIfTI-2: its fields, the place in space, and what a result takes over.

Sources: https://nifti.nimh.nih.gov/pub/dist/src/niftilib/nifti1.h and nifti2.h. A known affine is written twice: as
the matrix (sform) and, if its axes are at right angles, as a quaternion (qform).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.formats.image.volumes.ordered import Record

# Declared as a list: mypy takes seconds to find the type of so many tuples.
_FIELDS1: list[Any] = [
    ("sizeof_hdr", "<i4"), ("data_type", "S10"), ("db_name", "S18"), ("extents", "<i4"), ("session_error", "<i2"),
    ("regular", "S1"), ("dim_info", "u1"), ("dim", "<i2", 8), ("intent_p", "<f4", 3), ("intent_code", "<i2"),
    ("datatype", "<i2"), ("bitpix", "<i2"), ("slice_start", "<i2"), ("pixdim", "<f4", 8), ("vox_offset", "<f4"),
    ("scl_slope", "<f4"), ("scl_inter", "<f4"), ("slice_end", "<i2"), ("slice_code", "u1"), ("xyzt_units", "u1"),
    ("cal_max", "<f4"), ("cal_min", "<f4"), ("slice_duration", "<f4"), ("toffset", "<f4"), ("glmax", "<i4"),
    ("glmin", "<i4"), ("descrip", "S80"), ("aux_file", "S24"), ("qform_code", "<i2"), ("sform_code", "<i2"),
    ("quatern", "<f4", 3), ("qoffset", "<f4", 3), ("srow", "<f4", (3, 4)), ("intent_name", "S16"), ("magic", "S4"),
]  # fmt: skip
NIFTI1 = np.dtype(_FIELDS1)
_FIELDS2: list[Any] = [
    ("sizeof_hdr", "<i4"), ("magic", "S8"), ("datatype", "<i2"), ("bitpix", "<i2"), ("dim", "<i8", 8),
    ("intent_p", "<f8", 3), ("pixdim", "<f8", 8), ("vox_offset", "<i8"), ("scl_slope", "<f8"),
    ("scl_inter", "<f8"), ("cal_max", "<f8"), ("cal_min", "<f8"), ("slice_duration", "<f8"), ("toffset", "<f8"),
    ("slice_start", "<i8"), ("slice_end", "<i8"), ("descrip", "S80"), ("aux_file", "S24"), ("qform_code", "<i4"),
    ("sform_code", "<i4"), ("quatern", "<f8", 3), ("qoffset", "<f8", 3), ("srow", "<f8", (3, 4)),
    ("slice_code", "<i4"), ("xyzt_units", "<i4"), ("intent_code", "<i4"), ("intent_name", "S16"),
    ("dim_info", "u1"), ("unused", "S15"),
]  # fmt: skip
NIFTI2 = np.dtype(_FIELDS2)
VERSIONS = (NIFTI1, NIFTI2)
MAGIC = {NIFTI1: b"n+1", NIFTI2: b"n+2\0\r\n\x1a\n"}
EXTENDER_BYTES = 4
LABELS_INTENT = 1002
MILLIMETRES = 2
SCANNER = 1  # coordinates of the scanner
LENGTHS = {1: "meter", 2: "millimeter", 3: "micrometer"}
TIMES = {8: "second", 16: "millisecond", 24: "microsecond"}
# The largest deviation from right angles of a rotation's axes.
_ORTHOGONAL = 1e-4
_HALF_TURN = 1e-7  # the square of a, below which the rotation is by 180 degrees, as in nifti1_io.c
_TOLERATED = 1e-5  # of a pixel size, stored in float32 twice


def blank(version: np.dtype[Any] = NIFTI1) -> Record:
    """A header without a place or units, whose values are stored unscaled."""
    record = np.zeros((), version)
    record["sizeof_hdr"], record["magic"] = version.itemsize, MAGIC[version]
    record["vox_offset"] = version.itemsize + EXTENDER_BYTES
    record["dim"], record["pixdim"], record["scl_slope"] = 1, 1, 1
    return record


def put_affine(record: Record, affine: NDArray[np.float64], code: int = SCANNER) -> None:
    """State where the volume lies: (4, 4), from indices (x, y, z, 1) to coordinates."""
    quaternion, qfac = quaternion_of(affine)
    record["pixdim"][0] = qfac
    record["sform_code"], record["srow"] = code, affine[:3]
    if quaternion is not None:
        record["qform_code"], record["quatern"], record["qoffset"] = code, quaternion, affine[:3, 3]


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


@dataclass(frozen=True, repr=False)
class NiftiTags:
    """What a NIfTI result takes over from a NIfTI input: its whole header, little-endian, and its extensions."""

    head: bytes
    extensions: tuple[tuple[int, bytes], ...] = ()  # code and content

    def __repr__(self) -> str:
        return f"NiftiTags({self.head!r}, {self.extensions!r})"

    @property
    def record(self) -> Record:
        """A copy of the header's fields."""
        version = next(each for each in VERSIONS if each.itemsize == len(self.head))
        return np.frombuffer(bytearray(self.head), version).reshape(())

    @property
    def affine(self) -> NDArray[np.float64] | None:
        """(3, 4), of the sform, else of the qform; None if there is neither."""
        record = self.record
        if record["sform_code"] > 0:
            return np.asarray(record["srow"], np.float64)
        return _of_quaternion(record) if record["qform_code"] > 0 else None

    @property
    def origin(self) -> tuple[float, float, float] | None:
        """The first sample's position, if the axes run along x, y and z, with the pixel sizes; else None."""
        affine, sizes = self.affine, self.record["pixdim"][1:4].astype(np.float64)
        if affine is None or np.abs(affine[:, :3] - np.diag(sizes)).max() > _TOLERATED * np.abs(sizes).max():
            return None
        x, y, z = affine[:, 3].tolist()
        return x, y, z

    def facts(self) -> dict[str, str]:
        """As `Calibration.facts`."""
        record = self.record
        known = {
            "affine": ("orientation in space (affine)", self.affine is not None and self.origin is None),
            "intent": ("intent", int(record["intent_code"]) not in (0, LABELS_INTENT)),
            "slices": ("slice timing", bool(record["slice_code"] or record["slice_duration"])),
            "auxiliary": ("auxiliary file", bool(record["aux_file"].item())),
            "extensions": ("NIfTI extensions", bool(self.extensions)),
        }
        return {key: words for key, (words, is_known) in known.items() if is_known}

    def cropped(self, boxes: Mapping[str, range]) -> NiftiTags:
        """The tags of a part: place and time move with its first sample; the timing of slices is that of the whole."""
        record, times = self.record, boxes.get("T", range(1))
        first = np.array([boxes.get(letter, range(1)).start for letter in "XYZ"], np.float64)
        moved = _of_quaternion(record)[:, :3] @ first
        record["qoffset"] = record["qoffset"] + (moved if record["qform_code"] > 0 else 0)
        record["srow"][:, 3] = record["srow"][:, 3] + record["srow"][:, :3].astype(np.float64) @ first
        record["toffset"] = record["toffset"] + times.start * record["pixdim"][4]
        record["pixdim"][4] = record["pixdim"][4] * times.step
        if "Z" in boxes and len(boxes["Z"]) < record["dim"][3]:
            for name in ("slice_start", "slice_end", "slice_code", "slice_duration"):
                record[name] = 0
        return NiftiTags(record.tobytes(), self.extensions)


def _of_quaternion(record: Record) -> NDArray[np.float64]:
    b, c, d = record["quatern"].astype(np.float64)
    left = 1.0 - (b * b + c * c + d * d)
    if left < _HALF_TURN:  # rounding of b, c and d
        b, c, d = np.array([b, c, d]) / np.sqrt(1.0 - left)
    a = np.sqrt(left) if left >= _HALF_TURN else 0.0
    rotation = np.array(
        [
            [a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c)],
            [2 * (b * c + a * d), a * a + c * c - b * b - d * d, 2 * (c * d - a * b)],
            [2 * (b * d - a * c), 2 * (c * d + a * b), a * a + d * d - b * b - c * c],
        ]
    )
    sizes = record["pixdim"][1:4].astype(np.float64) * [1, 1, -1 if record["pixdim"][0] < 0 else 1]
    return np.column_stack((rotation * sizes, record["qoffset"].astype(np.float64)))
