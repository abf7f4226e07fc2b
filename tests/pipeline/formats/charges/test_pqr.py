from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InputError
from pipeline.formats.charges import pqr
from pipeline.formats.charges.base import Molecule
from pipeline.formats.charges.pqr import read_pqr, stated_cell
from tests.pipeline.formats.charges.real_molecules import real_molecule
from tests.pipeline.formats.image.contract import QUICK, input_error, one_line

GOOD = "ATOM      1  N   MET     1      11.104   6.134  -6.504 -0.3000 1.8500\n"


def written(tmp_path: Path, text: str | bytes, name: str = "a.pqr") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def atoms(molecule: Molecule) -> list[list[float]]:
    assert molecule.radii is not None
    return np.column_stack([molecule.coordinates, molecule.charges, molecule.radii]).tolist()


def pdb2pqr_line(serial: int, x: float, y: float, z: float, charge: float, radius: float) -> str:
    """As PDB2PQR writes it without --whitespace: every field in its columns, nothing between them."""
    place = f"{'ATOM':<6}{serial:5d} {'HH11':<4}{'ARG':>4} {'A':1}{serial % 10000:4d}    "
    return f"{place}{x:8.3f}{y:8.3f}{z:8.3f}{charge:8.4f}{radius:7.4f}\n"


PLACE = "ATOM      1  N   MET A   1    "


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (GOOD, [11.104, 6.134, -6.504, -0.3, 1.85]),
        ("ATOM  5 N      MET    1  -6.40600  5.46900  -3.25900 -0.30000 1.85000", [-6.406, 5.469, -3.259, -0.3, 1.85]),
        ("HETATM 9 CA CA B 7 1e1 -2.5E-3 +3 2 0", [10, -0.0025, 3, 2, 0]),
        ("ATOM 1 N MET A 52B 1 2 3 .5 1.", [1, 2, 3, 0.5, 1]),
        ("ATOM 1 N MET A1000 1.5 2.5 3.5 .5 1", [1.5, 2.5, 3.5, 0.5, 1]),
        ("ATOM 1 N MET -5 1.5 2.5 3.5 .5 1", [1.5, 2.5, 3.5, 0.5, 1]),
        ("ATOM 100000 N_1 MET 1 1.5 2.5 3.5 .5 1", [1.5, 2.5, 3.5, 0.5, 1]),
        ("ATOM\t1\tN\tMET\t1\t1.5\t2.5\t3.5\t.5\t1\r", [1.5, 2.5, 3.5, 0.5, 1]),
        ("ATOM 1 N MET A 1 1.5 2.5 3.5 .5 1 N", [1.5, 2.5, 3.5, 0.5, 1]),
        # Numbers that touch, in the PDB's columns.
        (f"{PLACE} -67.825-100.826  12.300 -0.3000 1.8500", [-67.825, -100.826, 12.3, -0.3, 1.85]),
        (f"{PLACE}-167.825-100.826-912.300-10.0000 1.8500", [-167.825, -100.826, -912.3, -10, 1.85]),
        (f"{PLACE}1167.8251100.8261912.300 -0.834010.0000", [1167.825, 1100.826, 1912.3, -0.834, 10]),
        (f"{PLACE}-167.825-100.826-912.300 -0.834 1.7683 N", [-167.825, -100.826, -912.3, -0.834, 1.7683]),
        (pdb2pqr_line(99999, -999.999, -999.999, -999.999, -0.5, 1.5), [-999.999, -999.999, -999.999, -0.5, 1.5]),
        # Serials of six digits, in hex and where the columns were too few.
        ("HETATM100000 N MET A 1 1.5 2.5 3.5 .5 1", [1.5, 2.5, 3.5, 0.5, 1]),
        ("ATOM  186a0  N   MET A   1       1.500   2.500   3.500  0.5000 1.0000", [1.5, 2.5, 3.5, 0.5, 1]),
        ("ATOM  *****  N   MET A   1       1.500   2.500   3.500  0.5000 1.0000", [1.5, 2.5, 3.5, 0.5, 1]),
        ("  ATOM 1 N MET 1 1.5 2.5 3.5 .5 1", [1.5, 2.5, 3.5, 0.5, 1]),
        ("hetatm 1 N MET 1 1.5 2.5 3.5 .5 1", [1.5, 2.5, 3.5, 0.5, 1]),
        # A column behind the radius is passed over, also where x could be the residue's number.
        ("ATOM 1 N MET A 1 11 6 -6 -0.3 1.85 0.5", [11, 6, -6, -0.3, 1.85]),
    ],
)
def test_one_atom(tmp_path: Path, line: str, expected: list[float]) -> None:
    assert atoms(read_pqr(written(tmp_path, line + "\n"))) == [expected]


