from __future__ import annotations

import gzip
import struct
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.errors import InputError, ParameterError
from pipeline.formats.charges import open_point_charges
from pipeline.formats.charges.mdanalysis import _frame_offsets
from pipeline.storage.positional import PositionalFile
from tests.pipeline.formats.charges.real_molecules import real_molecule
from tests.pipeline.formats.image.contract import input_error, one_line

PDB_ATOM = "ATOM  {0:5d}  {1:<3} MET A{0:4d}    {2:8.3f}{3:8.3f}{4:8.3f}  1.00  0.00           {5}\n"
CHARGES = [-0.25, 0.5, -0.75, 1.0, 0.125]
FRAMES = np.round(np.random.default_rng(2).uniform(-50, 50, (4, 5, 3)), 2).astype(np.float32)
CELL = np.array([80, 90, 100, 90, 90, 90], np.float32)


@pytest.fixture
def psf(tmp_path: Path) -> Path:
    path = tmp_path / "a.psf"
    path.write_text(psf_text())
    return path


def psf_text() -> str:
    """A topology with charges and without coordinates."""
    atoms = "".join(
        f"{n:8d} SYS  {n:<4d} MET  {'CA' if n % 2 else 'N':<4} C    {charge:10.6f} {12.0:13.4f} {0:11d}\n"
        for n, charge in enumerate(CHARGES, 1)
    )
    return f"PSF\n\n{1:8d} !NTITLE\n REMARKS made\n\n{len(CHARGES):8d} !NATOM\n{atoms}\n{0:8d} !NBOND: bonds\n\n"


