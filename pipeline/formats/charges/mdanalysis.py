"""Topologies and trajectories of molecular dynamics, through MDAnalysis: the only place that imports it.

Charges come from the topology (PSF, TPR, PRMTOP, MOL2, PQR …), coordinates and cell from the trajectory (DCD, XTC, TRR,
or a single GRO, PDB, CRD …), or else from the topology where that holds some (TPR, MOL2, PQR); the cell of a PQR,
which MDAnalysis leaves out, is read here. Of XTC and TRR, MDAnalysis first finds where each frame begins, and would
keep that in a hidden file beside the trajectory: it is handed a link in a temporary folder instead, with a copy of that
file where there is one already. Nothing is written beside the input.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import InputError, ParameterError, StorageError, counted, too_many_files
from pipeline.formats.charges.base import Array, Frame, Trajectory, cell_vectors, require_finite
from pipeline.formats.charges.pqr import stated_cell
from pipeline.storage.positional import first_bytes, reason

_WITH_CHARGES = ".psf, .tpr, .prmtop, .parm7, .mol2 and .pqr"
_INDEXED = (".xtc", ".trr")
_LINKS = "millrace-trajectory-"
_WITH_COORDINATES = ".dcd, .xtc, .trr, .nc or .mdcrd, or a single frame to .gro, .pdb, .crd or .inpcrd"
_NO_COORDINATES = "holds no coordinates; name the file that does with --trajectory"


def chosen_atoms(path: Path, select: str, count: int) -> NDArray[np.intp]:
    """The numbers of the atoms that `select` chooses from a file of `count` atoms. Errors as `UniverseTrajectory`'s."""
    with UniverseTrajectory(path, None, select) as found:
        if found.universe_atoms != count:
            raise InputError(
                f"{path}: --select goes by MDAnalysis, which finds {counted(found.universe_atoms, 'atom')} where there "
                f"are {count:,}; write each atom's line as PDB2PQR does, or leave --select out"
            )
        return np.arange(count)[found.chosen]


class UniverseTrajectory(Trajectory):
    """The chosen atoms of an MDAnalysis Universe. One frame is read at a time, whatever the number of threads."""

    coordinate_dtype = np.dtype(np.float32)

    def __init__(self, topology: Path, trajectory: Path | None = None, select: str | None = None) -> None:
        """`select`: MDAnalysis's selection language, evaluated once, at the first frame.

        Raises ParameterError where MDAnalysis is not installed, or the selection is malformed, empty or asks for what
        the topology does not state; InputError where a file cannot be read, the two do not fit each other, or there
        are no charges.
        """
        self.path = topology
        self._source = trajectory or topology
        self._reading = threading.Lock()
        self._links = Path(tempfile.mkdtemp(prefix=_LINKS))
        self._remove_links = weakref.finalize(self, shutil.rmtree, self._links, ignore_errors=True)
        self._universe: Any = None
        try:
            self._universe = _universe(topology, trajectory, self._links)
            if not hasattr(self._universe, "trajectory"):
                raise InputError(f"{topology}: {_NO_COORDINATES}")
            atoms = self._selected(select)
            self.charges = _charges(topology, atoms)
            self.radii = None
            # All of them in their order, as a rule: nothing is then to be picked out.
            self.universe_atoms = len(self._universe.atoms)
            is_whole = np.array_equal(atoms.indices, np.arange(self.universe_atoms))
            self.chosen: slice | NDArray[np.intp] = slice(None) if is_whole else atoms.indices
            with _translated(self._source):
                self._whole_frames = len(self._universe.trajectory)
            # One that is cut short counts, so that it is missed where it is asked for.
            self.n_frames = self._whole_frames + _ends_within_a_frame(self._universe.trajectory)
            if self.n_frames < 1:
                raise InputError(f"{self._source}: has no frames")
            self._stated_cell = _cell_of_pqr(self._source)
        except BaseException:
            self.close()
            raise

    def frame(self, index: int) -> Frame:
        if not 0 <= index < self.n_frames:
            raise IndexError(f"{self._source}: frame {index} of {self.n_frames}")
        if index == self._whole_frames:
            raise InputError(
                f"{self._source}: truncated: the file ends within frame {index}; copy it again, or choose those before "
                f"it with --frames ::{index}"
            )
        with self._reading, _translated(self._source, f", frame {index}"):
            step = self._universe.trajectory[index]
            if not step.has_positions:  # a TRR may hold velocities alone
                raise InputError(f"{self._source}, frame {index}: has no positions; leave it out with --frames")
            coordinates = np.ascontiguousarray(step.positions[self.chosen], np.float64)
            dimensions = None if step.dimensions is None else np.array(step.dimensions, np.float64)
        require_finite(self._source, "position", coordinates, f"frame {index}, atom")
        return Frame(coordinates=coordinates, cell=self._cell(index, dimensions))

    def close(self) -> None:
        with suppress(AttributeError):  # no universe, or one without coordinates
            self._universe.trajectory.close()
        self._remove_links()

    def _selected(self, select: str | None) -> Any:
        if select is None:
            return self._universe.atoms
        try:
            with _quiet():
                atoms = self._universe.select_atoms(select)
        except Exception as exc:  # a wrong word, an attribute that the topology lacks, a package that is not there
            raise ParameterError(
                f"--select '{select}': {_one_line(exc)}; write it as MDAnalysis has it: protein and not name H*"
            ) from exc
        if len(atoms) == 0:
            raise ParameterError(f"--select '{select}': chooses none of {counted(len(self._universe.atoms), 'atom')}")
        return atoms

    def _cell(self, index: int, dimensions: Array | None) -> Array | None:
        if dimensions is None or not dimensions[:3].any():
            return self._stated_cell
        try:
            return cell_vectors(dimensions[:3], dimensions[3:])
        except ValueError as exc:
            raise InputError(f"{self._source}: frame {index}: {exc}") from exc