def test_other_lines_are_passed_over_and_the_cell_is_read(tmp_path: Path) -> None:
    text = "REMARK ATOM\nCRYST1   10.000   20.000   30.000  90.00  90.00  90.00 P 1\nMODEL 1\n" + GOOD + "TER\n" + GOOD
    molecule = read_pqr(written(tmp_path, text + "ENDMDL\nEND\n\n"))
    assert len(atoms(molecule)) == 2
    assert molecule.cell is not None
    np.testing.assert_array_equal(molecule.cell, np.diag([10.0, 20.0, 30.0]))
    for array in (molecule.coordinates, molecule.charges, molecule.radii):
        assert array is not None
        assert array.dtype == np.float64
        assert array.flags.c_contiguous


@pytest.mark.parametrize(
    "cell",
    [
        "CRYST1    0.000    0.000    0.000  90.00  90.00  90.00 P 1           1",
        "CRYST1    1.000    1.000    1.000  90.00  90.00  90.00 P 1           1",
        "",
    ],
)
def test_a_cell_that_only_fills_the_line_is_none(tmp_path: Path, cell: str) -> None:
    assert read_pqr(written(tmp_path, f"{cell}\n{GOOD}")).cell is None


def test_a_cell_whose_numbers_touch(tmp_path: Path) -> None:
    line = "CRYST110000.00010000.00010000.000  60.00  60.00  90.00 P 1\n"
    cell = read_pqr(written(tmp_path, line + GOOD)).cell
    assert cell is not None
    np.testing.assert_allclose(np.linalg.norm(cell, axis=1), 10_000, rtol=1e-14)
    np.testing.assert_allclose(cell @ cell.T / 1e8, [[1, 0, 0.5], [0, 1, 0.5], [0.5, 0.5, 1]], atol=1e-14)


def test_a_cell_that_touches_its_name(tmp_path: Path) -> None:
    line = "CRYST110000.000  100.000  200.000  60.00  60.00  90.00   1\n"  # six numbers stand behind the first
    cell = read_pqr(written(tmp_path, line + GOOD)).cell
    assert cell is not None
    np.testing.assert_allclose(np.linalg.norm(cell, axis=1), [10_000, 100, 200], rtol=1e-14)


def test_the_cell_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.pqr"
    cell = stated_cell(path, f"REMARK\nCRYST1 10 20 30 90 90 90\nATOM none of its business\n{GOOD}END\n{GOOD}".encode())
    np.testing.assert_array_equal(cell, np.diag([10.0, 20.0, 30.0]))
    assert stated_cell(path, GOOD.encode()) is None
    with input_error(path, f"{path}:2: CRYST1 needs"):
        stated_cell(path, b"REMARK\nCRYST1 10 20\n")


def test_no_atom_is_lost_to_what_an_editor_puts_before_it(tmp_path: Path) -> None:
    assert len(atoms(read_pqr(written(tmp_path, b"\xef\xbb\xbf" + (GOOD + GOOD).encode())))) == 2
    mixed = GOOD.strip() + "\r" + GOOD.strip() + "\r\n" + GOOD  # joined of files of different systems
    assert len(atoms(read_pqr(written(tmp_path, mixed)))) == 3


