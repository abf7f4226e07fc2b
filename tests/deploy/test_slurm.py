"""The Slurm script, submitted to a Slurm of one node on loopback: it drains and is requeued, or lends workers."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
from distributed import Client

from kernels.smoothing import gaussian_filter, uniform_filter
from tests.commands import COMMAND
from tests.deploy.waiting import wait_until as wait_until_each
from tests.images import names_in, read_image, write_image
from tests.pipeline.cluster.processes import running_scheduler

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "millrace.sbatch"
DAEMONS = ("munged", "slurmctld", "slurmd")
PLACES = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
SIGMA = 25

CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1
NodeName=localhost NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count):
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


@contextmanager
def slurm(folder):
    """The daemons, in the foreground as our children; yields the environment for Slurm's commands."""
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    configuration = folder / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(folder=folder, user=getpass.getuser(), ports=free_ports(2)))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MILLRACE_"))},
        "PATH": f"{Path(sys.executable).parent}:{PLACES}",
        "SLURM_CONF": str(configuration),
        "MILLRACE_INTERFACE": "lo",
    }
    munged = ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"]
    munged += [f"--{name}={folder}/munge.{name}" for name in ("pid-file", "log-file", "seed-file")]
    started = []
    try:
        for command in (munged, ["slurmctld", "-D", "-i"], ["slurmd", "-D", "-N", "localhost"]):
            started.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
        yield environment
    finally:
        for process in reversed(started):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()


# Asking Slurm is starting a program.
wait_until = partial(wait_until_each, every_s=0.5)


class Node:
    """Slurm's commands, run in the folder `work`."""

    def __init__(self, folder, environment):
        self.work = folder / "work"
        self.log = folder / "job.log"
        self.environment = environment

    def ask(self, *command):
        done = subprocess.run(command, cwd=self.work, env=self.environment, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def submit(self, *arguments, tasks):
        return self.ask("sbatch", "--parsable", f"--ntasks={tasks}", f"--output={self.log}", SCRIPT, *arguments)

    def story(self, job):
        """All that is known of a job."""
        return "\n".join([
            self.ask("scontrol", "show", "job", job), self.log.read_text() if self.log.exists() else "no log"
        ])  # fmt: skip

    def warn(self, job):
        """As Slurm does before the time limit, by the script's own --signal=B:USR1@300."""
        self.ask("scancel", "--batch", "--signal=USR1", job)


@pytest.fixture
def node(tmp_path):
    for name in (*DAEMONS, "sbatch", "openssl"):
        if shutil.which(name, path=PLACES) is None:
            pytest.skip(
                f"{name} is not installed (Debian: apt-get install slurmctld slurmd slurm-client munge openssl)"
            )
    with slurm(tmp_path) as environment:
        made = Node(tmp_path, environment)
        made.work.mkdir()
        wait_until(lambda: "idle" in made.ask("sinfo", "--noheader", "--format=%T"), "Slurm's start")
        yield made


@pytest.mark.slow
def test_a_job_that_runs_out_of_time_keeps_its_chunks_and_is_requeued(node):
    work = node.work
    samples = np.random.default_rng(3).integers(0, 65536, (1499, 1201, 3)).astype(np.uint16)
    write_image(work / "in.npy", samples)
    options = [
        "--filter", "gaussian", "--sigma", str(SIGMA), "--memory", "2800KiB", "--device", "cpu", "--threads", "1",
    ]  # fmt: skip
    job = node.submit("run", "smooth", "in.npy", "out.npy", *options, tasks=1)
    story = partial(node.story, job)
    wait_until(lambda: list((work / "out.npy.ledger").glob("chunks-*.json")), "the first entry", story)
    node.warn(job)
    wait_until(
        lambda: node.ask("squeue", "--noheader", "--format=%T", f"--jobs={job}") == "PENDING", "the requeue", story
    )
    assert "draining" in node.log.read_text()
    assert "Requeue=1 Restarts=1" in node.ask("scontrol", "show", "job", job)
    node.ask("scancel", job)  # its second start, with --resume, would be all of this once more
    kept = list((work / "out.npy.ledger").glob("chunks-*.json"))
    assert kept
    assert [name for name in names_in(work) if name.startswith(".millrace")] == [], "the key of a job is left"
    resumed = ["run", "smooth", "in.npy", "out.npy", *options, "--resume", "--json"]
    done = subprocess.run([*COMMAND, *resumed], cwd=work, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
    assert done.stderr.startswith("millrace: warning: chunks are much smaller than their halo"), done.stderr
    assert json.loads(done.stdout)["resumed_chunks"] >= len(kept)
    np.testing.assert_array_equal(read_image(work / "out.npy"), gaussian_filter(samples, SIGMA, axes=(0, 1)))
    assert names_in(work) == ["in.npy", "out.npy", "out.npy.receipt.json"]


@pytest.mark.slow
def test_an_allocation_lends_a_worker_for_each_task_and_takes_them_back(node, tmp_path):
    samples = np.random.default_rng(4).integers(0, 65536, (901, 703)).astype(np.uint16)
    write_image(node.work / "in.npy", samples, "YX")
    with running_scheduler(tmp_path) as (_, address), Client(address) as client:
        job = node.submit("workers", address, tasks=2)
        story = partial(node.story, job)
        wait_until(lambda: len(client.scheduler_info()["workers"]) == 2, "that both tasks' workers join", story)
        asked = ["run", "smooth", "in.npy", "out.npy", "--size", "7", "--scheduler", address, "--json"]
        done = subprocess.run([*COMMAND, *asked], cwd=node.work, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        np.testing.assert_array_equal(read_image(node.work / "out.npy"), uniform_filter(samples, 7))
        node.warn(job)
        wait_until(lambda: "JobState=COMPLETED" in node.ask("scontrol", "show", "job", job), "the end", story)
        assert "ExitCode=0:0" in node.ask("scontrol", "show", "job", job)
        assert "draining" in node.log.read_text()
        wait_until(lambda: not client.scheduler_info()["workers"], "that the workers leave", story)
