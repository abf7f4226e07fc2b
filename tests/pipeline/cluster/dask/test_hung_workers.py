"""Workers that hang or are killed from outside while they run somebody's function: the job goes on elsewhere."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import sys
import threading
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from distributed import Client, KilledWorker

from pipeline.cluster import segments, silence
from pipeline.cluster.dask import hung_workers
from pipeline.cluster.dask.hung_workers import CHUNK_LEAST_S, FIRST_CHUNK_S, ChunkWatch, LocalWorkers, SilentWorkers
from pipeline.cluster.dask.segment_tasks import SegmentTasks
from pipeline.cluster.dask.worker_processes import local_workers, workers_of
from pipeline.cluster.dask.worker_start import cpu_workers
from pipeline.cluster.segments import Segment, WorkerDevice, run_segment
from pipeline.cluster.silence import Silence
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.ledger import Ledger
from pipeline.engine.run import RunOptions, plan_job, run_job
from pipeline.engine.stages import StageRecord
from pipeline.errors import ClusterError, OperatorError
from pipeline.storage.partial import Opening
from pipeline.workloads import JobSpec, workload_named
from tests.images import names_in, read_image, write_image
from tests.pipeline.cluster.processes import running, running_scheduler, wait_until

# Dask leaves connections to killed workers to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")

WAIT_S = 60.0
WHERE = "the cluster of the test"
MARK = 255
CHUNK_BYTES = 1420  # ten rows, in and out
# A function that is in the way of its worker as it meets the mark: the first time, or each time.
FUNCTIONS = """
import os, threading
from pipeline import image_operator

def once(block, *, flag):
    if (block == 255).any():
        try:
            found = os.open(flag, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return 255 - block
        os.write(found, b"%d." % os.getpid())
        threading.Event().wait()
    return 255 - block

def always(block):
    if (block == 255).any():
        threading.Event().wait()
    return 255 - block

@image_operator(halo=0)
def operator(block, *, flag: str):
    return once(block, flag=flag)
"""


@pytest.fixture(scope="module", autouse=True)
def _garbage_is_collected_here():
    yield
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()


@pytest.fixture
def marked(tmp_path, monkeypatch):
    """A folder with an image whose 57th row has the mark, and with the functions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "hanging.py").write_text(FUNCTIONS)
    importlib.invalidate_caches()
    samples = np.random.default_rng(5).integers(0, 200, (200, 71)).astype(np.uint8)
    samples[57, 3] = MARK
    write_image(tmp_path / "in.npy", samples, "YX")
    yield tmp_path
    sys.modules.pop("hanging", None)


def run_map(folder, workers, function, **param):
    """The job's receipt; for any thread."""
    workload = workload_named("map")
    spec = JobSpec(
        workload="map", input=folder / "in.npy", output=folder / "out.npy",
        parameters=workload.Parameters(function=f"hanging:{function}", param=param),
    )  # fmt: skip
    options = RunOptions(memory_bytes=64 << 20, chunk_bytes=CHUNK_BYTES)
    return run_job(plan_job(spec, workers, options), options, stream=workers.stream)


def check_result(folder):
    np.testing.assert_array_equal(read_image(folder / "out.npy"), 255 - read_image(folder / "in.npy"))


def in_thread(work):
    outcome = []
    thread = threading.Thread(target=lambda: outcome.append(work()), daemon=True)
    thread.start()
    return thread, outcome


def process_noted(flag, found=psutil.Process):
    """The process that the function wrote into its flag."""
    wait_until(lambda: flag.exists() and flag.read_text().endswith("."), "the function's call")
    return found(int(flag.read_text().rstrip(".")))


@pytest.mark.parametrize("function", ["once", "operator"])
def test_a_worker_killed_while_it_runs_a_function_costs_only_its_chunks(marked, function):
    with local_workers(cpu_workers(2, 1)) as workers:
        thread, outcome = in_thread(lambda: run_map(marked, workers, function, flag=str(marked / "flag")))
        process_noted(marked / "flag").kill()
        thread.join(WAIT_S)
        assert [receipt["chunks"] for receipt in outcome] == [20]
    check_result(marked)


