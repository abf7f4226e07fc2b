from __future__ import annotations

import errno
import itertools
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import png as pypng
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.errors import InputError, StorageError
from pipeline.formats.image.base import ImageHeader, Region
from pipeline.formats.image.metadata import Calibration, Step
from pipeline.formats.image.png import Png
from tests.pipeline.formats.image.contract import (
    QUICK,
    Case,
    FormatContract,
    assert_same_bits,
    input_error,
    one_line,
    read_whole,
    samples,
    write_whole,
)
from tests.pipeline.formats.image.real_images import real_image

FORM = Png()


class TestPngContract(FormatContract):
    format = FORM
    cases = tuple(
        Case(suffix=".png", axes="YXS" if channels > 1 else "YX", channels=channels, dtype=dtype)
        for channels, dtype in itertools.product((1, 2, 3, 4), ("uint8", "uint16"))
    )
    refused = (
        Case(suffix=".png", axes="YX", dtype="float32"),
        Case(suffix=".png", axes="YX", dtype="int16"),
        Case(suffix=".png", axes="YXS", channels=5, dtype="uint8"),
        Case(suffix=".png", axes="ZYX", dtype="uint8"),
        Case(suffix=".png", axes="ZYXS", dtype="uint8"),
    )


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(*, width: int, height: int, depth: int, colour: int, raw: bytes, between: bytes = b"") -> bytes:
    ihdr = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"".join(
        (b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", ihdr), between, chunk(b"IDAT", zlib.compress(raw)), chunk(b"IEND", b""))
    )


def by_pypng(path: Path) -> NDArray[Any]:
    """An independent decoder, in plain Python."""
    width, height, rows, info = pypng.Reader(bytes=path.read_bytes()).asDirect()
    array = np.vstack([np.asarray(row) for row in rows]).reshape(height, width, info["planes"])
    return array[..., 0] if info["planes"] == 1 else array


def test_a_png_says_what_it_refuses_and_what_takes_it(tmp_path: Path) -> None:
    reason = FORM.refusal(Case(suffix=".png", axes="YX", dtype="float32").header, tmp_path / "a.png")
    one_line(reason, "a.png", "float32", ".tif", ".npy", ".zarr")


# Reading


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("gray", "alpha"), [(True, False), (True, True), (False, False), (False, True)])
def test_every_depth_and_colour_type(gray: bool, alpha: bool, depth: int, interlaced: bool, tmp_path: Path) -> None:
    if depth < 8 and (alpha or not gray):
        return  # PNG has no such images
    planes = (1 if gray else 3) + alpha
    image = np.random.default_rng(depth).integers(0, 2**depth, (13, 17, planes))
    with (tmp_path / "a.png").open("wb") as file:
        writer = pypng.Writer(17, 13, greyscale=gray, alpha=alpha, bitdepth=depth, interlace=interlaced)
        writer.write(file, image.reshape(13, -1).tolist())
    stretched = image * (255 // (2**depth - 1)) if depth < 8 else image
    expected = stretched.astype(np.uint16 if depth == 16 else np.uint8)
    assert_same_bits(read_whole(FORM, tmp_path / "a.png"), expected[..., 0] if planes == 1 else expected)


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("transparent", [False, True])
def test_palettes_come_out_as_colours(depth: int, transparent: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(depth)
    palette = rng.integers(0, 256, (2**depth, 4 if transparent else 3))
    indices = rng.integers(0, 2**depth, (13, 17))
    with (tmp_path / "a.png").open("wb") as file:
        writer = pypng.Writer(17, 13, palette=[tuple(map(int, colour)) for colour in palette], bitdepth=depth)
        writer.write(file, indices.tolist())
    assert_same_bits(read_whole(FORM, tmp_path / "a.png"), palette[indices].astype(np.uint8))


@pytest.mark.parametrize("depth", [1, 8, 16])
@pytest.mark.parametrize("gray", [True, False])
def test_a_transparent_colour_becomes_alpha(gray: bool, depth: int, tmp_path: Path) -> None:
    if depth == 1 and not gray:
        return
    planes = 1 if gray else 3
    image = np.random.default_rng(3).integers(0, 2**depth, (13, 17, planes))
    clear = image[5, 7]
    with (tmp_path / "a.png").open("wb") as file:
        transparent = int(clear[0]) if gray else tuple(map(int, clear))
        writer = pypng.Writer(17, 13, greyscale=gray, bitdepth=depth, transparent=transparent)
        writer.write(file, image.reshape(13, -1).tolist())
    top = 65535 if depth == 16 else 255
    alpha = np.where((image == clear).all(axis=-1, keepdims=True), 0, top)
    stretched = image * 255 if depth == 1 else image
    expected = np.concatenate([stretched, alpha], axis=-1).astype(np.uint16 if depth == 16 else np.uint8)
    assert_same_bits(read_whole(FORM, tmp_path / "a.png"), expected)


def test_gamma_and_profiles_do_not_touch_the_samples(tmp_path: Path) -> None:
    raw = b"".join(b"\0" + bytes([row * 40, 255 - row]) for row in range(5))
    between = chunk(b"gAMA", struct.pack(">I", 45455)) + chunk(b"iCCP", b"junk\0\0" + zlib.compress(b"no profile"))
    path = tmp_path / "a.png"
    path.write_bytes(png_of(width=2, height=5, depth=8, colour=0, raw=raw, between=between))
    expected = np.array([[row * 40, 255 - row] for row in range(5)], np.uint8)
    assert_same_bits(read_whole(FORM, path), expected)


def test_the_header_is_read_without_decoding(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png_of(width=3, height=5, depth=16, colour=6, raw=b"not the samples at all"))
    with FORM.open(path) as reader:
        assert (reader.header.shape, reader.header.axes) == ((5, 3, 4), "YXS")
        assert reader.header.dtype == np.uint16
        with input_error(path, "corrupt"):
            reader.read(Region((0, 0, 0), (1, 1, 1)), np.empty((1, 1, 1), np.uint16))


def test_a_header_that_promises_more_than_deflate_can_hold(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png_of(width=1_000_000, height=1_000_000, depth=16, colour=6, raw=b""))
    with input_error(path, "cannot hold"):
        FORM.open(path)


@pytest.mark.parametrize(
    ("depth", "colour", "width", "height"), [(3, 0, 1, 1), (16, 3, 1, 1), (8, 5, 1, 1), (8, 0, 0, 1), (8, 0, 1, 2**31)]
)
def test_a_header_that_png_does_not_allow(depth: int, colour: int, width: int, height: int, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png_of(width=width, height=height, depth=depth, colour=colour, raw=b"\0\0"))
    with input_error(path, "header"):
        FORM.open(path)


@pytest.mark.parametrize("shape", [(2, 1_000_000), (1_000_000, 2)])
def test_the_longest_sides(shape: tuple[int, int], tmp_path: Path) -> None:
    header = ImageHeader(shape=shape, axes="YX", dtype=np.dtype(np.uint16))
    image = samples(header)
    write_whole(FORM, tmp_path / "a.png", header, image)
    assert_same_bits(read_whole(FORM, tmp_path / "a.png"), image)


@pytest.mark.parametrize("shape", [(2, 1_000_001), (1_000_001, 2)])
def test_longer_sides_are_refused(shape: tuple[int, int], tmp_path: Path) -> None:
    header = ImageHeader(shape=shape, axes="YX", dtype=np.dtype(np.uint16))
    one_line(FORM.refusal(header, tmp_path / "a.png"), "1,000,000", "a.png")
    path = tmp_path / "a.png"
    path.write_bytes(png_of(width=shape[1], height=shape[0], depth=16, colour=0, raw=b""))
    with input_error(path, "1,000,000"):
        FORM.open(path)


@QUICK
@given(st.data())
def test_every_damaged_byte_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damage")
    header = ImageHeader(shape=(31, 29, 3), axes="YXS", dtype=np.dtype(np.uint16))
    write_whole(FORM, folder / "a.png", header, samples(header))
    whole = bytearray((folder / "a.png").read_bytes())
    position = data.draw(st.integers(0, len(whole) - 1))
    whole[position] ^= data.draw(st.integers(1, 255))
    (folder / "a.png").write_bytes(whole)
    try:
        image = read_whole(FORM, folder / "a.png")
    except InputError as error:
        one_line(error, "a.png")
    else:
        raise AssertionError(f"byte {position} changed unnoticed: {image.shape}")


# A transparent colour as grey samples have it.
_CLEAR = chunk(b"tRNS", b"\0a")


@pytest.mark.parametrize(
    "changed",
    [
        lambda data: data.replace(_CLEAR, _CLEAR + chunk(b"tRNS", b"\0b")),
        lambda data: data.replace(_CLEAR, chunk(b"PLTE", b"abc") + _CLEAR),
        lambda data: data.replace(_CLEAR, data[8:33] + _CLEAR),
        lambda data: data[:-12] + chunk(b"PLTE", b"abc") + _CLEAR + data[-12:],
    ],
)
def test_chunks_that_do_not_belong_are_left_out(
    changed: Callable[[bytes], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(changed(png_of(width=3, height=1, depth=8, colour=0, raw=b"\0abc", between=_CLEAR)))
    assert_same_bits(read_whole(FORM, path), np.array([[[97, 0], [98, 255], [99, 255]]], np.uint8))
    assert caplog.records == []


def test_interlaced_files_are_read_without_a_remark(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (tmp_path / "a.png").open("wb") as file:
        pypng.Writer(3, 1, greyscale=True, interlace=True).write(file, [[1, 2, 3]])
    assert_same_bits(read_whole(FORM, tmp_path / "a.png"), np.array([[1, 2, 3]], np.uint8))
    assert caplog.records == []


def png_without_samples(filtering: int = 0) -> bytes:
    ihdr = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, filtering, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", ihdr) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            png_of(width=1, height=1, depth=8, colour=0, raw=b"\0a", between=chunk(b"tRNS", b"\0a\0\0")),
            "as its header states",
        ),
        (png_of(width=3, height=1, depth=8, colour=3, raw=b"\0\1\1\1"), "cannot be decoded (PngError)"),
        (png_without_samples(), "no IDAT"),
        (png_without_samples(filtering=1), "methods (compression 0, filter 1, interlace 0)"),
    ],
)
def test_what_is_wrong_is_said_on_one_line(
    data: bytes, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(data)
    with input_error(path, words, "export it again"):
        read_whole(FORM, path)
    assert caplog.records == []


# Writing


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_other_decoders_read_what_is_written(channels: int, dtype: str, tmp_path: Path) -> None:
    header = Case(suffix=".png", axes="YXS" if channels > 1 else "YX", channels=channels, dtype=dtype).header
    image = samples(header)
    write_whole(FORM, tmp_path / "a.png", header, image)
    np.testing.assert_array_equal(by_pypng(tmp_path / "a.png"), image)


@pytest.mark.parametrize("rows", [1, 2, 100, 1543])
@pytest.mark.parametrize("constant", [False, True])
def test_many_bands_make_one_stream(rows: int, constant: bool, tmp_path: Path) -> None:
    header = ImageHeader(shape=(rows, 3001), axes="YX", dtype=np.dtype(np.uint16))
    image = np.full(header.shape, 12345, np.uint16) if constant else samples(header)
    write_whole(FORM, tmp_path / "a.png", header, image)
    assert_same_bits(read_whole(FORM, tmp_path / "a.png"), image)


def test_a_disk_that_fills_up_while_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = ImageHeader(shape=(2003, 3001), axes="YX", dtype=np.dtype(np.uint16))
    writer = FORM.create(tmp_path / "a.png", header)
    writer.write(Region.whole(header.shape), samples(header))
    pwrite, left = os.pwrite, [3_000_000]

    def filling(descriptor: int, data: memoryview, offset: int) -> int:
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr("os.pwrite", filling)
    with pytest.raises(StorageError) as caught:
        writer.publish()
    one_line(caught.value, "a.png", "no space")
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_resolution_and_colour_space_are_carried_over(tmp_path: Path) -> None:
    kept = [
        (b"gAMA", struct.pack(">I", 45455)),
        (b"cICP", bytes([9, 16, 0, 1])),  # BT.2100 PQ
        (b"cLLI", struct.pack(">II", 10_000_000, 2_000_000)),
        (b"pHYs", struct.pack(">IIB", 2835, 2836, 1)),
        (b"eXIf", b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"),  # orientation 6
        (b"tEXt", b"Comment\0of the scene"),
        (b"iTXt", b"XML:com.adobe.xmp\0\0\0de\0\0<x:xmpmeta/>"),
    ]
    between = b"".join(chunk(kind, data) for kind, data in (*kept, (b"tEXt", b"Software\0a camera")))
    (tmp_path / "a.png").write_bytes(png_of(width=1, height=1, depth=8, colour=0, raw=b"\0\x07", between=between))
    with FORM.open(tmp_path / "a.png") as reader:
        header = reader.header
    assert "plane" in FORM.keeps(header, tmp_path / "b.png")
    write_whole(FORM, tmp_path / "b.png", header, np.full((1, 1), 9, np.uint8))
    found = list(pypng.Reader(bytes=(tmp_path / "b.png").read_bytes()).chunks())
    assert found[1 : 1 + len(kept)] == kept
    kinds = [kind for kind, _ in found]
    assert (kinds[0], {*kinds[1 + len(kept) : -1]}, kinds[-1]) == (b"IHDR", {b"IDAT"}, b"IEND")


@pytest.mark.parametrize(
    ("micrometers", "per_meter"), [(0.25, 4_000_000), (254, 3937), (1000, 1000), (700.0, None), (1e-5, None)]
)
def test_a_pixel_size_is_kept_if_whole_pixels_in_a_metre_hold_it(
    tmp_path: Path, micrometers: float, per_meter: int | None
) -> None:
    step = Step(micrometers, "micrometer")
    header = ImageHeader(
        shape=(1, 1), axes="YX", dtype=np.dtype(np.uint8), calibration=Calibration({"Y": step, "X": step})
    )
    assert ("plane" in FORM.keeps(header, tmp_path / "a.png")) == (per_meter is not None)
    write_whole(FORM, tmp_path / "a.png", header, np.full((1, 1), 9, np.uint8))
    found = dict(pypng.Reader(bytes=(tmp_path / "a.png").read_bytes()).chunks()).get(b"pHYs")
    assert found == (None if per_meter is None else struct.pack(">IIB", per_meter, per_meter, 1))


def test_texts_are_read_wherever_they_are_and_damaged_ones_left_out(tmp_path: Path) -> None:
    bomb = b"\0\0" + zlib.compress(bytes(5 << 20))
    before = chunk(b"zTXt", b"Comment\0\0" + zlib.compress("63×".encode("latin-1")))
    after = [
        (b"iTXt", b"Title\0\x01\0\0\0" + zlib.compress("Лист 7".encode())), (b"tEXt", b"Creation Time\0yesterday"),
        (b"iTXt", b"Author\0\0\0\0\0\xff"), (b"zTXt", b"Source" + bomb), (b"zTXt", b"Warning\0\0cut"), (b"tEXt", b""),
    ]  # fmt: skip
    whole = png_of(width=1, height=1, depth=8, colour=0, raw=b"\0\x07", between=before)
    end = whole.index(b"IEND") - 4
    (tmp_path / "a.png").write_bytes(whole[:end] + b"".join(chunk(*each) for each in after) + whole[end:])
    with FORM.open(tmp_path / "a.png") as reader:
        notes = reader.header.notes
    assert (notes.name, notes.description, notes.acquired, notes.tags) == ("Лист 7", "63×", None, {})
    assert notes.png_alone == ("Creation Time", "")


def test_a_real_16_bit_photograph(tmp_path: Path) -> None:
    path = real_image("hdr_room_rgb16.png")
    with FORM.open(path) as reader:
        header = reader.header
    assert (header.shape, header.axes, header.dtype) == ((449, 676, 3), "YXS", np.dtype(np.uint16))
    image = read_whole(FORM, path)
    assert len(np.unique(image)) == 29_831
    np.testing.assert_array_equal(image, by_pypng(path))
    write_whole(FORM, tmp_path / "copy.png", header, image)
    np.testing.assert_array_equal(by_pypng(tmp_path / "copy.png"), image)
