"""A service whose server, or whose workers, are killed again and again: counts what was lost. Tests use it in short.

python -m tests.pipeline.service.soak server [--cycles 50] [--submits 20]     kill -9 of the server at random moments
python -m tests.pipeline.service.soak workers [--jobs 50] [--every 2]         kill -9 of a worker every so many seconds
python -m tests.pipeline.service.soak array   [--jobs 50] [--cycles 50]       of the server or a worker, with an array
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kernels.smoothing import uniform_filter
from pipeline.client import Client
from pipeline.errors import MillraceError
from tests.commands import COMMAND, Popen
from tests.images import read_image, write_image

START_S = 90.0
END_S = 3600.0


@dataclass
class Tally:
    """What came of a run. `acknowledged`: the id told for each key."""

    acknowledged: dict[str, str] = field(default_factory=dict)
    kills: int = 0
    states: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    attempts: int = 0  # of all jobs together
    resumed_chunks: int = 0
    orphans: list[int] = field(default_factory=list)  # workers that outlived their killed server


@contextmanager
def server(folder: Path, port: int, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """`millrace serve` in a process of its own, ready to take jobs. What it says of itself is in server.log."""
    with (folder / "server.log").open("a") as log:
        process = Popen(
            [*COMMAND, "serve", "--data-roots", folder / "data", "--state-dir", folder / "state", "--port", str(port),
             "--device", "cpu", "--threads", "1", *flags],
            stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not re.match(r"Millrace serves at http://127\.0\.0\.1:\d+", line):
            said = (folder / "server.log").read_text()[-2000:]
            raise RuntimeError(f"the server did not start: {line!r}, exit code {process.wait(START_S)}: {said}")
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The worker processes of a server: forked by its fork server, or started by itself."""
    parents, found = _parents(), []
    for child in [pid for pid, parent in parents.items() if parent == process.pid]:
        found += [pid for pid, parent in parents.items() if parent == child]
        if "spawn_main" in _command(child):
            found.append(child)
    return sorted(found)


