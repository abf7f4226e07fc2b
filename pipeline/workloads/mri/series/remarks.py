"""What the plan and the receipt say about an MRI job's data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config import format_bytes
from pipeline.formats.series.base import SeriesHeader
from pipeline.workloads.mri.parameters import MriParameters
from pipeline.workloads.mri.series.header import misplaced
from pipeline.workloads.mri.source.images import ImageSource


def remarks(
    source: ImageSource, parameters: MriParameters, header: SeriesHeader, most_bytes: int, least_bytes: int | None
) -> dict[str, Any]:
    """Remarks by name. header: of the output. most_bytes: of GPU memory. least_bytes: if coil maps may be streamed."""
    first = source.images[0]
    found: dict[str, Any] = {
        "coils": source.coils,
        "channels": source.channels,
        "readouts": _readouts(source, parameters),
        "samples": first.samples,
        "traj_units": source.grid.units,
        "prewhitened": source.white is not None,
    }
    if source.delays is not None:
        found["gradient_delay_samples"] = _delays(source.delays, source.delay_error)
    if source.grid.warning:
        found["warning"] = source.grid.warning
    if source.header.cartesian:
        found["sampling"] = f"Cartesian, {first.points / math.prod(source.grid.shape):.3g} of the grid"
    if header.voxel_mm is not None:
        found["voxel_mm"] = [round(length, 6) for length in header.voxel_mm]
    if why := misplaced(source):
        found["slices"] = why
    if source.frames > 1:
        found["frames"] = source.frames
    if source.header.times > 1:
        found["times"] = list(source.header.time_names)
    found["gpu_memory"] = f"at most {format_bytes(most_bytes)} besides the chunks"
    if least_bytes is not None:
        found["gpu_memory"] += f", and at least {format_bytes(least_bytes)}: coil maps are streamed if need be"
    return found


def _readouts(source: ImageSource, parameters: MriParameters) -> int | list[int]:
    """Readouts of the first image; with a sorting file, of each motion state of the first slice and time."""
    counts = [image.readouts.count for image in source.images]
    return counts[0] if parameters.sorting is None else counts[: source.frames]


def _delays(matrix: NDArray[np.float64], error: float | None) -> dict[str, float]:
    """For the receipt: of each gradient, and of estimated ones the coupling and the crossings' error."""
    found = {"xyz"[axis]: round(float(matrix[axis, axis]), 4) for axis in range(len(matrix))}
    return found if error is None else found | {"xy": round(float(matrix[0, 1]), 4), "error": round(error, 4)}
