"""Packed blocks decoded on a GPU: the bits of the processor's decoders."""

from __future__ import annotations

import numcodecs
import numpy as np
import pytest
import tifffile
import zarr

from pipeline.formats.image import open_image
from tests.pipeline.formats.image.test_packed_zarr import CHUNK, COMPRESSORS, SHAPE, regions, samples

pytestmark = pytest.mark.gpu


def unpacked(packed, memory, shape, dtype):
    """The samples, and whether every stream decoded."""
    import cupy

    from pipeline.engine.devices.unpacking import NO_FAULT, Unpacking

    stream = cupy.cuda.get_current_stream()
    device = cupy.cuda.alloc(packed.nbytes)
    unpacking = Unpacking(packed, memory, device)
    device.copy_from_host(memory[: packed.nbytes].ctypes.data, packed.nbytes)
    out = cupy.full(shape, 77, dtype)
    fault = unpacking.launch(out, stream)
    return out.get(), int(fault) == NO_FAULT


@pytest.mark.sanitize("blocks")
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float64"])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda c: "-".join(map(str, c.values())))
def test_every_codec_and_shuffle(tmp_path, compressor, dtype):
    image = samples(dtype)
    codec = numcodecs.get_codec(compressor)
    array = zarr.open_array(
        tmp_path / "a.zarr", mode="w", shape=SHAPE, chunks=CHUNK, dtype=dtype, zarr_format=2, compressor=codec
    )
    array[...] = image
    for region in regions(SHAPE):
        memory = np.zeros(2 * image.nbytes + (1 << 16), np.uint8)
        with open_image(tmp_path / "a.zarr") as reader:
            packed = reader.read_packed(region, memory)
        assert packed is not None
        found, is_right = unpacked(packed, memory, region.shape, image.dtype)
        assert is_right
        np.testing.assert_array_equal(found, image[region.slices])


@pytest.mark.sanitize("blocks")
@pytest.mark.parametrize("blocks", [{"tile": (48, 64)}, {"rowsperstrip": 17}], ids=str)
@pytest.mark.parametrize("shape", [(211, 307), (97, 141, 3)])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
@pytest.mark.parametrize("predictor", [False, True])
def test_tiles_and_strips_of_deflate(tmp_path, blocks, shape, dtype, predictor):
    image = samples(dtype, shape)
    photometric = "rgb" if len(shape) == 3 else "minisblack"
    tifffile.imwrite(
        tmp_path / "a.tif", image, compression="zlib", predictor=predictor, photometric=photometric, **blocks
    )
    for region in regions(shape):
        memory = np.zeros(2 * image.nbytes + (1 << 16), np.uint8)
        with open_image(tmp_path / "a.tif") as reader:
            packed = reader.read_packed(region, memory)
        assert packed is not None
        found, is_right = unpacked(packed, memory, region.shape, image.dtype)
        assert is_right
        np.testing.assert_array_equal(found, image[region.slices])


def test_a_damaged_stream_is_noticed(tmp_path):
    image = samples("uint16")
    array = zarr.open_array(
        tmp_path / "a.zarr", mode="w", shape=SHAPE, chunks=CHUNK, dtype="uint16", zarr_format=2,
        compressor=numcodecs.Blosc("lz4", 5, 1),
    )  # fmt: skip
    array[...] = image
    memory = np.zeros(2 * image.nbytes + (1 << 16), np.uint8)
    with open_image(tmp_path / "a.zarr") as reader:
        packed = reader.read_packed(next(regions(SHAPE)), memory)
    at, length, *_ = packed.streams(memory)[:, packed.encoded // 2].tolist()
    memory[at : at + length] = 0  # a repetition of bytes before the first
    assert not unpacked(packed, memory, SHAPE, image.dtype)[1]
