"""A service whose users replace files and folders by links, and back, as fast as they can, while it runs jobs.

python -m tests.pipeline.service.link_race [--seconds 60] [--workers 2] [--seed 0]

Everything outside the data roots has samples of 60,000 and names of its own; everything inside has samples below 1,000.
So a sample, a digest or a file on the wrong side shows.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from pipeline.client import Client
from pipeline.errors import InputError, MillraceError
from pipeline.storage.partial import _exchanged
from tests.images import read_image, write_image
from tests.pipeline.service.soak import server

LARGEST_INSIDE, OUTSIDE = 999, 60_000
SHAPE = (521, 1031)
JOBS = (("x.npy", ".npy"), ("x.zarr", ".zarr"), ("x.npy", ".tif"), ("x.zarr", ".npy"))
AT_ONCE = 4


@dataclass
class Found:
    """What came of a race."""

    states: dict[str, int] = field(default_factory=dict)
    errors: set[str] = field(default_factory=set)
    swaps: int = 0
    wrong: list[str] = field(default_factory=list)


def race(
    folder: Path, service: Callable[[Path], AbstractContextManager[str]], *, seconds: float, seed: int = 0
) -> Found:
    """Submits jobs for so long. `service`: its URL; its data root is `folder/data`."""
    data, outside, found = folder / "data", folder / "outside", Found()
    start, stop, swaps = multiprocessing.Event(), multiprocessing.Event(), multiprocessing.Value("q", 0)
    swappers = [
        multiprocessing.Process(target=_swap, args=(swap, data, outside, seed + number, start, stop, swaps))
        for number, swap in enumerate((_swap_inputs, _swap_outputs))
    ]
    for swapper in swappers:  # before the service has threads
        swapper.start()
    try:
        with service(folder) as url, Client(url) as client:
            for place, samples in ((data, _inside()), (outside, np.full(SHAPE, OUTSIDE, np.uint16))):
                for name in ("in", "out"):
                    (place / name).mkdir(parents=True)
                write_image(place / "in" / "x.npy", samples, "YX")
                write_image(place / "in" / "x.zarr", samples, "YX")
            (outside / "secret").write_bytes(b"secret")
            before = _tree(outside)
            start.set()
            _run_jobs(client, found, time.monotonic() + seconds)
            stop.set()
    finally:
        for event in (stop, start):
            event.set()
        for swapper in swappers:
            swapper.join()
    found.swaps = swaps.value
    found.wrong += _written_outside(before, _tree(outside))
    found.wrong += _read_from_outside(data, outside)
    return found


@contextmanager
def workers_service(folder: Path, workers: int) -> Iterator[str]:
    """`millrace serve`, with processes that plan and processes that compute."""
    (folder / "data").mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with server(folder, port, "--workers", str(workers)):
        yield f"http://127.0.0.1:{port}"


def _run_jobs(client: Client, found: Found, end: float) -> None:
    """At least one; jobs that are unfinished in the end are left."""
    number, running = 0, []
    while not found.states or time.monotonic() < end:
        while len(running) < AT_ONCE:
            source, suffix = JOBS[number % len(JOBS)]
            number += 1
            with suppress(MillraceError):  # refused by the check at submission, which saw a link
                running.append(client.submit("smooth", f"in/{source}", f"out/y{number}{suffix}", size="3"))
        with suppress(TimeoutError):
            job = running[0].wait(timeout_s=max(end - time.monotonic(), 1.0))
            found.states[job.state] = found.states.get(job.state, 0) + 1
            found.errors.add(_kind_of(job.error or ""))
            del running[0]


def _kind_of(error: str) -> str:
    """An error without the paths in it."""
    return " ".join(word for word in error.split() if "/" not in word)


def _inside() -> np.ndarray:
    return np.random.default_rng(1).integers(0, LARGEST_INSIDE + 1, SHAPE).astype(np.uint16)


def _tree(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def _written_outside(before: dict[str, bytes | None], after: dict[str, bytes | None]) -> list[str]:
    return [f"{path}: changed" for path in before.keys() | after.keys() if before.get(path, "") != after.get(path, "")]


def _read_from_outside(data: Path, outside: Path) -> list[str]:
    """Results and receipts with something from outside."""
    digest, wrong = hashlib.sha256((outside / "in" / "x.npy").read_bytes()).hexdigest(), []
    for path in sorted((data / "out").iterdir()):
        if path.is_symlink() or ".partial" in path.name or ".ledger" in path.name:
            continue
        if path.suffix == ".json":
            wrong += [f"{path}: has the digest of a file outside"] if digest in path.read_text() else []
        elif path.suffix in (".npy", ".zarr", ".tif"):
            try:
                largest = read_image(path).max()
            except InputError as refused:
                # A link that was put into a folder just before it was published: it is not followed.
                if "leads out of the service's data roots" not in str(refused):
                    raise
                continue
            wrong += [f"{path}: has samples from outside"] if largest > LARGEST_INSIDE else []
    return wrong


# What the two processes do


def _swap(swap, data: Path, outside: Path, seed: int, start, stop, swaps) -> None:
    start.wait()
    if not stop.is_set():
        swap(data, outside, random.Random(seed), stop, swaps)


def _swap_inputs(data: Path, outside: Path, rng: random.Random, stop, swaps) -> None:
    links = [_link(data, outside, name) for name in ("in", "in/x.npy", "in/x.zarr", "in/x.zarr/0/c")]
    while not stop.is_set():
        name, link = rng.choice(links)
        _swap_for_a_moment(name, link, rng)
        swaps.value += 1


def _swap_outputs(data: Path, outside: Path, rng: random.Random, stop, swaps) -> None:
    folder, link = _link(data, outside, "out")
    traps = {".partial": outside / "secret", ".ledger": outside / "out", ".json": outside / "secret"}
    while not stop.is_set():
        _swap_for_a_moment(folder, link, rng)
        swaps.value += 1
        if rng.random() > 0.05:  # each trap fails a job
            continue
        for path in folder.iterdir():
            with suppress(OSError):
                if path.name.endswith(".zarr.partial") and rng.random() < 0.5:
                    path /= "0/c"
                    _plant(path, outside / "in" / "x.zarr" / "0" / "c", rng)
                elif path.suffix in traps:
                    _plant(path, traps[path.suffix], rng)


def _link(data: Path, outside: Path, name: str) -> tuple[Path, Path]:
    """A path, and a link to its like outside to exchange it with."""
    link = data.parent / f"link-{name.replace('/', '-')}"
    link.symlink_to(outside / name)
    return data / name, link


def _swap_for_a_moment(name: Path, link: Path, rng: random.Random) -> None:
    _exchanged(name, link)
    time.sleep(rng.expovariate(2000))
    _exchanged(name, link)
    time.sleep(rng.expovariate(rng.choice((10, 100, 5000))))


def _plant(path: Path, target: Path, rng: random.Random) -> None:
    away = path.parent / f"away-{rng.random()}"
    path.rename(away)
    path.symlink_to(target)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        service = partial(workers_service, workers=given.workers)
        found = race(Path(folder), service, seconds=given.seconds, seed=given.seed)
    print(f"{found.swaps} swaps; jobs: {found.states}")
    print(*sorted(found.errors), sep="\n")
    print(*found.wrong or ["nothing left the data roots"], sep="\n")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
