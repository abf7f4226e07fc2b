"""The Slurm script, submitted to a Slurm of one node on loopback: it drains, and is requeued."""

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

from kernels.smoothing import gaussian
from tests.deploy.waiting import wait_until as wait_until_each
from tests.images import COMMAND, names_in, read_image, write_image

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


def test_a_job_that_runs_out_of_time_keeps_its_chunks_and_is_requeued(tmp_path):
    for name in (*DAEMONS, "sbatch", "openssl"):
        if shutil.which(name, path=PLACES) is None:
            pytest.skip(
                f"{name} is not installed (Debian: apt-get install slurmctld slurmd slurm-client munge openssl)"
            )
    work = tmp_path / "work"
    work.mkdir()
    samples = np.random.default_rng(3).integers(0, 65536, (1499, 1201, 3)).astype(np.uint16)
    write_image(work / "in.npy", samples)
    log = tmp_path / "job.log"
    options = [
        "--filter",
        "gaussian",
        "--sigma",
        str(SIGMA),
        "--memory",
        "2800KiB",
        "--device",
        "cpu",
        "--threads",
        "1",
    ]
    with slurm(tmp_path) as environment:

        def ask(*command):
            done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
            return done.stdout.strip()

        def story():
            return "\n".join([ask("scontrol", "show", "job", job), log.read_text() if log.exists() else "no log"])

        wait_until(lambda: "idle" in ask("sinfo", "--noheader", "--format=%T"), "Slurm's start")
        job = ask(
            "sbatch",
            "--parsable",
            "--ntasks=1",
            f"--output={log}",
            SCRIPT,
            "run",
            "smooth",
            "in.npy",
            "out.npy",
            *options,
        )
        wait_until(lambda: list((work / "out.npy.ledger").glob("chunks-*.json")), "the first entry", story)
        # As Slurm does before the time limit, by the script's own --signal=B:USR1@300.
        ask("scancel", "--batch", "--signal=USR1", job)
        wait_until(
            lambda: ask("squeue", "--noheader", "--format=%T", f"--jobs={job}") == "PENDING", "the requeue", story
        )
        assert "draining" in log.read_text()
        assert "Requeue=1 Restarts=1" in ask("scontrol", "show", "job", job)
        ask("scancel", job)  # its second start, with --resume, would be all of this once more
    kept = list((work / "out.npy.ledger").glob("chunks-*.json"))
    assert kept
    assert [name for name in names_in(work) if name.startswith(".millrace")] == [], "the key of a job is left"
    resumed = ["run", "smooth", "in.npy", "out.npy", *options, "--resume", "--json"]
    done = subprocess.run([*COMMAND, *resumed], cwd=work, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["resumed_chunks"] >= len(kept)
    np.testing.assert_array_equal(read_image(work / "out.npy"), gaussian(samples, SIGMA, axes=(0, 1)))
    assert names_in(work) == ["in.npy", "out.npy", "out.npy.receipt.json"]
