"""tifffile and imagecodecs: a page's decoding function, taken out of its file, and LERC's mask."""

from __future__ import annotations

import inspect
from pathlib import Path

import imagecodecs
import numpy as np
import tifffile

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
