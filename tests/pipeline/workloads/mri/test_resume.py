"""A run that is killed in the middle of an image's iterations goes on from the iterate that it saved last."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.engine import iterates
from pipeline.engine.ledger import Ledger
from pipeline.engine.run import run_job
from pipeline.errors import DeviceError, ParameterError
from pipeline.workloads.mri import MriJob
from pipeline.workloads.paths import ledger_path
from pipeline.workloads.protocol import KeepsIterates
from tests import commands
from tests.kernels.sense.phantom import normalised_error
from tests.pipeline.cluster.dask.thread_workers import ThreadWorkers
from tests.pipeline.workloads.mri.mri_jobs import Streamed, job, scan, shared_images, volume, write_npz

ROOT = Path(__file__).parents[4]  # of the repository, for a process that imports the tests
FISTA = {"regularizer": "l1-wavelet", "strength": "0.01", "iterations": 12, "tolerance": 0.0}
CASES = {
    "cg": {"iterations": 12, "tolerance": 0.0},
    "cg, stops early": {"iterations": 100, "tolerance": 1e-3},
    "fista": FISTA,
    "admm": {"regularizer": "tv,l1-wavelet", "strength": "0.01", "iterations": 12, "tolerance": 0.0},
    "frames": {"regularizer": "llr", "strength": "0.01", "iterations": 12, "tolerance": 0.0, "frames": 10},
    "parts": {"split": "coils", "iterations": 12, "tolerance": 0.0},
    "parts, fista": FISTA | {"split": "coils"},
    "parts, admm": {"split": "coils", "regularizer": "tv", "strength": "0.01", "iterations": 12, "tolerance": 0.0},
}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(iterates, "INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(iterates, "_SHARE", np.inf)


@pytest.fixture
def source(tmp_path):
    return write_npz(tmp_path / "in.npz", *scan(20))


class Killed(BaseException):
    pass


def interrupted(source, output, monkeypatch, after, **options):
    """A run that ends just after its `after`th iterate is saved; returns that iterate."""
    save, saved = iterates.Iterates.save, []

    def kill(self, chunk, state):
        save(self, chunk, state)
        saved.append({name: np.array(array) for name, array in state.items()})
        if len(saved) == after:
            raise Killed

    planned = job(source, output, **options)
    with monkeypatch.context() as patch:
        patch.setattr(iterates.Iterates, "save", kill)
        with pytest.raises(Killed):
            run_job(*planned)
    return saved[-1]


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_makes_the_same_image_in_the_iterations_left(tmp_path, source, monkeypatch, case):
    options, output = CASES[case], tmp_path / "out.npy"
    if "parts" in case:
        source = volume(tmp_path / "volume.npz")
    expected = run_job(*job(source, tmp_path / "whole.npy", **options))
    state = interrupted(source, output, monkeypatch, 5, **options)
    assert ledger_path(output).is_dir()
    loaded, load = [], Ledger.iterate
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "iterate", lambda self, chunk: loaded.append(load(self, chunk)) or loaded[-1])
        receipt = run_job(*job(source, output, resume=True, **options))
    assert loaded[0].keys() == state.keys()
    for name, array in state.items():
        np.testing.assert_array_equal(loaded[0][name], array)
    np.testing.assert_array_equal(np.load(output), np.load(tmp_path / "whole.npy"))
    assert receipt["image"]["iterations"] == expected["image"]["iterations"] > 5
    assert receipt["image"]["convergence"] == expected["image"]["convergence"]
    assert not ledger_path(output).exists()


@pytest.mark.parametrize(("case", "ranks", "later"), [("parts", 2, 3), ("parts, admm", 3, 2), ("parts, fista", 2, 1)])
def test_ranks_that_share_coils_go_on_from_a_saved_iterate(tmp_path, monkeypatch, case, ranks, later):
    """Also another number of ranks: rank 0 saves, and all start from its state."""
    source, options, output = volume(tmp_path / "volume.npz"), CASES[case], tmp_path / "out.npy"
    planned, run_options = job(source, tmp_path / "whole.npy", **options)
    run_job(planned, run_options)
    save, saved = iterates.Iterates.save, []

    def fail(self, chunk, state):
        save(self, chunk, state)
        saved.append(state)
        if len(saved) == 5:
            raise DeviceError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(iterates.Iterates, "save", fail)
        with pytest.raises(DeviceError, match="stopped"):
            shared_images(source, output, ThreadWorkers(ranks), ranks, **options)
        assert len(saved) == 5, "one rank saves"
    seen = []
    monkeypatch.setattr(MriJob, "_follower", lambda self, number: lambda iteration, _: seen.append(iteration))
    monkeypatch.setattr(MriJob, "_penalty_follower", MriJob._follower)
    planned, run_options = job(source, output, resume=True, **options)
    run_job(planned, run_options, stream=Streamed(ThreadWorkers(later), later))
    assert sorted(seen) == sorted(list(range(6, 13)) * later)
    assert normalised_error(np.load(output), np.load(tmp_path / "whole.npy")) < 2e-4
    assert not ledger_path(output).exists()


def test_only_the_iterations_left_are_run(tmp_path, source, monkeypatch):
    options = CASES["fista"]
    interrupted(source, tmp_path / "out.npy", monkeypatch, 7, **options)
    planned, run_options = job(source, tmp_path / "out.npy", resume=True, **options)
    seen = []
    planned.job._penalty_follower = lambda number: lambda iteration, status: seen.append(iteration)
    run_job(planned, run_options)
    assert seen == [8, 9, 10, 11, 12]


def test_a_killed_process_leaves_an_iterate(tmp_path, source):
    """SIGKILL within the third save: the second is whole."""
    script = """
