"""The promises of the service, measured on a local one with CPU workers: each figure with its goal.

submit  : 50 jobs a second at fixed times, independent of answers, while they run: seconds until each is on disk
crowd   : the same beside 64 clients without a token that request /metrics and /readyz at full speed
accept  : 100 jobs a second; all acknowledged jobs are in the list, and each succeeds
list    : 10,000 finished jobs, page by page, and the first page
queued  : 100,000 queued jobs: the first page of the list, and the page in a browser
poison  : small files that take gigabytes once they are read: how much later another job of the same queue is done
array   : an array of jobs, each of one TIFF of 512² u16, from the submission until the last one is done
small   : a small job from submission to result, minus the time of the same job in a separate process
drain   : SIGTERM in the middle of a job: seconds until the server has ended, and the work that is not repeated
memory  : of the server and its workers while many jobs run; `memory` alone takes minutes
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import queue
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tifffile

from benchmarks.options import Options
from pipeline.api_models import TERMINAL, State
from pipeline.client import Client
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.run import RunOptions, plan_job, run_job
from pipeline.service.jobs import Computed, Planned, Published
from pipeline.service.store import Facts, NewJob, Store
from pipeline.workloads import JobSpec, workloads

COMMAND = (sys.executable, "-c", "from pipeline.cli import main; main()")
SENDERS = 16
WAIT_S = 3600.0
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured value. `goal`: the required value, in words; `met`: None if there is no goal."""

    name: str
    value: float
    unit: str
    goal: str = ""
    met: bool | None = None


def below(name: str, value: float, limit: float, unit: str) -> Figure:
    return Figure(name=name, value=float(value), unit=unit, goal=f"< {limit:g} {unit}", met=bool(value < limit))


class Service:
    """`millrace serve` in a separate process."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        (folder / "data").mkdir(exist_ok=True)
        self.flags = flags

    def start(self) -> None:
        roots = ("--data-roots", str(self.folder / "data"), "--state-dir", str(self.folder / "state"))
        self.process = subprocess.Popen(
            [*COMMAND, "serve", *roots, "--port", "0", "--device", "cpu", "--threads", "1",
             "--jobs-waiting-of-an-owner", "1000000", *self.flags],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        found = re.fullmatch(r"Millrace serves at (http://127\.0\.0\.1:(\d+))\n", self.process.stdout.readline())
        if found is None:
            raise SystemExit("the service does not start")
        self.url, self.port = found[1], int(found[2])

    def stop(self) -> float:
        """Seconds until the process has ended."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)
        return time.monotonic() - began

    @contextmanager
    def running(self) -> Iterator[Client]:
        self.start()
        try:
            with Client(self.url) as client:
                yield client
        finally:
            if self.process.poll() is None:
                self.process.kill()
            self.process.wait()

    def memory_mib(self) -> tuple[float, float]:
        """The private memory of the server, and of its workers together."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        everyone = {task for path in Path(f"/proc/{self.process.pid}/task").iterdir() if (task := path.name)}
        workers = {
            child for task in everyone
            for child in Path(f"/proc/{self.process.pid}/task/{task}/children").read_text().split()
        }  # fmt: skip
        return _own_mib(self.process.pid), sum(_own_mib(int(child)) for child in workers | set(children))


def _own_mib(process: int) -> float:
    text = Path(f"/proc/{process}/smaps_rollup").read_text()
    return sum(int(kib) for kib in re.findall(r"^Private_\w+: +(\d+) kB", text, re.MULTILINE)) / 1024


def make_image(folder: Path, name: str, shape: tuple[int, int]) -> None:
    folder.mkdir(exist_ok=True)
    np.save(folder / name, np.random.default_rng(1).integers(0, 65536, shape).astype(np.uint16))


def sent(service: Service, rate: float, seconds: float, label: str) -> tuple[list[float], list[str]]:
    """Submits at a fixed rate; returns the seconds from each scheduled time to its answer, and the acknowledged ids."""
    moments: queue.SimpleQueue[tuple[int, float] | None] = queue.SimpleQueue()
    taken: list[tuple[float, str]] = []

    def send() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
        while (moment := moments.get()) is not None:
            number, due = moment
            body = {"workload": "smooth", "input": "small.npy", "output": f"{label}-{number}.npy"}
            headers = {"Content-Type": "application/json", "Idempotency-Key": f"{label}-{number}"}
            connection.request("POST", "/v1/jobs", json.dumps(body), headers)
            answer = connection.getresponse()
            content = json.loads(answer.read())
            if answer.status == 201:
                taken.append((time.monotonic() - due, content["jobs"][0]["id"]))
        connection.close()

    senders = [threading.Thread(target=send) for _ in range(SENDERS)]
    for sender in senders:
        sender.start()
    began = time.monotonic() + 0.1
    for number in range(round(rate * seconds)):
        due = began + number / rate
        time.sleep(max(due - time.monotonic(), 0))
        moments.put((number, due))
    for _ in senders:
        moments.put(None)
    for sender in senders:
        sender.join()
    return [waited for waited, _ in taken], [job for _, job in taken]


def under_way(client: Client) -> bool:
    """Whether any job has not ended."""
    return any(any(client.jobs(state=str(state), limit=1)) for state in State if state not in TERMINAL)


def all_over(client: Client, count: int) -> list[Mapping[str, Any]]:
    """Waits until no job is active; returns all jobs."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if not under_way(client):
            break
        time.sleep(0.25)
    found = [job.view for job in client.jobs()]
    assert len(found) >= count, f"{count} were acknowledged, {len(found)} are there"
    return found


