"""The parameters of `millrace run coulomb`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from kernels.coulomb import Scheme
from kernels.ewald import DEFAULT_CUTOFF_ANGSTROM as DEFAULT_NEAR_ANGSTROM
from kernels.ewald import DEFAULT_FREE_CUTOFF_ANGSTROM as DEFAULT_FREE_NEAR_ANGSTROM
from kernels.ewald import LEVELS, Boundary, Method
from pipeline.config import AbsolutePath
from pipeline.formats.charges.base import Array, cell_from
from pipeline.workloads.common.index_range import IndexRange
from pipeline.workloads.coulomb.units import DEFAULT_TEMPERATURE_KELVIN, Units
from pipeline.workloads.paths import version_of
from pipeline.workloads.protocol import Parameters

Combination = Literal["avg", "min", "max", "std", "none"]

FULL = ("ewald", "full")  # the schemes with a far part

DEFAULT_CUTOFF_ANGSTROM = 12.0
DEFAULT_PADDING_ANGSTROM = 5.0
DEFAULT_SPACING_ANGSTROM = 0.5
# In angstrom. Beyond this, float32 sums are no longer accurate.
FARTHEST_ANGSTROM = 1e6
LEAST_CUTOFF_ANGSTROM = 1e-2
LEAST_PERMITTIVITY, LARGEST_PERMITTIVITY = 1e-3, 1e12


class CoulombParameters(Parameters):
    """Lengths in angstrom, charges in elementary charges, temperatures in kelvin."""

    trajectory: AbsolutePath | None = Field(
        None, description="coordinates for the charges of INPUT, a topology: .dcd, .xtc, .trr, or one .gro, .pdb …"
    )
    select: str | None = Field(
        None,
        json_schema_extra={"unit": "SELECTION"},
        description="atoms to include, in MDAnalysis' selection language: 'protein and not name H*' [default: all]",
    )
    frames: str = Field(
        ":",
        json_schema_extra={"unit": "A:B:STEP"},
        description="frames from 0, or from the end as -1, -2 …: start:stop:step (stop not included), or one",
    )
    combine: Combination = Field(
        "avg", description="how several frames are combined at each point: mean, minimum, maximum, standard deviation"
    )
    scheme: Literal["shift", "taylor2", "truncate", "ewald", "full", "direct"] = Field(
        "shift",
        description="potential of a charge q at distance r, s = r/cutoff. Within the cutoff, shift: q/r (1 - s²)²; "
        "taylor2: q (1/r - (1.875 - 1.25 s² + 0.375 s⁴)/cutoff); truncate: q/r. Without one, ewald: q/r of all atoms "
        "and their periodic images; full: q/r of all atoms, by a mesh; direct: the same, one by one",
    )
    cutoff: float | None = Field(
        None,
        json_schema_extra={"unit": "Å"},
        ge=LEAST_CUTOFF_ANGSTROM,
        lt=FARTHEST_ANGSTROM,
        allow_inf_nan=False,
        description=f"ignore atoms beyond this, in angstrom [default: {DEFAULT_CUTOFF_ANGSTROM:g}; direct has none]; "
        "for ewald and full, the reach of the part that no mesh computes "
        f"[default: {DEFAULT_NEAR_ANGSTROM:g} and {DEFAULT_FREE_NEAR_ANGSTROM:g}]",
    )
    accuracy: float | None = Field(
        None,
        le=1e-2,
        gt=0,
        allow_inf_nan=False,
        description="for ewald and full: relative L2 error beyond 1 Å of any atom, "
        f"{LEVELS[-1].accuracy:g} or more [default: {LEVELS[0].accuracy:g}]",
    )
    boundary: Boundary | None = Field(
        None, description="for ewald: a conductor around the crystal, or a vacuum [default: tinfoil]"
    )
    smear: float | None = Field(
        None,
        json_schema_extra={"unit": "1/Å"},
        ge=1e-3,
        le=1e3,
        allow_inf_nan=False,
        description="for ewald and full: charges are Gaussians q (S/√π)³ exp(-S² r²), S in 1/angstrom, as PMEPot's are "
        "(0.25)",
    )
    dielectric: str = Field(
        "1",
        json_schema_extra={"unit": "X|Xr"},
        description="relative permittivity: 4, or 4r for 4 times the distance in angstrom",
    )
    exclude_radius: float = Field(
        0.0,
        json_schema_extra={"unit": "Å"},
        ge=0,
        lt=FARTHEST_ANGSTROM,
        allow_inf_nan=False,
        description="set points closer than this to any atom to 0, in angstrom; 0: none",
    )
    cell: str = Field(
        "file",
        json_schema_extra={"unit": "CELL"},
        description="the periodic cell: file (each frame's own, if it has one; direct and full ignore it), none, or "
        "A,B,C or A,B,C,ALPHA,BETA,GAMMA in angstrom and degrees, or 9 numbers: three vectors",
    )
    spacing: tuple[float, ...] | None = Field(
        None,
        json_schema_extra={"unit": "Å"},
        description="angstrom between grid points, for all axes or for each: 1 or 1,1,2 "
        f"[default: {DEFAULT_SPACING_ANGSTROM:g}]",
    )
    padding: float | None = Field(
        None,
        json_schema_extra={"unit": "Å"},
        ge=0,
        lt=FARTHEST_ANGSTROM,
        allow_inf_nan=False,
        description=f"angstrom of grid beyond the atoms of all frames [default: {DEFAULT_PADDING_ANGSTROM:g}]",
    )
    origin: tuple[float, ...] | None = Field(
        None,
        json_schema_extra={"unit": "Å"},
        description="the first grid point, X,Y,Z in angstrom; requires --shape, replaces --padding",
    )
    shape: tuple[int, ...] | None = Field(
        None, description="grid points along x, y and z, as NX,NY,NZ; requires --origin"
    )
    profile: Literal["x", "y", "z"] | None = Field(
        None, description="also write the mean over the planes across this axis, as OUTPUT.profile-AXIS.csv and .png"
    )
    at: AbsolutePath | None = Field(
        None,
        description="a CSV file of points x,y,z in angstrom: also write the potential there, in float64, without the "
        "term of an atom at the point itself, as OUTPUT.at.csv",
    )
    units: Units = Field("kT/e", description="unit of the map's values; e/A is charge over distance without a constant")
    temperature: float | None = Field(
        None,
        json_schema_extra={"unit": "K"},
        ge=1e-3,
        le=1e9,
        allow_inf_nan=False,
        description=f"kelvin, for --units kT/e [default: {DEFAULT_TEMPERATURE_KELVIN}]",
    )

    @field_validator("spacing", "origin", "shape", mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(","))
        return value if value is None or isinstance(value, tuple | list) else (value,)

    @field_validator("spacing")
    @classmethod
    def _one_or_three(cls, value: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if value is not None and (
            len(value) not in (1, 3) or not all(1e-6 <= step <= FARTHEST_ANGSTROM for step in value)
        ):
            raise ValueError(
                f"one length or three, 1e-6 to {FARTHEST_ANGSTROM:g} Å, as 0.5 or 1,1,2; got {_joined(value)}"
            )
        return value

    @field_validator("origin")
    @classmethod
    def _place(cls, value: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if value is not None and (len(value) != 3 or not all(abs(place) <= FARTHEST_ANGSTROM for place in value)):
            raise ValueError(f"three numbers of at most {FARTHEST_ANGSTROM:g} Å, as X,Y,Z; got {_joined(value)}")
        return value

    @field_validator("shape")
    @classmethod
    def _counts(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and (len(value) != 3 or min(value) < 1):
            raise ValueError(f"three numbers of points, 1 or more, as NX,NY,NZ; got {_joined(value)}")
        return value

    @field_validator("frames")
    @classmethod
    def _range(cls, value: str) -> str:
        return str(IndexRange.parse(value))

    @field_validator("dielectric", mode="before")
    @classmethod
    def _permittivity(cls, value: Any) -> str:
        text = str(value).strip()
        try:
            _scheme_with(text)
        except ValueError:
            raise ValueError(
                f"a number from {LEAST_PERMITTIVITY:g} to {LARGEST_PERMITTIVITY:g}, or one and r for so much times r; "
                f"got {text!r}"
            ) from None
        return text

    @field_validator("cell", mode="before")
    @classmethod
    def _cell_numbers(cls, value: Any) -> Any:
        return ",".join(map(str, value)) if isinstance(value, tuple | list) else value

    @field_validator("cell")
    @classmethod
    def _cell_words(cls, value: str) -> str:
        if value not in ("file", "none"):
            _given_cell(value)
        return value

    @model_validator(mode="after")
    def _fitting(self) -> CoulombParameters:
        self._check_full()
        if self.scheme == "direct" and self.cutoff is not None:
            raise ValueError("--scheme direct has no cutoff: leave --cutoff out, or choose shift, taylor2 or truncate")
        if self.scheme in ("direct", "full") and self.cell not in ("file", "none"):
            raise ValueError(
                f"--scheme {self.scheme} has no images: leave --cell out, or choose shift, taylor2, truncate or ewald"
            )
        if (self.origin is None) != (self.shape is None):
            raise ValueError("--origin and --shape go together: give both, or neither and perhaps --padding")
        if self.origin is not None and self.padding is not None:
            raise ValueError("--padding is for a grid around the atoms: leave it out, or --origin and --shape")
        if self.temperature is not None and self.units != "kT/e":
            raise ValueError(f"--temperature matters to --units kT/e alone; leave it out with {self.units}")
        return self

    def _check_full(self) -> None:
        if self.scheme not in FULL:
            for option in ("accuracy", "boundary", "smear"):
                if getattr(self, option) is not None:
                    raise ValueError(f"--{option} is for the schemes ewald and full: leave it out with {self.scheme}")
            return
        if self.accuracy is not None and self.accuracy < LEVELS[-1].accuracy * (1 - 1e-9):
            raise ValueError(
                f"--accuracy {self.accuracy:g} is finer than float32 maps can be: choose at least "
                f"{LEVELS[-1].accuracy:g}"
            )
        if _scheme_with(self.dielectric)[1]:
            raise ValueError(
                f"--dielectric {self.dielectric}: one that grows with the distance has no far field on a mesh: "
                "choose a number, or shift, taylor2, truncate or direct"
            )
        if self.scheme == "full" and self.boundary is not None:
            raise ValueError("--boundary is for --scheme ewald: a full sum has no images; leave it out")
        if self.scheme == "ewald" and self.cell == "none":
            raise ValueError("--scheme ewald needs a periodic cell: leave out --cell none, or choose --scheme full")
        if self.smear is not None and self.cutoff is not None:
            raise ValueError("--smear leaves no near part, so --cutoff means nothing: leave one of them out")

    @property
    def frame_range(self) -> IndexRange:
        return IndexRange.parse(self.frames)

    @property
    def temperature_kelvin(self) -> float:
        return DEFAULT_TEMPERATURE_KELVIN if self.temperature is None else self.temperature

    @property
    def steps(self) -> tuple[float, float, float]:
        """The spacing along x, y and z."""
        given = self.spacing or (DEFAULT_SPACING_ANGSTROM,)
        x, y, z = given * 3 if len(given) == 1 else given
        return x, y, z

    @property
    def formula(self) -> Scheme:
        """The scheme as the kernels take it."""
        factor, by_distance = _scheme_with(self.dielectric)
        if self.method is not None:
            return replace(self.method.scheme, exclude_radius_angstrom=self.exclude_radius)
        return Scheme(
            name=self.scheme,
            cutoff_angstrom=DEFAULT_CUTOFF_ANGSTROM if self.cutoff is None else self.cutoff,
            dielectric=factor,
            distance_dependent=by_distance,
            exclude_radius_angstrom=self.exclude_radius,
        )

    @property
    def method(self) -> Method | None:
        """How the kernels compute the schemes with a far part; None for others."""
        if self.scheme not in FULL:
            return None
        near = DEFAULT_NEAR_ANGSTROM if self.scheme == "ewald" else DEFAULT_FREE_NEAR_ANGSTROM
        return Method(
            accuracy=LEVELS[0].accuracy if self.accuracy is None else self.accuracy,
            cutoff_angstrom=near if self.cutoff is None else self.cutoff,
            boundary=self.boundary or "tinfoil",
            dielectric=_scheme_with(self.dielectric)[0],
            exclude_radius_angstrom=self.exclude_radius,
            smear_per_angstrom=self.smear,
            free=self.scheme == "full",
        )

    @property
    def uses_frame_cells(self) -> bool:
        """Whether each frame's own cell is used."""
        return self.cell == "file" and self.scheme not in ("direct", "full")

    @property
    def given_cell(self) -> Array | None:
        """The cell given as a parameter, vectors as rows."""
        return None if self.cell in ("file", "none") else _given_cell(self.cell)

    @property
    def further_files(self) -> Iterator[Path]:
        yield from (path for path in (self.trajectory, self.at) if path is not None)

    def in_force(self) -> dict[str, Any]:
        found = self.model_dump(mode="json", exclude_none=True)
        found |= {"frames": str(self.frame_range), "spacing": list(self.steps)}
        if self.trajectory is not None:
            found["trajectory"] = version_of(self.trajectory)
        if self.at is not None:
            found["at"] = version_of(self.at)
        if self.scheme in ("direct", "full"):
            found["cell"] = "none"
        if self.scheme not in ("direct", *FULL):
            found["cutoff"] = self.formula.cutoff_angstrom
        if self.method is not None:
            found["accuracy"] = self.method.accuracy
        if self.scheme == "ewald":
            found.setdefault("boundary", "tinfoil")
        if self.origin is None:
            found.setdefault("padding", DEFAULT_PADDING_ANGSTROM)
        if self.units == "kT/e":
            found["temperature"] = self.temperature_kelvin
        return found


def _scheme_with(dielectric: str) -> tuple[float, bool]:
    """The permittivity, or its factor, and whether it grows with the distance. Raises ValueError."""
    by_distance = dielectric.endswith("r")
    factor = float(dielectric.removesuffix("r") or 1) if by_distance else float(dielectric)
    if not LEAST_PERMITTIVITY <= factor <= LARGEST_PERMITTIVITY:
        raise ValueError(f"a permittivity of {factor:g}")
    return factor, by_distance


def _given_cell(text: str) -> Array:
    try:
        numbers = np.array([float(part) for part in text.split(",")])
        found = cell_from(numbers.reshape(3, 3) if numbers.size == 9 else numbers)
    except ValueError as error:
        raise ValueError(
            f"file, none, or 3 lengths, 3 lengths and 3 angles, or 9 numbers, with commas; got {text!r} ({error})"
        ) from None
    if found is None:
        raise ValueError(f"{text!r} stands for no cell in files: pass none")
    return found


def _joined(values: Any) -> str:
    return ",".join(f"{value:g}" for value in values)
