from __future__ import annotations

import os
import re
import tracemalloc
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.formats.image.base import ImageHeader, Region
from pipeline.formats.image.pnm import Pnm
from tests.pipeline.formats.image.contract import (
    QUICK,
    Case,
    FormatContract,
    assert_same_bits,
    input_error,
    read_whole,
    samples,
    write_whole,
)
from tests.pipeline.formats.image.real_images import real_image

FORM = Pnm()


class TestPnmContract(FormatContract):
    format = FORM
    cases = (
        Case(suffix=".pgm", axes="YX", dtype="uint8"),
        Case(suffix=".pgm", axes="YX", dtype="uint16", maxval=4095),
        Case(suffix=".ppm", axes="YXS", dtype="uint8", maxval=200),
        Case(suffix=".ppm", axes="YXS", dtype="uint16"),
        Case(suffix=".pnm", axes="YX", dtype="uint16"),
        Case(suffix=".pnm", axes="YXS", dtype="uint8"),
        Case(suffix=".pam", axes="YX", dtype="uint16"),
        Case(suffix=".pam", axes="YXS", channels=2, dtype="uint8"),
        Case(suffix=".pam", axes="YXS", channels=4, dtype="uint16", metadata={"tuple_type": "RGB_ALPHA"}),
        Case(suffix=".pam", axes="YXS", channels=7, dtype="uint16", maxval=1000, metadata={"tuple_type": "sun rays"}),
    )
    refused = (
        Case(suffix=".ppm", axes="YX", dtype="uint8"),
        Case(suffix=".pgm", axes="YXS", dtype="uint8"),
        Case(suffix=".pnm", axes="YXS", channels=4, dtype="uint8"),
        Case(suffix=".pam", axes="ZYX", dtype="uint8"),
        Case(suffix=".pam", axes="YX", dtype="int16"),
        Case(suffix=".pgm", axes="YX", dtype="float32"),
        Case(suffix=".pgm", axes="YX", dtype="uint16", maxval=255),
        Case(suffix=".pgm", axes="YX", dtype="uint8", maxval=256),
    )


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# Headers


@pytest.mark.parametrize(
    "head",
    [
        b"P5 3 2 255 ",
        b"P5\n# by hand\n3 2\n255\n",
        b"P5#x\n#y\n\n3# width 99\n\t2 # height\r\n255# the end\n",
        b"P5\r\n3\r\n2\r\n255\n",
        b"P5\n0003 02\n255\n",
        b"P5\n" + b"#" * 60_000 + b"\n3 2 255\n",
    ],
)
def test_comments_and_blanks_may_stand_anywhere(head: bytes, tmp_path: Path) -> None:
    path = written(tmp_path / "a.pgm", head + b"#23456")
    assert_same_bits(read_whole(FORM, path), np.frombuffer(b"#23456", np.uint8).reshape(2, 3))


@pytest.mark.parametrize("order", range(6))
def test_pam_fields_may_stand_in_any_order(order: int, tmp_path: Path) -> None:
    fields = [
        b"WIDTH 3",
        b"# a comment",
        b" HEIGHT \t2 ",
        b"DEPTH\t2",
        b"",
        b"MAXVAL 256",
        b"TUPLTYPE A",
        b"TUPLTYPE B",
    ]
    fields = fields[order:] + fields[:order]
    data = np.arange(12, dtype=">u2")
    path = written(tmp_path / "a.pam", b"\n".join([b"P7", *fields, b"ENDHDR", b""]) + data.tobytes())
    with FORM.open(path) as reader:
        assert reader.header.axes == "YXS"
        assert reader.header.maxval == 256
        assert reader.header.metadata["tuple_type"] in ("A B", "B A")
    assert_same_bits(read_whole(FORM, path), data.astype(np.uint16).reshape(2, 3, 2))


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"P4\n8 1\n\xff", "bitmap"),
        (b"P1\n1 1\n1", "bitmap"),
        (b"P5\n3 2\n", "header"),
        (b"P5\n3 x 255\n123456", "header"),
        (b"P5\n0 2 255\n", "0 × 2 pixels of 1 channel; nothing"),
        (b"P5\n3 2 0\n123456", "MAXVAL"),
        (b"P5\n3 2 65536\n" + bytes(12), "MAXVAL"),
        (b"P5\n1000000000000 1000000000000 255\n123", "truncated"),
        (b"P5\n" + b"9" * 18 + b" " + b"9" * 18 + b" 65535\n123", "truncated"),
        (b"P5\n" + b"9" * 5000 + b" 1 255\n1", "header"),
        (b"P6\n3 2 255\n" + bytes(17), "18"),
        (b"P7\nWIDTH 3\nHEIGHT 2\nMAXVAL 255\nENDHDR\n123456", "DEPTH"),
        (b"P7\nWIDTH 3\nHEIGHT 2\nDEPTH 1\nMAXVAL 255\n123456", "ENDHDR"),
        (b"P7\nWIDTH -3\nENDHDR\n", "line"),
        (b"P7\nWIDTH 3\nHEIGHT 0\nDEPTH 1\nMAXVAL 255\nENDHDR\n", "nothing"),
        (b"P7 332\n#IMGINFO:3x2\n", "line"),
        (b"P2\n3 2\n255\n1 2 3 4 5", "truncated"),
        (b"P2\n3 2\n255\n1 2 3 4 5          ", "numbers"),
        (b"P2\n3 2\n255\n1 2 3 4 5 x       ", "numbers"),
        (b"P2\n3 2\n255\n1 2 3 4 5 -6      ", "numbers"),
        (b"P2\n3 2\n255\n1 2 3 4 5 +6      ", "numbers"),
        (b"P2\n3 2\n255\n1 2 3 4 5 1_0     ", "numbers"),
        (b"P2\n3 2\n255\n1 2 3 4 5 6\0     ", "numbers"),
        (b"P2\n3 2\n255\n1 2 3 4 5 " + b"9" * 30, "MAXVAL"),
        (b"P2\n3 2\n255\n1 2 3 4 5 " + b"9" * 4000, "MAXVAL"),
        (b"P2\n3 2\n255\n1 2 3 4 5 # 6", "numbers"),
        (b"P2\n3 2\n255\n1 2 3 4 5 256     ", "256"),
    ],
)
def test_a_header_that_lies_or_is_none(data: bytes, word: str, tmp_path: Path) -> None:
    path = written(tmp_path / "bad.ppm", data)
    with input_error(path, word):
        read_whole(FORM, path)


