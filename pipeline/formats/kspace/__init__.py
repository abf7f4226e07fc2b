"""Opening raw MRI data by suffix. Each format's module is imported on first use: h5py is slow to load."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import InputError
from pipeline.formats.kspace.base import SUFFIXES, KSpaceReader


def open_kspace(path: Path, *, trajectory: Path | None = None) -> KSpaceReader:
    """Read and check a file's header; close the reader after use.

    path       : ISMRMRD (.h5, .mrd), BART (.cfl or .hdr, either names the pair), NumPy (.npz)
    trajectory : BART's second pair, if its k-space is not Cartesian; files of the other formats contain theirs

    Raises InputError, one line that names the file and the fault.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(
            f"{path}: unsupported raw data format; Millrace reads ISMRMRD (.h5, .mrd), BART (.cfl with .hdr) and "
            "NumPy (.npz)"
        )
    if suffix in (".cfl", ".hdr"):
        from pipeline.formats.kspace.bart import BartCartesian, BartKSpace, is_cartesian

        if trajectory is None and is_cartesian(path):
            return BartCartesian(path)
        if trajectory is None:
            raise InputError(f"{path}: BART keeps the trajectory in a file of its own: name it with --trajectory")
        if trajectory.suffix.lower() not in ("", ".cfl", ".hdr"):
            raise InputError(f"--trajectory {trajectory}: {path} needs a .cfl with its .hdr: convert it")
        return BartKSpace(path, trajectory)
    if trajectory is not None:
        raise InputError(f"--trajectory {trajectory}: {path} holds its own; only BART's .cfl needs a second file")
    if suffix == ".npz":
        from pipeline.formats.kspace.npz import NpzKSpace

        return NpzKSpace(path)
    from pipeline.formats.kspace.ismrmrd import Ismrmrd

    return Ismrmrd(path)