@pytest.mark.parametrize("data", [GOOD.encode("utf-16"), GOOD.encode() + b"\0" + GOOD.encode(), b"\x1f\x8b\x08\0"])
def test_what_is_no_text_is_refused(tmp_path: Path, data: bytes) -> None:
    path = written(tmp_path, data)
    with input_error(path, "NUL bytes", "plain text"):
        read_pqr(path)


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_any_line_end_and_no_last_one(tmp_path: Path, line_end: bytes) -> None:
    path = written(tmp_path, line_end.join([b"REMARK", *[GOOD.strip().encode()] * 3]))
    assert len(atoms(read_pqr(path))) == 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ATOM      1  N   MET     1      11.104   6.134  -6.504 -0.3000", ("radius",)),
        ("ATOM 1 N MET 1 11.104 6.134 -6.504 -0.3", ("9 fields",)),
        ("ATOM 1 N MET A 1 11.104 6.134 -6.504 -0.3", ("field is missing", "'A'")),
        ("ATOM 1 N MET A 1 11.104 6.134 -6.504", ("9 fields",)),
        ("ATOM 1 N", ("3 fields", "x y z charge radius")),
        ("ATOM", ("1 field;",)),
        ("ATOM 1 N MET 1 abc 6.134 -6.504 -0.3 1.85", ("'abc'", "x coordinate")),
        ("ATOM 1 N MET 1 1.0 6.134 -6.504 -0.3 1,85", ("'1,85'", "radius")),
        ("ATOM 1 N MET 1 1.0 6.134 -6.504 -0.3-1.85 1.85", ("'-0.3-1.85'", "charge")),
        ("ATOM 1 N MET 1 1_0 6.134 -6.504 -0.3 1.85", ("'1_0'", "x coordinate")),
        ("ATOM 1 N MET 1 nan 6.134 -6.504 -0.3 1.85", ("x coordinate", "nan", "finite")),
        ("ATOM 1 N MET 1 1.0 6.134 inf -0.3 1.85", ("z coordinate", "inf", "finite")),
        ("ATOM 1 N MET 1 1.0 6.134 1.0 NaN 1.85", ("charge", "nan", "finite")),
        ("ATOM 1 N MET 1 1.0 6.134 1.0 1e999 1.85", ("charge", "inf", "finite")),
        ("ATOM 1 N MET 1 1e308 1e308 1e308 1 1.85", ("the sum of its numbers overflows",)),
        ("ATOM      1  N   MET A   1     -67.825-100.826  12.300", ("no charge and radius", "column 55")),
        ("ATOM      1  N   MET A   1     -67.825-100.826  12.300 -0.3000 abc", ("column 55",)),
        ("ATOM      1  N   MET A   1     -67.825-100.8 6  12.300 -0.3000 1.85", ()),
        ("ATOM 1 N MET 1 \xff\xfe 6.134 -6.504 -0.3 1.85", ("x coordinate",)),
        ("CRYST1 10 20", ("CRYST1", "three lengths")),
        ("CRYST1 10 20 30 90 90 abc", ("CRYST1", "three lengths")),
        ("CRYST1 -10 20 30 90 90 90", ("CRYST1", "no cell")),
        ("CRYST1 10 20 30 90 90 180", ("CRYST1", "no cell")),
        ("CRYST1 10 20 30 20 20 90", ("CRYST1", "no cell")),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, words: tuple[str, ...]) -> None:
    path = written(tmp_path, (GOOD + "REMARK\n" + GOOD + line + "\n" + GOOD).encode("latin-1"))
    with input_error(path, f"{path}:4: ", *words):
        read_pqr(path)


@pytest.mark.parametrize("end", ["ENDMDL", "END"])
def test_a_second_model_is_refused(tmp_path: Path, end: str) -> None:
    path = written(tmp_path, GOOD + end + "\nMODEL 2\n" + GOOD)
    with input_error(path, f"{path}:4: ", end, "line 2"):
        read_pqr(path)


def test_a_second_model_without_an_end_of_the_first_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "MODEL 1\n" + GOOD + "MODEL 2\n" + GOOD)
    with input_error(path, f"{path}:4: ", "MODEL of line 3"):
        read_pqr(path)


def test_several_cells_must_be_one(tmp_path: Path) -> None:
    """As in files that were put together: which one counts would be anybody's guess."""
    cell, none = "CRYST1 10 20 30 90 90 90\n", "CRYST1 1 1 1 90 90 90\n"
    for text in (cell + GOOD + cell, none + cell + GOOD, cell + GOOD + none):
        path = written(tmp_path, text)
        np.testing.assert_array_equal(read_pqr(path).cell, np.diag([10.0, 20, 30]))
    path = written(tmp_path, cell + GOOD + cell.replace("30", "31"))
    with input_error(path, f"{path}:3: this CRYST1 differs from an earlier one"):
        read_pqr(path)
    with input_error(path, f"{path}:3: this CRYST1 differs from an earlier one"):
        stated_cell(path, path.read_bytes())


