"""Topologies and trajectories of molecular dynamics, read by MDAnalysis, which only this module imports.

Charges come from the topology (PSF, TPR, PRMTOP, MOL2, PQR …), coordinates and cell from the trajectory (DCD, XTC, TRR,
or a single GRO, PDB, CRD …), or from a topology that holds some (TPR, MOL2, PQR); the cell of a PQR, which MDAnalysis
ignores, is read here. MDAnalysis indexes the frames of XTC and TRR and would store the index in a hidden file beside
the trajectory: it gets a link in a temporary folder instead, with a copy of an existing index. Nothing is written
beside the input.
"""

from __future__ import annotations

import re
import shutil
import struct
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import InputError, ParameterError, StorageError, counted, too_many_files
from pipeline.formats.charges import xtc
from pipeline.formats.charges.base import Array, Frame, Trajectory, cell_vectors, require_finite
from pipeline.formats.charges.pqr import stated_cell
from pipeline.storage.confinement import by_descriptor, open_beneath
from pipeline.storage.positional import PositionalFile, first_bytes, reason

_WITH_CHARGES = ".psf, .tpr, .prmtop, .parm7, .mol2 and .pqr"
_INDEXED = (".xtc", ".trr")
# A TRR frame's beginning: marks; the sizes of its parts in bytes; atoms, step, and a number that is not used.
_TRR_HEAD = struct.Struct(">3i12s13i")
_TRR_MARK = [1993, 13, 12, b"GMX_trn_file"]
_LINKS = "millrace-trajectory-"
_WITH_COORDINATES = ".dcd, .xtc, .trr, .nc or .mdcrd, or a single frame to .gro, .pdb, .crd or .inpcrd"
_NO_COORDINATES = "holds no coordinates; name the file that does with --trajectory"


def chosen_atoms(path: Path, select: str, count: int) -> NDArray[np.intp]:
    """The indices of the atoms that `select` chooses from a file of `count` atoms. Raises as `UniverseTrajectory`."""
    with UniverseTrajectory(path, None, select) as found:
        if found.universe_atoms != count:
            raise InputError(
                f"{path}: --select uses MDAnalysis, which finds {counted(found.universe_atoms, 'atom')} instead of "
                f"{count:,}; write each atom's line as PDB2PQR does, or leave --select out"
            )
        return np.arange(count)[found.chosen]


