"""Strips and tiles that are decoded together: as tifffile decodes them, and left to it where something is unusual."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pipeline.codecs.loops import tiles
from pipeline.errors import InputError
from pipeline.formats.image import Region, open_image
from pipeline.formats.image.tiff import blocks
from tests.pipeline.formats.image.decoded_tiles import decoded_tiles

CODECS = ["zlib", "lzw", "zstd", "packbits"]
MANY = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@MANY
@given(
    data=st.data(),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 70), st.integers(1, 4)),
    compression=st.sampled_from([None, *CODECS]),
    dtype=st.sampled_from(["uint8", "uint16", "int16", "uint32", "int64", "float16", "float32", "float64"]),
    order=st.sampled_from("<>"),
    has_predictor=st.booleans(),
    is_planar=st.booleans(),
)
def test_regions_are_read_as_tifffile_reads_them(
    data: st.DataObject, shape: tuple[int, ...], compression: str | None, dtype: str, order: Any, has_predictor: bool,
    is_planar: bool, tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    path = tmp_path_factory.mktemp("in") / "ä b.tif"
    tile = data.draw(st.none() | st.tuples(st.sampled_from([16, 32, 48]), st.sampled_from([16, 32, 64])))
    storage: Any = {"rowsperstrip": data.draw(st.integers(1, 20))} if tile is None else {"tile": tile}
    samples = shape[3]
    array = (np.random.default_rng(1).integers(0, 300, shape) * (1 if dtype[0] == "u" else -1)).astype(dtype)
    planar = "separate" if is_planar and samples > 1 else "contig"
    stored = np.moveaxis(array, 3, 1) if planar == "separate" else array
    tifffile.imwrite(
        path, np.ascontiguousarray(stored if samples > 1 else array[..., 0]), compression=compression,
        photometric="rgb" if samples in (3, 4) else "minisblack", planarconfig=planar if samples > 1 else None,
        predictor=has_predictor and compression not in (None, "packbits"), byteorder=order, metadata=None, **storage,
    )  # fmt: skip
    whole = np.asarray(tifffile.imread(path)).reshape(stored.shape)
    whole = np.moveaxis(whole, 1, 3) if planar == "separate" else whole
    np.testing.assert_array_equal(whole, array)
    with open_image(path) as opened:
        header = opened.header
        lengths = dict(zip("ZYXS", shape, strict=True))
        axes = header.axes.replace("T", "Z").replace("C", "Z")
        assert header.shape == tuple(lengths[letter] for letter in axes)
        expected = array.reshape(header.shape)
        cuts = [[(0, size // 2), (max(size // 2 - 1, 0), size)] if size > 1 else [(0, 1)] for size in header.shape]
        if data.draw(st.booleans()):
            opened.expect(cuts)
        for corner in np.ndindex(*map(len, cuts)):
            spans = [each[number] for each, number in zip(cuts, corner, strict=True)]
            region = Region(tuple(start for start, _ in spans), tuple(stop for _, stop in spans))
            out = np.empty(region.shape, header.dtype)
            opened.read(region, out)
            np.testing.assert_array_equal(out, expected[region.slices])


def test_tiles_at_the_edges_that_were_decoded_alone_are_read_together_with_others(tmp_path: Path) -> None:
    """A thread decodes a tile alone if another is decoding it, and keeps it without padding."""
    array = np.random.default_rng(2).integers(0, 300, (37, 53)).astype("uint16")
    tifffile.imwrite(tmp_path / "in.tif", array, compression="zlib", tile=(16, 16))
    with open_image(tmp_path / "in.tif") as opened:
        opened.expect([[(0, 37)] * 3, [(0, 53)]])
        alone: Any = opened
        page = alone._blocks._pages[0]
        for down, across in np.ndindex(3, 4):
            assert alone._blocks.use(page, (0, down, across), lambda block: block.size > 0, (), wait=True)
        for _ in range(2):
            out = np.zeros_like(array)
            opened.read(Region.whole(out.shape), out)
            np.testing.assert_array_equal(out, array)


def outcome(path: Path) -> Any:
    """The samples, or the error's text."""
    try:
        with open_image(path) as opened:
            out = np.empty(opened.header.shape, opened.header.dtype)
            opened.read(Region.whole(out.shape), out)
    except InputError as error:
        return str(error)
    return out.tolist()


@pytest.mark.parametrize(
    ("compression", "predictor"), [*((name, False) for name in CODECS), ("zlib", True), ("lzw", True)]
)
def test_damaged_tiles_are_named_as_if_each_were_read_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str, predictor: bool
) -> None:
    path, rng = tmp_path / "a.tif", np.random.default_rng(3)
    array = np.tile(np.arange(70, dtype=np.uint16), (50, 1)) + rng.integers(0, 3, (50, 70)).astype(np.uint16)
    tifffile.imwrite(path, array, compression=compression, predictor=predictor, tile=(16, 16))
    with tifffile.TiffFile(path) as file:
        first, count = file.pages[0].dataoffsets[7], file.pages[0].databytecounts[7]
    sound, refused = path.read_bytes(), 0
    for _ in range(25):
        damaged = bytearray(sound)
        for _ in range(rng.integers(1, 4)):
            damaged[first + rng.integers(count)] = rng.choice([0, 1, 127, 128, 255])
        path.write_bytes(damaged)
        together = outcome(path)
        with monkeypatch.context() as patched:
            patched.setattr(blocks, "_TOGETHER", set())
            assert outcome(path) == together
        if isinstance(together, str):
            assert together.startswith(f"{path}: page 0, tile 7 does not decode")
            assert "\n" not in together
            refused += 1
    assert refused > 0 or compression in ("packbits", "lzw"), "which decode almost any bytes"


@pytest.mark.parametrize("compression", CODECS)
def test_nothing_usual_is_left_and_a_library_without_the_codec_leaves_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    array = np.random.default_rng(0).integers(0, 99, (3, 50, 70)).astype(np.uint16)
    tifffile.imwrite(tmp_path / "a.tif", array, compression=compression, tile=(16, 32), photometric="minisblack")
    decoded = decoded_tiles(monkeypatch)
    assert outcome(tmp_path / "a.tif") == array.tolist()
    assert decoded.total() == len(decoded) == 3 * 4 * 3
    decoded.clear()
    monkeypatch.setattr(tiles, "decoder", lambda name: None)
    assert outcome(tmp_path / "a.tif") == array.tolist()
    assert not decoded