# Each on a connection of its own, one request after another at full speed; its answers are not looked at.
_ASKING = """
import selectors, socket, sys
port, count = map(int, sys.argv[1:])
waiting = selectors.DefaultSelector()
for number in range(count):
    client = socket.create_connection(("127.0.0.1", port))
    request = b"GET %s HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\n\\r\\n" % (b"/metrics", b"/readyz")[number % 2]
    client.sendall(request)
    waiting.register(client, selectors.EVENT_READ, (request, bytearray()))
while True:
    for key, _ in waiting.select():
        request, said = key.data
        said += key.fileobj.recv(1 << 20)
        head, end, body = said.partition(b"\\r\\n\\r\\n")
        if end and len(body) == int(head.lower().partition(b"content-length: ")[2].split()[0]):
            assert b" 200 " in head.splitlines()[0], head
            said.clear()
            key.fileobj.sendall(request)
"""
ANONYMOUS = 64


@contextmanager
def anonymous(service: Service) -> Iterator[None]:
    """Clients without a token that request /metrics and /readyz without a pause, in a process."""
    process = subprocess.Popen([sys.executable, "-c", _ASKING, str(service.port), str(ANONYMOUS)])
    try:
        yield
        if process.poll() is not None:
            raise SystemExit("the anonymous clients ended early")
    finally:
        process.kill()
        process.wait()