def test_the_header_is_read_without_the_samples(tmp_path: Path) -> None:
    path = tmp_path / "large.ppm"
    path.write_bytes(b"P6\n100000 100000\n65535\n")
    os.truncate(path, 23 + 60_000_000_000)  # sparse: 60 GB that take no space
    with FORM.open(path) as reader:
        assert reader.header == ImageHeader(
            shape=(100_000, 100_000, 3), axes="YXS", dtype=np.dtype(np.uint16), maxval=65535
        )
        out = np.ones((1, 7, 3), np.uint16)
        reader.read(Region((99_999, 99_993, 0), (100_000, 100_000, 3)), out)
        assert not out.any()


def test_a_stream_of_several_images_gives_the_first(tmp_path: Path) -> None:
    path = written(tmp_path / "two.pgm", b"P5 3 1 255\nabcP5 3 1 255\ndef")
    assert_same_bits(read_whole(FORM, path), np.frombuffer(b"abc", np.uint8).reshape(1, 3))


# Samples


@pytest.mark.parametrize("maxval", [1, 254, 255, 256, 1023, 65534, 65535])
def test_maxval_decides_the_bytes_of_a_sample_and_is_kept(maxval: int, tmp_path: Path) -> None:
    dtype = np.dtype(np.uint8 if maxval < 256 else np.uint16)
    header = ImageHeader(shape=(11, 13), axes="YX", dtype=dtype, maxval=maxval)
    image = samples(header)
    write_whole(FORM, tmp_path / "a.pgm", header, image)
    stored = np.frombuffer((tmp_path / "a.pgm").read_bytes()[-image.nbytes :], dtype.newbyteorder(">"))
    np.testing.assert_array_equal(stored, image.ravel())
    with FORM.open(tmp_path / "a.pgm") as reader:
        assert reader.header.maxval == maxval


def test_a_sample_above_maxval_is_named_by_its_row(tmp_path: Path) -> None:
    image = np.full((5, 4), 1000, ">u2")
    image[3, 2] = 1001
    path = written(tmp_path / "a.pgm", b"P5 4 5 1000\n" + image.tobytes())
    with FORM.open(path) as reader:
        with input_error(path, "row 3 holds a sample of 1001"):
            reader.read(Region((2, 0), (5, 4)), np.empty((3, 4), np.uint16))
        good = np.empty((3, 4), np.uint16)
        reader.read(Region((0, 0), (3, 4)), good)
        assert (good == 1000).all()


def test_a_sample_above_maxval_is_never_written(tmp_path: Path) -> None:
    header = ImageHeader(shape=(2, 2), axes="YX", dtype=np.dtype(np.uint8), maxval=100)
    writer = FORM.create(tmp_path / "a.pgm", header)
    with pytest.raises(ValueError, match="MAXVAL"):
        writer.write(Region.whole((2, 2)), np.full((2, 2), 101, np.uint8))
    writer.discard()


@pytest.mark.parametrize(("suffix", "channels"), [(".pgm", 1), (".ppm", 3)])
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_opencv_reads_what_is_written_and_the_other_way_round(
    suffix: str, channels: int, dtype: str, tmp_path: Path
) -> None:
    case = Case(suffix=suffix, axes="YX" if channels == 1 else "YXS", dtype=dtype)
    image = samples(case.header)
    write_whole(FORM, tmp_path / f"ours{suffix}", case.header, image)
    theirs = cv2.imread(str(tmp_path / f"ours{suffix}"), cv2.IMREAD_UNCHANGED)
    np.testing.assert_array_equal(theirs if channels == 1 else theirs[..., ::-1], image)
    cv2.imwrite(str(tmp_path / f"theirs{suffix}"), theirs)
    assert_same_bits(read_whole(FORM, tmp_path / f"theirs{suffix}"), image)


