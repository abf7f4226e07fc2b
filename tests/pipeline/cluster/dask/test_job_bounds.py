"""What a job may take of workers: a number of them, and memory. Others are not touched."""

from __future__ import annotations

import importlib
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from kernels.smoothing import gaussian_filter
from pipeline.cluster.dask.worker_processes import local_workers
from pipeline.cluster.dask.worker_start import cpu_workers
from pipeline.cluster.dask.workers import SomeWorkers
from pipeline.engine.planned import Bounds
from pipeline.engine.run import RunEvents, RunOptions, plan_job, run_job
from pipeline.errors import LimitExceeded
from pipeline.formats.image import Storage
from pipeline.workloads import JobSpec, workload_named
from tests.images import read_image, write_image
from tests.pipeline.cluster.processes import wait_until

WAIT_S = 60.0
MIB = 1 << 20
FUNCTIONS = """
import os, pathlib, time

kept = []

def noted(block, *, folder):
    pathlib.Path(folder, str(os.getpid())).touch()
    time.sleep(0.02)
    return 255 - block

def hungry(block, *, folder):
    import numpy as np
    if (block == 255).any():
        kept.append(np.ones(400 << 20, np.uint8))
    time.sleep(0.3)  # workers tell what they take twice a second
    return 255 - block
"""


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    functions = tmp_path_factory.mktemp("functions")
    (functions / "bounded.py").write_text(FUNCTIONS)
    sys.path.insert(0, str(functions))
    importlib.invalidate_caches()
    try:
        with local_workers(cpu_workers(2, 1)) as found:
            yield found
    finally:
        sys.path.remove(str(functions))
        sys.modules.pop("bounded", None)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pids").mkdir()
    samples = np.random.default_rng(5).integers(0, 200, (400, 71)).astype(np.uint8)
    samples[57, 3] = 255
    write_image(tmp_path / "in.npy", samples, "YX")
    return tmp_path


def run_map(folder, workers, function, bounds, output="out.npy", **events):
    workload = workload_named("map")
    spec = JobSpec(
        workload="map", input=folder / "in.npy", output=folder / output,
        parameters=workload.Parameters(function=f"bounded:{function}", param={"folder": str(folder / "pids")}),
    )  # fmt: skip
    options = RunOptions(memory_bytes=64 * MIB, chunk_bytes=1420, bounds=bounds, resume=True)
    planned = plan_job(spec, workers, options)
    receipt = run_job(planned, options, stream=workers.stream, events=RunEvents(**events))
    np.testing.assert_array_equal(read_image(folder / output), 255 - read_image(folder / "in.npy"))
    return receipt


def test_a_job_runs_on_as_many_workers_as_it_asks_for(folder, workers):
    run_map(folder, workers, "noted", Bounds(workers=1))
    (first,) = [path.name for path in (folder / "pids").iterdir()]
    run_map(folder, workers, "noted", Bounds(workers=2), "all.npy")
    assert {first} < {path.name for path in (folder / "pids").iterdir()}
    assert not +workers._in_use


def test_a_lost_worker_of_such_a_job_is_replaced(folder, workers):
    killed = []

    def kill(chunk):
        if not killed:
            (pid,) = [int(path.name) for path in (folder / "pids").iterdir()]
            killed.append(pid)
            psutil.Process(pid).kill()

    # Chunks are reported once their segment is done.
    run_map(folder, workers, "noted", Bounds(workers=1), on_written=kill)
    assert len(killed) == 1
    assert len(list((folder / "pids").iterdir())) > 1
    wait_until(lambda: len(workers.identities()) == 2, "the worker's return")


def test_a_job_beyond_its_memory_fails_and_its_workers_live_on(folder, workers):
    before, taken = set(workers.identities()), []
    bounds = Bounds(memory_bytes=256 * MIB)
    with pytest.raises(LimitExceeded, match=r"^took \d{3} MiB of memory on \S+, and may take 256 MiB: submit it again"):
        run_map(folder, workers, "hungry", bounds, on_memory=lambda *each: taken.append(each))
    assert set(workers.identities()) == before
    assert 256 * MIB < max(nbytes for nbytes, _ in taken) < 500 * MIB
    assert list(folder.glob("out.npy.ledger/chunks-*"))
    # What the function has kept is the worker's idle size from now on; the next job is not charged with it.
    receipt = run_map(folder, workers, "noted", bounds, "next.npy")
    assert receipt["resumed_chunks"] == 0
    assert set(workers.identities()) == before


