from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.formats.image.base import ImageHeader, Region
from pipeline.formats.image.npy import Npy
from tests.pipeline.formats.image.contract import (
    DTYPES,
    QUICK,
    Case,
    FormatContract,
    assert_same_bits,
    input_error,
    read_whole,
    regions_of,
    samples,
    write_whole,
)

FORM = Npy()


class TestNpyContract(FormatContract):
    format = FORM
    cases = (
        *(Case(suffix=".npy", axes="YX", dtype=dtype) for dtype in DTYPES),
        Case(suffix=".npy", axes="YXS", dtype="uint16"),
        Case(suffix=".npy", axes="YXS", channels=4, dtype="float32"),
        Case(suffix=".npy", axes="ZYX", dtype="float64"),
        Case(suffix=".npy", axes="ZYXS", dtype="uint8"),
    )
    refused = (Case(suffix=".npy", axes="YX", dtype="complex64"),)


def with_header(path: Path, text: str, data: bytes = b"", version: bytes = b"\x01\x00") -> Path:
    body = text.encode("latin-1")
    length = struct.pack("<H" if version[0] == 1 else "<I", len(body))
    path.write_bytes(b"\x93NUMPY" + version + length + body + data)
    return path


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_loads_what_is_written(dtype: str, tmp_path: Path) -> None:
    header = Case(suffix=".npy", axes="ZYX", dtype=dtype).header
    image = samples(header)
    write_whole(FORM, tmp_path / "a.npy", header, image)
    assert_same_bits(np.load(tmp_path / "a.npy"), image)
    np.save(tmp_path / "theirs.npy", image)
    # The samples start at a multiple of 64 bytes, as in NumPy's own files.
    assert (tmp_path / "a.npy").stat().st_size % 64 == image.nbytes % 64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("bytes_order", ["<", ">"])
@pytest.mark.parametrize("shape", [(37, 53), (17, 29, 4), (5, 29, 23), (3, 19, 17, 2)])
def test_any_region_of_what_numpy_saved(
    dtype: str, order: str, bytes_order: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    native = samples(ImageHeader(shape=shape, axes="", dtype=np.dtype(dtype)))
    np.save(tmp_path / "a.npy", np.asarray(native.astype(native.dtype.newbyteorder(bytes_order)), order=order))
    with FORM.open(tmp_path / "a.npy") as reader:
        assert reader.header.dtype == native.dtype
        assert reader.header.dtype.isnative

        @QUICK
        @given(regions_of(shape))
        def check(region: Region) -> None:
            out = np.empty(region.shape, reader.header.dtype)
            reader.read(region, out)
            assert_same_bits(out, native[region.slices])

        check()


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((7, 2), "YX"), ((7, 5, 4), "YXS"), ((7, 5, 5), "ZYX"), ((2, 3, 4, 9), "ZYXS"), ((7, 5, 1), "YXS")],
)
def test_axes_are_told_by_the_shape(shape: tuple[int, ...], axes: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(shape, np.uint8))
    with FORM.open(tmp_path / "a.npy") as reader:
        assert reader.header.axes == axes


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_the_header(version: tuple[int, int], tmp_path: Path) -> None:
    image = np.arange(6, dtype=np.int16).reshape(2, 3)
    with (tmp_path / "a.npy").open("wb") as file:
        np.lib.format.write_array(file, image, version=version)
    assert_same_bits(read_whole(FORM, tmp_path / "a.npy"), image)


def test_a_header_as_python_2_wrote_it(tmp_path: Path) -> None:
    text = "{'descr': '<u2', 'fortran_order': False, 'shape': (1L, 3L), }          \n"
    path = with_header(tmp_path / "a.npy", text, np.arange(3, dtype="<u2").tobytes())
    assert_same_bits(read_whole(FORM, path), np.arange(3, dtype=np.uint16).reshape(1, 3))


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((2, 3), np.longdouble), ("float128", "bool, uint8, uint16, uint32, uint64, int8")),
        (np.zeros((2, 3), np.complex128), ("complex128", "save the magnitude, or the real")),
        (np.zeros((2, 3), "S4"), ("'|S4'", "uint16")),
        (np.zeros((2, 3), "M8[s]"), ("M8", "uint16")),
        (np.zeros((2, 3), [("a", "<u2")]), ("records", "uint16")),
        (np.zeros(3, np.uint8), ("1 axis", "2 to 4")),
        (np.zeros((1, 1, 1, 1, 1), np.uint8), ("5 axes",)),
        (np.zeros((), np.uint8), ("0 axes",)),
        (np.zeros((3, 0), np.uint8), ("no samples",)),
    ],
)
def test_arrays_that_are_no_image_are_refused(
    array: np.ndarray[Any, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    np.save(tmp_path / "a.npy", array)
    with input_error(tmp_path / "a.npy", *words):
        FORM.open(tmp_path / "a.npy")


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "sprung"),))

    np.save(tmp_path / "a.npy", np.array([[Trap()]], dtype=object), allow_pickle=True)
    with input_error(tmp_path / "a.npy", "object"):
        FORM.open(tmp_path / "a.npy")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "{'descr': '<u2', 'fortran_order': False}",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (-1, 3), }",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (1.5, 3), }",
        "{'descr': '<u2', 'fortran_order': maybe, 'shape': (1, 3), }",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (" + "1, " * 10_000 + "), }",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (" + "9" * 18 + ", " + "9" * 18 + "), }",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (1099511627776, 1), }",
        "{'descr': '<u2', 'fortran_order': False, 'shape': ((1), 3), }",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (1\t 3), }",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (1L3, 3), }",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (" + "9" * 4000 + "x), }",
        "(" * 5000,
        "__import__('os').getcwd()",
    ],
)
@pytest.mark.parametrize("version", [b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x00"])
def test_a_header_that_lies_or_is_none(text: str, version: bytes, tmp_path: Path) -> None:
    path = with_header(tmp_path / "bad.npy", text, bytes(100), version)
    with input_error(path):
        FORM.open(path)


def test_a_header_that_claims_to_be_huge_needs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "bad.npy"
    path.write_bytes(b"\x93NUMPY\x02\x00" + b"\xff\xff\xff\xff" + b"{" * 1000)
    with input_error(path):
        FORM.open(path)


def test_the_header_is_read_without_the_samples(tmp_path: Path) -> None:
    text = "{'descr': '>f8', 'fortran_order': True, 'shape': (100000, 80000), }\n"
    path = with_header(tmp_path / "large.npy", text)
    os.truncate(path, path.stat().st_size + 64_000_000_000)  # sparse: 64 GB that take no space
    with FORM.open(path) as reader:
        assert (reader.header.shape, reader.header.dtype) == ((100_000, 80_000), np.dtype(np.float64))
        out = np.ones((3, 5))
        reader.read(Region((99_997, 79_995), (100_000, 80_000)), out)
        assert not out.any()


@QUICK
@given(st.binary(max_size=300))
def test_any_bytes_after_the_magic(tmp_path_factory: pytest.TempPathFactory, tail: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "a.npy"
    path.write_bytes(b"\x93NUMPY" + tail)
    with input_error(path):
        FORM.open(path)
