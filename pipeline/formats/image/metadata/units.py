"""Units of length and time: OME-Zarr's names, the symbols of OME-XML, and what other programs write.

Sources: OME-Zarr 0.5, section "axes"; OME schema 2016-06 (UnitsLength, UnitsTime); ImageJ's Calibration.
"""

from __future__ import annotations

from typing import NamedTuple


class _Unit(NamedTuple):
    kind: str  # "length" or "time"
    size: float  # in metres or seconds
    symbol: str  # in OME-XML


_UNITS = {
    "picometer": _Unit("length", 1e-12, "pm"),
    "angstrom": _Unit("length", 1e-10, "Å"),
    "nanometer": _Unit("length", 1e-9, "nm"),
    "micrometer": _Unit("length", 1e-6, "µm"),
    "millimeter": _Unit("length", 1e-3, "mm"),
    "centimeter": _Unit("length", 1e-2, "cm"),
    "inch": _Unit("length", 0.0254, "in"),
    "decimeter": _Unit("length", 0.1, "dm"),
    "foot": _Unit("length", 0.3048, "ft"),
    "meter": _Unit("length", 1.0, "m"),
    "kilometer": _Unit("length", 1e3, "km"),
    "nanosecond": _Unit("time", 1e-9, "ns"),
    "microsecond": _Unit("time", 1e-6, "µs"),
    "millisecond": _Unit("time", 1e-3, "ms"),
    "second": _Unit("time", 1.0, "s"),
    "minute": _Unit("time", 60.0, "min"),
    "hour": _Unit("time", 3600.0, "h"),
    "day": _Unit("time", 86400.0, "d"),
}
_SPELLINGS = {
    **{name: name for name in _UNITS},
    **{unit.symbol: name for name, unit in _UNITS.items()},
    "um": "micrometer", "micron": "micrometer", "microns": "micrometer", "a": "angstrom", "å": "angstrom",
    "inches": "inch", "us": "microsecond", "sec": "second", "seconds": "second", "minutes": "minute",
}  # fmt: skip
_MICRO_SIGNS = str.maketrans("\u03bc", "\u00b5")  # Greek mu; the sign of OME-XML


def unit_named(text: str) -> str | None:
    """OME-Zarr's name of a unit, from any usual spelling: µm, um, micron; None if it is unknown."""
    # ImageJ escapes what Latin-1 lacks: \u00B5m.
    plain = text.strip().replace("\\u00B5", "\u00b5").replace("\\u00b5", "\u00b5").translate(_MICRO_SIGNS)
    lower = plain.lower().replace("metre", "meter")
    return _SPELLINGS.get(plain) or _SPELLINGS.get(lower) or _SPELLINGS.get(lower.removesuffix("s"))


def kind_of(unit: str | None) -> str | None:
    """ "length" or "time"; None if the unit is unknown."""
    return _UNITS[unit].kind if unit in _UNITS else None


def symbol_of(unit: str) -> str:
    """OME-XML's symbol of a known unit."""
    return _UNITS[unit].symbol


def in_unit(size: float, unit: str | None, wanted: str) -> float | None:
    """A size in another unit; None if the units are of different kinds, or unknown."""
    if unit == wanted:
        return size
    if unit not in _UNITS or wanted not in _UNITS or _UNITS[unit].kind != _UNITS[wanted].kind:
        return None
    return size * (_UNITS[unit].size / _UNITS[wanted].size)