def _count_decodes():
    """In a worker: count from now on."""
    from collections import Counter

    from pipeline.codecs.block_cache import BlockCache
    from pipeline.formats.image.zarr import together as loops

    decode, decoded = BlockCache._decoded, Counter()

    def counted(cache, key, *arguments):
        decoded[key] += 1
        return decode(cache, key, *arguments)

    def together(files, kind, parts, target):
        decoded.update(part.place for part in parts if not part.is_held)
        return loops.undone(files, kind, parts, target)

    BlockCache.undone, BlockCache.counts, BlockCache._decoded = decode, decoded, counted
    loops.undone, loops.read_together = loops.read_together, together


def _counted_decodes():
    from pipeline.codecs.block_cache import BlockCache
    from pipeline.formats.image.zarr import together

    BlockCache._decoded, together.read_together = BlockCache.undone, together.undone
    return dict(BlockCache.counts)


def test_a_worker_decodes_each_block_once(tmp_path, workers):
    """A worker holds its share of what the job may hold, not only one slot's worth: rows of blocks overlap."""
    image = np.random.default_rng(2).integers(0, 65536, (1021, 1021)).astype(np.uint16)
    write_image(tmp_path / "in.zarr", image, "YX", Storage(chunks=(64,), compression="zstd"))
    spec = JobSpec(
        workload="smooth", input=tmp_path / "in.zarr", output=tmp_path / "out.npy",
        parameters=workload_named("smooth").Parameters(filter="gaussian", sigma="2"),
    )  # fmt: skip
    options = RunOptions(memory_bytes=2 * MIB, chunk_bytes=64 << 10, bounds=Bounds(workers=1))
    planned = plan_job(spec, workers, options)
    assert planned.budget.budget_bytes < planned.held_bytes // 2  # a slot's worth would not hold two rows
    client = workers._connection.client
    client.run(_count_decodes)
    try:
        run_job(planned, options, stream=workers.stream)
    finally:
        decodes = client.run(_counted_decodes)
    (counts,) = filter(None, decodes.values())
    assert len(counts) == 16 * 16
    assert set(counts.values()) == {1}
    np.testing.assert_array_equal(read_image(tmp_path / "out.npy"), gaussian_filter(image, 2, truncate=4.0))


# Which workers


def test_jobs_share_the_workers_evenly():
    heard, in_use = dict.fromkeys("abcd", 0.0), Counter()
    workers = SimpleNamespace(last_heard=lambda: heard, lock=None, tell=None, start_on=None)
    first, second = (SomeWorkers(workers, count, in_use) for count in (2, 2))
    assert first.addresses() == ["a", "b"]
    assert second.addresses() == ["c", "d"]
    assert list(second.last_heard()) == ["c", "d"]
    third = SomeWorkers(workers, 3, in_use)
    assert third.addresses() == ["a", "b", "c"]
    del heard["a"]
    assert first.addresses() == ["b", "d"], "the one that fewer use takes the lost one's place"
    heard["e"] = 0.0
    assert third.addresses() == ["b", "c", "e"]
    for each in (first, second, third):
        each.close()
    assert not +in_use
    heard.clear()
    assert first.addresses() == []


def test_choosing_is_safe_from_many_threads():
    heard, in_use = dict.fromkeys(map(str, range(8)), 0.0), Counter()
    workers = SimpleNamespace(last_heard=lambda: heard, lock=None, tell=None, start_on=None)
    jobs = [SomeWorkers(workers, 1, in_use) for _ in range(8)]
    threads = [threading.Thread(target=job.addresses) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(job.addresses()[0] for job in jobs) == sorted(heard)
