"""The parameters of `millrace run smooth`."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from kernels.smoothing.window import box_window, check_order, gaussian_radius
from pipeline.workloads.common.crop import RegionParameters
from pipeline.workloads.common.extents import SampleExtent, WholeExtent, is_text
from pipeline.workloads.protocol import BETWEEN_NUMBERS

DEFAULT_SIZE = (3,)


class SmoothingParameters(RegionParameters):
    """The parameters of scipy.ndimage's uniform_filter and gaussian_filter, under the same names."""

    filter: Literal["box", "gaussian"] = Field("box", description="mean over a box, or Gaussian")
    size: tuple[WholeExtent, ...] | None = Field(
        None, description="box: pixels along each axis; for all or for each: 3, 3,5, 2um or Z=5,Y=2um [default: 3]"
    )
    sigma: tuple[SampleExtent, ...] | None = Field(
        None,
        description="gaussian: standard deviation in pixels, 0 for no smoothing; for all axes or for each: 2, 1.5,3, "
        "0.5um or Z=2um,Y=0.5um",
    )
    order: tuple[int, ...] | None = Field(
        None,
        description="gaussian: derivative along each axis, 0 to 3, per pixel; float32 for integer images [default: 0]",
    )
    truncate: float | None = Field(
        None,
        description="gaussian: cut the kernel at this many standard deviations [default: 4; none if sigma is large]",
        gt=0,
    )
    radius: tuple[int, ...] | None = Field(None, description="gaussian: cut the kernel at this many pixels instead")
    mode: Literal["reflect", "mirror", "nearest", "wrap", "constant"] = Field(
        "reflect", description="values beyond the edge"
    )
    cval: float = Field(0.0, description="the value beyond the edge with mode constant")
    axes: tuple[str, ...] | None = Field(
        None,
        json_schema_extra={"unit": "AXIS"},
        description="axes to smooth, by letter or number: YX or 0,1 [default: Y, X, and Z of volumes]",
    )
    nan_policy: Literal["propagate", "omit", "raise"] = Field(
        "propagate", description="float images: let NaN spread, leave it out of the mean, or refuse it"
    )
    nodata: float | None = Field(
        None, description="a value that marks missing pixels, which are left out [default: that of a GeoTIFF]"
    )
    statistics: bool = Field(
        False, description="minimum, maximum, mean, deviation and histogram of the result, by channel, in the receipt"
    )

    @field_validator("size", "sigma", "radius", "order", mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        return _several(BETWEEN_NUMBERS.sub(",", value) if isinstance(value, str) else value)

    @field_validator("size")
    @classmethod
    def _box(cls, sizes: tuple[int, ...] | None) -> tuple[int, ...] | None:
        for size in () if is_text(sizes) else sizes or ():
            box_window(0, size, "reflect")  # raises ValueError before any image is opened
        return sizes

    @field_validator("axes", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        return _several(value)

    @model_validator(mode="after")
    def _of_one_filter(self) -> SmoothingParameters:
        if self.filter == "box":
            given = [name for name in ("sigma", "radius", "truncate", "order") if self._differs(name)]
            if given:
                raise ValueError(f"--{given[0]} belongs to --filter gaussian; a box has --size")
        elif self.size is not None:
            raise ValueError("--size belongs to --filter box; a Gaussian has --sigma")
        elif self.sigma is None:
            raise ValueError("--filter gaussian needs --sigma, the standard deviation in pixels")
        elif self.radius is not None and self._differs("truncate"):
            raise ValueError("--truncate and --radius both cut the kernel: pass one of them")
        if self.nodata is not None and self.nan_policy == "raise":
            raise ValueError("--nodata leaves pixels out, and --nan-policy raise refuses them: pass one of them")
        if any(self.order or ()) and (self.nan_policy == "omit" or self.nodata is not None):
            option = "--nodata" if self.nodata is not None else "--nan-policy omit"
            raise ValueError(f"--order and {option}: the derivative of a mean over some pixels is not defined")
        return self

    @model_validator(mode="after")
    def _gaussian(self) -> SmoothingParameters:
        if self.filter == "gaussian" and not is_text(self.sigma):
            sigmas, radii, orders = self.sigma or (), self.radius or (None,), self.order or (0,)
            count = max(len(sigmas), len(radii), len(orders))
            try:
                # Raises ValueError before any image is opened; the image's axes limit the number of values later.
                each = zip(_each(sigmas, count), _each(radii, count), _each(orders, count), strict=False)
                for sigma, radius, order in each:
                    check_order(order, gaussian_radius(sigma, truncate=self.truncate, radius=radius), sigma)
            except ValueError as error:
                raise ValueError(f"--{self.named(str(error))}: {error}") from error
        return self

    @model_validator(mode="after")
    def _of_one_mode(self) -> SmoothingParameters:
        if self.mode != "constant" and self._differs("cval"):
            raise ValueError(f"--cval belongs to --mode constant, and the mode is {self.mode}")
        if math.isnan(self.cval) and self.nodata is not None:
            raise ValueError("--cval nan does not fit --nodata, which leaves NaN out: pass a number")
        if math.isnan(self.cval) and self.nan_policy != "propagate":
            # In a chunk the border's samples are like any others: they would be omitted or refused too.
            raise ValueError(
                f"--cval nan does not fit --nan-policy {self.nan_policy}: pass a number, or --nan-policy propagate"
            )
        return self

    def named(self, fault: str) -> str:
        """The parameter of an error message: the one it starts with, else the one that sets the window's extent."""
        if self.filter == "box":
            return "size"
        stated = next((name for name in ("sigma", "truncate", "radius", "order") if fault.startswith(name)), None)
        if stated is None and self.radius is not None:
            return "radius"
        return stated or "sigma"

    def _differs(self, name: str) -> bool:
        """Whether it differs from the default; options without effect are refused only then."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    def in_force(self) -> dict[str, Any]:
        own = {"size"} if self.filter == "box" else {"sigma", "truncate", "radius", "order"}
        common = {"filter", "mode", "axes", "nan_policy"} | ({"cval"} if self.mode == "constant" else set())
        common |= {"statistics"} if self.statistics else set()
        common |= {"nodata"} if self.nodata is not None else set()
        common |= set(RegionParameters.model_fields)  # those that are given
        found = self.model_dump(mode="json", exclude_none=True, include=own | common)
        return {**found, "size": list(self.size or DEFAULT_SIZE)} if self.filter == "box" else found


def _each(values: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """One value applies to all."""
    return values * count if len(values) == 1 else values


def _several(value: Any) -> Any:
    """One value or several: 3, "3" or "3,5"."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(","))
    return value if value is None or isinstance(value, tuple | list) else (value,)
