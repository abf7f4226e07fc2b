"""Potential maps on a GPU, as whole jobs: the definition's values, and bits that do not depend on the chunks."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest

from pipeline.cluster.gang.gang_stream import GangStream
from pipeline.cluster.segments import ClusterJob, WorkerDevice
from pipeline.engine.run import open_device, run_job
from pipeline.engine.stages import StageRecord
from tests.gpu_ranks import COMMAND
from tests.pipeline.cluster.dask.thread_workers import ThreadWorkers
from tests.pipeline.workloads.coulomb.coulomb_jobs import (
    KINDS,
    check,
    definition,
    job,
    make_map,
    molecule,
    points_of,
    write_npz,
    write_trajectory,
)

pytestmark = pytest.mark.gpu

GRID = {"origin": "-9.3,1.1,17.7", "shape": "47,31,37", "spacing": "0.35,0.5,0.45", "units": "e/A"}
COMBINED = {"avg": np.mean, "min": np.min, "max": np.max, "std": np.std}


def on_gpu(folder, *arguments, **options):
    return make_map(folder, *arguments, device=open_device("cuda:0"), **options)


@pytest.mark.parametrize(("scheme", "cell"), KINDS)
def test_the_definition_and_the_same_bits_in_chunks(tmp_path, scheme, cell):
    write_npz(tmp_path / "a.npz", molecule(), cell)
    options = GRID | {"scheme": scheme, "exclude_radius": 0.6} | ({} if scheme == "direct" else {"cutoff": 5.3})
    whole, receipt = on_gpu(tmp_path, **options)
    part = (slice(None, None, 4),) * 3
    expected = definition(molecule(), points_of(receipt)[part], scheme, 5.3, exclude=0.6, cell=cell)
    check(np.ascontiguousarray(whole[part]), *expected)
    for chunk_bytes in (100_000, 20_000, 9000):
        parts, receipt = on_gpu(tmp_path, output="parts.npy", chunk_bytes=chunk_bytes, **options)
        assert receipt["chunks"] >= 2
        assert receipt["device"]["name"] == "cuda:0"
        np.testing.assert_array_equal(whole.view(np.uint32), parts.view(np.uint32))


@pytest.mark.parametrize("how", COMBINED)
@pytest.mark.parametrize("cells", [None, [(15.0 + number, 14.0, 16.0, 90, 90, 90) for number in range(5)]])
def test_frames_are_combined(tmp_path, how, cells):
    frames = write_trajectory(tmp_path, 5, cells=cells)
    options = GRID | {"trajectory": str(tmp_path / "a.dcd"), "combine": how, "cutoff": 5}
    whole, receipt = on_gpu(tmp_path, "a.pqr", **options)
    part = (slice(None, None, 6),) * 3
    vectors = [None] * 5 if cells is None else [np.diag(np.float64(cell[:3])) for cell in cells]
    found = [
        definition(atoms, points_of(receipt)[part], cutoff=5, cell=cell, images=2)
        for atoms, cell in zip(frames, vectors, strict=True)
    ]
    maps, sizes = zip(*found, strict=True)
    check(np.ascontiguousarray(whole[part]), COMBINED[how](maps, axis=0), np.max(sizes, axis=0))
    parts, _ = on_gpu(tmp_path, "a.pqr", output="parts.npy", chunk_bytes=40_000, memory=2 << 20, **options)
    np.testing.assert_array_equal(whole.view(np.uint32), parts.view(np.uint32))


@pytest.mark.parametrize("how", COMBINED)
def test_a_rank_gives_the_bits_of_the_device_alone(tmp_path, how):
    write_trajectory(tmp_path, 19, cells=[(15.0 + number, 14.0, 16.0, 90, 90, 90) for number in range(19)])
    options = GRID | {"trajectory": str(tmp_path / "a.dcd"), "combine": how, "cutoff": 5}
    alone, _ = on_gpu(tmp_path, "a.pqr", **options)

    def stream(planned, plan, ledger, events):
        ledger.create()
        cluster_job = ClusterJob(
            name=how, spec=planned.spec, budget=planned.budget, held_bytes=0, ledger_identity=ledger.identity,
            worker_device=WorkerDevice(device="cuda:0", threads=None),
        )  # fmt: skip
        found = GangStream(ThreadWorkers(1), cluster_job, planned, ranks=1, memory_bytes=256 << 20)
        record = StageRecord()
        assert found.is_better
        found.stream(plan, ledger, events, record)
        counted = {stage: totals.seconds for stage, totals in record.totals.items()}
        assert all(0 < seconds < record.wall_seconds for seconds in counted.values())
        assert sum(counted[stage] for stage in ("upload", "compute", "download")) < record.wall_seconds
        return record

    receipt = run_job(*job(tmp_path, "a.pqr", "rank.npy", chunk_bytes=300_000, **options), stream=stream)
    assert receipt["chunks"] >= 2
    np.testing.assert_array_equal(np.load(tmp_path / "rank.npy").view(np.uint32), alone.view(np.uint32))


@pytest.mark.multi_gpu
def test_all_gpus_give_the_bits_of_one(tmp_path):
    write_trajectory(tmp_path, 40)
    for device in ("cuda:0", "all"):
        arguments = ("a.pqr", f"{device[:3]}.npy", "--trajectory", "a.dcd", "--combine", "std", "--device", device)
        subprocess.run([*COMMAND, "run", "coulomb", *arguments, "--quiet"], cwd=tmp_path, check=True)
    assert (tmp_path / "cud.npy").read_bytes() == (tmp_path / "all.npy").read_bytes()
