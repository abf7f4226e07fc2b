"""What a lost scheduler, worker or answer means to whoever hands out a job: never more than its own error."""

from __future__ import annotations

import errno
import itertools
import logging
import socket
import threading
from concurrent.futures import CancelledError
from contextlib import closing, contextmanager
from types import SimpleNamespace

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from distributed import Client, KilledWorker, LocalCluster
from distributed.deploy import spec as dask_spec

from pipeline.cluster.dask import connection, segment_tasks, worker_processes, worker_states
from pipeline.cluster.dask.connection import Connection, listen, submit
from pipeline.cluster.dask.segment_tasks import MOST_ATTEMPTS, SegmentTasks
from pipeline.cluster.dask.worker_processes import local_workers, serve_workers, workers_of
from pipeline.cluster.dask.worker_start import cpu_workers
from pipeline.cluster.segments import Segment, SegmentReceipt
from pipeline.errors import ClusterError, DeviceUnavailable, MillraceError
from tests.pipeline.cluster.processes import kill_9, running, running_scheduler, wait_until

WAIT_S = 60.0
WHERE = "the scheduler of the test"


# A scheduler that goes away and comes back


def workers_there(workers):
    try:
        return len(workers.identities())
    except ClusterError:
        return 0


def test_a_scheduler_started_again_at_its_address_is_found_again(tmp_path, monkeypatch):
    worker = ("worker", "--device", "cpu", "--workers", 1)
    with running_scheduler(tmp_path) as (process, address), running(*worker, address, cwd=tmp_path) as its_worker:
        with Client(address, set_as_default=False) as client:
            client.wait_for_workers(1, timeout=WAIT_S)
        opened = workers_of(address, "cpu", 1)
        workers = opened.__enter__()
        lost = workers._connection.client
        lost._timeout = 0.2  # seconds for which it looks for a scheduler that has gone
        monkeypatch.setattr(worker_processes, "CONNECT_SECONDS", 0.5)
        process.kill()
        process.wait()
        wait_until(lambda: lost.status == "closed", "the client's end")
        with pytest.raises(ClusterError, match="no longer answers"):
            workers.identities()
        with pytest.raises(ClusterError, match="no longer answers"):
            workers.start_on("tcp://127.0.0.1:1", print, on_done=lambda: None)
        its_worker.wait(WAIT_S)
    monkeypatch.setattr(worker_processes, "CONNECT_SECONDS", 10.0)
    port = int(address.rpartition(":")[2])
    with running_scheduler(tmp_path, port), running(*worker, address, cwd=tmp_path):
        wait_until(lambda: workers_there(workers) == 1, "the worker's return")
        call_is_over = threading.Event()
        (there,) = workers.last_heard()
        call = workers.start_on(there, len, "four", on_done=call_is_over.set)
        assert call_is_over.wait(WAIT_S)
        assert call.result() == 4
        opened.__exit__(None, None, None)
    with pytest.raises(ClusterError):  # and no other client is made then
        workers.identities()


class FakeClient:
    def __init__(self, status="running"):
        self.status = status
        self.closed = False

    def close(self, timeout=None):
        self.closed = True


def test_a_client_that_is_held_up_is_replaced_in_the_end(monkeypatch):
    made = []

    def connect():
        made.append(FakeClient())
        return made[-1]

    found = Connection(connect, WHERE)
    assert found.client is made[0]
    made[0].status = "connecting"
    with pytest.raises(ClusterError, match=WHERE):
        found.client  # noqa: B018 - Dask may find the scheduler again by itself
    assert len(made) == 1
    monkeypatch.setattr(connection, "GIVE_UP_S", 0.0)
    assert found.client is made[1]
    assert made[0].closed


def test_a_closed_client_takes_no_work_and_says_so():
    with LocalCluster(n_workers=0, processes=False, dashboard_address="127.0.0.1:0") as cluster:
        client = Client(cluster, set_as_default=False)
        client.close()
        with pytest.raises(ClusterError, match=WHERE):
            submit(client, WHERE, len, "four")
        with pytest.raises(ClusterError, match=WHERE):
            listen(client, WHERE, "topic", print)


