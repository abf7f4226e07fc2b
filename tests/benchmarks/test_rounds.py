"""Interleaved rounds."""

from __future__ import annotations

from benchmarks.rounds import Rival, measure


def test_a_slow_rival_runs_once_and_that_time_stands_for_every_round():
    ran = []
    times = {"quick": iter([0.1, 0.2, 0.3, 0.4]), "slow": iter([5.0])}

    def clock(run):
        return next(times[run()])

    def run_of(name):
        return lambda: ran.append(name) or name

    rivals = [Rival(name=name, device="cpu", run=run_of(name), clock=clock) for name in times]
    found = measure([*rivals, Rival(name="absent", device="cpu", run=None)], repeats=3, once_s=1.0)
    assert [rival.seconds for rival in found] == [[0.2, 0.3, 0.4], [5.0] * 3]
    assert ran == ["quick", "slow", "quick", "quick", "quick"]
