"""Ledgers, receipts and leftovers of a service's job whose folders were replaced by links."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.identity import InputIdentity
from pipeline.engine.ledger import Entry, Ledger, remove_leftovers
from pipeline.engine.receipt import write_receipt
from pipeline.engine.run import RunEvents, RunOptions, finished_before, plan_job, run_job
from pipeline.errors import MillraceError, OutputError
from pipeline.storage.confinement import Confinement, confine
from pipeline.workloads import JobSpec, workloads
from tests.images import read_image, write_image

ENTRY = Entry(chunks=(0,), notes={}, device="cpu")
STATE = {"step": np.array(3)}


@pytest.fixture
def root(tmp_path):
    for name in ("root", "outside"):
        (tmp_path / name / "there").mkdir(parents=True)
    confine(Confinement((tmp_path / "root",)))
    return tmp_path / "root"


@pytest.fixture
def outside(root):
    return root.parent / "outside"


def swap(path, target):
    path.rename(path.with_name(path.name + ".away"))
    path.symlink_to(target)


def tree(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def failure(work):
    """The message; None if it succeeds."""
    try:
        work()
    except MillraceError as error:
        return str(error)
    return None


def begun(output):
    ledger = Ledger(output, {"chunks": 3})
    ledger.create()
    ledger.add(ENTRY)
    return ledger


@pytest.mark.parametrize("which", ["ledger", "folder"])
def test_a_ledger_is_neither_written_nor_read_nor_removed_outside(root, outside, which):
    output = root / "there" / "y"
    ledger = begun(output)
    other = begun(outside / "there" / "y")
    other.save_iterate(0, STATE)
    elsewhere = other.folder
    before = tree(outside)
    swap(ledger.folder, elsewhere) if which == "ledger" else swap(root / "there", outside / "there")
    keep, drop = partial(ledger.save_iterate, 0, STATE), partial(ledger.drop_iterates, [0])
    for write in (lambda: ledger.add(ENTRY), ledger.go_on, keep, drop, ledger.remove, ledger.create):
        with pytest.raises(OutputError, match=rf"^{ledger.folder}: "):
            write()
    assert not ledger.is_this_runs
    assert ledger.within([0, 1, 2]) == ledger.entries() == []
    assert ledger.iterate(0) is None
    assert Ledger.recorded_budget(output) is None
    assert tree(outside) == before


def test_an_entry_is_not_written_through_a_link_of_its_temporary_name(root, outside, monkeypatch):
    ledger = begun(root / "y")
    (outside / "secret").write_text("kept")
    monkeypatch.setattr("threading.get_native_id", lambda: 7)
    (ledger.folder / ".job.json.7").symlink_to(outside / "secret")
    with pytest.raises(OutputError, match="a symbolic link that cannot be followed"):
        ledger.go_on()
    assert (outside / "secret").read_text() == "kept"


@pytest.mark.parametrize("name", ["y.partial", "y.samples.partial"])
def test_leftovers_are_not_removed_outside(root, outside, name):
    begun(root / "there" / "y")
    begun(outside / "there" / "y")
    for folder in (root, outside):
        (folder / "there" / name).write_bytes(b"left")
    swap(root / "there", outside / "there")
    before = tree(outside)
    with pytest.raises(OutputError, match="leads elsewhere by a symbolic link"):
        remove_leftovers(root / "there" / "y")
    assert tree(outside) == before


def test_receipts_are_neither_written_nor_read_outside(root, outside):
    for folder in (root, outside):
        (folder / "there" / "y").touch()
        write_receipt(folder / "there" / "y", {"job": "7"})
    before = tree(outside)
    assert finished_before(root / "there" / "y", "7") == {"job": "7"}
    swap(root / "there", outside / "there")
    assert finished_before(root / "there" / "y", "7") is None
    with pytest.raises(MillraceError, match="leads elsewhere by a symbolic link"):
        write_receipt(root / "there" / "y", {"job": "8"})
    assert tree(outside) == before


def test_the_digest_of_a_file_outside_is_not_recorded(root, outside):
    (root / "x").write_bytes(b"root")
    (outside / "x").write_bytes(b"very secret")
    identity = InputIdentity(root / "x")
    swap(root / "x", outside / "x")
    identity._hash()
    assert identity._digest is None


@pytest.mark.parametrize("when", ["planned", "written"])
@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
@pytest.mark.parametrize("what", ["there/x.npy", "there", "out"])
def test_a_job_whose_files_are_replaced_by_links(root, outside, what, suffix, when):
    """It fails, or makes its result of what it opened; in neither case does it touch anything outside."""
    for folder, value in ((root, 7), (outside, 200)):
        (folder / "out").mkdir()
        write_image(folder / "there" / "x.npy", np.full((521, 131), value, np.uint8), "YX")
    before = tree(outside)
    spec = JobSpec(
        workload="smooth", input=root / "there" / "x.npy", output=root / "out" / f"y{suffix}",
        parameters=workloads()["smooth"].Parameters(size="3"),
    )  # fmt: skip
    options = RunOptions(memory_bytes=64 << 20, chunk_bytes=30_000, job="7")
    job = plan_job(spec, CpuDevice(1), options)
    if when == "planned":
        swap(root / what, outside / what)
        events = None
    else:
        waiting = [lambda: swap(root / what, outside / what)]
        events = RunEvents(on_written=lambda chunk: waiting.pop()() if waiting else None)
    error = failure(lambda: run_job(job, options, events=events))
    if error is None:
        assert what != "out"
        assert (read_image(spec.output) == 7).all()
    else:
        assert str(root) in error
        assert "/proc/" not in error
    assert tree(outside) == before
