"""Raw MRI data in files: opened by the suffix. The libraries behind the formats are imported on first use only."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import InputError
from pipeline.formats.kspace.base import SUFFIXES, KSpaceReader


def open_kspace(path: Path, *, trajectory: Path | None = None) -> KSpaceReader:
    """Read a file's header, and check it; close the reader after use.

    path       : ISMRMRD (.h5, .mrd), BART (.cfl or .hdr: the pair counts), NumPy (.npz)
    trajectory : BART's second pair; the other formats hold theirs

    Raises InputError in one line that names the file and the fault.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(
            f"{path}: is no raw data that Millrace reads: ISMRMRD (.h5, .mrd), BART (.cfl with .hdr), NumPy (.npz)"
        )
    if suffix in (".cfl", ".hdr"):
        from pipeline.formats.kspace.bart import BartKSpace

        if trajectory is None:
            raise InputError(f"{path}: BART keeps the trajectory in a file of its own: name it with --trajectory")
        if trajectory.suffix.lower() not in ("", ".cfl", ".hdr"):
            raise InputError(f"--trajectory {trajectory}: is no .cfl with its .hdr, as {path} needs: convert it")
        return BartKSpace(path, trajectory)
    if trajectory is not None:
        raise InputError(f"--trajectory {trajectory}: {path} holds its own; only BART's .cfl needs a second file")
    if suffix == ".npz":
        from pipeline.formats.kspace.npz import NpzKSpace

        return NpzKSpace(path)
    from pipeline.formats.kspace.ismrmrd import Ismrmrd

    return Ismrmrd(path)
