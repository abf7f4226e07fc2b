"""The image's grid, and its trajectory converted to cycles per field of view."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import InputError, ParameterError
from pipeline.formats.kspace.base import KSpaceHeader, TrajectoryUnits
from pipeline.workloads.mri.parameters import MriParameters

# Gradient delays may shift samples slightly beyond the matrix.
_BEYOND = 1.02
# A trajectory that fills less of the matrix suggests other units or another matrix.
_FILLED = 0.25
_OPTION = "--traj-units"
# A trajectory without units that reaches exactly this far, apart from float32's rounding, is in cycles/pixel.
_HALF, _ROUNDING = 0.5, 1e-6


@dataclass(frozen=True, kw_only=True)
class ImageGrid:
    """The pixels along x, y (and z), the units of the file's trajectory, and the factor along each axis that converts
    them to cycles per field of view. warning: what was concluded from the trajectory's range, if anything was."""

    shape: tuple[int, ...]
    units: TrajectoryUnits
    factors: tuple[float, ...]
    warning: str = ""

    def scaled(self, points: NDArray[np.float64], where: str) -> NDArray[np.float64]:
        """The trajectory (…, dimensions) in cycles per field of view. InputError if it leaves the matrix."""
        scaled = points * np.array(self.factors)
        reach = np.abs(scaled).reshape(-1, len(self.shape)).max(axis=0, initial=0)
        for axis, (far, n) in enumerate(zip(reach, self.shape, strict=True)):
            if far > _BEYOND * n / 2:
                raise InputError(
                    f"{where}: its trajectory reaches {far:.4g} cycles per field of view along {'xyz'[axis]}, unlike "
                    f"that of the first image; {n} pixels resolve {n / 2:g}"
                )
        return np.asarray(scaled)


def image_grid(parameters: MriParameters, header: KSpaceHeader, points: NDArray[np.float64], path: Path) -> ImageGrid:
    """The grid of the parameters and the file. ParameterError, with the units that the trajectory's range suggests, if
    units are missing or do not fit the matrix.

    points : (…, dimensions), the first image's trajectory in the file's units
    """
    reach = np.abs(points).reshape(-1, header.dimensions).max(axis=0)
    if not reach.max() > 0:
        raise InputError(f"{path}: every point of its trajectory is the centre of k-space")
    _refuse_several_missing(parameters, header, _free(header, reach), path, points.shape[-2])
    units = _units(parameters, header, _free(header, reach), path)
    shape = _shape(parameters, header, units, reach, path)
    concluded = parameters.traj_units is None and header.units is None
    grid = ImageGrid(
        shape=shape,
        units=units,
        factors=_factors(header, units, shape),
        warning=f"{path} states no units for its trajectory; its range of exactly ±0.5 is taken as {units}: "
        f"if it is not, pass {_OPTION}"
        if concluded
        else "",
    )
    _refuse_misfit(parameters, header, grid, reach, path)
    return grid


def _free(header: KSpaceHeader, reach: NDArray[np.float64]) -> float:
    """How far the trajectory reaches along the axes whose units are unknown."""
    return float(reach[:2].max() if header.plane_steps else reach.max())


def _units(parameters: MriParameters, header: KSpaceHeader, reach: float, path: Path) -> TrajectoryUnits:
    given = parameters.traj_units
    if header.units is not None:
        if given not in (None, header.units):
            raise ParameterError(f"{_OPTION} {given}: {path} defines its own, {header.units}: leave it out")
        return header.units
    if given is None and abs(reach - _HALF) <= _ROUNDING:
        return "cycles/pixel"
    if given is None:
        raise ParameterError(
            f"{_OPTION}: {path} states no units for its trajectory, which reaches {reach:.4g}: that suggests "
            f"{_suggested(reach)}; pass one of cycles/pixel, cycles/fov or radians/pixel"
        )
    return given


