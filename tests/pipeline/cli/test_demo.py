"""The inputs of the demonstration: each is what it says, and the same seed makes the same bytes."""

from __future__ import annotations

import re

import numpy as np
import pytest

from pipeline.cli.demo import make_demo_inputs
from pipeline.cli.demo.molecule import RISE_ANGSTROM, SITES, make_helix
from pipeline.cli.demo.scan import ELLIPSES, SLOPE, make_scan
from pipeline.errors import OutputError, StorageError
from pipeline.formats.charges.pqr import read_pqr
from pipeline.workloads import Budget, JobSpec, workloads
from pipeline.workloads.filters.chain import Chain
from pipeline.workloads.operator import ImageOperator
from tests.images import names_in


def test_every_workload_has_an_input(tmp_path):
    inputs = make_demo_inputs(tmp_path / "made", 64, 0)
    made = dict(zip(("smooth", "coulomb", "mri"), zip(inputs, ("a.tif", "b.dx", "c.nii.gz"), strict=True), strict=True))
    filters = {name for name, kind in workloads().items() if isinstance(kind, ImageOperator | Chain)}
    assert set(workloads()) - filters == set(made)
    for name, (source, output) in made.items():
        kind = workloads()[name]
        job = kind.open(JobSpec(workload=name, input=source, output=tmp_path / output, parameters=kind.Parameters()))
        assert job.plan(Budget(budget_bytes=1 << 28, target_bytes=1 << 24)).chunks
        job.close()


def test_a_folder_in_which_nothing_could_be_made_is_not_left(tmp_path, monkeypatch):
    def refuse(*_):
        raise StorageError("the disk is full")

    monkeypatch.setattr("pipeline.cli.demo.make_cells", refuse)
    with pytest.raises(StorageError):
        make_demo_inputs(tmp_path / "new", 64, 0)
    (tmp_path / "old").mkdir()
    with pytest.raises(StorageError):
        make_demo_inputs(tmp_path / "old", 64, 0)
    assert names_in(tmp_path) == ["old"]


def test_messages_name_the_folder_that_was_asked_for(tmp_path, monkeypatch):
    def refuse(path, *_):
        raise StorageError(f"{path}: the disk is full")

    monkeypatch.setattr("pipeline.cli.demo.make_helix", refuse)
    with pytest.raises(StorageError, match=f"^{re.escape(str(tmp_path))}/helix.pqr: the disk is full$"):
        make_demo_inputs(tmp_path, 64, 0)
    assert names_in(tmp_path) == []


def test_what_is_there_already_is_left_alone(tmp_path):
    inputs = make_demo_inputs(tmp_path, 64, 0)
    made = [path.read_bytes() for path in inputs]
    assert make_demo_inputs(tmp_path, 64, 0) == inputs  # the same again
    inputs[0].unlink()
    inputs[1].write_text("somebody's molecule")
    with pytest.raises(OutputError, match=r"helix\.pqr exists with other content: move it, or name"):
        make_demo_inputs(tmp_path, 64, 0)
    assert names_in(tmp_path) == ["helix.pqr", "scan.npz"]
    assert inputs[1].read_text() == "somebody's molecule"
    inputs[1].unlink()
    make_demo_inputs(tmp_path, 64, 0)
    assert [path.read_bytes() for path in inputs] == made


def test_the_helix_is_neutral_and_turns(tmp_path):
    make_helix(tmp_path / "helix.pqr", 7)
    found = read_pqr(tmp_path / "helix.pqr")
    assert len(found.charges) == 2 * 7 * len(SITES)
    assert abs(found.charges.sum()) < 1e-9
    phosphates = found.coordinates[:: len(SITES)]
    for strand in (phosphates[:7], phosphates[7:]):
        steps = np.diff(strand, axis=0)
        np.testing.assert_allclose(steps[:, 2], RISE_ANGSTROM, atol=2e-3)
        np.testing.assert_allclose(np.hypot(strand[:, 0], strand[:, 1]), 8.9, atol=2e-3)
    np.testing.assert_allclose(np.linalg.norm(steps, axis=1), np.linalg.norm(steps[0]), atol=4e-3)


def test_the_scan_is_the_transform_of_its_ellipses(tmp_path, monkeypatch):
    """Against the sum over a fine grid: another method, whose own error the grid bounds."""
    monkeypatch.setattr("pipeline.cli.demo.scan.NOISE", 0.0)
    pixels, coils, fine = 16, 3, 1024
    make_scan(tmp_path / "scan.npz", pixels, 5, coils, 0)
    made = np.load(tmp_path / "scan.npz")
    r = (np.arange(fine) + 0.5) / fine - 0.5
    x, y = r[:, None], r[None, :]
    head = np.zeros((fine, fine))
    for brightness, cx, cy, a, b, angle in ELLIPSES:
        along = (x - cx) * np.cos(angle) + (y - cy) * np.sin(angle)
        across = (y - cy) * np.cos(angle) - (x - cx) * np.sin(angle)
        head[(along / a) ** 2 + (across / b) ** 2 <= 1] += brightness
    points = pixels * made["traj"].astype(np.float64)[1:4:2]
    for coil in range(coils):
        direction = 2 * np.pi * coil / coils
        seen = head * (1 + SLOPE * np.sin(np.pi * (x * np.cos(direction) + y * np.sin(direction))))
        for spoke, expected_at in zip((1, 3), points, strict=True):
            rows = np.exp(-2j * np.pi * expected_at[:, 0, None] * r)
            columns = np.exp(-2j * np.pi * expected_at[:, 1, None] * r)
            expected = np.einsum("sx,xy,sy->s", rows, seen, columns, optimize=True) * (pixels / fine) ** 2
            np.testing.assert_allclose(made["kspace"][coil, spoke], expected, atol=2e-3 * pixels**2)


def test_the_same_seed_makes_the_same_bytes(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_scan(tmp_path / name, 16, 5, 2, seed)
    first, again, other = ((tmp_path / name).read_bytes() for name in "abc")
    assert first == again
    assert first != other