@contextmanager
def server(answer):
    """The address of a server that says `answer` to whoever says something, or never anything."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        taken = []

        def serve():
            while True:
                try:
                    taken.append(listening.accept()[0])
                except OSError:
                    return
                if answer and taken[-1].recv(1):
                    taken[-1].sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        for each in taken:
            each.close()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "another server is there"),
        (b"SSH-2.0-OpenSSH_9.9\r\n", "another server is there"),
        (bytes(100), "another server is there"),
        (b"", "no reason given"),
    ],
)
def test_another_server_at_the_schedulers_address_is_told_as_one(monkeypatch, answer, told):
    monkeypatch.setattr(worker_processes, "CONNECT_SECONDS", 0.5)
    with server(answer) as address:
        with pytest.raises(DeviceUnavailable, match=f"--scheduler {address}: no Dask scheduler answers there .{told}"):
            workers_of(address, "cpu", 1).__enter__()
        with pytest.raises(DeviceUnavailable, match=f"{address}: no Dask scheduler answers there: {told}"):
            serve_workers(address, cpu_workers(1, 1), 1.0)


# Segments whose worker dies


class FakeFuture:
    """One that is done: `told` is what its task raised, `lost` what asking for its result raises."""

    def __init__(self, outcome):
        self.outcome = outcome

    def add_done_callback(self, function):
        function(self)

    def exception(self):
        return None if self.outcome.get("told") is None else self.outcome["told"]

    def result(self):
        if "lost" in self.outcome:
            raise self.outcome["lost"]
        return self.outcome["receipt"]


def tasks_with(outcomes):
    """Segment tasks whose futures have these outcomes, one after another, and how many were asked for."""
    asked = itertools.count(1)
    left = iter(outcomes)
    client = SimpleNamespace(
        status="running",
        submit=lambda *args, **how: (next(asked), FakeFuture(next(left)))[1],
        cancel=lambda *args, **how: None,
        run=lambda *args, **how: None,
    )
    return SegmentTasks(
        client, SimpleNamespace(name="job", spec=SimpleNamespace(workload="smooth")), WHERE, lambda: None
    ), asked


SEGMENT = Segment(chunks=(3, 4))
RECEIPT = SegmentReceipt(segment=SEGMENT, notes=(), stages={})
KILLED = KilledWorker("segment", SimpleNamespace(address="tcp://127.0.0.1:1"), 3)


@pytest.mark.parametrize("lost", [KILLED, OSError("Timed out"), CancelledError("segment"), KeyError("segment")])
def test_a_result_lost_with_its_worker_is_asked_for_again(lost):
    tasks, asked = tasks_with([{"lost": lost}, {"told": KILLED}, {"receipt": RECEIPT}])
    assert list(tasks.receipts([SEGMENT])) == [RECEIPT]
    assert next(asked) == 4


def test_results_lost_again_and_again_end_the_job_with_its_own_error():
    tasks, asked = tasks_with([{"lost": KILLED}] * MOST_ATTEMPTS)
    with pytest.raises(ClusterError, match="chunks 3 to 4 took down one worker after another"):
        list(tasks.receipts([SEGMENT]))
    assert next(asked) == MOST_ATTEMPTS + 1


@pytest.mark.parametrize("when", ["told", "lost"])
def test_what_is_wrong_with_the_job_is_not_tried_again(when):
    tasks, asked = tasks_with([{when: MillraceError("the disk is full")}])
    with pytest.raises(MillraceError, match="the disk is full"):
        list(tasks.receipts([SEGMENT]))
    assert next(asked) == 2


def test_a_segment_whose_task_was_cancelled_is_told_so(monkeypatch):
    """Its worker stood still when the job was ended, and no word but Dask's own reached it."""
    begun, cancelled, found = threading.Event(), threading.Event(), []

    def run_segment(job, segment, tell, check):
        check()
        begun.set()
        assert cancelled.wait(WAIT_S)
        try:
            check()
        except MillraceError as error:
            found.append(str(error))
            raise

    monkeypatch.setattr(segment_tasks, "run_segment", run_segment)
    options = {"n_workers": 1, "threads_per_worker": 1, "processes": False, "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(**options) as cluster, Client(cluster, set_as_default=False) as client:
        (worker,) = cluster.workers.values()
        future = client.submit(segment_tasks._run_segment, SimpleNamespace(name="job"), SEGMENT, key="segment")
        assert begun.wait(WAIT_S)
        client.cancel([future], force=True)
        wait_until(lambda: worker.state.tasks["segment"].state == "cancelled", "the cancelling")
        cancelled.set()
        wait_until(lambda: found, "the segment's end")
    assert found == ["the job was ended"]


# Workers of this machine


def test_a_worker_that_is_slow_to_end_takes_nothing_from_the_job(monkeypatch):
    close = worker_processes._Nanny.close

    async def slow(nanny, *args, **how):
        await close(nanny, *args, **how)
        raise TimeoutError

    monkeypatch.setattr(worker_processes._Nanny, "close", slow)
    with local_workers(cpu_workers(1, 1)) as workers:
        assert len(workers.last_heard()) == 1


def test_a_worker_that_hangs_as_it_starts_holds_up_no_end(monkeypatch):
    """Dask would wait until it is there before it is ended."""
    monkeypatch.setattr(worker_processes, "END_SECONDS", 0.5)
    with local_workers(cpu_workers(1, 1)) as workers:
        cluster = workers._connection.client.cluster
        (nanny,) = cluster.workers.values()
        first = nanny.pid
        kill_9(psutil.Process(first))
        wait_until(lambda: nanny.pid not in (None, first), "the start of another process")
        hanging = psutil.Process(nanny.pid)
        hanging.suspend()
    wait_until(lambda: not hanging.is_running(), "its end")
    assert cluster.scheduler.status.name == "closed"


@pytest.mark.parametrize("role", ["client", "scheduler", "worker"])
def test_certificates_of_local_workers_are_valid_whatever_the_clock_says(role):
    """A service runs for years, and its clock may be set back: a worker that dies then has to be let in again."""
    security = worker_processes._security()
    certificate = x509.load_pem_x509_certificate(getattr(security, f"tls_{role}_cert").encode())
    assert security.require_encryption
    assert security.tls_ca_file == getattr(security, f"tls_{role}_cert")
    assert (certificate.not_valid_before_utc.year, certificate.not_valid_after_utc.year) == (1970, 9999)
    key = serialization.load_pem_private_key(getattr(security, f"tls_{role}_key").encode(), None)
    assert key.public_key() == certificate.public_key()


def test_workers_that_do_not_come_in_time_are_the_clusters_error(monkeypatch):
    def wait_for_workers(*_, **__):
        raise TimeoutError("Only 1/2 workers arrived")

    monkeypatch.setattr(Client, "wait_for_workers", wait_for_workers)
    with (
        pytest.raises(ClusterError, match="the local workers do not start: Only 1/2"),
        local_workers(cpu_workers(1, 1)),
    ):
        pass


def test_a_worker_is_waited_for_however_long_its_start_takes(monkeypatch):
    """Dask ends for good what is not back in a quarter of a minute, which is little on a busy machine."""
    waits_s, parse = [], dask_spec.parse_timedelta

    def parse_timedelta(words):
        waits_s.append(parse(words))
        return waits_s[-1]

    with local_workers(cpu_workers(1, 1)) as workers:
        monkeypatch.setattr(dask_spec, "parse_timedelta", parse_timedelta)
        (nanny,) = workers._connection.client.cluster.workers.values()
        before = workers.last_heard()
        kill_9(psutil.Process(nanny.pid))
        wait_until(lambda: waits_s, "the news of the worker's death")
        assert min(waits_s) >= 3600
        wait_until(lambda: workers.last_heard().keys() - before.keys(), "the worker's return")


def test_why_local_workers_do_not_start(monkeypatch):
    """Dask says only that a nanny failed."""

    def fail(*arguments, **options):
        try:
            raise OSError(errno.EMFILE, "Too many open files")
        except OSError:
            raise RuntimeError("_Nanny failed to start.") from None

    monkeypatch.setattr(worker_processes, "SpecCluster", fail)
    said = r"the local workers do not start: OSError: .* Too many open files; .*ulimit -n"
    with pytest.raises(ClusterError, match=said), local_workers(cpu_workers(2)):
        pass


@pytest.mark.parametrize("error", [OSError("Stream is closed"), ValueError("ours")])
def test_a_lost_connection_is_told_in_one_line(error):
    found = (type(error), error, None)
    record = logging.LogRecord("distributed.worker", logging.ERROR, "", 0, "cannot reach %s", ("it",), found)
    assert worker_states.in_one_line(record)
    told = ("cannot reach it: Stream is closed", None) if isinstance(error, OSError) else ("cannot reach it", found)
    assert (record.getMessage(), record.exc_info) == told