def test_a_chunk_that_hangs_is_computed_by_another_worker(marked, monkeypatch, caplog):
    """Its worker still sends heartbeats."""
    monkeypatch.setattr(hung_workers, "CHUNK_LEAST_S", 3.0)
    flag = marked / "flag"
    with local_workers(cpu_workers(2, 1)) as workers:
        thread, outcome = in_thread(lambda: run_map(marked, workers, "once", flag=str(flag)))
        hung = process_noted(flag)
        thread.join(WAIT_S)
        assert [receipt["chunks"] for receipt in outcome] == [20]
        assert not hung.is_running()
        wait_until(lambda: len(workers.identities()) == 2, "the worker's return")
    check_result(marked)
    [line] = [record.getMessage() for record in caplog.records if record.name == "millrace.workers"]
    assert line.endswith(f"chunk 5 of {marked}/in.npy was in one stage for more than 3 s")


def test_a_worker_of_a_dask_cluster_ends_itself_if_its_chunk_hangs(marked, monkeypatch):
    monkeypatch.setattr(hung_workers, "CHUNK_LEAST_S", 3.0)
    with (
        running_scheduler(marked) as (_, address),
        running("worker", address, "--device", "cpu", "--workers", 1, cwd=marked),
    ):
        with Client(address, set_as_default=False) as client:
            client.wait_for_workers(1, timeout=WAIT_S)
        with workers_of(address, "cpu", 1) as workers:
            thread, outcome = in_thread(lambda: run_map(marked, workers, "once", flag=str(marked / "flag")))
            thread.join(WAIT_S)
            assert [receipt["chunks"] for receipt in outcome] == [20]
            assert not process_noted(marked / "flag", psutil.pid_exists)
    check_result(marked)


@pytest.mark.slow
def test_a_chunk_that_hangs_on_three_workers_fails_the_job(marked, monkeypatch):
    monkeypatch.setattr(hung_workers, "CHUNK_LEAST_S", 3.0)
    said = r"^hanging:always: chunk 5 hung on 3 workers of the local cluster, one after another, each time for more "
    with local_workers(cpu_workers(2, 1)) as workers, pytest.raises(OperatorError, match=said) as caught:
        run_map(marked, workers, "always")
    assert "\n" not in str(caught.value)
    assert "out.npy" not in names_in(marked)


# Which workers hang


