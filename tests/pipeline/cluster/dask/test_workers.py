"""Jobs over worker processes: the same bits as on one device, whatever dies meanwhile."""

from __future__ import annotations

import json
import random
import signal
import time

import numpy as np
import pytest
from distributed import Client

from kernels.smoothing import gaussian_filter
from tests.images import names_in, read_image, write_image
from tests.pipeline.cluster.processes import kill_9, run, running, running_scheduler, wait_until, worker_processes
from tests.pipeline.scrapes import free_port, scraped

SIGMA = 25
# Small chunks with wide halos: the job takes long enough.
SMALL = ("--memory", "2800KiB")
SLOW = ("--filter", "gaussian", "--sigma", SIGMA, "--truncate", 4, "--device", "cpu", "--threads", 1)


@pytest.fixture
def folder(tmp_path, monkeypatch, own_settings):
    monkeypatch.chdir(tmp_path)
    write_samples(tmp_path, (1499, 1201, 3))
    return tmp_path


def write_samples(folder, shape):
    samples = np.random.default_rng(3).integers(0, 65536, shape).astype(np.uint16)
    write_image(folder / "in.tif", samples)


def expected(folder):
    return gaussian_filter(read_image(folder / "in.tif"), SIGMA, truncate=4.0, axes=(0, 1))


def smooth(output, *options):
    return ("run", "smooth", "in.tif", output, *SLOW, *options)


def ledger_entries(folder, output):
    return list((folder / f"{output}.ledger").glob("chunks-*.json"))


@pytest.mark.parametrize("output", ["out.tif", "out.png", "out.zarr"])
def test_several_processes_make_the_same_bits(folder, output):
    write_samples(folder, (601, 1201, 3))
    code, out, err = run(*smooth(output, "--workers", 2, "--chunk-bytes", "300KB", "--json"), cwd=folder)
    assert (code, err) == (0, "")
    np.testing.assert_array_equal(read_image(folder / output), expected(folder))
    receipt = json.loads(out)
    assert receipt["device"]["name"] == "2 × cpu"
    assert len(receipt["device"]["workers"]) == 2
    assert receipt["stages"]["write"]["bytes"] == receipt["written_bytes"]
    assert receipt["audit"]["samples"] == 100
    assert names_in(folder) == ["in.tif", output, f"{output}.receipt.json"]


@pytest.mark.slow
def test_the_job_survives_twenty_killed_workers(folder):
    """Each kill -9 takes at most the segments that this worker held; the rest is never computed again."""
    rng = random.Random(11)
    write_samples(folder, (2003, 2001, 3))
    options = ("--workers", 2, *SMALL, "--quiet")
    killed = 0
    with running(*smooth("out.npy", *options), cwd=folder) as process:
        wait_until(lambda: ledger_entries(folder, "out.npy"), "the first segment")
        while killed < 20 and process.poll() is None:
            victims = worker_processes(process)
            if victims:
                kill_9(rng.choice(victims))
                killed += 1
            time.sleep(rng.uniform(0.0, 0.3))
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (0, "", "")
    assert killed == 20
    np.testing.assert_array_equal(read_image(folder / "out.npy"), expected(folder))
    assert names_in(folder) == ["in.tif", "out.npy", "out.npy.receipt.json"]


def test_a_killed_command_is_resumed_from_its_ledger(folder, millrace):
    with running(*smooth("out.npy", "--workers", 2, *SMALL), cwd=folder) as process:
        wait_until(lambda: len(ledger_entries(folder, "out.npy")) >= 3, "the third segment")
        process.kill()
        process.wait()
        wait_until(lambda: not worker_processes(process), "the workers' end")
    assert "out.npy" not in names_in(folder)
    entries = [json.loads(path.read_text()) for path in ledger_entries(folder, "out.npy")]
    done = {chunk for entry in entries for chunk in entry["chunks"]}
    assert done
    # On one device, which would prefer larger chunks: the cut is the ledger's.
    code, out, err = millrace(*smooth("out.npy", "--resume", "--json"))
    assert (code, err) == (0, "")
    receipt = json.loads(out)
    assert receipt["resumed_chunks"] >= len(done)
    assert receipt["stages"]["write"]["bytes"] < receipt["written_bytes"]
    assert receipt["audit"]["samples"] == 100
    np.testing.assert_array_equal(read_image(folder / "out.npy"), expected(folder))
    assert names_in(folder) == ["in.tif", "out.npy", "out.npy.receipt.json"]


@pytest.fixture
def scheduler(tmp_path):
    """A Dask scheduler and one of our workers, as an administrator starts them."""
    port = free_port()
    with (
        running_scheduler(tmp_path) as (process, address),
        running("worker", address, "--device", "cpu", "--workers", 1, "--metrics-port", port, cwd=tmp_path),
    ):
        with Client(address, set_as_default=False) as client:
            client.wait_for_workers(1, timeout=60)  # longer than the command waits, on a busy machine
        yield process, address, port


def test_workers_of_a_cluster_do_the_job_and_tell_it_at_their_port(folder, scheduler):
    _, address, port = scheduler
    code, out, err = run(*smooth("out.npy", "--scheduler", address), cwd=folder)
    assert (code, err) == (0, "")
    assert "on 1 × cpu" in out
    np.testing.assert_array_equal(read_image(folder / "out.npy"), expected(folder))
    told = scraped(f"127.0.0.1:{port}")
    assert told["millrace_work_total", (("unit", "pixels"), ("workload", "smooth"))] == 1499 * 1201
    code, _, err = run("worker", address, "--workers", 1, "--device", "cpu", "--metrics-port", port, cwd=folder)
    assert code == 2
    assert err.startswith(f"millrace: --metrics-port {port}: ")


