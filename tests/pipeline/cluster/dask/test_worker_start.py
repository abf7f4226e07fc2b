"""What the process has loaded that workers are forked from, and when it is started."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from pipeline.cluster import executor
from pipeline.config import Settings
from pipeline.errors import DeviceUnavailable
from pipeline.workloads import JobSpec, workload_named
from pipeline.workloads.protocol import Prefetches

LOADED = """
import multiprocessing
import sys
from pipeline.cluster.dask import worker_start

NAMES = ("pipeline.cluster.dask.worker_imports", "colorsys", "pipeline.no_such_module")


def tell():
    print(*(name in sys.modules for name in NAMES))

if __name__ == "__main__":
    worker_start.start_fork_server(["colorsys", "pipeline.no_such_module"])
    child = multiprocessing.get_context(worker_start.METHOD).Process(target=tell)
    child.start()
    child.join()
"""


def test_what_is_forked_has_the_modules_asked_for(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LOADED)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True True False\n"
    assert done.stderr == ""


INTERRUPTED = """
import multiprocessing
import os
import signal
import sys
from pipeline.cluster.dask import worker_start

NUMBER = int(sys.argv[1])

def stay():
    signal.raise_signal(NUMBER)
    print("forked", flush=True)

if __name__ == "__main__":
    signal.signal(NUMBER, lambda *_: print("told", flush=True))
    worker_start.start_fork_server()
    os.killpg(0, NUMBER)
    child = multiprocessing.get_context(worker_start.METHOD).Process(target=stay)
    child.start()
    child.join()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["Ctrl-C", "closed terminal"])
def test_what_ends_a_terminals_job_is_for_the_process_that_started_it_alone(tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    command = [sys.executable, script, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, start_new_session=True)
    assert (done.stdout, done.stderr) == ("told\nforked\n", "")


def test_it_starts_before_gpus_are_looked_for(monkeypatch):
    done = []

    def all_gpus():
        done.append("gpus")
        raise DeviceUnavailable("--device all: no driver")

    monkeypatch.setattr(executor.worker_start, "start_fork_server", done.append)
    monkeypatch.setattr(executor, "all_gpus", all_gpus)
    with pytest.raises(DeviceUnavailable), executor.open_executor(Settings(device="all"), ["heavy"]):
        pass
    assert done == [["heavy"], "gpus"]


@pytest.mark.parametrize(("trajectory", "modules"), [(None, ()), ("a.xtc", ("MDAnalysis",))])
def test_trajectories_need_their_reader(tmp_path, trajectory, modules):
    coulomb = workload_named("coulomb")
    spec = JobSpec(
        workload="coulomb", input=tmp_path / "a.pqr", output=tmp_path / "a.npy",
        parameters=coulomb.Parameters(trajectory=trajectory),
    )  # fmt: skip
    assert coulomb.modules(spec) == modules
    assert not isinstance(workload_named("smooth"), Prefetches)
