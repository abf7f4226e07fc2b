"""Runs on a device that decodes packed blocks: the results are those of one that does not."""

from __future__ import annotations

import numpy as np
import pytest
import tifffile
import zarr

from pipeline.cli.terminal import plan_lines
from pipeline.engine.devices.device import CpuDevice, CudaDevice
from pipeline.engine.run import RunOptions, plan_job, run_job
from pipeline.errors import InputError
from pipeline.formats.image import ImageHeader, Region, Storage, format_for_output, open_image
from pipeline.workloads import JobSpec, workloads
from tests.pipeline.unpacking import Unpacking

SHAPE = (1201, 173)


def store(path, image, compression="lz4"):
    header = ImageHeader(shape=image.shape, axes="YX", dtype=image.dtype)
    writer = format_for_output(path, Storage(chunks=(64,), compression=compression)).create(path, header)
    writer.write(Region.whole(image.shape), image)
    writer.publish()


def result(source, output, device, workload="smooth", *, memory_bytes=1 << 26, **parameters):
    spec = JobSpec(
        workload=workload, input=source, output=output, parameters=workloads()[workload].Parameters(**parameters)
    )
    options = RunOptions(memory_bytes=memory_bytes, chunk_bytes=min(160 << 10, memory_bytes // 8))
    receipt = run_job(plan_job(spec, device, options), options)
    with open_image(output) as reader:
        found = np.empty(reader.header.shape, reader.header.dtype)
        reader.read(Region.whole(found.shape), found)
    return found, receipt


@pytest.fixture(scope="module")
def image():
    """Compresses well, so that neighbours' blocks fit a slot as well."""
    return (np.add.outer(np.arange(SHAPE[0]), 5 * np.arange(SHAPE[1])) // 16 * 77).astype(np.uint16)


@pytest.mark.parametrize(
    ("workload", "parameters"),
    [
        *(
            ("smooth", {"filter": "gaussian", "sigma": "2", "mode": mode})
            for mode in ("reflect", "nearest", "constant")
        ),
        ("smooth", {"size": "5", "crop": "Y=20:200,X=3:150"}),
        ("median", {"size": "3", "mode": "mirror"}),
    ],
    ids=str,
)
def test_the_result_is_the_same(tmp_path, image, workload, parameters):
    store(tmp_path / "in.zarr", image)
    expected, _ = result(tmp_path / "in.zarr", tmp_path / "a.npy", CpuDevice(2), workload, **parameters)
    device = Unpacking(2)
    found, receipt = result(tmp_path / "in.zarr", tmp_path / "b.npy", device, workload, **parameters)
    np.testing.assert_array_equal(found, expected)
    assert len(device.chunks) > receipt["chunks"] // 2


@pytest.mark.parametrize("predicted", [False, True])
def test_a_tiff_of_deflate_gives_the_same_result(tmp_path, image, predicted):
    tifffile.imwrite(tmp_path / "in.tif", image, tile=(64, 64), compression="zlib", predictor=predicted)
    device = Unpacking(2)
    found, receipt = result(tmp_path / "in.tif", tmp_path / "b.zarr", device, size="5", compression="lz4")
    expected, _ = result(tmp_path / "in.tif", tmp_path / "a.npy", CpuDevice(2), size="5")
    np.testing.assert_array_equal(found, expected)
    assert len(device.chunks) > receipt["chunks"] // 2
    assert len(device.encoded) == receipt["chunks"]


@pytest.mark.parametrize("damage", ["stream", "checksum"])
def test_a_damaged_tile_is_named_as_by_the_processor(tmp_path, image, damage):
    path = tmp_path / "in.tif"
    tifffile.imwrite(path, image, tile=(64, 64), compression="zlib", predictor=True)
    with tifffile.TiffFile(path) as tiff:
        first, length = (getattr(tiff.pages[0], name)[7] for name in ("dataoffsets", "databytecounts"))
    data = bytearray(path.read_bytes())
    if damage == "stream":
        data[first + length // 2 : first + length] = bytes(length - length // 2)
    else:
        data[first + length - 1] ^= 1
    path.write_bytes(data)
    for device in (CpuDevice(2), Unpacking(2)):
        with pytest.raises(InputError, match=r"in\.tif: page 0, tile 7 does not decode .*export it again"):
            result(path, tmp_path / "b.npy", device, size="3")


def test_a_wrapped_image_is_read_by_the_processor_at_its_edges(tmp_path, image):
    store(tmp_path / "in.zarr", image)
    device = Unpacking(2)
    found, receipt = result(tmp_path / "in.zarr", tmp_path / "b.npy", device, size="9", axes="Y", mode="wrap")
    expected, _ = result(tmp_path / "in.zarr", tmp_path / "a.npy", CpuDevice(2), size="9", axes="Y", mode="wrap")
    np.testing.assert_array_equal(found, expected)
    assert 0 < len(device.chunks) < receipt["chunks"]


@pytest.mark.parametrize("damage", ["header", "stream"])
def test_a_damaged_chunk_is_named_as_by_the_processor(tmp_path, image, damage):
    store(tmp_path / "in.zarr", image)
    chunk = tmp_path / "in.zarr/0/c/2/1"
    data = bytearray(chunk.read_bytes())
    data[4 if damage == "header" else len(data) // 2 :] = bytes(
        len(data) - (4 if damage == "header" else len(data) // 2)
    )
    chunk.write_bytes(data)
    for device in (CpuDevice(2), Unpacking(2)):
        with pytest.raises(InputError, match=r"in\.zarr: chunk 2/1 does not decode \(.*export it again"):
            result(tmp_path / "in.zarr", tmp_path / "b.npy", device, size="3")


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("further", [{}, {"shards": "128"}, {"levels": "3"}, {"chunks": "40,173"}], ids=str)
def test_encoded_chunks_are_files_that_every_reader_opens(tmp_path, image, compression, further):
    store(tmp_path / "in.zarr", image)
    asked = {"size": "3", "compression": compression, "chunks": "64", **further}
    expected, _ = result(tmp_path / "in.zarr", tmp_path / "a.zarr", CpuDevice(2), **asked)
    device = Unpacking(2)
    found, receipt = result(tmp_path / "in.zarr", tmp_path / "b.zarr", device, **asked)
    assert len(device.encoded) == receipt["chunks"] > 2
    np.testing.assert_array_equal(found, expected)
    for level in range(int(further.get("levels", 1))):
        theirs = zarr.open_group(tmp_path / "b.zarr", mode="r")[str(level)][...]
        np.testing.assert_array_equal(theirs, zarr.open_group(tmp_path / "a.zarr", mode="r")[str(level)][...])


def test_a_device_encodes_chunks_of_shards_that_no_chunk_of_the_job_holds(tmp_path, image):
    store(tmp_path / "in.zarr", image)
    asked = {"size": "3", "compression": "lz4", "chunks": "64", "shards": "1024,192"}
    expected, _ = result(tmp_path / "in.zarr", tmp_path / "a.zarr", CpuDevice(2), **asked)
    device = Unpacking(2)
    found, receipt = result(tmp_path / "in.zarr", tmp_path / "b.zarr", device, memory_bytes=1 << 20, **asked)
    assert len(device.encoded) == receipt["chunks"] > 2
    np.testing.assert_array_equal(found, expected)


def test_a_gpu_has_fewer_lanes_if_its_chunks_would_be_small(tmp_path, image, monkeypatch):
    gpu = object.__new__(CudaDevice)
    gpu.readers, gpu.writers, gpu.ring_depth = 4, 4, 9
    fewer = gpu.with_fewer_lanes()
    fewest = fewer.with_fewer_lanes()
    lanes = [(each.readers, each.writers, each.ring_depth) for each in (gpu, fewer, fewest)]
    assert lanes == [(4, 4, 9), (3, 2, 6), (2, 1, 4)]
    store(tmp_path / "in.zarr", image)
    spec = JobSpec(
        workload="smooth", input=tmp_path / "in.zarr", output=tmp_path / "out.zarr",
        parameters=workloads()["smooth"].Parameters(size="3"),
    )  # fmt: skip
    many, few = Unpacking(8), Unpacking(2)
    many.readers = 2
    monkeypatch.setattr(many, "with_fewer_lanes", lambda: few)
    assert plan_job(spec, many, RunOptions(memory_bytes=1 << 30)).device is many
    assert plan_job(spec, many, RunOptions(memory_bytes=1 << 24)).device is few


def test_a_gpu_that_decodes_leaves_most_memory_to_the_ring(tmp_path, image):
    store(tmp_path / "in.zarr", image)
    parameters = workloads()["smooth"].Parameters(size="3")
    spec = JobSpec(workload="smooth", input=tmp_path / "in.zarr", output=tmp_path / "b.npy", parameters=parameters)
    memory_bytes = 1 << 24
    cpu, gpu = (
        plan_job(spec, device, RunOptions(memory_bytes=memory_bytes)) for device in (CpuDevice(2), Unpacking(2))
    )
    assert cpu.budget.budget_bytes == memory_bytes // 2 // 4
    assert gpu.budget.budget_bytes == pytest.approx(memory_bytes * 7 / 8 / 4 * 2 / 3, abs=1)
    assert gpu.held_bytes + gpu.ring_bytes <= memory_bytes


@pytest.mark.parametrize(("side", "packs"), [(512, True), (1024, False)])
def test_long_tiles_are_left_to_the_processor(tmp_path, side, packs):
    tifffile.imwrite(tmp_path / "in.tif", np.zeros((1024, 1024), np.uint16), tile=(side, side), compression="zlib")
    with open_image(tmp_path / "in.tif") as reader:
        assert reader.packs is packs


def test_the_plan_states_what_codecs_take_of_a_gpu(tmp_path, image, monkeypatch):
    store(tmp_path / "in.zarr", image)
    options = RunOptions(memory_bytes=1 << 26)
    spec = JobSpec(
        workload="smooth", input=tmp_path / "in.zarr", output=tmp_path / "out.zarr",
        parameters=workloads()["smooth"].Parameters(size="3"),
    )  # fmt: skip
    assert "codec_bytes" not in plan_job(spec, Unpacking(2), options).describe(), "it decodes on the processor"
    monkeypatch.setattr(Unpacking, "codec_bytes", lambda device, inputs, outputs: 5 << 20)
    plan = plan_job(spec, Unpacking(2), options).describe()
    assert plan["codec_bytes"] == 5 << 20
    assert "on the GPU too, and up to 5.0 MiB there for codecs" in plan_lines(plan)[-1]


@pytest.mark.parametrize("compression", ["none", "deflate"])
def test_other_chunks_are_encoded_by_the_processor(tmp_path, image, compression):
    store(tmp_path / "in.zarr", image)
    device = Unpacking(2)
    found, _ = result(tmp_path / "in.zarr", tmp_path / "b.zarr", device, size="3", compression=compression)
    expected, _ = result(tmp_path / "in.zarr", tmp_path / "a.npy", CpuDevice(2), size="3")
    assert device.encoded == []
    np.testing.assert_array_equal(found, expected)