def _refuse_several_missing(
    parameters: MriParameters, header: KSpaceHeader, reach: float, path: Path, samples: int
) -> None:
    """ParameterError that asks for everything at once, if the file and the parameters lack more than one thing."""
    suggested = _suggested(reach)
    units = header.units or parameters.traj_units
    lacking = {
        _OPTION: ("units", suggested, units is None and abs(reach - _HALF) > _ROUNDING),
        "--matrix": (
            "pixels",
            str(samples),
            parameters.matrix is None and header.matrix is None and (units or suggested) != "cycles/fov",
        ),
        "--dwell": (
            "time between samples",
            "5",
            parameters.field_map is not None and parameters.dwell is None and header.dwell_us is None,
        ),
    }
    missing = {option: (what, example) for option, (what, example, lacks) in lacking.items() if lacks}
    if len(missing) > 1:
        *names, last = missing
        nothing = " nor ".join(what for what, _ in missing.values())
        asked = " ".join(f"{option} {example}" for option, (_, example) in missing.items())
        raise ParameterError(
            f"{', '.join(names)} and {last}: {path} states no {nothing}; its trajectory reaches {reach:.4g}, with "
            f"{samples} samples a readout: give all of them, such as {asked}"
        )


def _suggested(reach: float) -> TrajectoryUnits:
    if reach <= 0.5 * _BEYOND:
        return "cycles/pixel"
    return "radians/pixel" if reach <= math.pi * _BEYOND else "cycles/fov"


def _shape(
    parameters: MriParameters, header: KSpaceHeader, units: TrajectoryUnits, reach: NDArray[np.float64], path: Path
) -> tuple[int, ...]:
    asked = parameters.matrix
    if asked is not None:
        if len(asked) == 1:
            return asked * header.dimensions
        if len(asked) != header.dimensions:
            raise ParameterError(
                f"--matrix {','.join(map(str, asked))}: the trajectory of {path} has {header.dimensions} axes: give 1 "
                f"or {header.dimensions} numbers"
            )
        return asked
    if header.matrix is not None:
        return header.matrix
    if units == "cycles/fov":
        # The pixels that the range needs, as in BART; rounding must not add any.
        return tuple(max(2 * math.ceil(far - 1e-3), 1) for far in reach)
    raise ParameterError(
        f"--matrix: {path} states no matrix, and its trajectory in {units} implies none: give the pixels, such as "
        "--matrix 256"
    )


def _factors(header: KSpaceHeader, units: TrajectoryUnits, shape: tuple[int, ...]) -> tuple[float, ...]:
    share = header.encoded_fov or (1.0,) * len(shape)
    encoded = header.encoded or shape
    by_units = {
        "cycles/fov": share,
        "cycles/pixel": encoded,
        "radians/pixel": tuple(n / (2 * math.pi) for n in encoded),
    }[units]
    factors = [float(factor) for factor in by_units]
    if header.plane_steps:
        factors[2] = share[2]
    return tuple(factors)


def _refuse_misfit(
    parameters: MriParameters, header: KSpaceHeader, grid: ImageGrid, reach: NDArray[np.float64], path: Path
) -> None:
    filled = reach * np.array(grid.factors) / (np.array(grid.shape) / 2)
    worst = int(np.argmax(filled))
    if _FILLED <= filled[worst] <= _BEYOND:
        return
    far, n = reach[worst] * grid.factors[worst], grid.shape[worst]
    pixels = " × ".join(map(str, grid.shape))
    needed = (max(2 * math.ceil(axis - 1e-3), 1) for axis in reach * np.array(grid.factors))
    # Axes that fit stay, unless even the widest is nearly empty.
    fits = [filled[worst] > _BEYOND >= share for share in filled]
    fitting = [own if fit else least for own, least, fit in zip(grid.shape, needed, fits, strict=True)]
    said = f"the trajectory of {path} reaches {far:.4g} cycles per field of view along {'xyz'[worst]}"
    if parameters.matrix is not None:
        asked = ",".join(map(str, parameters.matrix))
        problem = f"--matrix {asked}: {said}, for which {_numbers(fitting)} pixels are right"
    else:
        problem = f"{_OPTION} {grid.units}: {said}, where its matrix {pixels} resolves {n / 2:g}"
    suggested = _suggested(_free(header, reach))
    if header.units is not None or suggested == grid.units:
        if parameters.matrix is None:
            problem += f"; give --matrix {_numbers(fitting)}"
    else:
        problem += f"; its range in the file, {_free(header, reach):.4g}, suggests {_OPTION} {suggested}"
    raise ParameterError(problem)


def _numbers(pixels: list[int]) -> str:
    return ",".join(map(str, pixels[:1] if len(set(pixels)) == 1 else pixels))
