from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.errors import InputError, ParameterError
from pipeline.formats.charges import open_point_charges
from pipeline.formats.charges.arrays import read_charge_array
from tests.pipeline.formats.image.contract import QUICK, input_error, one_line

TABLE = np.random.default_rng(5).standard_normal((7, 4))


@pytest.mark.parametrize("dtype", ["float64", ">f4", "float16", "int16", "uint8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_of_four_columns(tmp_path: Path, dtype: str, order: Any) -> None:
    table = np.asarray((np.abs(TABLE) * 10).astype(dtype), order=order)
    np.save(tmp_path / "a.npy", table)
    with open_point_charges(tmp_path / "a.npy") as charges:
        frame = charges.frame(0)
        np.testing.assert_array_equal(frame.coordinates, table[:, :3].astype(np.float64))
        np.testing.assert_array_equal(charges.charges, table[:, 3].astype(np.float64))
        assert frame.cell is None
        assert (charges.n_frames, charges.n_atoms) == (1, 7)
        assert frame.coordinates.flags.c_contiguous
        assert frame.coordinates.dtype == charges.charges.dtype == np.float64


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("cell", [None, [9, 8, 7], [9, 8, 7, 90, 90, 90], np.diag([9.0, 8, 7])])
def test_an_archive_of_named_arrays(tmp_path: Path, save: Any, stacked: bool, cell: Any) -> None:
    arrays: dict[str, Any] = {"unrelated": np.array(["text"]), "q": TABLE[:, 3]}
    arrays |= {"xyz": TABLE[:, :3]} if stacked else dict(zip("xyz", TABLE.T, strict=False))
    arrays |= {} if cell is None else {"cell": cell}
    save(tmp_path / "a.npz", **arrays)
    molecule = read_charge_array(tmp_path / "a.npz")
    np.testing.assert_array_equal(molecule.coordinates, TABLE[:, :3])
    np.testing.assert_array_equal(molecule.charges, TABLE[:, 3])
    if cell is None:
        assert molecule.cell is None
    else:
        assert molecule.cell is not None
        np.testing.assert_array_equal(molecule.cell, np.diag([9.0, 8.0, 7.0]))


def broken(value: float, column: int) -> NDArray[np.float64]:
    table = TABLE.copy()
    table[4, column] = value
    return table


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (TABLE[:, :3], ("(7, 3)", "n × 4")),
        (TABLE[0], ("(4,)",)),
        (np.zeros((0, 4)), ("no atoms",)),
        (TABLE.astype(complex), ("complex128", "real numbers")),
        (np.array([["a"] * 4]), ("<U1",)),
        (broken(np.nan, 0), ("row 5", "position", "finite")),
        (broken(-np.inf, 2), ("row 5", "position", "finite")),
        (broken(np.nan, 3), ("row 5", "charge", "finite")),
        (np.array([[None] * 4], object), ("plain numbers",)),
        (np.array([[np.longdouble("1e400"), 0, 0, 1]]), ("row 1", "position", "finite")),
    ],
)
def test_arrays_that_are_no_charges(tmp_path: Path, table: NDArray[Any], words: tuple[str, ...]) -> None:
    np.save(tmp_path / "a.npy", table, allow_pickle=True)
    with input_error(tmp_path / "a.npy", *words):
        read_charge_array(tmp_path / "a.npy")


def test_a_sum_that_overflows_says_nothing_of_its_terms(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", [[1e308, 1e308, 0, 1]])
    assert read_charge_array(tmp_path / "a.npy").coordinates.max() == 1e308


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({}, ("holds no arrays", "xyz and q")),
        ({"arr_0": np.zeros((3, 4))}, ("holds arr_0, saved without names", "np.savez(file, xyz=positions")),
        ({"positions": np.zeros((3, 3)), "q": np.ones(3)}, ("holds positions, q; it needs", "xyz and q")),
        ({f"array_with_a_long_name_{n}": np.ones(3) for n in range(9)}, ("holds 9 arrays; it needs",)),
        ({"x": TABLE[:, 0], "y": TABLE[:, 1], "z": TABLE[:, 2]}, ("holds x, y, z",)),
        ({"x": TABLE[:6, 0], "y": TABLE[:, 1], "z": TABLE[:, 2], "q": TABLE[:, 3]}, ("same length", "x (6,)")),
        ({"xyz": TABLE, "q": TABLE[:, 3]}, ("(7, 4)", "(n, 3)")),
        ({"xyz": TABLE[:, :3], "q": TABLE[:5, 3]}, ("q (5,)",)),
        ({"xyz": TABLE[:, :3], "q": TABLE[:, 3], "cell": [1, 2]}, ("cell", "3 lengths")),
        ({"xyz": TABLE[:, :3], "q": TABLE[:, 3], "cell": [1, 2, "x"]}, ("cell holds",)),
        ({"xyz": TABLE[:, :3], "q": np.array([None] * 7)}, ("plain numbers",)),
        ({"xyz": TABLE[:, :3], "q": np.full(7, np.longdouble("1e400"))}, ("row 1", "charge", "finite")),
    ],
)
def test_archives_that_are_no_charges(tmp_path: Path, arrays: dict[str, Any], words: tuple[str, ...]) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with input_error(tmp_path / "a.npz", *words):
        read_charge_array(tmp_path / "a.npz")


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "sprung"),))

    np.save(tmp_path / "a.npy", np.array([[Trap()]], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "a.npz", x=np.array([Trap()], dtype=object))
    for name in ("a.npy", "a.npz"):
        with input_error(tmp_path / name):
            read_charge_array(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", ["a.npy", "a.npz"])
def test_any_damage_is_an_input_error_or_charges(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    np.save(path, TABLE) if name == "a.npy" else np.savez_compressed(path, xyz=TABLE[:, :3], q=TABLE[:, 3])
    whole = path.read_bytes()
    changes = st.dictionaries(st.integers(0, min(len(whole), 400) - 1), st.integers(0, 255), min_size=1, max_size=6)

    @QUICK
    @given(changes, st.integers(0, len(whole)))
    def check(changed: dict[int, int], length: int) -> None:
        data = bytearray(whole)
        for position, value in changed.items():
            data[position] = value
        for content in (whole[:length] if length < len(whole) else b"", bytes(data)):
            path.write_bytes(content)
            try:
                molecule = read_charge_array(path)
            except InputError as error:
                one_line(error, name)
            else:
                assert np.isfinite(molecule.coordinates).all()

    check()


def test_a_missing_file_and_options_that_need_a_topology(tmp_path: Path) -> None:
    with input_error(tmp_path / "absent.npy", "no such file"):
        open_point_charges(tmp_path / "absent.npy")
    np.save(tmp_path / "a.npy", TABLE)
    for option, given_one in (("--select", {"select": "all"}), ("--trajectory", {"trajectory": tmp_path / "a.dcd"})):
        with pytest.raises(ParameterError, match=option):
            open_point_charges(tmp_path / "a.npy", **given_one)  # type: ignore[arg-type]
