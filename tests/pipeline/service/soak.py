"""Submits jobs to a service that is killed again and again, and counts what was lost: the tests' short form, and more.

python -m tests.pipeline.service.soak [--cycles 50] [--submits 20]
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kernels.smoothing import box
from pipeline.client import Client
from pipeline.errors import MillraceError
from tests.images import read_image, write_image

START_S = 90.0
END_S = 300.0
COMMAND = [sys.executable, "-c", "from pipeline.cli import main; main()"]


@dataclass
class Tally:
    """What came of a run. `acknowledged`: the id told for each key."""

    acknowledged: dict[str, str] = field(default_factory=dict)
    kills: int = 0
    states: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


@contextmanager
def server(folder: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """`millrace serve` in a process of its own, ready to take jobs."""
    process = subprocess.Popen(
        [*COMMAND, "serve", "--data-roots", folder / "data", "--state-dir", folder / "state", "--port", str(port),
         "--device", "cpu", "--threads", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not re.match(r"Millrace serves at http://127\.0\.0\.1:\d+", line):
            raise RuntimeError(f"the server did not start: {line!r}, exit code {process.wait(START_S)}")
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def soak(folder: Path, *, port: int, cycles: int, submits: int, seed: int = 0) -> Tally:
    """So many times: start the server, submit, kill it at a random moment. Then start it once more and wait."""
    (folder / "data").mkdir()
    samples = np.random.default_rng(1).integers(0, 65536, (700, 301)).astype(np.uint16)
    write_image(folder / "data" / "in.npy", samples, "YX")
    rng, tally = random.Random(seed), Tally()
    for cycle in range(cycles):
        with server(folder, port) as process:
            ends = threading.Timer(rng.uniform(0.05, 2.0), process.send_signal, (signal.SIGKILL,))
            ends.start()
            for number in range(submits):
                _submit(port, f"{cycle}-{number}", tally)
            ends.join()
            tally.kills += 1
    with server(folder, port), Client(f"http://127.0.0.1:{port}") as client:
        for key in [f"{cycle}-{number}" for cycle in range(cycles) for number in range(submits)]:
            if key not in tally.acknowledged:  # nobody knows what became of those: asked again, they are one job too
                _submit(port, key, tally)
        end = time.monotonic() + END_S
        for job in client.jobs():
            over = job.wait(timeout_s=max(end - time.monotonic(), 0))
            tally.states[job.id] = over.state if over.error is None else f"{over.state}: {over.error}"
    expected = box(samples, 5)
    tally.wrong = [
        key
        for key, job in tally.acknowledged.items()
        if tally.states.get(job) == "succeeded"
        and not np.array_equal(read_image(folder / "data" / f"out-{key}.npy"), expected)
    ]
    return tally


def _submit(port: int, key: str, tally: Tally) -> None:
    """One try: a client that gave up would not know either."""
    import httpx2

    body = {"workload": "smooth", "input": "in.npy", "output": f"out-{key}.npy", "parameters": {"size": "5"}}
    try:
        answer = httpx2.post(
            f"http://127.0.0.1:{port}/v1/jobs", json=body, headers={"Idempotency-Key": key}, timeout=30
        )
    except (httpx2.TransportError, MillraceError):
        return
    if answer.status_code == 201:
        tally.acknowledged[key] = answer.json()["jobs"][0]["id"]


def verdict(tally: Tally) -> list[str]:
    """What is not as promised."""
    ids = list(tally.acknowledged.values())
    faults = [f"{key}: lost" for key, job in tally.acknowledged.items() if job not in tally.states]
    faults += [f"{job}: two keys" for job in set(ids) if ids.count(job) > 1]
    faults += [f"{job}: {state}" for job, state in tally.states.items() if state != "succeeded"]
    faults += [f"{job}: a job that no key knows" for job in tally.states if job not in ids]
    return faults + [f"{key}: wrong samples" for key in tally.wrong]


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--submits", type=int, default=20)
    parser.add_argument("--port", type=int, default=8799)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tally = soak(Path(folder), port=options.port, cycles=options.cycles, submits=options.submits)
    faults = verdict(tally)
    print(
        f"{tally.kills} kills, {len(tally.acknowledged)} jobs acknowledged, {len(tally.states)} over, "
        f"{len(faults)} faults, {time.monotonic() - began:.0f} s"
    )
    print("\n".join(faults))
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