@pytest.mark.parametrize("loosely", [str.lower, lambda text: "  " + text.replace("\n", "\n  ")])
def test_what_stands_beside_loosely_written_atoms_counts_too(tmp_path: Path, loosely: Callable[[str], str]) -> None:
    """Indented or in small letters, as the atoms may be: the cell, and where a model ends."""
    cell, atom = "CRYST1 10 20 30 90 90 90 P 1\n", "ATOM 1 N MET 1 1 2 3 .5 1\n"
    path = written(tmp_path, loosely(cell + atom + "TER\nENDMDL\n"))
    np.testing.assert_array_equal(read_pqr(path).cell, np.diag([10.0, 20, 30]))
    np.testing.assert_array_equal(stated_cell(path, path.read_bytes()), np.diag([10.0, 20, 30]))
    for end in ("ENDMDL", "END", "MODEL 2"):
        path = written(tmp_path, loosely(atom + end + "\n" + atom))
        with input_error(path, f"{path}:3: ", "line 2"):
            read_pqr(path)


@pytest.mark.parametrize("text", ["", "REMARK\n", "END\n", "REMARK ATOM\natoms of the first chain\n"])
def test_a_file_without_atoms_is_refused(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    with input_error(path, "no ATOM"):
        read_pqr(path)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.pqr", tmp_path):
        with input_error(path):
            read_pqr(path)


COORDINATES = st.integers(-9_999_999, 99_999_999).map(lambda thousandths: thousandths / 1000)
CHARGES = st.integers(-999_999, 999_999).map(lambda parts: parts / 10_000)
RADII = st.integers(0, 99_999).map(lambda parts: parts / 10_000)
ATOMS = st.lists(st.tuples(COORDINATES, COORDINATES, COORDINATES, CHARGES, RADII), min_size=1, max_size=12)


@QUICK
@given(ATOMS)
def test_any_numbers_that_fit_the_columns(
    tmp_path_factory: pytest.TempPathFactory, table: list[tuple[float, float, float, float, float]]
) -> None:
    wide = [row for row in table if all(-999.9995 < value < 9999.9995 for value in row[:3])]
    if not wide:
        return
    text = "".join(pdb2pqr_line(serial, *row) for serial, row in enumerate(wide, 1))
    assert atoms(read_pqr(written(tmp_path_factory.mktemp("pqr"), text))) == [list(row) for row in wide]


@QUICK
@given(
    st.lists(st.tuples(*[st.floats(-1e6, 1e6)] * 4, st.floats(0, 100)), min_size=1, max_size=12),
    st.sampled_from(["", " A", " 7"]),
)
def test_any_numbers_parted_by_spaces_to_the_last_bit(
    tmp_path_factory: pytest.TempPathFactory, table: list[tuple[float, ...]], chain: str
) -> None:
    lines = [f"ATOM {n} N MET{chain} {n} " + " ".join(map(repr, row)) for n, row in enumerate(table)]
    assert atoms(read_pqr(written(tmp_path_factory.mktemp("pqr"), "\n".join(lines)))) == [list(row) for row in table]


PIECES = st.sampled_from(
    [
        "ATOM",
        "HETATM",
        "CRYST1",
        "END",
        "N",
        "MET",
        "1",
        "-1",
        "12.500",
        "-67.825-100.826",
        "nan",
        "1e400",
        "1_0",
        ".",
        "A",
    ]
)
LINES = st.one_of(
    st.lists(PIECES, max_size=13).map(" ".join),
    st.tuples(st.just(GOOD), st.integers(0, 80), st.text(max_size=4)).map(lambda c: c[0][: c[1]] + c[2] + c[0][c[1] :]),
    st.text(max_size=90).map(lambda text: "ATOM" + text),
)


@QUICK
@given(st.lists(LINES, max_size=6).map("\n".join).map(str.encode) | st.binary(max_size=200))
def test_any_text_is_a_molecule_or_an_input_error(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    path = written(tmp_path_factory.mktemp("pqr"), text)
    try:
        molecule = read_pqr(path)
    except InputError as error:
        one_line(error, path.name)
    else:
        assert np.isfinite(molecule.coordinates).all()
        assert np.isfinite(molecule.charges).all()
        assert len(molecule.charges) == len(molecule.coordinates) > 0


@pytest.mark.parametrize(
    ("name", "count", "charge", "first"),
    [
        ("1a63.pqr", 2065, -1, [-6.406, 5.469, -3.259]),
        ("actin_dimer.pqr", 11754, -24, [46.331, 15.935, -4.837]),
        ("watbox_sl40.pqr", 5943, 0, [-16.332, -9.918, -4.096]),
    ],
)
def test_real_files(name: str, count: int, charge: float, first: list[float]) -> None:
    molecule = read_pqr(real_molecule(name))
    assert len(molecule.charges) == count
    assert math.isclose(molecule.charges.sum(), charge, abs_tol=1e-9)
    assert molecule.coordinates[0].tolist() == first
    assert molecule.cell is None


@QUICK
@given(
    st.lists(st.tuples(*[st.integers(-(10**15), 10**15)] * 5, *[st.integers(0, 15)] * 5), min_size=1, max_size=9),
    st.lists(st.sampled_from(["", "REMARK 5", "HETATM 9 CA CA 7 1e1 -2.5E-3 3 2 0", "ATOM 1 N M 1 1 2 3 4 5 6"])),
    st.integers(1, 400),
    st.sampled_from(["", " A"]),
)  # fmt: skip
def test_lines_read_together_have_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, table: list[tuple[int, ...]], others: list[str], size: int, chain: str
) -> None:
    """Numbers of any number of digits and decimals, in blocks of any size, with lines between that are otherwise."""
    lines = [
        f"ATOM {number} N MET{chain} {number}" + "".join(f" {_decimal(row[each], row[5 + each])}" for each in range(5))
        for number, row in enumerate(table)
    ]
    for each in others:
        lines.insert(len(each) % len(lines), each)
    path, found = written(tmp_path_factory.mktemp("pqr"), "\n".join(lines)), []
    for alike, block in ((pqr._alike, size), (lambda block: None, 1 << 18)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pqr, "_alike", alike)
            patch.setattr(pqr, "BLOCK_BYTES", block)
            molecule = read_pqr(path)
            assert molecule.radii is not None
            found.append([each.tobytes() for each in (molecule.coordinates, molecule.charges, molecule.radii)])
    assert found[0] == found[1]


def _decimal(whole: int, decimals: int) -> str:
    digits = f"{abs(whole):0{decimals + 1}d}"
    point = len(digits) - decimals
    return f"{'-' * (whole < 0)}{digits[:point]}.{digits[point:]}"


def test_the_lines_of_a_usual_file_are_read_together() -> None:
    block = b"".join(b"ATOM %d N MET %d 11.104 -6.134 -0.5 0.3000 1.8500\n" % (n, n) for n in range(999))
    assert pqr._alike(block) is not None
    for spoilt in (b"ATOM 5 N MET A 5 1 2 3 4 5\n", b"ATOM 5 N M 5 1 2 3 4\n", b"ATOM 5 N M 5 1 2 3 4 5 6\n", b"TER\n",
                   b"ATOM 5 N MET 5\t1 2 3 4 5\n", b"ATOM 5 N MET -5 1 2 3 4 5\n", b"ATOM 5 N MET 5 1 2 3 4 1e5\n",
                   b"ATOM 5 N MET 5 1 2 3 4 .\n", b"ATOM 5 N MET 5 1 2 3 4 1.2.3\n", b"ATOM 5 N MET 5 1 2 3 4 --5\n",
                   b"atom 5 N MET 5 1 2 3 4 5\n", b"ATOM 5 N MET 5 1 2 3 4 1234567890123456\n", b"\n"):  # fmt: skip
        assert pqr._alike(block + spoilt) is None
        assert pqr._alike(spoilt + block) is None