def test_a_scheduler_that_goes_away_leaves_a_job_to_resume(folder, scheduler, millrace):
    process, address, _ = scheduler
    with running(*smooth("out.npy", "--scheduler", address, *SMALL), cwd=folder) as command:
        wait_until(lambda: len(ledger_entries(folder, "out.npy")) >= 2, "the second segment")
        process.kill()
        _, err = command.communicate(timeout=60)
    assert command.returncode == 1
    assert err.startswith(f"millrace: the scheduler {address} no longer answers: see its log, and start it again; ")
    assert err.endswith("chunks kept: continue with --resume\n")
    code, _, err = millrace(*smooth("out.npy", "--resume"))
    assert (code, err) == (0, "")
    np.testing.assert_array_equal(read_image(folder / "out.npy"), expected(folder))


@pytest.mark.parametrize(
    ("number", "moment"), [(signal.SIGKILL, "Registered to"), (signal.SIGTERM, "Starting established connection")]
)
def test_a_worker_whose_scheduler_goes_away_says_so(tmp_path, number, moment):
    """Also where the worker is there, but not yet all that watches over it."""
    with (
        running_scheduler(tmp_path) as (process, address),
        running("worker", address, "--device", "cpu", "--workers", 1, cwd=tmp_path) as worker,
    ):
        assert any(moment in line for line in worker.stderr)
        process.send_signal(number)
        _, err = worker.communicate(timeout=60)
    assert worker.returncode == 1
    assert err.endswith(f"millrace: {address}: the scheduler no longer answers; start it, then this again\n")
    assert "Traceback" not in err


def drop_workers(client):
    def drop(dask_scheduler):  # not of the module, which the scheduler cannot import
        for connection in dask_scheduler.stream_comms.values():
            connection.abort()

    client.run_on_scheduler(drop)


@pytest.mark.parametrize(
    ("lose", "code", "last"),
    [
        (drop_workers, 1, "the connection to the scheduler was lost; start this again"),
        (lambda client: client.retire_workers(), 0, "closed."),
    ],
    ids=["lost", "let go"],
)
def test_a_worker_tells_a_scheduler_that_was_lost_from_one_that_lets_it_go(tmp_path, lose, code, last):
    """It is there again by the time that the worker looks."""
    with (
        running_scheduler(tmp_path) as (_, address),
        running("worker", address, "--device", "cpu", "--workers", 1, cwd=tmp_path) as worker,
        Client(address, set_as_default=False) as client,
    ):
        client.wait_for_workers(1, timeout=60)
        lose(client)
        _, err = worker.communicate(timeout=60)
    assert worker.returncode == code, err
    assert err.endswith(f"{last}\n")


def test_stopping_ends_every_worker(folder):
    with running(*smooth("out.npy", "--workers", 2, *SMALL), cwd=folder) as process:
        wait_until(lambda: ledger_entries(folder, "out.npy"), "the first segment")
        workers = worker_processes(process)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM; nothing was published; " in err
    assert "continue with --resume" in err
    assert not any(worker.is_running() for worker in workers)


def test_another_job_is_not_resumed(folder, millrace):
    with running(*smooth("out.npy", "--workers", 1, *SMALL), cwd=folder) as process:
        wait_until(lambda: ledger_entries(folder, "out.npy"), "the first segment")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    before = names_in(folder)
    code, _, err = millrace("run", "smooth", "in.tif", "out.npy", "--size", 5, "--resume")
    assert code == 2
    assert "is of another job (parameters." in err
    assert names_in(folder) == before
    # Without --resume it starts anew.
    assert millrace("run", "smooth", "in.tif", "out.npy", "--size", 5, "--quiet") == (0, "", "")
    assert names_in(folder) == ["in.tif", "out.npy", "out.npy.receipt.json"]


def test_a_damaged_input_is_the_users_error_on_any_worker(folder):
    whole = (folder / "in.tif").read_bytes()
    (folder / "cut.npy").write_bytes(b"\x93NUMPY")
    code, _, err = run("run", "smooth", "cut.npy", "out.npy", "--workers", 2, cwd=folder)
    assert code == 2
    assert "cut.npy" in err
    assert (folder / "in.tif").read_bytes() == whole
    assert names_in(folder) == ["cut.npy", "in.tif"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--scheduler", "tcp://127.0.0.1:1"), "no Dask scheduler answers there"),
        (("--scheduler", "127.0.0.1:8786"), "must be an address like tcp://HOST:PORT"),
        (("--scheduler", "tcp://a:1", "--workers", "2"), "give one of them"),
        (("--scheduler", "tcp://a:1", "--device", "cuda:1"), "with --scheduler, use auto, cpu or cuda"),
        (("--workers", "2", "--device", "cuda:0"), "--device all has a process for each GPU"),
        (("--workers", "2", "--device", "all"), "--device all means GPUs: give one of them"),
        (("--workers", "2", "--overlap", "1"), "--overlap is for one device"),
        (("--workers", "0"), "--workers: "),
    ],
)
def test_contradictions_and_absent_clusters_are_one_line(folder, millrace, monkeypatch, options, message):
    monkeypatch.setattr("pipeline.cluster.dask.worker_processes.CONNECT_SECONDS", 0.5)
    code, out, err = millrace("run", "smooth", "in.tif", "out.npy", *options)
    assert (code, out) == (2, "")
    assert err.startswith("millrace: ")
    assert err.count("\n") == 1
    assert message in err
    assert names_in(folder) == ["in.tif"]
