"""The interface of point charge formats: charges once, coordinates and cell frame by frame."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.elementary import cosine
from pipeline.errors import InputError
from pipeline.formats import Reader

Array = NDArray[np.float64]

# Products of longer cell vectors may exceed float64's range.
_LONGEST_CELL_ANGSTROM = 1e12


@dataclass(frozen=True, kw_only=True, eq=False)
class Frame:
    """The atoms' positions at one time.

    coordinates : (n, 3) float64 in angstrom, C-contiguous and finite
    cell        : (3, 3) float64, the periodic cell's vectors a, b and c in angstrom as rows; None if unknown
    """

    coordinates: Array
    cell: Array | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Molecule(Frame):
    """One frame with its charges.

    charges : (n,) float64 in elementary charges, finite
    radii   : (n,) float64 in angstrom, if the file states them
    """

    charges: Array
    radii: Array | None = None

    def only(self, atoms: NDArray[np.intp]) -> Molecule:
        """The atoms with these indices."""
        return replace(
            self,
            coordinates=np.ascontiguousarray(self.coordinates[atoms]),
            charges=self.charges[atoms],
            radii=None if self.radii is None else self.radii[atoms],
        )


class Trajectory(Reader):
    """Moving point charges: one or more frames with the same charges, read by any thread. `path`: the charges' file."""

    charges: Array  # (n,) float64 in elementary charges, finite, n ≥ 1
    radii: Array | None = None
    n_frames: int  # known without reading the frames, ≥ 1
    coordinate_dtype: np.dtype[Any] = np.dtype(np.float64)  # the precision of the file's coordinates

    @property
    def n_atoms(self) -> int:
        return len(self.charges)

    @abstractmethod
    def frame(self, index: int) -> Frame:
        """Frame `index`, from 0. InputError if the file is damaged or a coordinate is not finite."""


class Still(Trajectory):
    """A molecule as a trajectory of one frame."""

    n_frames = 1

    def __init__(self, path: Path, molecule: Molecule) -> None:
        self.path = path
        self.charges = molecule.charges
        self.radii = molecule.radii
        self._frame = Frame(coordinates=molecule.coordinates, cell=molecule.cell)

    def frame(self, index: int) -> Frame:
        if index != 0:
            raise IndexError(f"{self.path}: frame {index} of 1")
        return self._frame

    def close(self) -> None:
        """Nothing is open."""


def cell_vectors(lengths: Array, angles_degrees: Array) -> Array | None:
    """Three cell vectors as rows, a along x and b in the xy plane; None for a placeholder that means "no cell".

    lengths : a, b, c in angstrom; placeholders are all 0, or all 1 with right angles (PDB format 3.3, CRYST1)
    angles_degrees : alpha, beta, gamma

    Raises ValueError if no cell has such lengths and angles.
    """
    lengths, angles = np.asarray(lengths, np.float64), np.asarray(angles_degrees, np.float64)
    if not (np.isfinite(lengths).all() and np.isfinite(angles).all()):
        raise ValueError("a cell with a length or an angle that is not finite")
    _refuse_longer(lengths)
    if (lengths == 0).all() or ((lengths == 1).all() and (angles == 90).all()):
        return None
    if (lengths <= 0).any() or (angles <= 0).any() or (angles >= 180).any():
        raise ValueError(f"no cell has the lengths {_text(lengths)} and the angles {_text(angles)}")
    alpha, beta, gamma = cosine(angles / 360).tolist()  # exactly 0 for right angles
    sine = float(np.sqrt(1 - gamma * gamma))
    across = (alpha - beta * gamma) / sine if sine else 1.0
    up = 1 - beta * beta - across * across
    if sine == 0 or up <= 0:
        raise ValueError(f"no cell has the angles {_text(angles)}")
    a, b, c = lengths
    return np.array([[a, 0.0, 0.0], [b * gamma, b * sine, 0.0], [c * beta, c * across, c * np.sqrt(up)]])


def cell_from(values: Array) -> Array | None:
    """A cell given as three lengths, lengths and angles, or three vectors. ValueError for anything else."""
    values = np.asarray(values, np.float64)
    if values.shape in ((3,), (6,)):
        return cell_vectors(values[:3], values[3:] if len(values) == 6 else np.full(3, 90.0))
    if values.shape != (3, 3):
        raise ValueError("a cell is 3 lengths, 3 lengths and 3 angles, or 3 × 3 vectors as rows, in angstrom")
    _refuse_longer(values)
    if not np.isfinite(values).all() or abs(np.linalg.det(values)) <= 1e-9 * np.prod(np.linalg.norm(values, axis=1)):
        raise ValueError("the cell's vectors span no volume")
    return values.copy()


def _refuse_longer(values: Array) -> None:
    if (np.abs(values) > _LONGEST_CELL_ANGSTROM).any():
        raise ValueError(f"a cell has at most {_LONGEST_CELL_ANGSTROM:g} angstrom along a side")


def require_finite(path: Path, what: str, values: Array, record: str) -> None:
    """InputError naming the first record of `values` (one a row) that is NaN or infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum()):  # the usual case; a sum of finite numbers may overflow
            return
    finite = np.isfinite(values).reshape(len(values), -1).all(axis=1)
    if not finite.all():
        first = int(np.argmin(finite))
        raise InputError(f"{path}: {record} {first + 1:,}: the {what} is not finite; correct or remove it")


def _text(values: Array) -> str:
    return " ".join(f"{value:g}" for value in values)
