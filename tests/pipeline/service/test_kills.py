"""Runs, servers and workers that are killed: what was acknowledged is done, once, and right. More by `scripts/soak`."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import time
from functools import partial
from urllib.request import urlopen

import numpy as np
import pytest

from kernels.smoothing import uniform_filter
from pipeline.client import Client
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.run import RunOptions, finished_before, plan_job, published_before, run_job
from pipeline.errors import ParameterError
from pipeline.service.server import serve
from pipeline.service.settings import ServiceSettings
from pipeline.service.store.state_folder import sole_server
from pipeline.workloads import JobSpec, workloads
from tests.images import names_in, read_image, write_image
from tests.pipeline.service.segments import in_segments
from tests.pipeline.service.soak import (
    Tally,
    alive,
    check_samples,
    gather,
    make_input,
    server,
    submit,
    verdict,
    workers_of,
)

WAIT_S = 150.0
KILLED = 9


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# A run that is killed at any step


def run(folder, output, job):
    """As the service runs a job, or the command with --resume one without a name: what an earlier run left is gone on
    with. The receipt."""
    found = finished_before(folder / output, job) if job else None
    if found is not None:
        return found
    parameters = workloads()["smooth"].Parameters(size="5")
    spec = JobSpec(workload="smooth", input=folder / "in.npy", output=folder / output, parameters=parameters)
    options = RunOptions(memory_bytes=64 << 20, chunk_bytes=None, resume=True, start_over=bool(job), job=job)
    device = CpuDevice(1)
    device.target_bytes = lambda job_bytes: 20_000
    planned = plan_job(spec, device, options)
    return (None if job else published_before(planned)) or run_job(
        planned, options, stream=partial(in_segments, most=3)
    )


def killed_at(step, folder, output, job):
    """Forks a process that runs the job and dies, as if by kill -9, before its so manieth change of the file system.

    Whether it died of that.
    """
    child = os.fork()
    if child == 0:
        try:
            left, changes = step, ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.chmod")

            def count(event, arguments):
                nonlocal left
                if event in changes or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
                    left -= 1
                    if left == 0:
                        os._exit(KILLED)

            sys.addaudithook(count)
            run(folder, output, job)
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED), f"step {step}: the run failed by itself"
    return code == KILLED


@pytest.mark.parametrize(
    ("output", "first", "job"), [("out.npy", 1, "job"), ("out.zarr", 10, "job"), ("out.png", 10, None)]
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_run_killed_at_any_step_is_completed_by_the_next(tmp_path, output, first, job):
    samples = np.random.default_rng(1).integers(0, 65536, (64, 101)).astype(np.uint16)
    write_image(tmp_path / "in.npy", samples, "YX")
    expected, step = uniform_filter(samples, 5), first  # the kernel is compiled here, not in each child
    while True:
        folder = tmp_path / str(step)
        folder.mkdir()
        (folder / "in.npy").hardlink_to(tmp_path / "in.npy")
        died = killed_at(step, folder, output, job)
        made = (folder / output).stat() if (folder / output).exists() else None
        known = job is not None or (folder / f"{output}.ledger" / "job.json").exists()
        receipt = run(folder, output, job)
        np.testing.assert_array_equal(read_image(folder / output), expected, err_msg=f"step {step}")
        assert receipt.get("job") == job
        if made is not None and known:  # nothing is published twice, unless the command had put all its notes away
            assert (folder / output).stat().st_ino == made.st_ino, f"step {step}"
        assert names_in(folder) == ["in.npy", output, f"{output}.receipt.json"], f"step {step}"
        if not died:
            break
        step += 1
    assert step > first + 10


# A server that is killed


def until(condition, what):
    end = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.02)
    return found


@pytest.mark.slow
def test_whatever_ends_a_server_or_a_worker_every_acknowledged_job_is_done(tmp_path):
    samples, tally, port = make_input(tmp_path, (9000, 3001)), Tally(), free_port()
    url = f"http://127.0.0.1:{port}"
    with Client(url) as client:
        with server(tmp_path, port) as process:
            with urlopen(f"{url}/readyz", timeout=WAIT_S) as answer:
                assert answer.read() == b"ok\n"
            submit(port, "drained", tally)
            drained = client.job(tally.acknowledged["drained"])
            until(lambda: drained.refresh().state not in ("queued", "planning"), "the job does not begin")
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
        with server(tmp_path, port) as process:
            workers = workers_of(process)
            for number in range(3):
                submit(port, f"{number}", tally)
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert workers
            until(lambda: not alive(workers), "workers outlive their server")
        with server(tmp_path, port, "--workers", "2") as process:
            for number in range(4):
                submit(port, f"{number}", tally)  # those that were acknowledged are not accepted again
            absent = client.submit("smooth", "absent.npy", "never.npy")
            os.kill(workers_of(process)[0], signal.SIGKILL)
            assert "no such file" in absent.wait(timeout_s=WAIT_S).error
            gather(client, tally)
    assert tally.states.pop(absent.id).startswith("failed")
    check_samples(tmp_path, tally, samples)
    assert len(tally.acknowledged) == len(tally.states) == 5
    assert verdict(tally) == []


def test_a_second_server_on_one_state_folder_is_refused(tmp_path):
    settings = ServiceSettings(state_dir=tmp_path / "state", data_roots=[tmp_path])
    with sole_server(settings.state_dir), pytest.raises(ParameterError, match="another server is using it"):
        serve(settings)


def test_so_it_is_where_the_lock_file_was_removed(tmp_path):
    settings = ServiceSettings(state_dir=tmp_path / "state", data_roots=[tmp_path])
    with sole_server(settings.state_dir):
        (settings.state_dir / "lock").unlink()
        with pytest.raises(ParameterError, match="another server is using it"):
            serve(settings)
    with sole_server(settings.state_dir):  # and once it has ended it is the next one's
        pass


def test_a_state_folder_that_cannot_be_locked_is_no_other_servers(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("pipeline.service.store.state_folder.fcntl.flock", flock)
    with pytest.raises(ParameterError, match=r"cannot be locked \(No locks available\); choose one on a local disk"):
        serve(ServiceSettings(state_dir=tmp_path / "state", data_roots=[tmp_path]))