import os, signal, sys
from pathlib import Path
from pipeline.engine import iterates, ledger
from pipeline.engine.run import run_job
from tests.pipeline.workloads.mri.mri_jobs import job
from tests.pipeline.workloads.mri.test_resume import CASES
iterates.INTERVAL_SECONDS, iterates._SHARE = 0.0, float("inf")
write, writes = ledger.np.lib.format.write_array, []
def kill(*arguments):
    writes.append(1)
    if len(writes) == 24:
        os.kill(os.getpid(), signal.SIGKILL)
    write(*arguments)
ledger.np.lib.format.write_array = kill
run_job(*job(Path(sys.argv[1]), Path(sys.argv[2]), **CASES["fista"]))
"""
    output = tmp_path / "out.npy"
    ended = commands.run([sys.executable, "-c", script, source, output], cwd=ROOT, check=False, timeout=100)
    assert ended.returncode == -signal.SIGKILL
    run_job(*job(source, output, resume=True, **CASES["fista"]))
    run_job(*job(source, tmp_path / "whole.npy", **CASES["fista"]))
    np.testing.assert_array_equal(np.load(output), np.load(tmp_path / "whole.npy"))


def test_an_iterate_of_another_job_is_refused_and_without_resume_forgotten(tmp_path, source, monkeypatch):
    output = tmp_path / "out.npy"
    interrupted(source, output, monkeypatch, 3, **CASES["fista"])
    with pytest.raises(ParameterError, match=r'another job \(parameters\.strength: then "0\.01", now "0\.02"\)'):
        run_job(*job(source, output, resume=True, **(CASES["fista"] | {"strength": "0.02"})))
    planned, options = job(source, output, **(CASES["fista"] | {"iterations": 1}))
    assert run_job(planned, options)["image"]["iterations"] == 1
    assert not ledger_path(output).exists()


def test_a_damaged_iterate_is_not_used(tmp_path, source, monkeypatch):
    output = tmp_path / "out.npy"
    interrupted(source, output, monkeypatch, 3, **CASES["fista"])
    (iterate,) = ledger_path(output).glob("iterate-*.npz")
    for damaged in (iterate.read_bytes()[:-50], b"", b"PK\x03\x04 nothing"):
        iterate.write_bytes(damaged)
        assert Ledger(output, {}).iterate(0) is None
    run_job(*job(source, output, resume=True, **CASES["fista"]))
    run_job(*job(source, tmp_path / "whole.npy", **CASES["fista"]))
    np.testing.assert_array_equal(np.load(output), np.load(tmp_path / "whole.npy"))


def test_iterates_are_saved_at_most_every_few_seconds_and_seldom_if_that_takes_long(tmp_path, monkeypatch):
    monkeypatch.setattr(iterates, "INTERVAL_SECONDS", 5.0)
    monkeypatch.setattr(iterates, "_SHARE", 0.05)
    now = [100.0]
    monkeypatch.setattr(iterates.time, "monotonic", lambda: now[0])
    ledger = Ledger(tmp_path / "out.npy", {"chunks": 1})
    store = iterates.Iterates(ledger)
    assert store.saved(0) is None
    for now[0], due in ((104.9, False), (105.0, True)):
        assert store.due(0) == due

    def slow(chunk, state):
        now[0] += 2.0

    monkeypatch.setattr(ledger, "save_iterate", slow)
    store.save(0, {"image": np.zeros(3)})
    for now[0], due in ((146.9, False), (147.0, True)):
        assert store.due(0) == due
    assert ledger.exists


def test_jobs_of_the_workload_keep_iterates(tmp_path, source):
    planned, _ = job(source, tmp_path / "out.npy")
    assert isinstance(planned.job, KeepsIterates)
    planned.job.close()
