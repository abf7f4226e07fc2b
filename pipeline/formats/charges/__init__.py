"""Opening point charges, by the input's suffix."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import InputError, ParameterError, counted
from pipeline.formats.charges.base import Still, Trajectory

# Files that hold only coordinates, which cannot be the input.
_TRAJECTORIES = (".dcd", ".xtc", ".trr", ".nc", ".ncdf", ".netcdf", ".mdcrd", ".crdbox", ".rst7", ".inpcrd")


def open_point_charges(path: Path, *, trajectory: Path | None = None, select: str | None = None) -> Trajectory:
    """Charges and coordinates from `path`, or its charges with the coordinates of `trajectory`; close it after use.

    path       : .pqr, .npy or .npz (see `charges.arrays`), or a topology for MDAnalysis (.psf, .tpr, .prmtop …)
    trajectory : .dcd, .xtc, .trr …, or a single .gro, .pdb …, of as many atoms; read by MDAnalysis
    select     : the atoms to include, in MDAnalysis's selection language

    Raises InputError or ParameterError, one line that names the file or the option.
    """
    found = _opened(path, trajectory, select)
    if not found.charges.any():
        found.close()
        chosen = f"--select '{select}': " if select is not None else ""
        raise InputError(
            f"{chosen}{path}: no charge of {counted(found.n_atoms, 'atom')} differs from 0, so the potential is 0"
        )
    return found


def _opened(path: Path, trajectory: Path | None, select: str | None) -> Trajectory:
    suffix = path.suffix.lower()
    if suffix in (".npy", ".npz"):
        for option, given in (("--trajectory", trajectory), ("--select", select)):
            if given is not None:
                raise ParameterError(f"{option} needs a topology as the input; {path} is an array: leave it out")
        from pipeline.formats.charges.arrays import read_charge_array

        return Still(path, read_charge_array(path))
    if suffix == ".pqr" and trajectory is None:
        from pipeline.formats.charges.pqr import read_pqr

        molecule = read_pqr(path)
        if select is not None:
            from pipeline.formats.charges.mdanalysis import chosen_atoms

            molecule = molecule.only(chosen_atoms(path, select, len(molecule.charges)))
        return Still(path, molecule)
    if suffix in _TRAJECTORIES:
        raise InputError(
            f"{path}: is a trajectory and states no charges; name the topology (.psf, .tpr …) as the input, "
            "and this file with --trajectory"
        )
    from pipeline.formats.charges.mdanalysis import UniverseTrajectory

    return UniverseTrajectory(path, trajectory, select)