def submit(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    yield from _submitted(folder, options, "submit at 50/s while jobs run", lambda service: nullcontext())


def crowd(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    yield from _submitted(folder, options, f"submit at 50/s, {ANONYMOUS} anonymous clients", anonymous)


def _submitted(
    folder: Path, options: argparse.Namespace, name: str, beside: Callable[[Service], AbstractContextManager[None]]
) -> Iterator[Figure]:
    service = Service(folder)
    make_image(folder / "data", "small.npy", (64, 64))
    with service.running(), beside(service):
        sent(service, 50, 2, "warm")
        waited, ids = sent(service, 50, options.seconds, "submit")
    p50, p99 = np.quantile(waited, (0.5, 0.99)) * 1e3
    yield Figure(name=f"{name}, median", value=p50, unit="ms")
    yield below(f"{name}, 99th percentile", p99, 50, "ms")
    yield Figure(name=f"{name}, slowest", value=max(waited) * 1e3, unit="ms")
    yield Figure(
        name=f"{name}, not accepted", value=round(50 * options.seconds) - len(ids), unit="jobs",
        goal="0", met=len(ids) == round(50 * options.seconds),
    )  # fmt: skip


def accept(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    service = Service(folder)
    make_image(folder / "data", "small.npy", (64, 64))
    with service.running() as client:
        began = time.monotonic()
        _, ids = sent(service, 100, options.seconds, "accept")
        took = time.monotonic() - began
        views = {view["id"]: view for view in all_over(client, len(ids))}
        done = time.monotonic() - began
    lost = [job for job in ids if job not in views or views[job]["state"] != "succeeded"]
    rate = len(ids) / took
    yield Figure(name="accepted", value=rate, unit="jobs/s", goal="100 jobs/s", met=rate >= 95)
    yield Figure(name="acknowledged and not done", value=len(lost), unit="jobs", goal="0", met=not lost)
    yield Figure(name="small jobs done", value=len(ids) / done, unit="jobs/s")


def fill(path: Path, count: int) -> None:
    """Writes finished jobs as a service would, without syncing each one."""
    store = Store(path)
    with store._database.reading() as connection:  # the one that everything here uses
        connection.execute("PRAGMA synchronous = OFF")
    receipt = {"job": "x", "chunks": 4, "stages": {name: {"seconds": 1.5, "bytes": 1 << 20} for name in "abcde"}}
    for first in range(0, count, 500):
        new = [
            NewJob(owner="local", workload="smooth", input=f"in-{n}.npy", output=f"out-{n}.npy", parameters={"size": 5})
            for n in range(first, first + 500)
        ]
        for job in store.accept(new, now=time.time()):
            store.claim("bench", now=time.time(), lease_s=1e6, owner_cap=1 << 30)
            for event in (Planned(1, 4), Computed(1)):
                store.apply(job, event, now=time.time())
            store.apply(job, Published(1), now=time.time(), facts=Facts(receipt=receipt))
    store.close()


def list_jobs(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    service = Service(folder)
    fill(folder / "state" / "jobs.sqlite", 10_000)
    with service.running() as client:
        rounds: dict[str, list[float]] = {"all": [], "first": [], "page": []}
        for _ in range(7):
            began = time.monotonic()
            assert len(list(client.jobs(state="succeeded"))) == 10_000
            rounds["all"].append(time.monotonic() - began)
            began = time.monotonic()
            assert len(list(client.jobs(state="succeeded", limit=100))) == 100
            rounds["first"].append(time.monotonic() - began)
            began = time.monotonic()
            connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
            connection.request("GET", "/")
            assert connection.getresponse().read()
            rounds["page"].append(time.monotonic() - began)
    yield below("10,000 finished jobs, all of them", statistics.median(rounds["all"]) * 1e3, 200, "ms")
    yield below("10,000 finished jobs, the newest 100", statistics.median(rounds["first"]) * 1e3, 200, "ms")
    yield below("10,000 finished jobs, the page in a browser", statistics.median(rounds["page"]) * 1e3, 200, "ms")


def queued(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    """Other owners' jobs that cannot all run soon: what runs meanwhile is part of the measurement."""
    count, service = 100_000, Service(folder)
    make_image(folder / "data", "small.npy", (64, 64))
    store = Store(folder / "state" / "jobs.sqlite")
    with store._database.reading() as connection:  # the one that everything here uses
        connection.execute("PRAGMA synchronous = OFF")
    for first in range(0, count, 1000):
        store.accept(
            [
                NewJob(owner=f"user-{n % 10}", workload="smooth", input="small.npy", output=f"{n}.npy", parameters={})
                for n in range(first, first + 1000)
            ],
            now=time.time(),
        )
    store.close()
    with service.running():
        sought = {"the newest 100": "/v1/jobs?limit=100", "queued ones": "/v1/jobs?state=queued&limit=100", "page": "/"}
        rounds: dict[str, list[float]] = {name: [] for name in sought}
        connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
        for _ in range(20):
            for name, path in sought.items():
                began = time.monotonic()
                connection.request("GET", path)
                answer = connection.getresponse()
                assert answer.read()
                assert answer.status == 200
                rounds[name].append(time.monotonic() - began)
    for name, found in rounds.items():
        yield below(f"100,000 queued jobs, {name}", statistics.median(found) * 1e3, 100, "ms")


def _acquisitions_of_nothing(path: Path) -> None:
    """200 million compressed rows that were never written: 7 KB."""
    floats = h5py.vlen_dtype(np.float32)
    kind = np.dtype([("head", np.void(340).dtype), ("traj", floats), ("data", floats)])
    with h5py.File(path, "w") as file:
        group = file.create_group("dataset")
        group.create_dataset("data", (200_000_000,), kind, chunks=(1000,), maxshape=(None,), compression="gzip")
        group.create_dataset("xml", data=np.array(["<ismrmrdHeader/>"], object), dtype=h5py.string_dtype("utf-8"))


def _zeros(path: Path) -> None:
    """4.8 GB of k-space that is zero: 21 MB."""
    left = 4_800_000_000
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("kspace.npy", "w", force_zip64=True) as member:
            header = {"descr": "<c8", "fortran_order": False, "shape": (1, left // 8000, 1000)}
            np.lib.format.write_array_header_1_0(member, header)
            while left:
                left -= member.write(bytes(min(left, 1 << 20)))
        with archive.open("traj.npy", "w") as member:
            np.lib.format.write_array(member, np.zeros((4, 4, 2)))


def _many_atoms(path: Path) -> None:
    """384 MB."""
    line = b"ATOM 1 C ALA 1 1.000 2.000 3.000 1.0 1.5\n"
    with path.open("wb") as file:
        for _ in range(384):
            file.write(line * (1_000_000 // len(line)))


def poison(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    service, label = Service(folder), itertools.count()
    make_image(folder / "data", "small.npy", (64, 64))
    files: dict[str, Callable[[Path], None]] = {
        "in.h5": _acquisitions_of_nothing,
        "in.npz": _zeros,
        "in.pqr": _many_atoms,
    }
    for name, make in files.items():
        make(folder / "data" / name)
    with service.running() as client:

        def seconds() -> float:
            job = client.submit("smooth", "small.npy", f"small-{next(label)}.npy").wait()
            assert job.state == "succeeded", job.error
            return float(job.view["finished_at"] - job.view["submitted_at"])

        alone = statistics.median(seconds() for _ in range(7))
        before, _ = service.memory_mib()
        bad = [
            client.submit(
                "coulomb" if name == "in.pqr" else "mri", name, f"{name}.{'dx' if name == 'in.pqr' else 'nii'}"
            )
            for name in files
        ]
        late = seconds()
        for name, job in zip(files, bad, strict=True):
            now = client.job(job.id)  # the atoms are many, but right: that job may run on
            print(f"  {name}: {now.state}, {now.error}", flush=True)
        after, _ = service.memory_mib()
    yield below("a job behind three poison files, later than alone by", late - alone, 30, "s")
    yield Figure(name="memory of the server, growth", value=after - before, unit="MiB")


def array(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    service, count, rounds = Service(folder), options.files, 3
    (folder / "data" / "plate").mkdir()
    rng = np.random.default_rng(1)
    for number in range(count):
        image = rng.integers(0, 65536, (512, 512)).astype(np.uint16)
        tifffile.imwrite(folder / "data" / "plate" / f"{number}.tif", image)
    seconds = []
    with service.running() as client:
        client.submit("smooth", "plate/0.tif", "warm.tif").wait()
        for turn in range(rounds):
            (folder / "data" / f"out-{turn}").mkdir()
            jobs = client.submit_array("smooth", "plate/{index}.tif", f"out-{turn}/{{index}}.tif", f"0-{count - 1}")
            views = {view["id"]: view for view in all_over(client, count)}
            ours = [views[job.id] for job in jobs]
            assert all(view["state"] == "succeeded" for view in ours)
            seconds.append(max(view["finished_at"] for view in ours) - min(view["submitted_at"] for view in ours))
            print(f"  {count / seconds[-1]:.0f} files/s", flush=True)
    rate = count / statistics.median(seconds)
    yield Figure(name="an array of small images", value=rate, unit="files/s", goal=">= 300 files/s", met=rate >= 300)


def small(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    service, count = Service(folder), 60
    make_image(folder / "data", "small.npy", (512, 512))
    parameters = workloads()["smooth"].Parameters()
    own: list[float] = []
    with service.running() as client:
        answered, stored = [], []
        for number in range(count):
            began = time.monotonic()
            job = client.submit("smooth", "small.npy", f"small-{number}.npy").wait()
            answered.append(time.monotonic() - began)
            assert job.state == "succeeded", job.error
            stored.append(job.view["finished_at"] - job.view["submitted_at"])
            # The same job in this process, interleaved.
            began = time.monotonic()
            spec = JobSpec(
                workload="smooth", input=folder / "data" / "small.npy", output=folder / "data" / f"own-{number}.npy",
                parameters=parameters,
            )  # fmt: skip
            run = RunOptions(memory_bytes=256 * MIB)
            run_job(plan_job(spec, CpuDevice(1), run), run)
            own.append(time.monotonic() - began)
    warm = slice(10, None)
    alone = statistics.median(own[warm]) * 1e3
    yield Figure(name="a small job in a process of its own", value=alone, unit="ms")
    yield below("beyond that, until the service has it done", statistics.median(stored[warm]) * 1e3 - alone, 150, "ms")
    yield below("beyond that, until the client knows", statistics.median(answered[warm]) * 1e3 - alone, 150, "ms")


def drain(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    service = Service(folder)
    make_image(folder / "data", "large.npy", (24_000, 12_000))
    with service.running() as client:
        job = client.submit("smooth", "large.npy", "large.npy.tif", size=(151, 151), mode="nearest")
        end = time.monotonic() + 120
        seen = 0
        for event in job.events():
            chunks = event.data.get("chunks") or 0
            seen = event.data["chunks_done"] if event.kind == "progress" else seen
            if chunks and seen > 0.3 * chunks:
                break
            assert time.monotonic() < end
        seconds = service.stop()
    with service.running() as client:
        done = client.job(job.id).wait()
        assert done.state == "succeeded", done.error
        kept = done.receipt["resumed_chunks"]
    yield below("SIGTERM during a job", seconds, 10, "s")
    name = f"chunks kept, of {seen} that were finished"
    yield Figure(name=name, value=kept, unit="chunks", goal=f">= {seen}", met=kept >= seen)


def memory(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    service, label = Service(folder), itertools.count()
    make_image(folder / "data", "small.npy", (64, 64))
    found: list[tuple[float, float]] = []
    step = max(options.jobs // 20, 1)
    with service.running() as client:
        for done in range(0, options.jobs + 1, step):
            batch = next(label)
            if options.together:
                client.submit_array("smooth", "small.npy", f"m{batch}-{{index}}.npy", f"0-{step - 1}")
            for number in range(0 if options.together else step):
                client.submit("smooth", "small.npy", f"m{batch}-{number}.npy")
            while under_way(client):
                time.sleep(0.2)
            found.append(service.memory_mib())
            print(f"  {done + step} jobs: server {found[-1][0]:.1f} MiB, workers {found[-1][1]:.1f} MiB", flush=True)
    half = len(found) // 2
    for name, which in (("server", 0), ("workers", 1)):
        early, late = found[half][which], found[-1][which]
        yield Figure(name=f"memory of the {name} after {half * step} jobs", value=early, unit="MiB")
        yield Figure(
            name=f"memory of the {name}, growth over {options.jobs - half * step} more", value=late - early, unit="MiB",
            goal="< 3 % + 2 MiB", met=late - early < 0.03 * early + 2,
        )  # fmt: skip


PARTS = {
    "submit": submit,
    "crowd": crowd,
    "accept": accept,
    "list": list_jobs,
    "queued": queued,
    "poison": poison,
    "array": array,
    "small": small,
    "drain": drain,
    "memory": memory,
}


def main() -> None:
    parser = Options("service", __doc__)
    parser.add_parts(PARTS, default=[name for name in PARTS if name != "memory"])
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of submitting")
    parser.add_argument("--jobs", type=int, default=5000, help="number of jobs of `memory`")
    parser.add_argument("--together", action="store_true", help="the jobs of `memory` are arrays, which run together")
    parser.add_argument("--files", type=int, default=1000, help="number of images of `array`")
    parser.add_json()
    options = parser.parse_args()
    figures: list[Figure] = []
    for name in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            for figure in PARTS[name](Path(folder), options):
                figures.append(figure)
                verdict = {True: "met", False: "MISSED", None: ""}[figure.met]
                print(
                    f"{figure.name:56} {figure.value:10.1f} {figure.unit:7} {figure.goal:14} {verdict}".rstrip(),
                    flush=True,
                )
    if options.json is not None:
        about = {"cores": len(os.sched_getaffinity(0)), "figures": [asdict(figure) for figure in figures]}
        options.json.write_text(json.dumps(about, indent=2) + "\n")
    sys.exit(any(figure.met is False for figure in figures))


if __name__ == "__main__":
    main()
