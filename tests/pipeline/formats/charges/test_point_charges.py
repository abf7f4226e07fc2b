from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.formats.charges import open_point_charges
from tests.pipeline.formats.charges.real_molecules import real_molecule
from tests.pipeline.formats.image.contract import input_error

LINE = "ATOM {0} {1} MET A {0} 1.0 2.0 3.0 {2} 1.5\n"


def test_the_same_atoms_from_each_kind_of_file(tmp_path: Path) -> None:
    table = np.round(np.random.default_rng(4).uniform(-50, 50, (9, 4)), 3)
    (tmp_path / "a.pqr").write_text(
        "".join(f"ATOM {n} CA MET A {n} {x} {y} {z} {q} 1.5\n" for n, (x, y, z, q) in enumerate(table))
    )
    (tmp_path / "a.PQR").symlink_to(tmp_path / "a.pqr")
    np.save(tmp_path / "a.npy", table)
    np.savez(tmp_path / "a.npz", xyz=table[:, :3], q=table[:, 3])
    for name in ("a.pqr", "a.PQR", "a.npy", "a.npz"):
        with open_point_charges(tmp_path / name) as found:
            np.testing.assert_array_equal(found.frame(0).coordinates, table[:, :3])
            np.testing.assert_array_equal(found.charges, table[:, 3])
            assert (found.n_frames, found.path) == (1, tmp_path / name)


@pytest.mark.parametrize("select", [None, "name CA"])
def test_charges_that_are_all_zero(tmp_path: Path, select: str | None) -> None:
    others = 0.0 if select is None else 0.5
    path = tmp_path / "a.pqr"
    path.write_text(LINE.format(1, "CA", 0) + LINE.format(2, "N", others) + LINE.format(3, "CA", -0.0))
    with input_error(path, "differs from 0", *([] if select is None else ["--select", "2 atoms"])):
        open_point_charges(path, select=select)


def test_a_selection_of_a_real_pqr() -> None:
    with open_point_charges(real_molecule("1a63.pqr"), select="name CA") as found:
        assert (found.n_atoms, found.n_frames) == (130, 1)
        assert found.frame(0).cell is None