class UniverseTrajectory(Trajectory):
    """The chosen atoms of an MDAnalysis Universe. Threads read one frame at a time."""

    coordinate_dtype = np.dtype(np.float32)

    def __init__(self, topology: Path, trajectory: Path | None = None, select: str | None = None) -> None:
        """`select`: MDAnalysis's selection language, evaluated once, at the first frame.

        Raises ParameterError if MDAnalysis is not installed, or the selection is malformed, empty or uses attributes
        that the topology lacks; InputError if a file cannot be read, the two do not fit each other, or there are no
        charges.
        """
        self.path = topology
        self._source = trajectory or topology
        self._reading = threading.Lock()
        held = ExitStack()
        self._release = weakref.finalize(self, held.close)
        self._universe: Any = None
        try:
            self._offsets, is_cut = list[int](), False
            if self._source.suffix.lower() in _INDEXED:
                # Kept open, since the path may name another file later.
                self._file = held.enter_context(closing(PositionalFile(self._source)))
                self._offsets, is_cut = _frame_offsets(self._source, self._file)
                self._refuse_damaged_frame(0)
            self._universe = _universe(topology, trajectory, held)
            if not hasattr(self._universe, "trajectory"):
                raise InputError(f"{topology}: {_NO_COORDINATES}")
            atoms = self._selected(select)
            self.charges = _charges(topology, atoms)
            self.radii = None
            # Usually all atoms in their order, so that frames need no indexing.
            self.universe_atoms = len(self._universe.atoms)
            is_whole = np.array_equal(atoms.indices, np.arange(self.universe_atoms))
            self.chosen: slice | NDArray[np.intp] = slice(None) if is_whole else atoms.indices
            with _translated(self._source):
                self._whole_frames = len(self._offsets) - 1 if self._offsets else len(self._universe.trajectory)
            # A truncated last frame counts, so that reading it raises.
            self.n_frames = self._whole_frames + (is_cut or _ends_within_a_frame(self._universe.trajectory))
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
        self._refuse_damaged_frame(index)
        with self._reading, _translated(self._source, f", frame {index}"):
            step = self._universe.trajectory[index]
            if not step.has_positions:  # a TRR may hold velocities alone
                raise InputError(f"{self._source}, frame {index}: has no positions; leave it out with --frames")
            coordinates = np.ascontiguousarray(step.positions[self.chosen], np.float64)
            dimensions = None if step.dimensions is None else np.array(step.dimensions, np.float64)
        require_finite(self._source, "position", coordinates, f"frame {index}, atom")
        return Frame(coordinates=coordinates, cell=self._cell(index, dimensions))

    def _refuse_damaged_frame(self, index: int) -> None:
        """InputError if the packed coordinates of an XTC's frame are damaged: at some, MDAnalysis ends the process."""
        if self._source.suffix.lower() != ".xtc" or index + 1 >= len(self._offsets):
            return
        if not xtc.is_whole(self._file.head(self._offsets[index + 1] - self._offsets[index], self._offsets[index])):
            raise InputError(
                f"{self._source}, frame {index}: its coordinates are damaged; copy the file again, or leave the frame "
                "out with --frames"
            )

    def close(self) -> None:
        with suppress(AttributeError):  # no universe, or one without coordinates
            self._universe.trajectory.close()
        self._release()

    def _selected(self, select: str | None) -> Any:
        if select is None:
            return self._universe.atoms
        try:
            with _quiet():
                atoms = self._universe.select_atoms(select)
        except Exception as exc:  # a syntax error, an attribute that the topology lacks, a missing package
            raise ParameterError(
                f"--select '{select}': {_one_line(exc)}; use MDAnalysis's syntax, as in: protein and not name H*"
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


def _universe(topology: Path, trajectory: Path | None, held: ExitStack) -> Any:
    try:
        with _quiet():
            import MDAnalysis
    except ImportError as exc:
        raise ParameterError(
            f"{trajectory or topology}: files other than .pqr, .npy and .npz need MDAnalysis, "
            f"which cannot be imported ({exc}): pip install MDAnalysis"
        ) from exc
    files = [topology] if trajectory is None else [topology, trajectory]
    for path in files:
        first_bytes(path)  # reports a wrong path
    with _translated(*files):
        # Guess nothing: by default, MDAnalysis guesses masses, with warnings.
        return MDAnalysis.Universe(*(str(_linked(path, held)) for path in files), to_guess=())


def _linked(path: Path, held: ExitStack) -> Path:
    """The path for MDAnalysis to open, until `held` is closed: the file's own; or a link in a temporary folder, for a
    kind that it indexes, and for a confined path, to a descriptor."""
    here = held.enter_context(by_descriptor(path))
    if here == path and path.suffix.lower() not in _INDEXED:
        return path
    links = Path(tempfile.mkdtemp(prefix=_LINKS))
    held.callback(shutil.rmtree, links, ignore_errors=True)
    link = links / path.name
    link.symlink_to(path.resolve() if here == path else here)
    index = path.with_name(f".{path.name}_offsets.npz")
    # Missing or unreadable: MDAnalysis makes a new one.
    with suppress(OSError), open(index, "rb", opener=open_beneath) as found, (links / index.name).open("wb") as copy:
        shutil.copyfileobj(found, copy)
    return link


def _ends_within_a_frame(frames: Any) -> bool:
    """Whether a truncated frame follows the last whole one of a DCD; MDAnalysis ignores it."""
    dcd: Any = getattr(frames, "_file", None)
    if not hasattr(dcd, "_framesize"):
        return False
    behind_the_first = Path(frames.filename).stat().st_size - dcd._header_size - dcd._firstframesize
    return bool(behind_the_first % dcd._framesize)


def _cell_of_pqr(source: Path) -> Array | None:
    if ".pqr" not in [suffix.lower() for suffix in source.suffixes[-2:]]:
        return None
    from MDAnalysis.lib.util import anyopen  # compressed or not

    with _translated(source), by_descriptor(source) as here, anyopen(str(here), "rb") as opened:
        return stated_cell(source, opened.read())


def _frame_offsets(path: Path, file: PositionalFile) -> tuple[list[int], bool]:
    """The offsets of a TRR's or XTC's whole frames and of their end, and whether a part of a frame follows.

    Raises InputError if the header of a frame is damaged. At some, MDAnalysis divides by zero or writes beyond its
    memory, which ends the process, or takes the coordinates of the frame before.
    """
    is_trr = path.suffix.lower() == ".trr"
    layout, frame_bytes = (_TRR_HEAD, _trr_frame_bytes) if is_trr else (xtc.HEAD, xtc.frame_bytes)
    offsets, atoms = [0], None
    while len(head := file.head(layout.size, offsets[-1])) == layout.size:
        count, length = frame_bytes(layout.unpack(head))
        if length is None or count != (atoms or count):
            raise InputError(f"{path}, frame {len(offsets) - 1}: its header is damaged; copy the file again")
        if offsets[-1] + length > file.size:
            break
        offsets.append(offsets[-1] + length)
        atoms = count
    if len(offsets) == 1 and file.size:  # MDAnalysis would believe its number of atoms
        raise InputError(f"{path}: truncated: the file ends within its first frame; copy it again")
    return offsets, offsets[-1] < file.size


def _trr_frame_bytes(head: tuple[Any, ...]) -> tuple[int, int | None]:
    """The atoms and the length of a frame, or None if its header is damaged."""
    *mark, ir, e, box, vir, pres, top, sym, x, v, f, atoms, _, _ = head
    sizes = (box, vir, pres, x, v, f)
    number = box // 9 if box else max(x, v, f) // (3 * max(atoms, 1))  # bytes: of a float or a double
    is_damaged = mark != _TRR_MARK or any((ir, e, top, sym)) or atoms < 1 or number not in (4, 8)
    is_damaged |= not {box, vir, pres} <= {0, 9 * number} or not {x, v, f} <= {0, 3 * atoms * number}
    return atoms, None if is_damaged else _TRR_HEAD.size + 2 * number + sum(sizes)


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
    """Translate MDAnalysis's many exceptions for a damaged file, IndexError and struct.error among them."""
    what = " with ".join(map(str, files)) if all(isinstance(file, Path) for file in files) else "".join(map(str, files))
    try:
        with _quiet():
            yield
    except MemoryError as exc:
        raise InputError(f"{what}: declares more than memory holds; copy it again") from exc
    except (InputError, ParameterError, AttributeError):
        raise
    except ImportError as exc:  # names the package that this format needs
        raise ParameterError(f"{what}: {_one_line(exc)}") from exc
    except OSError as exc:
        if exc.errno is not None and exc.filename is not None:
            way_out = too_many_files(exc) or "check the disk and its permissions"
            raise StorageError(f"{exc.filename}: {reason(exc)}; {way_out}") from exc
        _let_go(exc)
        raise InputError(f"{what}: cannot be read: {_one_line(exc)}; check the file, or copy it again") from exc
    except Exception as exc:
        _let_go(exc)
        if "Cannot find an appropriate coordinate reader" in str(exc):
            raise InputError(f"{files[-1]}: unsupported trajectory format; convert it to {_WITH_COORDINATES}") from exc
        if "isn't a valid topology format" in str(exc):
            raise InputError(
                f"{files[0]}: unsupported format; name a .pqr, .npy, .npz or a topology (.psf, .tpr, .prmtop …)"
            ) from exc
        raise InputError(f"{what}: cannot be read: {_one_line(exc)}; check the file, or copy it again") from exc


def _let_go(exc: BaseException) -> None:
    """Free what the failed call left: a reader that could not open its file prints another error when it is deleted."""
    printing = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with _quiet():  # a NetCDF that is closed while its arrays exist
            traceback.clear_frames(exc.__traceback__)
    finally:
        sys.unraisablehook = printing


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignore MDAnalysis's warnings of guesses and of folders where it cannot store its index: users cannot fix them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _one_line(exc: BaseException) -> str:
    if isinstance(exc, EOFError):
        return "it ends early"
    text = re.sub(rf"\S*{_LINKS}[^/\s]*/", "", " ".join(str(exc).split())) or type(exc).__name__
    return text if len(text) <= 300 else text[:300] + "…"