class FakeLocal(LocalWorkers):
    """Workers whose address is their process."""

    def __init__(self):
        self.ended = []

    def process(self, address):
        return int(address)

    def end(self, address):
        self.ended.append(address)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set."""
    found = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(silence.time, "monotonic", lambda: found.now)
    return found


@pytest.mark.parametrize(("cores", "limit_s"), [(0.0, 20), (0.04, 20), (1.0, 300)])
def test_a_silent_worker_is_ended_soon_if_it_does_nothing_and_late_if_it_computes(clock, monkeypatch, cores, limit_s):
    """A function may hold the GIL for a while: then no heartbeat is sent."""
    local, seen = FakeLocal(), {"7": 0.0, "8": 0.0}
    monkeypatch.setattr(hung_workers, "cpu_seconds", lambda process: 50.0 + cores * (clock.now - 1000.0))
    watch = SilentWorkers(lambda: dict(seen), local)
    watch.look()
    for _ in range(limit_s):
        clock.now += 1.0
        seen["8"] += 1.0
        watch.look()
    assert local.ended == []
    for _ in range(3):
        clock.now += 1.0
        seen["8"] += 1.0
        watch.look()
    assert local.ended == ["7"]  # once


def test_time_in_which_the_service_itself_was_suspended_is_no_silence(clock):
    watched = Silence()
    watched.seconds({"a": 5.0})
    clock.now += 3600.0
    assert watched.seconds({"a": 5.0}) == {"a": 2.0}
    clock.now += 1.0
    assert watched.seconds({"a": 5.0}) == {"a": 3.0}
    assert watched.seconds({"a": 1.0, "b": 5.0}) == {"a": 0.0, "b": 0.0}  # the scheduler's clock was set back


def test_cpu_time_is_that_of_the_process():
    used = psutil.Process().cpu_times()
    assert silence.cpu_seconds(os.getpid()) == pytest.approx(used.user + used.system, abs=0.5)
    assert silence.cpu_seconds(0) == 0.0


# Which chunks hang


class Watched:
    """A watch over the job "job" on worker "a", whose heartbeats tell what is set here."""

    def __init__(self, clock):
        self.clock, self.ended, self.record = clock, [], StageRecord()
        self.workers = {}
        spec = SimpleNamespace(workload="smooth", input="in.npy", parameters=None)
        self.watch = ChunkWatch(
            lambda: self.workers, self.ended.append, SimpleNamespace(name="job", spec=spec), self.record, WHERE,
            opening_s=600.0,
        )  # fmt: skip

    def heard(self, address, chunk, seconds, *, job="job", silent=False, opening=False):
        report = {"in_hand": {job: [chunk, seconds]}} | ({"opening": {job: seconds}} if opening else {})
        self.workers = {
            address: {"name": address, "last_seen": 0.0 if silent else self.clock.now, "metrics": {"millrace": report}}
        }
        self.clock.now += 1.5
        self.watch()

    def finished(self, seconds):
        """A chunk took so long in each of the five stages."""
        self.record.include(dict.fromkeys(self.record.totals, (seconds, 1, 1)))


@pytest.fixture
def watched(clock):
    return Watched(clock)


def test_a_chunk_may_take_twenty_times_as_long_as_others(watched):
    watched.heard("a", 3, CHUNK_LEAST_S + 1)  # nothing is known yet
    assert watched.ended == []
    watched.finished(0.01)
    watched.heard("a", 3, CHUNK_LEAST_S - 1)
    watched.heard("a", 3, CHUNK_LEAST_S + 1, job="another")
    assert watched.ended == []
    watched.heard("a", 3, CHUNK_LEAST_S + 1)
    watched.heard("a", 3, CHUNK_LEAST_S + 2)
    assert watched.ended == ["a"]
    watched.finished(19.99)  # 50 s on average
    watched.heard("b", 4, 999)
    assert watched.ended == ["a"]
    watched.heard("b", 4, 1001)
    assert watched.ended == ["a", "b"]


def test_the_first_chunk_may_take_half_a_day(watched):
    watched.heard("a", 0, FIRST_CHUNK_S - 1)
    assert watched.ended == []
    watched.heard("a", 0, FIRST_CHUNK_S + 1)
    assert watched.ended == ["a"]


def test_a_worker_may_take_as_long_as_planning_to_open_a_job(watched, caplog):
    """However long the chunks of others take."""
    watched.heard("a", 0, 599, opening=True)
    watched.heard("a", 0, 601)
    watched.finished(0.01)
    watched.heard("a", 0, 599, opening=True)
    assert watched.ended == []
    for address in "abc":
        error = pytest.raises(ClusterError) if address == "c" else nullcontext()
        with error as caught:
            watched.heard(address, ord(address), 601, opening=True)
    assert watched.ended == ["a", "b", "c"]
    assert str(caught.value).startswith("the opening hung on 3 workers of the cluster of the test, one after another")
    assert caplog.messages[0] == "worker a is ended: the opening of in.npy was in one stage for more than 600 s"


def test_the_silence_of_a_worker_counts_as_its_chunks_time(watched):
    """The chunk holds the GIL: no heartbeat tells how long."""
    watched.finished(0.01)
    watched.heard("a", 3, CHUNK_LEAST_S - 2, silent=True)
    assert watched.ended == []
    watched.heard("a", 3, CHUNK_LEAST_S - 2, silent=True)
    watched.heard("a", 3, CHUNK_LEAST_S - 2, silent=True)
    assert watched.ended == ["a"]


def test_the_third_worker_on_which_a_chunk_hangs_is_the_clusters_error(watched):
    watched.finished(0.01)
    for address in ("a", "b"):
        watched.heard(address, 3, CHUNK_LEAST_S + 1)
        watched.heard(f"{address}2", 4, CHUNK_LEAST_S + 1)
    with pytest.raises(
        ClusterError, match=r"^chunk 3 hung on 3 workers of the cluster of the test, .* more than 300 s"
    ):
        watched.heard("c", 3, CHUNK_LEAST_S + 1)
    assert watched.ended == ["a", "a2", "b", "b2", "c"]  # the third one too


def test_a_scheduler_that_does_not_answer_is_not_the_watchs_to_tell(watched, clock):
    def silent():
        raise ClusterError("the scheduler no longer answers")

    watched.watch._identities = silent
    clock.now += 1.5
    watched.watch()
    assert watched.ended == []


def test_a_worker_tells_the_chunk_that_it_has_in_hand(tmp_path, monkeypatch):
    """Also while it opens the job, which a file system may hold up."""
    write_image(tmp_path / "in.npy", np.zeros((90, 31), np.uint8), "YX")
    workload = workload_named("smooth")
    spec = JobSpec(
        workload="smooth", input=tmp_path / "in.npy", output=tmp_path / "out.npy",
        parameters=workload.Parameters(size="3"),
    )  # fmt: skip
    job = plan_job(spec, CpuDevice(1), RunOptions(memory_bytes=64 << 20, chunk_bytes=1000))
    job.output.open(Opening.NEW)
    ledger = Ledger(spec.output, job.identity)
    ledger.create()
    told = {}

    def note(step):
        return lambda *_: told.update({step: segments.in_hand(), f"{step}, opened": segments.opening()})

    monkeypatch.setattr(segments, "refuse_other_input", note("opening"))
    monkeypatch.setattr(segments, "REPORT_S", 0.0)
    cluster_job = segments.ClusterJob(
        name="job", spec=spec, budget=job.budget, held_bytes=0, ledger_identity=ledger.identity,
        worker_device=WorkerDevice(device="cpu", threads=1),
    )  # fmt: skip
    run_segment(cluster_job, Segment(chunks=(4, 5)), note("writing"))
    segments.close_job("job")
    job.output.discard()
    assert segments.in_hand() == segments.opening() == {}
    assert 0 <= told["opening, opened"]["job"] < WAIT_S
    assert told["writing, opened"] == {}
    [(chunk, seconds)] = told["opening"].values()
    assert chunk == 4
    assert 0 <= seconds < WAIT_S
    assert told["writing"]["job"][0] == 5


# Deaths


class KilledFuture:
    """A task that was given up after three deaths."""

    def add_done_callback(self, function):
        function(self)

    def exception(self):
        return KilledWorker("segment", SimpleNamespace(address="tcp://127.0.0.1:1"), 2)


def test_segments_that_are_given_up_together_are_all_named():
    """Two run on a worker: nothing tells which of them ended it."""
    client = SimpleNamespace(
        status="running", submit=lambda *args, **how: KilledFuture(), cancel=lambda *args, **how: None,
        run=lambda *args, **how: None,
    )  # fmt: skip
    spec = SimpleNamespace(workload="map", parameters=SimpleNamespace(function="mine:deadly"))
    tasks = SegmentTasks(client, SimpleNamespace(name="job", spec=spec), WHERE, lambda: None)
    said = "^mine:deadly: chunks 0 to 3 or chunks 4 to 7 took down 3 workers of the cluster of the test"
    with pytest.raises(OperatorError, match=said):
        list(tasks.receipts([Segment(chunks=(0, 1, 2, 3)), Segment(chunks=(4, 5, 6, 7))]))


def test_a_stopped_worker_of_a_command_is_replaced(marked, monkeypatch, caplog):
    """Its nanny would wait for it, and Dask for five minutes."""
    monkeypatch.setattr(hung_workers, "IDLE_S", 2.0)
    with local_workers(cpu_workers(2, 1)) as workers:
        thread, outcome = in_thread(lambda: run_map(marked, workers, "once", flag=str(marked / "flag")))
        stopped = process_noted(marked / "flag")
        before = workers.identities()
        stopped.send_signal(signal.SIGSTOP)
        thread.join(WAIT_S)
        assert [receipt["chunks"] for receipt in outcome] == [20]
        wait_until(lambda: len(workers.identities()) == 2, "the worker's return")
        assert len(workers.identities().keys() - before.keys()) == 1
    check_result(marked)
    [line] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.startswith(f"worker process {stopped.pid} is replaced: no heartbeat for ")