def _universe(topology: Path, trajectory: Path | None, links: Path) -> Any:
    try:
        with _quiet():
            import MDAnalysis
    except ImportError as exc:
        raise ParameterError(
            f"{trajectory or topology}: topologies and trajectories need MDAnalysis, which cannot be imported ({exc}): "
            "pip install 'millrace[trajectory]'"
        ) from exc
    files = [topology] if trajectory is None else [topology, trajectory]
    for path in files:
        first_bytes(path)  # says what is wrong with the path, if anything is
    with _translated(*files):
        # Masses are guessed otherwise, with warnings; nobody needs them here.
        return MDAnalysis.Universe(*(str(_linked(path, links)) for path in files), to_guess=())


def _linked(path: Path, links: Path) -> Path:
    """Where MDAnalysis shall open the file: itself, or for a kind that it indexes, a link in the folder `links`."""
    if path.suffix.lower() not in _INDEXED:
        return path
    link = links / path.name
    link.symlink_to(path.resolve())
    index = f".{path.name}_offsets.npz"
    with suppress(OSError):  # none, or not to be read: it is made anew
        shutil.copyfile(path.with_name(index), links / index)
    return link


def _ends_within_a_frame(frames: Any) -> bool:
    """Whether some bytes of one more frame stand behind the last whole one. In these formats MDAnalysis passes over
    them."""
    dcd: Any = getattr(frames, "_file", None)
    xdr: Any = getattr(frames, "_xdr", None)
    if hasattr(dcd, "_framesize"):
        behind_the_first = Path(frames.filename).stat().st_size - dcd._header_size - dcd._firstframesize
        return bool(behind_the_first % dcd._framesize)
    if xdr is not None:
        with suppress(Exception), _quiet():  # the last frame is damaged: who asks for it is told
            frames[len(frames) - 1]
            return bool(xdr._bytes_tell() < Path(frames.filename).stat().st_size)
    return False


def _cell_of_pqr(source: Path) -> Array | None:
    if ".pqr" not in [suffix.lower() for suffix in source.suffixes[-2:]]:
        return None
    from MDAnalysis.lib.util import anyopen  # compressed or not

    with _translated(source), anyopen(str(source), "rb") as opened:
        return stated_cell(source, opened.read())


def _charges(topology: Path, atoms: Any) -> Array:
    from MDAnalysis.exceptions import NoDataError

    try:
        charges = np.array(atoms.charges, np.float64)
    except NoDataError as exc:
        raise InputError(
            f"{topology}: states no charges; {_WITH_CHARGES} do: name such a file as the input, "
            "and this one with --trajectory for its coordinates"
        ) from exc
    if len(charges) == 0:
        raise InputError(f"{topology}: holds no atoms")
    require_finite(topology, "charge", charges, "atom")
    return charges


@contextmanager
def _translated(*files: Path | str) -> Iterator[None]:
    """MDAnalysis raises many kinds of exceptions for a damaged file, IndexError and struct.error among them."""
    what = " with ".join(map(str, files)) if all(isinstance(file, Path) for file in files) else "".join(map(str, files))
    try:
        with _quiet():
            yield
    except MemoryError as exc:
        raise InputError(f"{what}: promises more than there is memory for; copy it again") from exc
    except (InputError, ParameterError, AttributeError):
        raise
    except OSError as exc:
        if exc.errno is not None and exc.filename is not None:
            way_out = too_many_files(exc) or "check the disk and its permissions"
            raise StorageError(f"{exc.filename}: {reason(exc)}; {way_out}") from exc
        _let_go(exc)
        raise InputError(f"{what}: cannot be read: {_one_line(exc)}; check the file, or copy it again") from exc
    except Exception as exc:
        _let_go(exc)
        if "Cannot find an appropriate coordinate reader" in str(exc):
            raise InputError(
                f"{files[-1]}: is of no kind of trajectory known here; convert it to {_WITH_COORDINATES}"
            ) from exc
        if "isn't a valid topology format" in str(exc):
            raise InputError(
                f"{files[0]}: is of no format known here: give .pqr, .npy, .npz, or a topology (.psf, .tpr, .prmtop …)"
            ) from exc
        raise InputError(f"{what}: cannot be read: {_one_line(exc)}; check the file, or copy it again") from exc


def _let_go(exc: BaseException) -> None:
    """Drop what the failed call left: a reader that could not open its file fails again, on stderr, when it goes."""
    printing = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        traceback.clear_frames(exc.__traceback__)
    finally:
        sys.unraisablehook = printing


@contextmanager
def _quiet() -> Iterator[None]:
    """MDAnalysis warns of what it guesses, and of folders where it cannot keep its index: nothing the user can mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _one_line(exc: BaseException) -> str:
    text = re.sub(rf"\S*{_LINKS}[^/\s]*/", "", " ".join(str(exc).split())) or type(exc).__name__
    return text if len(text) <= 300 else text[:300] + "…"
