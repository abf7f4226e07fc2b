"""Every stored block is decoded once a run, if two rows of blocks and those in hand fit half of the memory."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from pipeline.codecs.block_cache import BlockCache
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.run import RunOptions, plan_job
from pipeline.formats.image import ImageHeader, Region, Storage, format_for_output, open_image
from pipeline.workloads import JobSpec, workloads

SIDE = 1021
MEMORY_BYTES = 1 << 20


def store(path, image, storage):
    header = ImageHeader(shape=image.shape, axes="YX", dtype=image.dtype)
    writer = format_for_output(path, storage).create(path, header)
    writer.write(Region.whole(image.shape), image)
    writer.publish()


@pytest.mark.parametrize(("suffix", "compression"), [(".zarr", "zstd"), (".zarr", "lz4"), (".tif", "deflate")])
@pytest.mark.parametrize("block", [48, 64, 80])
@pytest.mark.parametrize("memory_bytes", [MEMORY_BYTES, 2 * MEMORY_BYTES])
def test_every_block_is_decoded_once(tmp_path, monkeypatch, suffix, compression, block, memory_bytes):
    decoded: Counter[tuple[int, ...]] = Counter()
    decode = BlockCache._decoded

    def counted(cache, key, *arguments):
        decoded[key] += 1
        return decode(cache, key, *arguments)

    source = tmp_path / f"in{suffix}"
    image = np.random.default_rng(1).integers(0, 65536, (SIDE, SIDE)).astype(np.uint16)
    store(source, image, Storage(chunks=(block,), compression=compression))
    parameters = workloads()["smooth"].Parameters(filter="gaussian", sigma="2")
    spec = JobSpec(workload="smooth", input=source, output=tmp_path / "out.npy", parameters=parameters)
    device = CpuDevice(2)
    monkeypatch.setattr(device, "target_bytes", lambda job_bytes: 64 << 10)
    monkeypatch.setattr(BlockCache, "_decoded", counted)
    planned = plan_job(spec, device, RunOptions(memory_bytes=memory_bytes))
    decoded.clear()
    for chunk in planned.plan.chunks:
        planned.job.read(chunk, [np.empty(each.shape, each.dtype) for each in chunk.inputs])
    planned.output.discard()
    assert len(planned.plan.chunks) > 8
    assert set(decoded.values()) == {1}, decoded.most_common(3)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_memory_is_kept_free_for_decoded_blocks_only_if_there_are_any(tmp_path, compression):
    store(tmp_path / "in.zarr", np.zeros((64, 64), np.uint16), Storage(chunks=(16,), compression=compression))
    with open_image(tmp_path / "in.zarr") as reader:
        assert (reader.hold_at_most(1 << 20) == 0) == (compression == "none")
