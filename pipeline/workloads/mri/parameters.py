"""The parameters of `millrace run mri`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, Field, field_validator, model_validator

from pipeline.config import AbsolutePath
from pipeline.errors import counted
from pipeline.formats.cfl import files_of
from pipeline.formats.kspace.base import TrajectoryUnits
from pipeline.workloads.common.index_range import IndexRange
from pipeline.workloads.paths import version_of
from pipeline.workloads.protocol import BETWEEN_NUMBERS, Parameters

DENSITIES = ("pipe-menon", "ramp", "none")
OF_THE_FILE = "file"
SENSITIVITIES = ("walsh", "espirit")
ITERATIONS, REGULARIZED_ITERATIONS = 10, 50
PENALTIES = ("l1-wavelet", "tv", "tv-time", "llr", "l2")
NO_PENALTY, AUTO = "none", "auto"
ARRAY_SUFFIXES = (".npy", ".cfl")
MOST_PIXELS = 1 << 15  # along an axis
MOST_DELAY = 10  # samples


def _number(text: str) -> float:
    """NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _parts(value: Any) -> list[str]:
    """The parts of a list, or of a text with commas."""
    parts = value if isinstance(value, tuple | list) else str(value).split(",")
    return [str(part).strip() for part in parts]


class MriParameters(Parameters):
    """Pixels, cycles per field of view, hertz, microseconds."""

    method: Literal["cg-sense", "gridding"] = Field(
        "cg-sense", description="iterative SENSE, or one weighted adjoint transform, coils combined"
    )
    iterations: int | None = Field(
        None, ge=1, le=1000, description="maximum number of iterations [default: 10; with --regularizer 50]"
    )
    damping: float = Field(
        0.01,
        alias="lambda",
        validation_alias=AliasChoices("lambda", "lamda"),  # Python's keyword arguments cannot say lambda
        ge=0,
        le=1e6,
        allow_inf_nan=False,
        description="cg-sense: Tikhonov damping, relative to the normal diagonal",
    )
    tolerance: float = Field(
        1e-4,
        ge=0,
        lt=1,
        allow_inf_nan=False,
        description="stop at this relative residual, or with --regularizer at this relative change of the image; "
        "0 disables early stopping",
    )
    regularizer: str = Field(
        "none",
        json_schema_extra={"unit": "NAME,…"},
        description="penalties for images from few samples, several with commas: l1-wavelet, tv, tv-time, llr, l2; "
        "tv-time and llr join the frames or times of a slice",
    )
    strength: str = Field(
        "auto",
        json_schema_extra={"unit": "auto|X,…"},
        description="weight of each penalty, relative to the largest pixel of the gridded image (of l2, to the normal "
        "diagonal): a number for all, one for each, or auto, the least risk estimated (SURE)",
    )
    wavelet: Literal["haar", "db2", "db3", "db4"] = Field("db2", description="l1-wavelet: Haar or Daubechies")
    block: int = Field(8, ge=2, le=64, description="llr: pixels of a block along each axis")
    basis: AbsolutePath | None = Field(
        None,
        description="temporal basis (frames, coefficients), .npy or .cfl, with orthonormal columns: the result is the "
        "images of its coefficients",
    )
    gradient_delay: str = Field(
        "none",
        json_schema_extra={"unit": "auto|X,…"},
        description="radial data: auto estimates the delays in the plane (RING); or x,y or x,y,z, the samples by "
        "which each gradient is late",
    )
    matrix: tuple[int, ...] | None = Field(
        None, description="pixels of the image, for all axes or for each: 256 or 256,256,64 [default: the file's]"
    )
    traj_units: TrajectoryUnits | None = Field(
        None, description="units of the trajectory, if neither the format nor the file defines them"
    )
    trajectory: AbsolutePath | None = Field(None, description="BART's pair of trajectory files, for a k-space pair")
    slices: str = Field(
        ":",
        json_schema_extra={"unit": "A:B:STEP"},
        description="slices from 0, or from the end as -1, -2 …: start:stop:step (stop not included), or one",
    )
    frames: int | None = Field(
        None, ge=1, description="readouts per frame of a dynamic series [default: all readouts, one image]"
    )
    frame_step: int | None = Field(
        None,
        ge=1,
        description="readouts from one frame to the next: fewer than --frames slide the window [default: --frames]",
    )
    sorting: AbsolutePath | None = Field(
        None,
        description="motion states instead of frames in time: .npy of the state of each readout, from 0 without gaps; "
        "-1 leaves a readout out",
    )
    view_sharing: int | None = Field(
        None,
        ge=1,
        description="neighbouring readouts on each side that fill the outer k-space of a frame where its own readouts "
        "do not",
    )
    density: str = Field(
        "pipe-menon",
        json_schema_extra={"unit": "NAME|FILE"},
        description="density compensation: pipe-menon, ramp (radial), none, file (the input's), or a file .npy or .cfl",
    )
    sensitivities: str = Field(
        "walsh",
        json_schema_extra={"unit": "NAME|FILE"},
        description="coil sensitivities: walsh or espirit from the k-space centre, or a file .npy or .cfl",
    )
    calibration: int = Field(
        24, ge=4, le=256, description="width of the k-space centre for sensitivities, in cycles per field of view"
    )
    compress: int | None = Field(
        None, ge=1, description="compress to this many virtual coils [default: no compression]"
    )
    prewhiten: Literal["auto", "no"] = Field(
        "auto", description="decorrelate the coils by the file's noise scan, if it has one"
    )
    field_map: AbsolutePath | None = Field(
        None, description="off resonance in hertz, .npy or .cfl as large as the image"
    )
    segments: int | None = Field(
        None, ge=1, le=64, description="time segments of the off-resonance correction [default: as the field map needs]"
    )
    dwell: float | None = Field(
        None,
        json_schema_extra={"unit": "µs"},
        gt=0,
        le=1e6,
        allow_inf_nan=False,
        description="microseconds between samples, if the file does not state them",
    )
    transform: Literal["auto", "gridding", "exact"] = Field(
        "auto", description="non-uniform transform; auto: the faster one"
    )
    eps: float = Field(1e-4, ge=1e-6, le=1e-1, allow_inf_nan=False, description="relative error of the transform")
    split: Literal["auto", "coils", "images"] = Field(
        "auto",
        description="over several workers: the coils of each image, or whole images; auto: the coils of volumes, "
        "if there are fewer volumes than workers",
    )
    window: str = Field(
        "auto",
        json_schema_extra={"unit": "auto|LOW,HIGH"},
        description=".png and .dcm: low,high, the values shown as black and white; auto: 0 and the 99.7th "
        "percentile (.dcm: the largest)",
    )
    output_values: Literal["magnitude", "complex"] = Field("magnitude", description="values of the output")

    @field_validator("matrix", mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(part.strip() for part in BETWEEN_NUMBERS.sub(",", value).split(","))
        return value if value is None or isinstance(value, tuple | list) else (value,)

    @field_validator("matrix")
    @classmethod
    def _sizes(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and (len(value) > 3 or not all(1 <= n <= MOST_PIXELS for n in value)):
            raise ValueError(f"one to three numbers of pixels, 1 to {MOST_PIXELS}; got {','.join(map(str, value))}")
        return value

    @field_validator("regularizer")
    @classmethod
    def _penalties(cls, value: str) -> str:
        names = _parts(value)
        if names == [NO_PENALTY]:
            return value
        for name in names:
            if name not in PENALTIES:
                raise ValueError(f"{', '.join(PENALTIES)}, or several with commas between; got {name!r}")
        if len(set(names)) < len(names):
            raise ValueError(f"each penalty once; got {value!r}")
        return ",".join(names)

    @field_validator("strength")
    @classmethod
    def _strengths(cls, value: str) -> str:
        parts = _parts(value)
        if parts != [AUTO]:
            for part in parts:
                if not 0 < _number(part) < math.inf:
                    raise ValueError(f"auto, or numbers above 0, such as 0.01; got {part!r}")
        return ",".join(parts)

    @field_validator("gradient_delay", mode="before")
    @classmethod
    def _delays(cls, value: Any) -> Any:
        parts = _parts(value)
        if parts not in ([NO_PENALTY], [AUTO]):
            numbers = [_number(part) for part in parts]
            if len(parts) not in (2, 3) or not all(abs(number) <= MOST_DELAY for number in numbers):
                raise ValueError(f"auto, or 2 or 3 numbers of samples, −{MOST_DELAY} to {MOST_DELAY}; got {value!r}")
        return ",".join(parts)

    @field_validator("window", mode="before")
    @classmethod
    def _limits(cls, value: Any) -> Any:
        parts = _parts(value)
        if parts != [AUTO]:
            numbers = [_number(part) for part in parts]
            if len(numbers) != 2 or not -math.inf < numbers[0] < numbers[1] < math.inf:
                raise ValueError(f"auto, or two numbers, low,high, the first smaller; got {value!r}")
        return ",".join(parts)

    @field_validator("slices")
    @classmethod
    def _range(cls, value: str) -> str:
        return str(IndexRange.parse(value))

    @field_validator("density", "sensitivities")
    @classmethod
    def _known_or_file(cls, value: str, info: Any) -> str:
        known = DENSITIES if info.field_name == "density" else SENSITIVITIES
        if value in known or (value == OF_THE_FILE and known is DENSITIES):
            return value
        if Path(value).suffix.lower() not in ARRAY_SUFFIXES:
            raise ValueError(f"{', '.join(known)}, or a file that ends with .npy or .cfl; got {value!r}")
        return os.path.abspath(value)  # noqa: PTH100 - symbolic links are not resolved

    @field_validator("sorting")
    @classmethod
    def _states(cls, value: Path | None) -> Path | None:
        if value is not None and value.suffix.lower() != ".npy":
            raise ValueError(f"a file that ends with .npy; got {str(value)!r}")
        return value

    @field_validator("field_map", "basis")
    @classmethod
    def _array(cls, value: Path | None) -> Path | None:
        if value is not None and value.suffix.lower() not in ARRAY_SUFFIXES:
            raise ValueError(f"a file that ends with .npy or .cfl; got {str(value)!r}")
        return value

    @model_validator(mode="after")
    def _fitting(self) -> MriParameters:
        if self.frame_step is not None and self.frames is None:
            raise ValueError("--frame-step is the way from frame to frame: give --frames, the readouts of each")
        if self.sorting is not None:
            self._refuse(("frames", "frame_step"), "frames in time, and --sorting makes frames of motion states")
        elif self.frames is None:
            self._refuse(("view_sharing",), "--frames or --sorting")
        for name in ("segments", "dwell"):
            if getattr(self, name) is not None and self.field_map is None:
                raise ValueError(f"--{name} belongs to --field-map: give that too, or leave it out")
        if self.method == "gridding":
            stated = () if self.iterations == ITERATIONS else ("iterations",)
            self._refuse((*stated, "damping", "tolerance", "regularizer"), "--method cg-sense")
        self._check_penalties()
        if self.sensitivities not in SENSITIVITIES:
            self._refuse(("calibration",), "--sensitivities walsh or espirit")
        if self.basis is not None:
            self._check_basis()
        return self

    def _check_basis(self) -> None:
        if self.method == "gridding":
            raise ValueError("--basis belongs to --method cg-sense: leave it out")
        if self.field_map is not None:
            raise ValueError("--basis and --field-map cannot be combined: leave one out")
        if "tv-time" in self.penalty_names:
            raise ValueError("--regularizer tv-time belongs to frames, and --basis makes coefficients: use llr")
        if self.frame_step not in (None, self.frames) or self.view_sharing is not None:
            raise ValueError("--basis: each readout belongs to one frame; leave --frame-step and --view-sharing out")

    def _check_penalties(self) -> None:
        names = self.penalty_names
        if not names:
            self._refuse(("strength", "wavelet", "block"), "--regularizer")
            return
        if self.damping != type(self).model_fields["damping"].default:
            raise ValueError(
                "--lambda is that of --method cg-sense alone: with --regularizer add l2, with its --strength"
            )
        if "l1-wavelet" not in names:
            self._refuse(("wavelet",), "--regularizer l1-wavelet")
        if "llr" not in names:
            self._refuse(("block",), "--regularizer llr")
        if self.strength == AUTO:
            if names == ("l2",):
                raise ValueError("--strength: auto finds those of l1-wavelet, tv, tv-time and llr; l2 needs a number")
            if "l2" in names:
                raise ValueError("--strength: with l2 give a number for each penalty instead of auto")
        elif (given := len(self.strength.split(","))) not in (1, len(names)):
            penalties = counted(len(names), "penalty", "penalties")
            raise ValueError(f"--strength {self.strength}: {given} numbers for {penalties}; give one, or one for each")

    def _refuse(self, names: tuple[str, ...], belongs_to: str) -> None:
        """Refuses values that would have no effect; a form may state the defaults."""
        for name in names:
            field = type(self).model_fields[name]
            if getattr(self, name) != field.default:
                raise ValueError(f"--{(field.alias or name).replace('_', '-')} belongs to {belongs_to}: leave it out")

    @property
    def penalty_names(self) -> tuple[str, ...]:
        return () if self.regularizer == NO_PENALTY else tuple(self.regularizer.split(","))

    @property
    def penalty_strengths(self) -> dict[str, float | None]:
        """Strengths by name of the penalty; None: automatic."""
        names, parts = self.penalty_names, self.strength.split(",")
        if parts == [AUTO]:
            return dict.fromkeys(names)
        numbers = [float(part) for part in parts]
        return dict(zip(names, numbers * len(names) if len(numbers) == 1 else numbers, strict=True))

    @property
    def delays(self) -> tuple[float, ...] | None:
        """The delays that are given, in samples."""
        if self.gradient_delay in (NO_PENALTY, AUTO):
            return None
        return tuple(map(float, self.gradient_delay.split(",")))

    @property
    def window_limits(self) -> tuple[float, float] | None:
        """None: automatic."""
        if self.window == AUTO:
            return None
        low, high = map(float, self.window.split(","))
        return low, high

    @property
    def has_penalties(self) -> bool:
        """Whether there are others than l2, which is the damping of conjugate gradients."""
        return bool(set(self.penalty_names) - {"l2"})

    @property
    def has_random_shifts(self) -> bool:
        """Whether a penalty shifts the image randomly in each iteration."""
        return bool({"l1-wavelet", "llr"} & set(self.penalty_names))

    @property
    def joins_times(self) -> bool:
        """Whether all times of a slice are one problem."""
        return self.basis is not None or bool({"tv-time", "llr"} & set(self.penalty_names))

    @property
    def most_iterations(self) -> int:
        return self.iterations or (REGULARIZED_ITERATIONS if self.has_penalties else ITERATIONS)

    @property
    def slice_range(self) -> IndexRange:
        return IndexRange.parse(self.slices)

    @property
    def further_files(self) -> Iterator[Path]:
        yield from (path for path in (self.trajectory, self.field_map, self.basis, self.sorting) if path is not None)
        yield from (Path(text) for text in (self.density, self.sensitivities) if Path(text).is_absolute())

    def in_force(self) -> dict[str, Any]:
        found = self.model_dump(mode="json", exclude_none=True, by_alias=True) | {"slices": str(self.slice_range)}
        found["iterations"] = self.most_iterations
        if self.method == "gridding":
            for name in ("iterations", "lambda", "tolerance"):
                found.pop(name)
        if self.gradient_delay == NO_PENALTY:
            found.pop("gradient_delay")
        if self.window == AUTO:
            found.pop("window")
        if self.penalty_names:
            found.pop("lambda")
        else:
            for name in ("regularizer", "strength"):
                found.pop(name)
        for name, penalty in (("wavelet", "l1-wavelet"), ("block", "llr")):
            if penalty not in self.penalty_names:
                found.pop(name)
        if self.sensitivities not in SENSITIVITIES:
            found.pop("calibration")
        for name in ("trajectory", "field_map", "basis", "sorting", "density", "sensitivities"):
            if name in found and Path(found[name]).is_absolute():
                found[name] = " and ".join(map(version_of, files_of(Path(found[name]))))
        return found
