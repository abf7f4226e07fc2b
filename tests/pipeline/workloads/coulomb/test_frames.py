"""A trajectory's frames are opened while workers start, once, and closed by whoever is the last to have them."""

from __future__ import annotations

import signal
import threading

import numpy as np
import pytest

from pipeline.errors import InputError
from pipeline.formats.charges import open_point_charges
from pipeline.workloads import JobSpec
from pipeline.workloads.coulomb import Coulomb, CoulombJob
from pipeline.workloads.coulomb import frames as coulomb_frames
from tests.pipeline.workloads.coulomb.coulomb_jobs import write_trajectory


@pytest.fixture
def opened_frames(monkeypatch):
    """How many times a trajectory was opened, and closed."""
    counts = {"opened": 0, "closed": 0}

    def counted(*arguments, **options):
        trajectory = open_point_charges(*arguments, **options)
        close = trajectory.close

        def counted_close():
            counts["closed"] += 1
            close()

        counts["opened"] += 1
        trajectory.close = counted_close
        return trajectory

    monkeypatch.setattr(coulomb_frames, "open_point_charges", counted)
    return counts


def spec_of(folder, **options):
    parameters = Coulomb.Parameters(trajectory=folder / "a.dcd", combine="avg", **options)
    return JobSpec(workload="coulomb", input=folder / "a.pqr", output=folder / "out.npy", parameters=parameters)


def test_frames_opened_ahead_are_those_of_the_job(tmp_path, opened_frames):
    write_trajectory(tmp_path, 3)
    with Coulomb().prefetch(spec_of(tmp_path)):
        workload = CoulombJob(spec_of(tmp_path))
        assert opened_frames["opened"] == 1
        other = CoulombJob(spec_of(tmp_path, cutoff=9))
        assert opened_frames["opened"] == 2
    assert opened_frames["closed"] == 0
    workload.close()
    other.close()
    assert opened_frames["closed"] == 2


def test_frames_that_nobody_asked_for_are_closed(tmp_path, opened_frames):
    write_trajectory(tmp_path, 3)
    with Coulomb().prefetch(spec_of(tmp_path)):
        pass
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch-frames"]
    CoulombJob(spec_of(tmp_path)).close()
    assert opened_frames == {"opened": 2, "closed": 2}


def test_what_is_wrong_with_frames_opened_ahead_is_told(tmp_path):
    write_trajectory(tmp_path, 3)
    (tmp_path / "a.dcd").write_bytes(b"no trajectory")
    with Coulomb().prefetch(spec_of(tmp_path)), pytest.raises(InputError, match=r"a\.dcd"):
        CoulombJob(spec_of(tmp_path))


def test_who_is_stopped_while_waiting_leaves_nothing_open(tmp_path, monkeypatch, opened_frames):
    write_trajectory(tmp_path, 3)
    surveyed = coulomb_frames.ChosenFrames._surveyed

    def slowly(self, parameters):
        self._cancelled.wait(30)
        return surveyed(self, parameters)

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(coulomb_frames.ChosenFrames, "_surveyed", slowly)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt), Coulomb().prefetch(spec_of(tmp_path)):
            CoulombJob(spec_of(tmp_path))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert opened_frames == {"opened": 1, "closed": 1}


@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 511, 769])
def test_the_box_holds_the_outermost_atom_wherever_it_stands(count):
    points = np.random.default_rng(count).normal(size=(count, 3))
    for place in {0, count // 2, count - 1}:
        for axis in range(3):
            for farthest in (-50.0, 50.0):
                each = points.copy()
                each[place, axis] = farthest
                low, high = coulomb_frames._corners(each)
                np.testing.assert_array_equal(low, each.min(axis=0))
                np.testing.assert_array_equal(high, each.max(axis=0))