@QUICK
@given(st.integers(1, 65535), st.sampled_from([1, 3]), st.sampled_from([" ", "\n", "\t # comment 12\n"]))
def test_plain_text_images(tmp_path_factory: pytest.TempPathFactory, maxval: int, channels: int, blank: str) -> None:
    image = np.random.default_rng(maxval).integers(0, maxval, (5, 7, channels), endpoint=True)
    head = f"P{2 if channels == 1 else 3}\n# plain\n7 5\n{maxval}\n"
    path = tmp_path_factory.mktemp("plain") / "a.pnm"
    path.write_text(head + blank.join(map(str, image.ravel())) + "\n")
    expected = image.astype(np.uint8 if maxval < 256 else np.uint16)
    assert_same_bits(read_whole(FORM, path), expected[..., 0] if channels == 1 else expected)


@QUICK
@given(st.data())
def test_plain_text_is_the_same_however_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Read in blocks of so many bytes, which part numbers and comments anywhere."""
    words = data.draw(st.lists(st.sampled_from([b"7", b"0012", b"255", b"#", b"# 1 2", b"#3\r4", b"##5\n"])))
    blanks = data.draw(st.lists(st.sampled_from([b" ", b"\n", b"\r\n", b"\t"]), min_size=len(words)))
    text = b"".join(word + blank for word, blank in zip(words, blanks, strict=False))
    expected = [int(word) for word in re.sub(rb"#[^\r\n]*", b" ", text).split()]
    path = tmp_path_factory.mktemp("cut") / "a.pgm"
    path.write_bytes(b"P2 %d 1 255\n" % max(1, len(expected)) + text + b"x 8")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("pipeline.formats.image.pnm._TEXT_BYTES", data.draw(st.integers(1, 9)))
        if expected:
            assert_same_bits(read_whole(FORM, path), np.array([expected], np.uint8))
        else:
            with input_error(path, "does not hold 1 number"):
                read_whole(FORM, path)


def test_plain_text_takes_little_more_memory_than_its_samples(tmp_path: Path) -> None:
    path = written(tmp_path / "a.pgm", b"P2 2000 2000 255\n" + b"137 " * 4_000_000)
    tracemalloc.start()
    try:
        image = read_whole(FORM, path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.all(image == 137)
    assert peak_bytes < 2 * image.nbytes + (16 << 20)


def test_the_tuple_type_fits_the_channels(tmp_path: Path) -> None:
    for channels, name in enumerate((b"GRAYSCALE", b"GRAYSCALE_ALPHA", b"RGB", b"RGB_ALPHA", None), start=1):
        header = ImageHeader(
            shape=(2, 3, channels) if channels > 1 else (2, 3),
            axes="YXS" if channels > 1 else "YX",
            dtype=np.dtype(np.uint8),
            metadata={"tuple_type": "RGB\nMAXVAL 9"},  # would forge a header line
        )
        write_whole(FORM, tmp_path / "a.pam", header, samples(header))
        found = re.search(rb"\nTUPLTYPE (.*)\n", (tmp_path / "a.pam").read_bytes())
        assert (found[1] if found else None) == name


# Real files


def test_a_real_16_bit_pam(tmp_path: Path) -> None:
    path = real_image("flower_rgba16.pam")
    with FORM.open(path) as reader:
        header = reader.header
    assert (header.shape, header.axes, header.maxval) == ((532, 510, 4), "YXS", 65535)
    assert header.metadata == {"tuple_type": "RGB_ALPHA"}
    image = read_whole(FORM, path)
    expected = np.frombuffer(path.read_bytes()[-532 * 510 * 8 :], ">u2").reshape(532, 510, 4)
    np.testing.assert_array_equal(image, expected)
    assert (image // 257 * 257 == image).all()  # 8-bit values replicated: any swap or shift would show
    write_whole(FORM, tmp_path / "copy.pam", header, image)
    assert (tmp_path / "copy.pam").read_bytes() == path.read_bytes()


def test_a_real_10_bit_ppm(tmp_path: Path) -> None:
    path = real_image("flower_rgb10.ppm")
    with FORM.open(path) as reader:
        header = reader.header
    assert (header.shape, header.maxval) == ((532, 510, 3), 1023)
    image = read_whole(FORM, path)
    np.testing.assert_array_equal(image, cv2.imread(str(path), cv2.IMREAD_UNCHANGED)[..., ::-1])
    write_whole(FORM, tmp_path / "copy.ppm", header, image)
    assert (tmp_path / "copy.ppm").read_bytes() == path.read_bytes()
