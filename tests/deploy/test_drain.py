"""Workers that are told to leave a cluster: what they have in hand is kept, and others go on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from contextlib import ExitStack

import dask
import numpy as np
import psutil
import pytest
from distributed import Scheduler

from kernels.smoothing import gaussian_filter
from pipeline.cluster.dask import worker_processes
from tests.deploy.waiting import WAIT_S, wait_until
from tests.images import read_image, write_image
from tests.pipeline.cluster.processes import running, running_scheduler

SIGMA = 25
JOB = (
    "run",
    "smooth",
    "in.npy",
    "out.npy",
    "--filter",
    "gaussian",
    "--sigma",
    SIGMA,
    "--threads",
    1,
    "--memory",
    "2800KiB",
)


def entries(folder):
    return list((folder / "out.npy.ledger").glob("chunks-*.json"))


@pytest.mark.slow
def test_a_worker_that_leaves_keeps_its_chunks_and_another_goes_on(tmp_path):
    samples = np.random.default_rng(3).integers(0, 65536, (1499, 1201, 3)).astype(np.uint16)
    write_image(tmp_path / "in.npy", samples)
    with running_scheduler(tmp_path) as (_, address):
        worker = ("worker", address, "--device", "cpu", "--workers", 1, "--threads", 1)
        with running(*worker, cwd=tmp_path) as first, ExitStack() as stack:
            # A job waits seconds for a first worker, and one may take longer on a machine with much else to do.
            assert any("Registered to" in line for line in first.stderr)
            job = stack.enter_context(running(*JOB, "--scheduler", address, "--json", cwd=tmp_path))
            wait_until(lambda: entries(tmp_path) or job.poll() is not None, "the first entry")
            assert job.poll() is None, job.communicate()
            # Slurm's signals reach every process of a task.
            for process in [*psutil.Process(first.pid).children(recursive=True), psutil.Process(first.pid)]:
                process.send_signal(signal.SIGUSR1)
            _, err = first.communicate(timeout=WAIT_S)
            assert (first.returncode, "Traceback" in err) == (0, False), err
            kept = [chunk for path in entries(tmp_path) for chunk in json.loads(path.read_text())["chunks"]]
            assert job.poll() is None
            with running(*worker, cwd=tmp_path) as second:
                out, err = job.communicate(timeout=WAIT_S)
                assert (job.returncode, err.count("\n")) == (0, 1), err
                assert err.startswith("millrace: warning: chunks are much smaller than their halo"), err
                second.send_signal(signal.SIGTERM)
                _, err = second.communicate(timeout=WAIT_S)
                assert (second.returncode, "Traceback" in err) == (0, False), err
    receipt = json.loads(out)
    assert len(set(kept)) == len(kept) < receipt["chunks"]
    assert receipt["stages"]["write"]["bytes"] <= receipt["written_bytes"]  # none was computed twice
    np.testing.assert_array_equal(read_image(tmp_path / "out.npy"), gaussian_filter(samples, SIGMA, axes=(0, 1)))


@pytest.mark.parametrize("noticed", [False, True])
def test_a_worker_that_died_is_not_waited_for(noticed):
    """Dask would go on calling it for half a minute; nor is another started in its place, only to leave at once."""
    took_s = 0.0

    async def killed_and_drained():
        nonlocal took_s
        async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
            async with worker_processes._Nanny(scheduler.address, nthreads=1, memory_limit=0, dashboard=False) as nanny:
                process = nanny.process
                os.kill(nanny.pid, signal.SIGKILL)
                if noticed:
                    await process.stopped.wait()
                began = time.monotonic()
                await worker_processes._drain(scheduler.address, [nanny], 60)
                took_s = time.monotonic() - began
            assert nanny.starts == 1

    with dask.config.set(worker_processes._CONFIG):
        asyncio.run(killed_and_drained())
    assert took_s < 15
