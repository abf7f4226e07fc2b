"""Statistics of a smoothed image: the definition's, and the same bits however the job was cut, shared out or killed."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from pipeline.engine.devices.device import CpuDevice, CudaDevice
from pipeline.engine.run import RunOptions, plan_job, run_job
from pipeline.errors import OutOfDeviceMemory, ParameterError, StorageError
from pipeline.formats.image.base import ImageHeader, Region
from pipeline.workloads import Chunk, JobSpec, workloads
from pipeline.workloads.common.statistics import ImageStatistics
from tests.gpu_ranks import COMMAND
from tests.images import read_image, write_image
from tests.kernels.statistics.cases import exact
from tests.pipeline.cluster.processes import kill_9, run, running, wait_until, worker_processes

SIGMA = 25
SLOW = ("--filter", "gaussian", "--sigma", SIGMA, "--truncate", 4, "--device", "cpu", "--threads", 1, "--statistics")
SMALL = ("--memory", "2800KiB")


def made_image(dtype, shape):
    rng = np.random.default_rng(7)
    if np.dtype(dtype).kind == "f":
        return (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3, shape)).astype(dtype)
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def smoothed(folder, device=None, chunk_bytes=None, **parameters):
    """The receipt of a job in this process."""
    chosen = workloads()["smooth"].Parameters(statistics=True, **parameters)
    spec = JobSpec(workload="smooth", input=folder / "in.npy", output=folder / "out.npy", parameters=chosen)
    options = RunOptions(memory_bytes=64 << 20, chunk_bytes=chunk_bytes)
    return run_job(plan_job(spec, device or CpuDevice(2), options), options)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32", "float64"])
@pytest.mark.parametrize(("shape", "axes"), [((61, 17, 3), "YXS"), ((67, 23), "YX")])
def test_the_definition_for_any_cut(tmp_path, dtype, shape, axes):
    write_image(tmp_path / "in.npy", made_image(dtype, shape), axes)
    receipts = [smoothed(tmp_path, chunk_bytes=chunk_bytes, size=(5,)) for chunk_bytes in (None, 5_000, 2_500)]
    found = [receipt["image"]["statistics"] for receipt in receipts]
    assert receipts[0]["chunks"] == 1 < receipts[2]["chunks"]
    assert found[0] == found[1] == found[2]
    output = read_image(tmp_path / "out.npy")
    channels = np.moveaxis(output, -1, 0) if axes == "YXS" else output[None]
    assert found[0] == [exact(channel.reshape(-1)) for channel in channels]
    json.dumps(found, allow_nan=False)


def test_special_values_are_counted_apart(tmp_path):
    samples = np.zeros((9, 11), np.float32)
    samples[2, 3], samples[4, 4], samples[8, 0], samples[0, 0] = np.nan, np.inf, -np.inf, -1.5
    write_image(tmp_path / "in.npy", samples, "YX")
    (found,) = smoothed(tmp_path, size=(1,))["image"]["statistics"]
    assert (found["nan"], found["infinite"], found["samples"]) == (1, [1, 1], 96)
    assert (found["min"], found["max"], found["mean"]) == (-1.5, 0.0, -1.5 / 96)


def test_a_device_that_halves_its_chunks_counts_each_sample_once(tmp_path):
    class SmallDevice(CpuDevice):
        def process(self, workload, chunk, slot, record):
            if chunk.input_bytes > 50_000:
                raise OutOfDeviceMemory("no room to compute; lower --chunk-bytes")
            super().process(workload, chunk, slot, record)

    write_image(tmp_path / "in.npy", made_image("uint16", (300, 301)), "YX")
    whole = smoothed(tmp_path, size=(3,))
    halved = smoothed(tmp_path, SmallDevice(2), size=(3,))
    assert halved["halvings"] >= 2
    assert halved["image"]["statistics"] == whole["image"]["statistics"]


def test_without_the_option_there_are_none(tmp_path):
    write_image(tmp_path / "in.npy", made_image("uint8", (30, 31)), "YX")
    spec = JobSpec(
        workload="smooth", input=tmp_path / "in.npy", output=tmp_path / "out.npy",
        parameters=workloads()["smooth"].Parameters(),
    )  # fmt: skip
    options = RunOptions(memory_bytes=64 << 20)
    receipt = run_job(plan_job(spec, CpuDevice(1), options), options)
    assert "statistics" not in receipt["image"]
    assert "statistics" not in receipt["parameters"]


def test_memory_that_does_not_hold_the_counts_is_the_users_to_raise(tmp_path):
    write_image(tmp_path / "in.npy", made_image("float64", (30, 31)), "YX")
    spec = JobSpec(
        workload="smooth", input=tmp_path / "in.npy", output=tmp_path / "out.npy",
        parameters=workloads()["smooth"].Parameters(statistics=True),
    )  # fmt: skip
    with pytest.raises(ParameterError, match="--memory is too small"):
        plan_job(spec, CpuDevice(1), RunOptions(memory_bytes=200_000))


# Told and told again

HEADER = ImageHeader(shape=(8, 5, 3), axes="YXS", dtype=np.dtype(np.uint16))


def part(index, values):
    region = Region((2 * index, 0, 0), (2 * index + 2, 5, 3))
    return Chunk(index=index, region=region, halo=((0, 0),) * 3, inputs=(), outputs=(), work=10), values


def noted(statistics, index, image):
    partial = np.zeros(statistics.spec.shape, np.int64)
    statistics.compute(np.ascontiguousarray(image[2 * index : 2 * index + 2]), partial, None)
    return statistics.note(part(index, None)[0], partial)


def test_chunks_that_are_told_twice_count_once():
    image = made_image("uint16", HEADER.shape)
    whole = ImageStatistics(HEADER)
    for index in range(4):
        noted(whole, index, image)
    first, second, client = ImageStatistics(HEADER), ImageStatistics(HEADER), ImageStatistics(HEADER)
    client.forget(4)
    told = [
        {index: json.loads(json.dumps(noted(each, index, image)())) for index in indices}
        for each, indices in ((first, (0, 1, 2)), (second, (3, 2)))  # 2 was in the hands of a worker that died
    ]
    for notes in (told[1], told[0], told[1]):
        for index, note in notes.items():
            client.add_note(index, note)
    assert client.is_complete
    assert client.describe() == whole.describe() == [exact(image[..., channel].reshape(-1)) for channel in range(3)]


def test_a_part_that_was_lost_is_an_error():
    image = made_image("uint16", HEADER.shape)
    statistics = ImageStatistics(HEADER)
    statistics.forget(4)
    noted(statistics, 0, image)
    with pytest.raises(StorageError, match=r"statistics of 3 chunks are missing: .* run again without --resume"):
        statistics.check()


# Processes


@pytest.fixture
def folder(tmp_path, monkeypatch, own_settings):
    monkeypatch.chdir(tmp_path)
    write_image(tmp_path / "in.tif", made_image("uint16", (811, 301, 3)))
    return tmp_path


def statistics_of(folder, output):
    return json.loads((folder / f"{output}.receipt.json").read_text())["image"]["statistics"]


def smooth(output, *options):
    return ("run", "smooth", "in.tif", output, *SLOW, *options)


def expected(folder, output):
    channels = np.moveaxis(read_image(folder / output).astype(np.int64), -1, 0)
    return [
        {
            "samples": channel.size,
            "min": int(channel.min()),
            "max": int(channel.max()),
            "mean": int(channel.sum()) / channel.size,
            "counts": np.bincount(channel.reshape(-1) >> 8, minlength=256).tolist(),
        }
        for channel in channels
    ]


def entries(folder):
    return [*folder.glob("2.npy.ledger/chunks-*.json")]


@pytest.mark.slow
def test_one_two_and_four_processes_kills_and_a_resumed_run_give_the_same(folder, millrace):
    assert millrace(*smooth("1.npy", "--quiet")) == (0, "", "")
    with running(*smooth("2.npy", "--workers", 2, *SMALL), cwd=folder) as process:
        wait_until(lambda: entries(folder), "the first segment")
        kill_9(random.Random(3).choice(worker_processes(process)))
        wait_until(lambda: len(entries(folder)) >= 5, "the fifth segment")
        process.kill()
        process.wait()
        wait_until(lambda: not worker_processes(process), "the workers' end")
    assert not (folder / "2.npy").exists()
    assert run(*smooth("2.npy", "--resume", "--workers", 4, "--quiet"), cwd=folder) == (0, "", "")
    found = statistics_of(folder, "2.npy")
    assert found == statistics_of(folder, "1.npy")
    for channel, wanted in zip(found, expected(folder, "1.npy"), strict=True):
        assert channel["histogram"]["counts"] == wanted.pop("counts")
        assert {name: channel[name] for name in wanted} == wanted


# GPUs


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32", "float64"])
def test_a_gpu_counts_what_it_wrote(tmp_path, dtype):
    write_image(tmp_path / "in.npy", made_image(dtype, (211, 103, 3)))
    receipts = [smoothed(tmp_path, CudaDevice(0), chunk_bytes, size=(5,)) for chunk_bytes in (None, 100_000)]
    found = [receipt["image"]["statistics"] for receipt in receipts]
    channels = np.moveaxis(read_image(tmp_path / "out.npy"), -1, 0)
    assert found[0] == found[1] == [exact(channel.reshape(-1)) for channel in channels]
    assert receipts[1]["chunks"] > 1
    if np.dtype(dtype).kind != "f":
        assert smoothed(tmp_path, size=(5,))["image"]["statistics"] == found[0]


@pytest.mark.multi_gpu
def test_several_gpus_count_the_same(folder):
    found = []
    for device in ("cuda:0", "all", "cpu"):
        options = ("--size", 9, "--device", device, "--chunk-bytes", "200KB", "--statistics", "--quiet")
        arguments = ("run", "smooth", "in.tif", f"{device}.npy", *options)
        assert run(*arguments, cwd=folder, command=COMMAND) == (0, "", "")
        found.append(statistics_of(folder, f"{device}.npy"))
    assert found[0] == found[1] == found[2]
