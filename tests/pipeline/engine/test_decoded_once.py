"""Every stored block is read and decoded once a run, if two rows of blocks and those in hand fit half of the memory."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pipeline.codecs.block_cache import BlockCache
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.run import RunOptions, plan_job
from pipeline.formats.image import ImageHeader, Region, Storage, format_for_output, open_image
from pipeline.formats.image.zarr.together import read_together
from pipeline.workloads import JobSpec, workloads
from tests.pipeline.formats.image.decoded_tiles import decoded_tiles

SIDE = 1021
MEMORY_BYTES = 1 << 20


def counted(monkeypatch):
    """How often each block is decoded from now on."""
    decoded = decoded_tiles(monkeypatch)
    decode = BlockCache._decoded

    def decoding(cache, key, *arguments):
        decoded[key] += 1
        return decode(cache, key, *arguments)

    def together(files, kind, parts, target):
        decoded.update(part.place for part in parts if not part.is_held)
        return read_together(files, kind, parts, target)

    monkeypatch.setattr(BlockCache, "_decoded", decoding)
    monkeypatch.setattr("pipeline.formats.image.zarr.together.read_together", together)
    return decoded


def store(path, image, storage):
    header = ImageHeader(shape=image.shape, axes="YX", dtype=image.dtype)
    writer = format_for_output(path, storage).create(path, header)
    writer.write(Region.whole(image.shape), image)
    writer.publish()


@pytest.mark.parametrize(("suffix", "compression"), [(".zarr", "zstd"), (".zarr", "deflate"), (".tif", "deflate")])
@pytest.mark.parametrize("block", [48, 64, 80])
@pytest.mark.parametrize("memory_bytes", [MEMORY_BYTES, 2 * MEMORY_BYTES])
def test_every_block_is_decoded_once(tmp_path, monkeypatch, suffix, compression, block, memory_bytes):
    source = tmp_path / f"in{suffix}"
    image = np.random.default_rng(1).integers(0, 65536, (SIDE, SIDE)).astype(np.uint16)
    store(source, image, Storage(chunks=(block,), compression=compression))
    parameters = workloads()["smooth"].Parameters(filter="gaussian", sigma="2")
    spec = JobSpec(workload="smooth", input=source, output=tmp_path / "out.npy", parameters=parameters)
    device = CpuDevice(2)
    monkeypatch.setattr(device, "target_bytes", lambda job_bytes: 64 << 10)
    decoded = counted(monkeypatch)
    planned = plan_job(spec, device, RunOptions(memory_bytes=memory_bytes))
    decoded.clear()
    for chunk in planned.plan.chunks:
        planned.job.read(chunk, [np.empty(each.shape, each.dtype) for each in chunk.inputs])
    planned.output.discard()
    assert len(planned.plan.chunks) > 8
    assert planned.held_bytes + planned.ring_bytes == memory_bytes  # blocks take what the ring leaves
    assert set(decoded.values()) == {1}, decoded.most_common(3)


@pytest.mark.parametrize(
    ("name", "compression", "largest_bytes", "is_kept"),
    [
        ("in.zarr", "zstd", 511, True),
        ("in.zarr", "none", 512, False),
        ("in.zarr", "none", 511, False),
        ("sharded.zarr", "zstd", 511, True),
        ("sharded.zarr", "none", 512, False),
        ("in.tif", "deflate", 511, True),
        ("in.tif", "none", 512, False),
    ],
)
def test_memory_is_kept_free_for_blocks_only_if_they_are_read_whole(
    tmp_path, monkeypatch, name, compression, largest_bytes, is_kept
):
    monkeypatch.setattr("pipeline.formats.image.zarr.reader._LARGEST_WHOLE_BYTES", largest_bytes)
    image = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64)
    shards = (32,) if name.startswith("sharded") else None
    store(tmp_path / name, image, Storage(chunks=(16,), shards=shards, compression=compression))
    with open_image(tmp_path / name) as reader:
        assert (reader.hold_at_most(1 << 20) > 0) == is_kept
        reader.expect([[(0, 20), (12, 64)], [(0, 64)]])
        for rows in ((0, 20), (12, 64)):
            out = np.empty((rows[1] - rows[0], 64), np.uint16)
            reader.read(Region((rows[0], 0), (rows[1], 64)), out)
            np.testing.assert_array_equal(out, image[slice(*rows)])


@pytest.mark.parametrize(("suffix", "compression"), [(".zarr", "zstd"), (".tif", "deflate")])
@pytest.mark.parametrize(("room", "most"), [(32, 1.0), (26, 1.15), (18, 1.6)])
def test_few_blocks_are_decoded_again_if_two_rows_do_not_fit(tmp_path, monkeypatch, suffix, compression, room, most):
    """22 blocks across: of the row above, the few rows of samples are kept that the next one needs."""
    monkeypatch.setattr("pipeline.codecs.parallel.os.sched_getaffinity", lambda _: {0})  # one thread, one order
    decoded = counted(monkeypatch)
    image = np.random.default_rng(1).integers(0, 65536, (SIDE, SIDE)).astype(np.uint16)
    store(tmp_path / f"in{suffix}", image, Storage(chunks=(48,), compression=compression))
    with open_image(tmp_path / f"in{suffix}") as reader:
        spans = [(max(a - 8, 0), min(a + 56, SIDE)) for a in range(0, SIDE, 48)]
        reader.hold_at_most(room * 48 * 48 * 2)
        reader.expect([spans, spans])
        for rows, columns in itertools.product(spans, spans):
            out = np.empty((rows[1] - rows[0], columns[1] - columns[0]), np.uint16)
            reader.read(Region((rows[0], columns[0]), (rows[1], columns[1])), out)
            np.testing.assert_array_equal(out, image[slice(*rows), slice(*columns)])
    assert len(decoded) == 22 * 22
    assert sum(decoded.values()) <= most * len(decoded)


@pytest.mark.parametrize(("suffix", "compression"), [(".zarr", "zstd"), (".zarr", "deflate"), (".tif", "deflate")])
def test_threads_that_overtake_each_other_get_the_samples_that_were_cut_away(tmp_path, suffix, compression):
    image = np.random.default_rng(1).integers(0, 65536, (SIDE, SIDE)).astype(np.uint16)
    store(tmp_path / f"in{suffix}", image, Storage(chunks=(96,), compression=compression))
    with open_image(tmp_path / f"in{suffix}") as reader, ThreadPoolExecutor(6) as threads:
        spans = [(max(a - 9, 0), min(a + 73, SIDE)) for a in range(0, SIDE, 64)]
        reader.hold_at_most(8 * 96 * 96 * 2)
        reader.expect([spans, spans])
        order = list(itertools.product(spans, spans))
        for at in range(0, len(order), 12):
            order[at : at + 12] = reversed(order[at : at + 12])

        def is_right(rows, columns):
            out = np.empty((rows[1] - rows[0], columns[1] - columns[0]), np.uint16)
            reader.read(Region((rows[0], columns[0]), (rows[1], columns[1])), out)
            return np.array_equal(out, image[slice(*rows), slice(*columns)])

        assert all(threads.map(is_right, *zip(*order, strict=True)))
