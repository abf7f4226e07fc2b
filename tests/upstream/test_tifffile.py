"""tifffile and imagecodecs: a page's decoding function, taken out of its file, LERC's mask, and codecs in C."""

from __future__ import annotations

import inspect
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import tifffile

from pipeline.codecs.loops import tiles
from pipeline.codecs.loops.system import DONE

SAMPLES = np.arange(64 * 48, dtype=np.uint16).reshape(64, 48)


def test_a_pages_decoder_outlives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, SAMPLES, compression="zlib", rowsperstrip=16)
    with tifffile.TiffFile(path, _multifile=False) as tiff:
        page = tiff.pages[0]
        decode, offsets, counts = page.decode, page.dataoffsets, page.databytecounts
    data = path.read_bytes()
    for index, (offset, count) in enumerate(zip(offsets, counts, strict=True)):
        decoded, corner, _ = decode(data[offset : offset + count], index, jpegtables=None)
        assert corner[2:4] == (16 * index, 0)
        np.testing.assert_array_equal(np.asarray(decoded).reshape(16, 48), SAMPLES[16 * index : 16 * index + 16])


def test_one_file_of_several_can_be_opened_alone() -> None:
    """Without `_multifile=False`, an OME-TIFF opens all files that its metadata names."""
    assert "_multifile" in inspect.signature(tifffile.TiffFile.__init__).parameters


def test_lerc_gives_its_mask() -> None:
    samples = np.ones((4, 5), np.float32)
    valid = np.ones((4, 5), bool)
    valid[1, 2] = False
    encoded = imagecodecs.lerc_encode(samples, level=0, masks=valid)
    mask = imagecodecs.lerc_decode(encoded, masks=True)[1]
    np.testing.assert_array_equal(np.asarray(mask, bool).reshape(4, 5), valid)


@pytest.mark.parametrize("name", ["deflate", "LZW", "PackBits", "Zstandard"])
def test_decoders_are_called_by_their_address(name: str) -> None:
    """`imcd_lzw_decode` and `imcd_packbits_decode` are in no public header: their arguments may change."""
    encode = getattr(imagecodecs, f"{'zstd' if name == 'Zstandard' else name.lower()}_encode")
    data = np.frombuffer(encode(SAMPLES.tobytes()), np.uint8)
    codec = tiles.decoder(name)
    assert codec is not None, "imagecodecs has it no more; tifffile decodes"
    for room in (SAMPLES.nbytes, SAMPLES.nbytes - 1000):
        samples, target = np.full(SAMPLES.nbytes, 0x5A, np.uint8), np.zeros((1, room), np.uint8)
        row = np.zeros((1, tiles.EXTENTS + 2), np.int64)
        row[0, tiles.OFFSET], row[0, tiles.LENGTH] = data.ctypes.data, len(data)
        row[0, tiles.HEIGHT], row[0, tiles.PART] = 1, target.ctypes.data
        row[0, tiles.EXTENTS :] = 1, room
        ends, form, strides = np.zeros(1, np.int8), np.array([room, 1, 1, 1, 0]), np.array([[room, 1], [room, 1]])
        alone = np.array([0, samples.ctypes.data, len(samples), 0, 0, 0, 0, 0])  # see `in_threads`
        tiles.read_tiles((np.zeros(1, np.int64), row, ends, -1, codec, form, strides, alone))
        assert (samples[room:] == 0x5A).all(), "nothing is written past the target"
        if room == SAMPLES.nbytes:
            assert ends[0] == DONE
            assert target.tobytes() == SAMPLES.tobytes()
