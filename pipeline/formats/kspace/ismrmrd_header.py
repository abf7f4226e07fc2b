"""The XML header of ISMRMRD: the parts that determine an image's grid.

Source: "ismrmrd.xsd", https://ismrmrd.readthedocs.io.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

from pipeline.errors import InputError
from pipeline.formats.kspace.base import LONGEST_FOV_MM, SHORTEST_FOV_MM, TrajectoryUnits

Matrix = tuple[int, int, int]
Lengths = tuple[float, float, float]
_LARGEST = 1 << 16
# The schema has no element for the trajectory's units; files that state them use a user parameter.
_UNITS = ("traj_units", "trajectory_units", "units")


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """One encoding: matrix (pixels) and field of view (mm) of the encoded and the reconstructed space.

    centre_1, centre_2 : the steps of the phase encodings at the centre of k-space; if not stated, half the matrix
    """

    encoded_matrix: Matrix
    encoded_fov_mm: Lengths
    recon_matrix: Matrix
    recon_fov_mm: Lengths
    centre_1: int = 0
    centre_2: int = 0
    states_centre_2: bool = False


@dataclass(frozen=True, kw_only=True)
class XmlHeader:
    """The header's contents. `trajectory`: of the first encoding, such as radial; `units`: of its values, if stated."""

    encodings: tuple[Encoding, ...]
    trajectory: str
    units: TrajectoryUnits | None = None

    def encoding(self, number: int) -> Encoding | None:
        return self.encodings[number] if number < len(self.encodings) else None


def read_xml(path: Path, text: bytes) -> XmlHeader:
    """InputError if it is not XML, or a matrix or field of view is missing or out of range."""
    try:
        root = ElementTree.fromstring(text.strip(b"\0 \r\n\t"))
    except (ElementTree.ParseError, LookupError, ValueError) as exc:  # the last two: an unknown text encoding
        raise InputError(f"{path}: its XML header is damaged: {exc}") from exc
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]  # without the namespace
    encodings = root.findall("encoding")
    found = tuple(_encoding(path, each, number) for number, each in enumerate(encodings))
    trajectory = (root.findtext("encoding/trajectory") or "nothing").strip()
    return XmlHeader(encodings=found, trajectory=trajectory, units=_units(path, root))


def _units(path: Path, root: ElementTree.Element) -> TrajectoryUnits | None:
    """The trajectory's units, if the header states them. InputError if they are unknown."""
    for place in ("encoding/trajectoryDescription", "userParameters"):
        for parameter in root.findall(f"{place}/userParameterString"):
            if (parameter.findtext("name") or "").strip().lower() not in _UNITS:
                continue
            units = (parameter.findtext("value") or "").strip()
            for known in get_args(TrajectoryUnits):
                if units == known:
                    return known  # type: ignore[no-any-return]
            raise InputError(
                f"{path}: its XML header has {units!r} as the trajectory's units; "
                f"{', '.join(get_args(TrajectoryUnits))} are known"
            )
    return None


def _encoding(path: Path, element: ElementTree.Element, number: int) -> Encoding:
    where = f"{path}: encoding {number} of its XML header"
    encoded_matrix = _matrix(where, element, "encodedSpace")
    centres = [element.findtext(f"encodingLimits/kspace_encoding_step_{axis}/center", "").strip() for axis in (1, 2)]
    stated = [int(text) if text.isdecimal() else n // 2 for text, n in zip(centres, encoded_matrix[1:], strict=True)]
    return Encoding(
        encoded_matrix=encoded_matrix,
        encoded_fov_mm=_lengths(where, element, "encodedSpace"),
        recon_matrix=_matrix(where, element, "reconSpace"),
        recon_fov_mm=_lengths(where, element, "reconSpace"),
        centre_1=stated[0],
        centre_2=stated[1],
        states_centre_2=centres[1].isdecimal(),
    )


def _matrix(where: str, element: ElementTree.Element, space: str) -> Matrix:
    x, y, z = (_number(where, element, f"{space}/matrixSize/{axis}") for axis in "xyz")
    if not all(1 <= number <= _LARGEST and number == int(number) for number in (x, y, z)):  # in this order: NaN
        raise InputError(f"{where}: the matrix {x:g} × {y:g} × {z:g} of {space} is out of range (1 to {_LARGEST:,})")
    return int(x), int(y), int(z)


def _lengths(where: str, element: ElementTree.Element, space: str) -> Lengths:
    x, y, z = (_number(where, element, f"{space}/fieldOfView_mm/{axis}") for axis in "xyz")
    if not all(SHORTEST_FOV_MM <= number <= LONGEST_FOV_MM for number in (x, y, z)):  # in this order: NaN
        raise InputError(
            f"{where}: the field of view {x:g} × {y:g} × {z:g} mm of {space} is out of range "
            f"({SHORTEST_FOV_MM:g} to {LONGEST_FOV_MM:g})"
        )
    return x, y, z


def _number(where: str, element: ElementTree.Element, name: str) -> float:
    text = element.findtext(name)
    try:
        return float(text or "")
    except ValueError as exc:
        raise InputError(f"{where} has {'no ' + name if text is None else f'{text!r} as {name}'}") from exc