def written(path: Path, frames: NDArray[Any] = FRAMES, cell: NDArray[Any] | None = CELL) -> Path:
    """A trajectory, by MDAnalysis itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import MDAnalysis

        universe = MDAnalysis.Universe.empty(frames.shape[1], trajectory=True)
        universe.dimensions = cell
        with MDAnalysis.Writer(str(path), frames.shape[1]) as writer:
            for frame in frames:
                universe.atoms.positions = frame
                writer.write(universe.atoms)
    return path


@pytest.mark.parametrize("suffix", [".dcd", ".xtc", ".trr"])
def test_charges_of_the_topology_with_each_kind_of_trajectory(psf: Path, tmp_path: Path, suffix: str) -> None:
    with open_point_charges(psf, trajectory=written(tmp_path / f"a{suffix}")) as found:
        assert (found.n_atoms, found.n_frames, found.path) == (5, 4, psf)
        np.testing.assert_array_equal(found.charges, CHARGES)
        for index in (3, 0, 2, 1):
            frame = found.frame(index)
            np.testing.assert_allclose(frame.coordinates, FRAMES[index], atol=6e-3 if suffix == ".xtc" else 1e-5)
            assert frame.cell is not None
            np.testing.assert_allclose(frame.cell, np.diag([80.0, 90.0, 100.0]), atol=1e-4)
            for array in (frame.coordinates, frame.cell, found.charges):
                assert array.dtype == np.float64
                assert array.flags.c_contiguous
        for index in (4, -1):
            with pytest.raises(IndexError):
                found.frame(index)
        found.close()


def test_frames_are_read_by_several_threads(psf: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "a.dcd", np.arange(50 * 5 * 3, dtype=np.float32).reshape(50, 5, 3))
    with open_point_charges(psf, trajectory=path) as found, ThreadPoolExecutor(4) as threads:
        order = [index * 7 % 50 for index in range(50)]
        for index, frame in zip(order, threads.map(found.frame, order), strict=True):
            assert frame.coordinates[0, 0] == index * 15


def test_a_trajectory_without_a_cell(psf: Path, tmp_path: Path) -> None:
    with open_point_charges(psf, trajectory=written(tmp_path / "a.dcd", cell=None)) as found:
        assert found.frame(0).cell is None


def test_a_selection(psf: Path, tmp_path: Path) -> None:
    with open_point_charges(psf, trajectory=written(tmp_path / "a.dcd"), select="name CA") as found:
        np.testing.assert_array_equal(found.charges, CHARGES[::2])
        np.testing.assert_array_equal(found.frame(1).coordinates, FRAMES[1, ::2])


@pytest.mark.parametrize(
    ("select", "word"),
    [("name XX", "none of 5 atoms"), ("nonsense", "nonsense"), ("name (", "name"), ("", ""), ("prop q", "")],
)
def test_a_selection_that_is_empty_or_malformed(psf: Path, tmp_path: Path, select: str, word: str) -> None:
    path = written(tmp_path / "a.dcd")
    with pytest.raises(ParameterError) as caught:
        open_point_charges(psf, trajectory=path, select=select)
    one_line(caught.value, "--select", word)


@pytest.mark.parametrize("select", ["element C", "chainID A", "smarts C"])
def test_a_selection_of_what_is_not_there(
    psf: Path, tmp_path: Path, select: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rdkit", None)  # which smarts asks for
    with pytest.raises(ParameterError, match=f"--select '{select}': ") as caught:
        open_point_charges(psf, trajectory=written(tmp_path / "a.dcd"), select=select)
    assert "\n" not in str(caught.value)


def test_a_topology_alone_that_holds_no_coordinates(psf: Path) -> None:
    with input_error(psf, "no coordinates", "--trajectory"):
        open_point_charges(psf)


@pytest.mark.parametrize("suffix", [".pdb", ".gro"])
def test_coordinates_from_a_single_structure_that_states_no_charges(psf: Path, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    if suffix == ".pdb":
        path.write_text(
            "".join(PDB_ATOM.format(n, "CA", *place, "C") for n, place in enumerate(FRAMES[0], 1)) + "END\n"
        )
    else:
        lines = [f"{n:5d}MET     CA{n:5d}" + "".join(f"{x / 10:8.3f}" for x in p) for n, p in enumerate(FRAMES[0], 1)]
        path.write_text("\n".join(["made", "5", *lines, "   8.0   9.0  10.0"]) + "\n")
    with open_point_charges(psf, trajectory=path) as found:
        np.testing.assert_allclose(found.frame(0).coordinates, FRAMES[0], atol=6e-3)
        assert (found.frame(0).cell is None) == (suffix == ".pdb")
    with input_error(path, "no charges", ".psf, .tpr", "--trajectory"):
        open_point_charges(path)


def test_a_pqr_may_be_a_topology(tmp_path: Path) -> None:
    path = tmp_path / "a.pqr"
    path.write_text("".join(f"ATOM {n} CA MET A {n} 1.0 2.0 3.0 {q} 1.5\n" for n, q in enumerate(CHARGES)))
    with open_point_charges(path, trajectory=written(tmp_path / "a.dcd"), select="resid 1 2") as found:
        np.testing.assert_array_equal(found.charges, CHARGES[1:3])
        np.testing.assert_array_equal(found.frame(2).coordinates, FRAMES[2, 1:3])


CRYST1 = "CRYST1   30.000   40.000   50.000  90.00  90.00  90.00 P 1           1\n"
TWO = "ATOM 1 CA MET A 1 1.001 2.0 3.0 0.5 1.5\nATOM 2 CB MET A 1 4.0 2.0 3.0 -0.25 1.25\n"


def test_the_cell_of_a_pqr_counts_however_it_is_read(tmp_path: Path) -> None:
    path, packed = tmp_path / "a.pqr", tmp_path / "b.pqr.gz"
    path.write_text(CRYST1 + TWO)
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for source, options in ((path, {"select": "name CB"}), (path, {"trajectory": path}), (packed, {})):
        with open_point_charges(source, **options) as found:  # type: ignore[arg-type]
            np.testing.assert_array_equal(found.frame(0).cell, np.diag([30.0, 40.0, 50.0]))


def test_a_selection_of_a_pqr_has_its_numbers_to_the_last_bit(tmp_path: Path) -> None:
    path = tmp_path / "a.pqr"
    path.write_text(TWO)
    with open_point_charges(path, select="name CA") as found:
        assert found.frame(0).coordinates.tolist() == [[1.001, 2.0, 3.0]]
        assert (found.charges.tolist(), found.radii) == ([0.5], [1.5])
    path.write_text("MODEL 1\n" + TWO + "MODEL 2\n" + TWO)
    with input_error(path, "second model"):
        open_point_charges(path, select="name CA")
    path.write_bytes(b"\xef\xbb\xbf" + TWO.encode())  # MDAnalysis would lose the first atom
    with input_error(path, "MDAnalysis", "finds 1 atom instead of 2"):
        open_point_charges(path, select="name CB")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_coordinate_that_is_not_finite_names_frame_and_atom(psf: Path, tmp_path: Path, value: float) -> None:
    frames = FRAMES.copy()
    frames[2, 3, 1] = value
    path = written(tmp_path / "a.dcd", frames)
    with open_point_charges(psf, trajectory=path) as found:
        found.frame(1)
        with input_error(path, "frame 2, atom 4", "finite"):
            found.frame(2)


def test_files_that_do_not_belong_together(psf: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "other.dcd", np.zeros((2, 7, 3), np.float32))
    with input_error(path, psf.name, "atoms"):
        open_point_charges(psf, trajectory=path)


@pytest.mark.parametrize("suffix", [".dcd", ".xtc", ".trr", ".nc"])
def test_damaged_trajectories(psf: Path, tmp_path: Path, suffix: str) -> None:
    whole = written(tmp_path / f"whole{suffix}").read_bytes()
    for length in (0, 3, 50, 150, len(whole) // 2, len(whole) - 3):
        path = tmp_path / f"{length}{suffix}"
        path.write_bytes(whole[:length])
        try:
            with open_point_charges(psf, trajectory=path) as found:
                # A file cut within its last frame: the frames before it are whole.
                assert found.n_frames <= len(FRAMES)
                for index in range(found.n_frames):
                    found.frame(index)
        except InputError as error:
            one_line(error, path.name)


@pytest.mark.parametrize("suffix", [".dcd", ".xtc", ".trr"])
def test_a_frame_that_is_cut_short_is_told_where_it_is_asked_for(psf: Path, tmp_path: Path, suffix: str) -> None:
    three, four = (len(written(tmp_path / f"{count}{suffix}", FRAMES[:count]).read_bytes()) for count in (3, 4))
    path = written(tmp_path / f"a{suffix}")
    whole = path.read_bytes()
    for length in (three + 4, three + 60, four - 1):
        path.write_bytes(whole[:length])
        with open_point_charges(psf, trajectory=path) as found:
            assert found.n_frames == 4
            np.testing.assert_allclose(found.frame(2).coordinates, FRAMES[2], atol=6e-3)
            with input_error(path, "frame 3"):
                found.frame(3)
    path.write_bytes(whole[:three])
    with open_point_charges(psf, trajectory=path) as found:
        assert found.n_frames == 3


@pytest.mark.parametrize("count", [5, 50])
def test_the_damaged_header_of_a_frame_of_an_xtc(
    psf: Path, tmp_path: Path, count: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """MDAnalysis ends the process at some, and takes the coordinates of the frame before for a count of -1."""
    places = np.random.default_rng(3).uniform(0, 30, (3, count, 3)).astype(np.float32)
    path = tmp_path / "a.xtc"
    two = len(written(path, places[:2]).read_bytes())
    whole = written(path, places).read_bytes()
    with closing(PositionalFile(path)) as file:
        _frame_offsets(path, file)
    # The mark and both counts of atoms; the precision, the last of the least integers, small differences and bytes.
    faults = [(0, 1994), (4, -1), (4, 0), (52, -1), (52, count + 1)]
    faults += [(56, 0), (56, -1), (68, 1 << 30), (84, 8), (84, 73), (88, 0), (88, 1 << 30)] if count > 9 else []
    for place, number in faults:
        damaged = bytearray(whole)
        struct.pack_into(">i", damaged, two + place, number)
        path.write_bytes(damaged)
        with input_error(path, "frame 2: its header is damaged; copy the file again"):
            open_point_charges(psf, trajectory=path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("extent", [30, 300_000])
def test_damaged_coordinates_of_an_xtc(tmp_path: Path, extent: float, capfd: pytest.CaptureFixture[str]) -> None:
    """At some, MDAnalysis divides by zero or writes beyond its memory, which ends the process. Atoms far apart are
    packed in another way."""
    topology = tmp_path / "a.pqr"
    topology.write_text("".join(f"ATOM {n} O HOH {n} 0 0 0 0.5 1\n" for n in range(1, 61)))
    rng = np.random.default_rng(3)
    molecules = rng.uniform(0, extent, (3, 20, 1, 3)) + rng.uniform(-1, 1, (3, 20, 3, 3))
    places = molecules.reshape(3, 60, 3).astype(np.float32)
    path = tmp_path / "a.xtc"
    two = len(written(path, places[:2]).read_bytes())
    whole = written(path, places).read_bytes()
    with open_point_charges(topology, trajectory=path) as found:
        for index in range(3):
            np.testing.assert_allclose(found.frame(index).coordinates, places[index], atol=6e-3, rtol=1e-6)
    faults = [(60, ">i", -1000 * extent), (64, ">i", -5000 * extent), (84, ">i", 9), (84, ">i", 72)]
    faults += [(place, "B", 255) for place in range(92, len(whole) - two, 11)]
    refused = 0
    for place, kind, number in faults:
        damaged = bytearray(whole)
        struct.pack_into(kind, damaged, two + place, number)
        path.write_bytes(damaged)
        with open_point_charges(topology, trajectory=path) as found:
            found.frame(1)
            try:
                found.frame(2)  # of other places, if the damage keeps the number of bits
            except InputError as error:
                one_line(error, f"{path}, frame 2: its coordinates are damaged; copy the file again, or leave")
                refused += 1
    assert refused > 5
    assert capfd.readouterr() == ("", "")


def test_the_damaged_header_of_the_first_frame_of_a_trr(psf: Path, tmp_path: Path) -> None:
    """MDAnalysis ends the process at some."""
    path = written(tmp_path / "a.trr")
    whole = path.read_bytes()
    for place, number in ((32, 35), (36, 4), (52, 61), (56, 8), (64, 6), (64, 1 << 30)):  # cell, virial, x, v and atoms
        damaged = bytearray(whole)
        struct.pack_into(">i", damaged, place, number)
        path.write_bytes(damaged)
        with input_error(path, "frame 0: its header is damaged; copy the file again"):
            open_point_charges(psf, trajectory=path)
    struct.pack_into(">4i", damaged, 52, 12 * 90_005, 0, 0, 90_005)  # consistent, and more than the file holds
    path.write_bytes(damaged)
    with input_error(path, "truncated: the file ends within its first frame; copy it again"):
        open_point_charges(psf, trajectory=path)


def test_a_frame_without_positions(psf: Path, tmp_path: Path) -> None:
    from MDAnalysis.lib.formats.libmdaxdr import TRRFile

    path, box = tmp_path / "a.trr", np.eye(3, dtype=np.float32)
    with TRRFile(str(path), "w") as file:
        for number, places in enumerate((FRAMES[0], None)):
            file.write(places, FRAMES[1], None, box, number, float(number), 0.0, len(CHARGES))
    with open_point_charges(psf, trajectory=path) as found:
        assert found.frame(0).coordinates.shape == (5, 3)
        with input_error(path, "frame 1: has no positions", "--frames"):
            found.frame(1)


@pytest.mark.parametrize("suffix", [".xtc", ".trr"])
def test_nothing_is_written_beside_the_trajectory(
    psf: Path, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(links))
    (tmp_path / "md").mkdir()
    path = written(tmp_path / "md" / f"a{suffix}")
    with open_point_charges(psf, trajectory=path) as found:
        found.frame(3)
        (folder,) = links.iterdir()
        index = folder / f".a{suffix}_offsets.npz"
        kept = index.read_bytes()
    assert list(links.iterdir()) == []
    assert list(path.parent.iterdir()) == [path]
    # An index that the user's own MDAnalysis has left is used, not made anew; one that is rubbish does no harm.
    beside = path.with_name(index.name)
    for content in (kept, b"rubbish"):
        beside.write_bytes(content)
        with open_point_charges(psf, trajectory=path) as found:
            np.testing.assert_allclose(found.frame(3).coordinates, FRAMES[3], atol=6e-3)
        assert beside.read_bytes() == content
    path.write_bytes(path.read_bytes()[:20])
    with input_error(path):
        open_point_charges(psf, trajectory=path)
    assert list(links.iterdir()) == []


@pytest.mark.parametrize("suffix", [".psf", ".pdb", ".tpr", ".prmtop", ".mol2", ".unknown", ""])
def test_what_is_no_topology(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"bad{suffix}"
    for content in (b"", b"rubbish\n" * 30, bytes(range(256)) * 20):
        path.write_bytes(content)
        with input_error(path):
            open_point_charges(path)


@pytest.mark.parametrize("suffix", [".csv", ""])
def test_what_is_no_trajectory_is_told_the_kinds_that_are(psf: Path, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_text("rubbish\n")
    with pytest.raises(InputError) as caught:
        open_point_charges(psf, trajectory=path)
    one_line(caught.value, f"{path}: unsupported trajectory format; convert it to .dcd, ")
    kinds = {kind[1:].upper() for kind in str(caught.value).replace(",", "").split() if kind.startswith(".")}
    from MDAnalysis import _READERS

    assert len(kinds) == 9
    assert kinds <= set(_READERS)


def test_an_empty_file_is_told_so(psf: Path, tmp_path: Path) -> None:
    for name in ("a.dcd", "a.psf"):  # the topology is opened first
        (tmp_path / name).write_bytes(b"")
        with input_error(tmp_path / name, "the file is empty; copy or export it again"):
            open_point_charges(psf, trajectory=tmp_path / name)


@pytest.mark.parametrize("suffix", [".dcd", ".xtc", ".trr"])
def test_a_trajectory_as_the_input(tmp_path: Path, suffix: str) -> None:
    with input_error(tmp_path / f"a{suffix}", "--trajectory", ".psf"):
        open_point_charges(tmp_path / f"a{suffix}")


def test_a_tpr_that_ends_early_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "a.tpr"
    path.write_bytes(real_molecule("adk_oplsaa.tpr").read_bytes()[:3000])
    with input_error(path, "cannot be read: it ends early; check the file, or copy it again"):
        open_point_charges(path)


def test_missing_files(psf: Path, tmp_path: Path) -> None:
    with input_error(tmp_path / "absent.tpr", "no such file"):
        open_point_charges(tmp_path / "absent.tpr")
    with input_error(tmp_path / "absent.xtc", "no such file"):
        open_point_charges(psf, trajectory=tmp_path / "absent.xtc")


def test_without_mdanalysis(psf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "MDAnalysis", None)
    with pytest.raises(ParameterError) as caught:
        open_point_charges(psf)
    one_line(caught.value, psf.name, "pip install MDAnalysis")


def test_a_real_tpr_holds_coordinates_and_cell_of_its_own() -> None:
    topology, trajectory = real_molecule("adk_oplsaa.tpr"), real_molecule("adk_oplsaa.xtc")
    with open_point_charges(topology) as alone, open_point_charges(topology, trajectory=trajectory) as moving:
        assert (alone.n_frames, moving.n_frames) == (1, 10)
        np.testing.assert_array_equal(alone.charges, moving.charges)
        frame, first = alone.frame(0), moving.frame(0)
        np.testing.assert_allclose(frame.coordinates, first.coordinates, atol=7e-3)  # which XTC rounds
        assert frame.cell is not None
        np.testing.assert_allclose(frame.cell, first.cell, atol=1e-3)


def test_a_real_trajectory() -> None:
    topology, trajectory = real_molecule("adk_oplsaa.tpr"), real_molecule("adk_oplsaa.xtc")
    with open_point_charges(topology, trajectory=trajectory, select="protein") as found:
        assert (found.n_atoms, found.n_frames) == (3341, 10)
        assert abs(found.charges.sum() + 4) < 1e-5
        frame = found.frame(3)
        assert frame.cell is not None
        # A rhombic dodecahedron.
        np.testing.assert_allclose(frame.cell[0], [80.0052, 0, 0], atol=1e-3)
        np.testing.assert_allclose(np.linalg.norm(frame.cell, axis=1), 80.0052, atol=1e-3)
        np.testing.assert_allclose(found.frame(9).coordinates[0], [52.76, 36.81, 30.42], atol=6e-3)
    with input_error(real_molecule("1a63.pqr"), topology.name, "atoms"):
        open_point_charges(topology, trajectory=real_molecule("1a63.pqr"))
