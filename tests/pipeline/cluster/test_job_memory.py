"""Memory of jobs on workers: measured above the idle size, and held against limits for the job that took it."""

from __future__ import annotations

import mmap

import pytest

from pipeline.cluster import job_memory
from pipeline.cluster.job_memory import NO_SHARE, MemoryMeter, MemoryShare, MemoryWatch
from pipeline.errors import ClusterError, Crowded, LimitExceeded

GIB = 1 << 30


@pytest.fixture
def process():
    """A process of 5 bytes when idle, and its meter; `process[0]` is what it takes."""
    resident = [5]
    return resident, MemoryMeter(lambda: resident[0])


def test_memory_above_the_idle_size_counts_until_the_next_report(process):
    resident, meter = process
    assert meter.report() == {"bytes": 0, "jobs": {}, "gpu_bytes": {}}
    meter.opened("a", MemoryShare(limit_bytes=GIB, ring_bytes=3))
    for resident[0] in (105, 25):
        meter.look()
    meter.note_gpu("a", 7)
    meter.note_gpu("a", 6)
    assert meter.report() == {"bytes": 100, "jobs": {"a": (GIB, True)}, "gpu_bytes": {"a": 7}}
    assert meter.report()["bytes"] == 20
    meter.opened("b", MemoryShare(ring_bytes=3))  # the idle size stays that of before `a`
    resident[0] = 55
    assert meter.report() == {
        "bytes": 50, "jobs": {"a": (GIB, True), "b": (6 + job_memory.UNLIMITED_BYTES, False)}, "gpu_bytes": {"a": 7},
    }  # fmt: skip
    resident[0] = 95
    meter.look()
    meter.closed("b")
    resident[0] = 35
    assert meter.report() == {"bytes": 30, "jobs": {"a": (GIB, True)}, "gpu_bytes": {"a": 7}}, "the peak was not a's"
    meter.closed("a")
    meter.closed("a")
    resident[0] = 15
    meter.opened("c", NO_SHARE)
    assert meter.report()["bytes"] == 0, "idle is what the process has kept"


def test_what_this_process_takes_is_measured():
    meter = MemoryMeter(job_memory._resident)
    meter.opened("a", NO_SHARE)
    with mmap.mmap(-1, 64 << 20) as taken:  # as the ring's slots are
        for page in range(0, len(taken), mmap.PAGESIZE):
            taken[page] = 1
        assert 60 << 20 < meter.report()["bytes"] < 90 << 20
    assert meter.report()["bytes"] < 30 << 20


class Watched:
    """A watch of job `b` with a limit of 1 GiB, what workers report, and what the watch notes."""

    def __init__(self, monkeypatch, limit_bytes=GIB):
        monkeypatch.setattr(job_memory, "LOOK_S", 0.0)
        self.workers, self.noted = {}, []
        share = MemoryShare(limit_bytes=limit_bytes, ring_bytes=0)
        self.watch = MemoryWatch(
            lambda: self.workers, lambda worker: worker["report"], "b", share, lambda *found: self.noted.append(found)
        )

    def report(self, address, host, nbytes, jobs, gpu_bytes=None):
        said = {"bytes": nbytes, "jobs": jobs, "gpu_bytes": gpu_bytes or {}}
        self.workers[address] = {"report": {"host": host, job_memory.REPORT: said}}


B = {"b": (GIB, True)}


def test_a_job_that_is_alone_is_held_against_its_limit_host_by_host(monkeypatch):
    watched = Watched(monkeypatch)
    watched.workers["0"] = {"report": {}}  # it has not reported yet
    watched.report("1", "one", GIB // 2, B)
    watched.report("2", "two", GIB, B, {"b": 77})
    watched.report("3", "two", 9 * GIB, {"a": (GIB, True)})  # another job's
    watched.watch()
    assert watched.noted == [(GIB // 2, None), (GIB, 77)]
    watched.report("4", "two", GIB // 2, B)
    with pytest.raises(
        LimitExceeded, match=r"^took 1.5 GiB of memory on two, and may take 1.0 GiB: submit it again with"
    ):
        watched.watch()


@pytest.mark.parametrize("limit_bytes", [None, 2 * GIB])
def test_a_job_within_its_limit_goes_on(monkeypatch, limit_bytes):
    watched = Watched(monkeypatch, limit_bytes)
    watched.report("1", "one", 2 * GIB, B)
    watched.watch()


def test_of_jobs_that_together_take_too_much_all_but_one_make_room(monkeypatch):
    watched = Watched(monkeypatch)
    watched.report("1", "one", 3 * GIB // 2, {"a": (GIB, True), **B})
    watched.watch()
    assert watched.noted == [(None, None)], "what of it is this job's is not known"
    watched.report("1", "one", 2 * GIB + 1, {"a": (GIB, True), **B})
    with pytest.raises(Crowded, match="makes room for another job"):
        watched.watch()
    watched.report("1", "one", 2 * GIB + 1, {"c": (GIB, True), **B})
    watched.watch()  # the other one does
    watched.report("1", "one", 2 * GIB + 1, {"a": (GIB, False), "b": (GIB, False)})
    watched.watch()  # without limits there is nothing to find out


def test_a_scheduler_that_does_not_answer_is_others_to_notice(monkeypatch):
    watched = Watched(monkeypatch)

    def lost():
        raise ClusterError("the scheduler no longer answers")

    watched.watch._identities = lost
    watched.watch()
    assert watched.noted == []