def _parents() -> dict[int, int]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            found[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def alive(pids: list[int]) -> list[int]:
    """Of these processes those that are still at work."""
    return [pid for pid in pids if _command(pid)]


def make_input(folder: Path, shape: tuple[int, int] = (700, 301)) -> np.ndarray:
    (folder / "data").mkdir(exist_ok=True)
    samples = np.random.default_rng(1).integers(0, 65536, shape).astype(np.uint16)
    write_image(folder / "data" / "in.npy", samples, "YX")
    return samples


def soak(folder: Path, *, port: int, cycles: int, submits: int, seed: int = 0, most_s: float = float("inf")) -> Tally:
    """So many times: start the server, submit, kill it at a random moment. Then start it once more and wait.

    Not by the clock alone: a slow machine would kill it before it was asked for anything.

    most_s : no cycle begins later
    """
    samples, rng, tally, began = make_input(folder), random.Random(seed), Tally(), time.monotonic()
    for cycle in range(cycles):
        if time.monotonic() - began > most_s:
            break
        with server(folder, port) as process:
            workers = workers_of(process)
            assert workers, "no worker process was found"
            last = rng.randrange(submits)
            for number in range(submits):
                submit(port, f"{cycle}-{number}", tally)
                if number == last:
                    ends = threading.Timer(rng.expovariate(2.0), process.send_signal, (signal.SIGKILL,))
                    ends.start()
            ends.join()
            tally.kills += 1
        tally.orphans += _outliving(workers)
    with server(folder, port), Client(f"http://127.0.0.1:{port}") as client:
        for key in [f"{cycle}-{number}" for cycle in range(tally.kills) for number in range(submits)]:
            if key not in tally.acknowledged:  # nobody knows what became of those: asked again, they are one job too
                submit(port, key, tally)
        gather(client, tally)
    check_samples(folder, tally, samples)
    return tally


def soak_workers(folder: Path, *, port: int, jobs: int, every_s: float, seed: int = 0, rows: int = 6000) -> Tally:
    """Submits jobs, and kills a worker every so many seconds until all are over."""
    samples, rng, tally = make_input(folder, (rows, 3001)), random.Random(seed), Tally()
    ended = threading.Event()
    with server(folder, port, "--workers", "2") as process, Client(f"http://127.0.0.1:{port}") as client:

        def kill() -> None:
            while not ended.wait(every_s):
                workers = workers_of(process)
                if workers:
                    with suppress(ProcessLookupError):
                        os.kill(rng.choice(workers), signal.SIGKILL)
                        tally.kills += 1

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            for number in range(jobs):
                submit(port, str(number), tally)
            gather(client, tally)
        finally:
            ended.set()
            killer.join()
    check_samples(folder, tally, samples)
    return tally


def soak_array(folder: Path, *, port: int, jobs: int, cycles: int, seed: int = 0) -> Tally:
    """An array of small images, which run together: so many times the server, a worker or a job's process is killed."""
    rng, tally, data = random.Random(seed), Tally(), folder / "data"
    data.mkdir()
    images = [np.random.default_rng(number).integers(0, 65536, (61, 67)).astype(np.uint16) for number in range(jobs)]
    for number, image in enumerate(images):
        write_image(data / f"{number}.tif", image, "YX")
    for cycle in range(cycles + 1):
        with server(folder, port) as process, Client(f"http://127.0.0.1:{port}") as client:
            if cycle == 0:
                array = client.submit_array("smooth", "{index}.tif", "out-{index}.tif", f"0-{jobs - 1}", size="5")
                tally.acknowledged = {str(number): job.id for number, job in enumerate(array)}
            if cycle == cycles:
                gather(client, tally)
                break
            ends = threading.Event()
            ends.wait(rng.expovariate(2.0))
            victims = [process.pid, *workers_of(process)]
            with suppress(ProcessLookupError):
                os.kill(rng.choice(victims), signal.SIGKILL)
                tally.kills += 1
            ends.wait(rng.expovariate(2.0))
    for key, job in tally.acknowledged.items():
        result = data / f"out-{key}.tif"
        if tally.states.get(job) != "succeeded" or not np.array_equal(
            read_image(result), uniform_filter(images[int(key)], 5)
        ):
            tally.wrong.append(key)
    tally.wrong += [
        each.name for each in data.iterdir() if not re.fullmatch(r"(out-)?\d+\.tif(\.receipt\.json)?", each.name)
    ]
    return tally


def gather(client: Client, tally: Tally) -> None:
    """Waits for every job, and notes what became of it."""
    end = time.monotonic() + END_S
    for job in client.jobs():
        over = job.wait(timeout_s=max(end - time.monotonic(), 0))
        tally.states[job.id] = over.state if over.error is None else f"{over.state}: {over.error}"
        tally.attempts += over.view["attempts"]
        if over.state == "succeeded":
            tally.resumed_chunks += over.receipt["resumed_chunks"]


def check_samples(folder: Path, tally: Tally, samples: np.ndarray) -> None:
    """What succeeded is compared with what it has to be."""
    expected = uniform_filter(samples, 5)
    tally.wrong = [
        key
        for key, job in tally.acknowledged.items()
        if tally.states.get(job) == "succeeded"
        and not np.array_equal(read_image(folder / "data" / f"out-{key}.npy"), expected)
    ]
    left = [path.name for path in (folder / "data").iterdir() if ".ledger" in path.name or ".partial" in path.name]
    tally.wrong += [name for name in left if tally.acknowledged]


def submit(port: int, key: str, tally: Tally) -> None:
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
    faults += [f"process {pid}: outlived its server" for pid in tally.orphans]
    return faults + [f"{key}: wrong samples, or left over" for key in tally.wrong]


def _outliving(workers: list[int]) -> list[int]:
    """Workers that are still there some seconds after their server was killed; they are waited for."""
    end = time.monotonic() + START_S / 3
    while (left := alive(workers)) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("server", "workers", "array"), nargs="?", default="server")
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no cycle after so long")
    parser.add_argument("--submits", type=int, default=20, help="in each cycle")
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--every", type=float, default=2.0, help="seconds from one kill of a worker to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8799)
    options = parser.parse_args()
    began, common = time.monotonic(), {"port": options.port, "seed": options.seed}
    with tempfile.TemporaryDirectory() as folder:
        if options.what == "server":
            tally = soak(
                Path(folder), cycles=options.cycles, submits=options.submits, most_s=60 * options.minutes, **common
            )
        elif options.what == "array":
            tally = soak_array(Path(folder), jobs=options.jobs, cycles=options.cycles, **common)
        else:
            tally = soak_workers(Path(folder), jobs=options.jobs, every_s=options.every, **common)
        faults = verdict(tally)
        if faults:
            print((Path(folder) / "server.log").read_text()[-4000:])
    print(
        f"{tally.kills} kills, {len(tally.acknowledged)} jobs acknowledged, {len(tally.states)} over in "
        f"{tally.attempts} attempts, {tally.resumed_chunks} chunks kept, {len(faults)} faults, "
        f"{time.monotonic() - began:.0f} s"
    )
    print("\n".join(faults))
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
