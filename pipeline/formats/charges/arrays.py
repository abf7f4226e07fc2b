"""Point charges from NumPy's files: `.npy` of n × 4 numbers (x, y, z, q), `.npz` of x, y, z, q or of xyz and q.

An `.npz` may hold the periodic cell under `cell`: 3 lengths, 3 lengths and 3 angles, or 3 × 3 vectors as rows. Lengths
are in angstrom, charges in elementary charges. Pickled objects are never loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import InputError, counted
from pipeline.formats.charges.base import Array, Molecule, cell_from, require_finite
from pipeline.formats.numpy_files import LONGEST_DETAIL, archive, is_archive, mapped_array

_COLUMNS = ("x", "y", "z", "q")
_LAYOUTS = "x, y, z and q, or xyz and q"
_UNNAMED = re.compile(r"arr_\d+")  # np.savez(file, array)


def read_charge_array(path: Path) -> Molecule:
    """InputError if the file is damaged, or does not hold finite numbers in one of these layouts."""
    if not is_archive(path):
        return _molecule(path, _table(path, mapped_array(path)), None)
    with archive(path) as found:
        names = list(found.files)
        arrays = {name: found[name] for name in names if name in (*_COLUMNS, "xyz", "cell")}
    return _molecule(path, _stacked(path, arrays, names), _cell(path, arrays))


def _table(path: Path, array: Any) -> Any:
    if array.ndim != 2 or array.shape[1] != 4:
        raise InputError(f"{path}: has the shape {array.shape}; n × 4 is needed, one row per atom: x, y, z, charge")
    return _real(path, "", array)


def _stacked(path: Path, arrays: Mapping[str, Any], names: Sequence[str]) -> Array:
    """`names`: of all arrays in the file."""
    if "xyz" in arrays and "q" in arrays:
        xyz, q = _numbers(path, "xyz", arrays["xyz"]), _numbers(path, "q", arrays["q"])
        if xyz.ndim != 2 or xyz.shape[1] != 3 or q.shape != xyz.shape[:1]:
            raise InputError(f"{path}: xyz has the shape {xyz.shape} and q {q.shape}; (n, 3) and (n,) are needed")
        return np.column_stack([xyz, q])
    missing = [name for name in _COLUMNS if name not in arrays]
    if missing:
        found = ", ".join(names) or "no arrays"
        if len(found) > LONGEST_DETAIL:
            found = counted(len(names), "array")
        if any(_UNNAMED.fullmatch(name) for name in names):
            found += ", saved without names"
        raise InputError(
            f"{path}: holds {found}; it needs arrays named {_LAYOUTS} (and may have cell): save them with "
            "np.savez(file, xyz=positions, q=charges)"
        )
    columns = [_numbers(path, name, arrays[name]) for name in _COLUMNS]
    if columns[0].ndim != 1 or any(column.shape != columns[0].shape for column in columns):
        shapes = ", ".join(f"{name} {column.shape}" for name, column in zip(_COLUMNS, columns, strict=True))
        raise InputError(f"{path}: x, y, z and q must have the same length: {shapes}")
    return np.column_stack(columns)


def _cell(path: Path, arrays: Mapping[str, Any]) -> Array | None:
    if "cell" not in arrays:
        return None
    try:
        return cell_from(_numbers(path, "cell", arrays["cell"]))
    except ValueError as exc:
        raise InputError(f"{path}: cell: {exc}") from exc


def _numbers(path: Path, name: str, array: Any) -> Array:
    with np.errstate(over="ignore"):  # a value that overflows becomes infinite, and is refused as such
        return np.array(_real(path, name, array), np.float64)


def _real(path: Path, name: str, array: Any) -> Any:
    if array.dtype.kind not in "iuf":
        what = f"{name} holds" if name else "holds"
        raise InputError(f"{path}: {what} {array.dtype}, not real numbers; convert it with .astype(float)")
    return array


def _molecule(path: Path, table: Any, cell: Array | None) -> Molecule:
    if len(table) == 0:
        raise InputError(f"{path}: holds no atoms")
    with np.errstate(over="ignore"):
        coordinates, charges = np.array(table[:, :3], np.float64, order="C"), np.array(table[:, 3], np.float64)
    require_finite(path, "position", coordinates, "row")
    require_finite(path, "charge", charges, "row")
    return Molecule(coordinates=coordinates, charges=charges, cell=cell)
