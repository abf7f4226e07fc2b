"""The header of a reconstructed series: its shape, and the positions of its voxels in the patient."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.formats.image.base import ImageWriter, Region
from pipeline.formats.kspace.base import KSpaceHeader, Placement
from pipeline.formats.series.base import SeriesHeader
from pipeline.workloads.mri.parameters import MriParameters
from pipeline.workloads.mri.source.images import ImageSource

# DICOM and ISMRMRD count to the left and to the back, NIfTI to the right and to the front.
_TO_RAS = np.diag([-1.0, -1.0, 1.0])
_UNEVEN_MM = 1e-2


def series_header(source: ImageSource, parameters: MriParameters, times: int) -> SeriesHeader:
    """The header of the output of so many times or coefficients, with an affine if the file states a field of view."""
    shape = source.grid.shape
    planes = shape[2] if len(shape) == 3 else len(source.slices)
    voxel = voxel_mm(source.header, shape)
    affine = None
    if voxel is not None:
        placements = [source.header.placements[slice_] for slice_ in source.slices if source.header.placements]
        affine = affine_of(placements, shape, voxel)
        if len(shape) == 2:
            x, y, _ = voxel
            voxel = (x, y, float(np.linalg.norm(affine[:3, 2])))
    return SeriesHeader(
        shape=(times, planes, shape[1], shape[0]),
        dtype=np.dtype(np.complex64 if parameters.output_values == "complex" else np.float32),
        is_volume=len(shape) == 3,
        voxel_mm=voxel,
        affine=affine,
        window=parameters.window_limits,
        title=f"{source.path.name}, {parameters.method}",
    )


def voxel_mm(header: KSpaceHeader, shape: tuple[int, ...]) -> tuple[float, float, float] | None:
    """Along x, y and z; z of slices is their thickness."""
    if header.fov_mm is None:
        return None
    x, y, z = header.fov_mm
    return x / shape[0], y / shape[1], z / (shape[2] if len(shape) == 3 else 1)


def affine_of(
    placements: list[Placement], shape: tuple[int, ...], voxel: tuple[float, float, float]
) -> NDArray[np.float64]:
    """(4, 4), from voxel indices to mm, axes right, anterior, superior. Pixel n // 2 is the middle of the
    field of view.

    placements : of each slice, or of the volume; none: the patient's axes, centred on the scanner. If the first and
                 last slice are in one plane, slices are a thickness apart along z: an affine needs a third direction
    """
    directions, position = np.eye(3), np.zeros(3)
    if placements:
        directions, position = np.array(placements[0].directions), np.array(placements[0].position)
    columns = directions.T * np.array(voxel)
    if len(shape) == 2 and len(placements) > 1:
        step = (np.array(placements[-1].position) - position) / (len(placements) - 1)
        if np.abs(step @ directions[2]) > _UNEVEN_MM:
            columns[:, 2] = step
    centre = np.array([*(n // 2 for n in shape), *([0] if len(shape) == 2 else [])])
    affine = np.eye(4)
    affine[:3, :3] = _TO_RAS @ columns
    affine[:3, 3] = _TO_RAS @ (position - columns @ centre)
    return affine


def misplaced(source: ImageSource) -> str:
    """Why no affine fits all slices, for the receipt; empty if one does."""
    found = [source.header.placements[slice_] for slice_ in source.slices if source.header.placements]
    positions = np.array([each.position for each in found])
    directions = np.array([each.directions for each in found])
    if len(found) < 2:
        return ""
    if np.abs(positions - positions[0]).max() <= _UNEVEN_MM:
        return "all in one place by the header: the affine puts them a thickness apart"
    if np.abs((positions - positions[0]) @ directions[0, 2]).max() <= _UNEVEN_MM:
        return "all in one plane by the header: the affine puts them a thickness apart"
    line = np.linspace(positions[0], positions[-1], len(positions))
    if np.abs(positions - line).max() > _UNEVEN_MM or np.abs(directions - directions[0]).max() > 1e-3:
        return "not evenly apart: the affine is a mean one"
    return ""


class MagnitudeSink:
    """Writes the magnitudes of complex images."""

    def __init__(self, writer: ImageWriter) -> None:
        self._writer = writer
        self.flush, self.publish = writer.flush, writer.publish
        self.keep, self.discard = writer.keep, writer.discard

    def write(self, region: Region, samples: NDArray[Any]) -> None:
        self._writer.write(region, np.abs(samples))
