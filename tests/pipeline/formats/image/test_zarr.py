from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

from pipeline.codecs.chunk_codec import ChunkCodec
from pipeline.errors import InputError, OutputError
from pipeline.formats.image.base import ImageHeader, Region, Storage
from pipeline.formats.image.metadata import Calibration, Step
from pipeline.formats.image.zarr import Zarr, array_writer
from pipeline.formats.image.zarr.together import encode, write_together
from pipeline.storage import partial
from pipeline.storage.partial import Opening
from tests import commands
from tests.pipeline.formats.image.contract import (
    DTYPES,
    QUICK,
    Case,
    FormatContract,
    assert_same_bits,
    input_error,
    one_line,
    read_whole,
    regions_of,
    samples,
    write_whole,
)

FORMAT = Zarr()


def volume(*shape: int, dtype: str = "uint16") -> NDArray[Any]:
    return np.random.default_rng(3).integers(0, 60_000, shape).astype(dtype)


def save_array(path: Path, array: NDArray[Any], chunks: tuple[int, ...], **options: Any) -> None:
    """An array that is its own root, by the zarr library."""
    made = zarr.create_array(str(path), shape=array.shape, chunks=chunks, dtype=array.dtype, **options)
    made[...] = array


def save_ome(path: Path, array: NDArray[Any], axes: str, version: str, **image: Any) -> None:
    """An OME-Zarr image of two levels, 0.4 in Zarr v2 or 0.5 in v3."""
    multiscales = [
        {
            "axes": [{"name": axis, "type": "space"} for axis in axes],
            "datasets": [
                {"path": "full", "coordinateTransformations": [{"type": "scale", "scale": [2.0] * len(axes)}]},
                {"path": "half", "coordinateTransformations": [{"type": "scale", "scale": [4.0] * len(axes)}]},
            ],
            **image,
        }
    ]
    attributes: dict[str, Any] = {"multiscales": multiscales}
    if version == "0.5":
        attributes = {"ome": {"version": "0.5", **attributes}}
    group = zarr.create_group(str(path), zarr_format=3 if version == "0.5" else 2, attributes=attributes)
    chunks = (*[1] * (array.ndim - 2), 16, 16)
    for name, level in (("full", array), ("half", array[..., ::2, ::2])):
        group.create_array(name, shape=level.shape, chunks=chunks, dtype=level.dtype)[...] = level


class TestContract(FormatContract):
    format = FORMAT
    cases = (
        *[Case(suffix=".zarr", axes=axes, dtype="uint16") for axes in ("YX", "YXS", "ZYX", "ZYXS", "CYX", "TCZYX")],
        *[Case(suffix=".zarr", axes="YX", dtype=dtype) for dtype in DTYPES if dtype != "uint16"],
        Case(
            suffix=".zarr",
            axes="ZYXS",
            dtype="uint8",
            channels=2,
            calibration=Calibration(
                {"Z": Step(2.0), "Y": Step(0.5, "micrometer"), "X": Step(0.5)}, {"Z": -7.5, "X": 12.0}
            ),
        ),
    )
    refused = (Case(suffix=".zarr", axes="YX", dtype="complex64"),)
    is_folder = True
    reserves = False


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("compressors", ["auto", None])
@pytest.mark.parametrize("dtype", ["uint8", ">u2", "int16", "float32", ">f8"])
def test_arrays_of_both_versions(tmp_path: Path, zarr_format: Any, compressors: Any, dtype: str) -> None:
    array = volume(5, 37, 41, dtype=dtype)
    save_array(tmp_path / "a.zarr", array, (2, 16, 16), zarr_format=zarr_format, compressors=compressors)
    assert_same_bits(read_whole(FORMAT, tmp_path / "a.zarr"), array.astype(array.dtype.newbyteorder("=")))


@pytest.mark.parametrize(
    "options",
    [
        {"compressors": BloscCodec(cname="lz4")},
        {"compressors": [ZstdCodec(), GzipCodec()]},
        {"compressors": BloscCodec(cname="zstd", shuffle="bitshuffle"), "shards": (4, 32, 64)},
        {"shards": (6, 48, 48), "compressors": GzipCodec()},
        {"chunk_key_encoding": {"name": "v2", "separator": "."}},
    ],
)
def test_any_region_of_other_codecs_and_shards(tmp_path: Path, options: dict[str, Any]) -> None:
    array = volume(5, 70, 61)
    save_array(tmp_path / "a.zarr", array, (2, 16, 16), **options)
    with FORMAT.open(tmp_path / "a.zarr") as reader:
        assert reader.block_shape == (2, 16, 16)

        @QUICK
        @given(regions_of(array.shape))
        def check(region: Region) -> None:
            out = np.empty(region.shape, np.uint16)
            reader.read(region, out)
            assert_same_bits(out, array[region.slices])

        check()


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((9, 8), "YX"), ((9, 8, 3), "YXS"), ((9, 8, 5), "ZYX"), ((1, 9, 8), "ZYX"), ((4, 9, 8, 2), "ZYXS")],
)
def test_nameless_axes_are_told_by_their_number(tmp_path: Path, shape: tuple[int, ...], axes: str) -> None:
    save_array(tmp_path / "a.zarr", volume(*shape), shape)
    with FORMAT.open(tmp_path / "a.zarr") as reader:
        assert (reader.header.axes, reader.header.shape) == (axes, shape)


@pytest.mark.parametrize("names", [("c", "y", "x"), ("C", "Y", "X"), ("channel", "y", "x"), ("band", "y", "x")])
def test_named_axes_are_believed(tmp_path: Path, names: tuple[str, ...]) -> None:
    array = volume(3, 20, 21)
    save_array(tmp_path / "a.zarr", array, (1, 8, 8), dimension_names=names)
    with FORMAT.open(tmp_path / "a.zarr") as reader:
        assert (reader.header.axes, reader.block_shape) == ("CYX", (1, 8, 8))
    assert_same_bits(read_whole(FORMAT, tmp_path / "a.zarr"), array)


@pytest.mark.parametrize(
    ("shape", "names", "axes"),
    [
        ((9, 8), ("lat", "lon"), "YX"),  # whatever two axes are called
        ((4, 9, 8), ("dim_0", "dim_1", "dim_2"), "ZYX"),
        ((4, 9, 8), (None, None, None), "ZYX"),
        ((1, 9, 8), ("wavelength", "y", "x"), "YX"),
    ],
)
def test_names_that_tell_nothing_leave_the_number(
    tmp_path: Path, shape: tuple[int, ...], names: tuple[str | None, ...], axes: str
) -> None:
    save_array(tmp_path / "a.zarr", volume(*shape), shape, dimension_names=names)
    with FORMAT.open(tmp_path / "a.zarr") as reader:
        assert reader.header.axes == axes


@pytest.mark.parametrize("version", ["0.4", "0.5"])
@pytest.mark.parametrize(
    ("axes", "shape", "expected"),
    [
        ("yx", (40, 37), "YX"),
        ("cyx", (3, 40, 37), "CYX"),
        ("zyx", (4, 40, 37), "ZYX"),
        ("czyx", (2, 4, 40, 37), "CZYX"),
        ("tczyx", (1, 2, 4, 40, 37), "CZYX"),
        ("tczyx", (3, 2, 1, 40, 37), "TCYX"),
        ("tczyx", (3, 2, 2, 40, 37), "TCZYX"),
        ("tczyx", (1, 1, 1, 40, 37), "YX"),
        ("tcyx", (1, 3, 40, 37), "TCYX"),
    ],
)
def test_ome_zarr_is_read_through_its_metadata(
    tmp_path: Path, version: str, axes: str, shape: tuple[int, ...], expected: str
) -> None:
    array = volume(*shape)
    save_ome(tmp_path / "a.zarr", array, axes, version)
    order = [axes.upper().index(letter) for letter in expected]
    extra = tuple(n for n, letter in enumerate(axes.upper()) if letter not in expected)
    want = array.transpose([*extra, *order]).reshape([shape[n] for n in order])
    with FORMAT.open(tmp_path / "a.zarr") as reader:
        assert (reader.header.axes, reader.header.shape) == (expected, want.shape)
        assert reader.header.calibration.steps["X"] == Step(2.0)

        @QUICK
        @given(regions_of(want.shape))
        def check(region: Region) -> None:
            out = np.empty(region.shape, np.uint16)
            reader.read(region, out)
            assert_same_bits(out, want[region.slices])

        check()


def test_a_result_is_ome_zarr_with_its_sizes(tmp_path: Path) -> None:
    array = volume(3, 30, 31, 2)
    header = ImageHeader(
        shape=array.shape,
        axes="ZYXS",
        dtype=array.dtype,
        metadata={"omero": {"channels": [{"label": "a"}]}},
        calibration=Calibration({"Z": Step(3.0, "micrometer"), "Y": Step(0.5), "X": Step(0.25)}),
    )
    write_whole(FORMAT, tmp_path / "a.zarr", header, array)
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="r")
    ome = group.attrs.asdict()["ome"]
    assert ome["version"] == "0.5"
    assert [axis["name"] for axis in ome["multiscales"][0]["axes"]] == ["c", "z", "y", "x"]
    scale = ome["multiscales"][0]["datasets"][0]["coordinateTransformations"]
    assert scale == [{"type": "scale", "scale": [1.0, 3.0, 0.5, 0.25]}]
    assert ome["omero"] == {"channels": [{"label": "a"}]}
    assert ome["multiscales"][0]["axes"][1] == {"name": "z", "type": "space", "unit": "micrometer"}
    np.testing.assert_array_equal(group["0"][...], np.moveaxis(array, -1, 0))


def test_where_an_image_lies_is_carried_over(tmp_path: Path) -> None:
    """A sample i of level 0 lies at 3 (2 i) + 5, and that is what the result says."""
    array = volume(20, 21)
    whole = [{"type": "scale", "scale": [3.0, 3.0]}, {"type": "translation", "translation": [5.0, -4.0]}]
    save_ome(tmp_path / "a.zarr", array, "yx", "0.5", coordinateTransformations=whole)
    with FORMAT.open(tmp_path / "a.zarr") as reader:
        write_whole(FORMAT, tmp_path / "b.zarr", reader.header, array)
    ome = zarr.open_group(str(tmp_path / "b.zarr"), mode="r").attrs.asdict()["ome"]
    assert ome["multiscales"][0]["datasets"][0]["coordinateTransformations"] == [
        {"type": "scale", "scale": [6.0, 6.0]},
        {"type": "translation", "translation": [5.0, -4.0]},
    ]


def test_a_group_of_one_array_is_that_array_and_of_several_is_refused(tmp_path: Path) -> None:
    group = zarr.create_group(str(tmp_path / "a.zarr"))
    with input_error(tmp_path / "a.zarr"):
        FORMAT.open(tmp_path / "a.zarr")
    array = volume(20, 21)
    group.create_array("one", shape=array.shape, dtype="uint16")[...] = array
    assert_same_bits(read_whole(FORMAT, tmp_path / "a.zarr"), array)
    assert_same_bits(read_whole(FORMAT, tmp_path / "a.zarr" / "one"), array)
    group.create_array("two", shape=(3, 3), dtype="uint16")
    with pytest.raises(InputError, match=r"a Zarr group of several arrays \(one, two\); .*a\.zarr/one"):
        FORMAT.open(tmp_path / "a.zarr")
    zarr.create_group(str(tmp_path / "b.zarr")).create_group("run")
    with pytest.raises(InputError, match=r"a Zarr group of further groups \(run\); .*b\.zarr/run"):
        FORMAT.open(tmp_path / "b.zarr")


def test_a_file_under_its_name_is_told_from_none(tmp_path: Path) -> None:
    (tmp_path / "a.zarr").write_text("packed")
    with input_error(tmp_path / "a.zarr", "is a file, but a Zarr image is a folder"):
        FORMAT.open(tmp_path / "a.zarr")


def test_sizes_beyond_all_numbers_are_left_behind(tmp_path: Path) -> None:
    """JSON has no infinity: a result that carried it would not be read again."""
    twice = [{"type": "scale", "scale": [1e308, 1.0]}]
    save_ome(tmp_path / "a.zarr", volume(20, 21), "yx", "0.5", coordinateTransformations=twice)
    with FORMAT.open(tmp_path / "a.zarr") as reader:
        assert reader.header.calibration == Calibration()


def test_a_narrow_image_is_not_cut_into_crumbs(tmp_path: Path) -> None:
    for columns, dtype, rows in ((1, "uint8", 65536), (100, "uint8", 655), (3, "float64", 2730), (300, "uint8", 256)):
        header = ImageHeader(shape=(100_000, columns), axes="YX", dtype=np.dtype(dtype))
        assert FORMAT.block_shape(header) == (rows, columns)
    array = volume(70_000, 1)
    write_whole(FORMAT, tmp_path / "a.zarr", ImageHeader(shape=array.shape, axes="YX", dtype=array.dtype), array)
    assert_same_bits(read_whole(FORMAT, tmp_path / "a.zarr"), array)
    assert len(list((tmp_path / "a.zarr" / "0" / "c").iterdir())) == 3


@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((2, 9, 8), "uint16", {"dimension_names": ("wavelength", "y", "x")}),
        ((9, 8, 2), "uint16", {"dimension_names": ("y", "x", "wavelength")}),
        ((2, 3, 9, 8), "uint16", {"dimension_names": ("t", "wavelength", "y", "x")}),
        ((2, 9, 8), "uint16", {"dimension_names": (None, "y", "x")}),
        ((2, 9, 8), "uint16", {"dimension_names": ("time", "lat", "lon")}),
        ((2, 9, 8), "uint16", {"dimension_names": ("wavelength", "row", "column")}),
        ((9, 9, 9), "uint16", {"dimension_names": ("y", "x", "y")}),
        ((9, 8), "complex64", {}),
        ((9,), "uint16", {}),
        ((1, 1, 1, 1, 9, 8), "uint16", {}),
        ((0, 8), "uint16", {}),
        ((1 << 20, 1 << 20), "uint16", {"chunks": (1 << 20, 1 << 20)}),
    ],
)
def test_what_is_not_taken_is_refused(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, options: dict[str, Any]
) -> None:
    zarr.create_array(str(tmp_path / "a.zarr"), shape=shape, dtype=dtype, **options)
    with input_error(tmp_path / "a.zarr"):
        FORMAT.open(tmp_path / "a.zarr")


def test_codecs_that_run_what_they_read_are_refused(tmp_path: Path) -> None:
    save_array(tmp_path / "a.zarr", volume(20, 21), (8, 8), zarr_format=2)
    meta = tmp_path / "a.zarr" / ".zarray"
    fields = json.loads(meta.read_text())
    fields["filters"] = [{"id": "pickle", "protocol": 5}]
    meta.write_text(json.dumps(fields))
    with input_error(tmp_path / "a.zarr"):
        FORMAT.open(tmp_path / "a.zarr")


@pytest.mark.parametrize("fill", [0, 7])
def test_missing_chunks_have_the_fill_value(tmp_path: Path, fill: int) -> None:
    array = volume(20, 21)
    save_array(tmp_path / "a.zarr", array, (8, 8), fill_value=fill)
    (tmp_path / "a.zarr" / "c" / "1" / "1").unlink()
    array[8:16, 8:16] = fill
    assert_same_bits(read_whole(FORMAT, tmp_path / "a.zarr"), array)


@pytest.mark.parametrize("compressor", [None, ZstdCodec(), GzipCodec(), BloscCodec(cname="lz4"), BloscCodec()])
@pytest.mark.parametrize("shards", [None, (16, 16)])
def test_truncated_and_damaged_chunks_are_input_errors(tmp_path: Path, compressor: Any, shards: Any) -> None:
    array = volume(20, 21)
    path = tmp_path / "a.zarr"
    save_array(path, array, (8, 8), compressors=compressor, shards=shards)
    chunk = path / "c" / "0" / "0"
    whole = chunk.read_bytes()
    for length in (0, 1, 7, 15, 16, 20, len(whole) // 2, len(whole) - 1):
        chunk.write_bytes(whole[:length])
        with input_error(path):
            read_whole(FORMAT, path)

    @QUICK
    @given(st.dictionaries(st.integers(0, len(whole) - 1), st.integers(0, 255), min_size=1, max_size=4))
    def check(changed: dict[int, int]) -> None:
        data = bytearray(whole)
        for position, value in changed.items():
            data[position] = value
        chunk.write_bytes(data)
        try:
            read_whole(FORMAT, path)
        except InputError as error:
            one_line(error, path.name)

    check()


def test_a_chunk_that_promises_a_terabyte_is_an_input_error(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    save_array(path, volume(20, 21), (8, 8))
    frame = b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little")
    (path / "c" / "0" / "0").write_bytes(frame + bytes(20))
    with input_error(path):
        read_whole(FORMAT, path)


def test_truncated_blosc_in_version_2_is_an_input_error(tmp_path: Path) -> None:
    import numcodecs

    path = tmp_path / "a.zarr"
    save_array(path, volume(20, 21), (8, 8), zarr_format=2, compressors=numcodecs.Blosc())
    chunk = path / "0.0"
    whole = chunk.read_bytes()
    for length in (0, 15, 16, 40, len(whole) - 1):
        chunk.write_bytes(whole[:length])
        with input_error(path):
            read_whole(FORMAT, path)


def saved_with_first_chunk(tmp_path: Path, shards: Any) -> tuple[Path, Path]:
    """An array of volume(8, 8), and the file of its first chunk or shard."""
    path = tmp_path / "a.zarr"
    save_array(path, volume(8, 8), (4, 4), shards=shards)
    return path, path / "c" / "0" / "0"


@pytest.mark.parametrize("shards", [None, (8, 8)])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_folder_in_place_of_a_chunk_is_refused_and_not_waited_for(
    tmp_path: Path, shards: Any, make: Callable[[Path], None]
) -> None:
    path, chunk = saved_with_first_chunk(tmp_path, shards)
    chunk.unlink()
    make(chunk)
    with input_error(chunk, "is not a regular file"):
        read_whole(FORMAT, path)


@pytest.mark.parametrize("shards", [None, (8, 8)])
def test_a_chunk_whose_link_leads_nowhere_is_refused_and_not_taken_for_empty(tmp_path: Path, shards: Any) -> None:
    path, chunk = saved_with_first_chunk(tmp_path, shards)
    chunk.rename(tmp_path / "elsewhere")
    chunk.symlink_to(tmp_path / "elsewhere")
    np.testing.assert_array_equal(read_whole(FORMAT, path), volume(8, 8))
    (tmp_path / "elsewhere").unlink()
    with input_error(chunk, "is a broken symbolic link"):
        read_whole(FORMAT, path)


def test_a_named_pipe_in_place_of_an_arrays_metadata_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    save_ome(path, volume(8, 8), "yx", "0.5")
    metadata = path / "full" / "zarr.json"
    metadata.unlink()
    os.mkfifo(metadata)
    with input_error(metadata, "is not a regular file"):
        FORMAT.open(path)


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_damaged_metadata_is_an_input_error_or_an_image(tmp_path: Path, version: str) -> None:
    path = tmp_path / "a.zarr"
    save_ome(path, volume(3, 20, 21), "cyx", version)
    files = sorted(found for found in path.rglob("*") if found.name in ("zarr.json", ".zattrs", ".zarray", ".zgroup"))
    whole = {found: found.read_bytes() for found in files}
    rng = random.Random(5)
    for _ in range(150):
        found = rng.choice(files)
        data = bytearray(whole[found])
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        else:
            for _ in range(rng.randint(1, 3)):
                data[rng.randrange(len(data))] = rng.choice(b'0123456789{}[]",:xnull-')
        found.write_bytes(data)
        try:
            FORMAT.open(path).close()
        except InputError as error:
            one_line(error, path.name)
        found.write_bytes(whole[found])


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ('"configuration": {"separator": "/"}', '"configuration": 3'),
        ('"configuration": {"endian": "little"}', '"configuration": 3'),
    ],
)
def test_metadata_of_another_type_is_an_input_error(tmp_path: Path, good: str, bad: str) -> None:
    path = tmp_path / "a.zarr"
    save_array(path, volume(20, 21), (8, 8))
    meta = path / "zarr.json"
    text = json.dumps(json.loads(meta.read_text()))
    assert good in text
    meta.write_text(text.replace(good, bad, 1))
    with pytest.raises(InputError, match=r"a\.zarr: its metadata \(zarr\.json\) cannot be used"):
        FORMAT.open(path)


def test_a_missing_codec_is_an_input_error(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    save_array(path, volume(20, 21), (8, 8))
    meta = path / "zarr.json"
    meta.write_text(meta.read_text().replace('"zstd"', '"acme-wavelet"'))
    with pytest.raises(InputError, match="acme-wavelet"):
        FORMAT.open(path)


def test_eight_threads_read_at_once(tmp_path: Path) -> None:
    array = volume(200, 190)
    save_array(tmp_path / "a.zarr", array, (16, 16))
    with FORMAT.open(tmp_path / "a.zarr") as reader, ThreadPoolExecutor(8) as threads:

        def check(seed: int) -> None:
            rng = random.Random(seed)
            top, left = rng.randrange(180), rng.randrange(170)
            region = Region((top, left), (rng.randrange(top + 1, 201), rng.randrange(left + 1, 191)))
            out = np.empty(region.shape, np.uint16)
            reader.read(region, out)
            assert_same_bits(out, array[region.slices])

        list(threads.map(check, range(64)))


def test_regions_that_share_chunks_are_written_right_by_several_threads(tmp_path: Path) -> None:
    header = ImageHeader(shape=(600, 301, 3), axes="YXS", dtype=np.dtype("uint16"))
    array = samples(header)
    writer = FORMAT.create(tmp_path / "a.zarr", header)
    assert FORMAT.block_shape(header) == (256, 301, 1)
    bands = [Region((row, 0, 0), (min(row + 37, 600), 301, 3)) for row in range(0, 600, 37)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda band: writer.write(band, array[band.slices]), bands))
    writer.publish()
    assert_same_bits(read_whole(FORMAT, tmp_path / "a.zarr"), array)


def test_two_processes_write_to_the_same_chunk(tmp_path: Path) -> None:
    """Rows in turn: each is written by reading the chunk, changing it and writing it back."""
    header = ImageHeader(shape=(128, 200), axes="YX", dtype=np.dtype("uint16"))
    array = samples(header)
    np.save(tmp_path / "array.npy", array)
    script = (
        "import sys; from pathlib import Path; import numpy as np\n"
        "from pipeline.formats.image.base import ImageHeader, Region\n"
        "from pipeline.storage.partial import Opening\n"
        "from pipeline.formats.image.zarr import Zarr\n"
        "array = np.load(sys.argv[1])\n"
        "header = ImageHeader(shape=array.shape, axes='YX', dtype=array.dtype)\n"
        "writer = Zarr().create(Path(sys.argv[2]), header, Opening.JOIN)\n"
        "print(flush=True); input()\n"
        "for row in range(1, 128, 2):\n"
        "    writer.write(Region((row, 0), (row + 1, 200)), array[row : row + 1])\n"
        "    writer.flush()\n"
    )
    writer = FORMAT.create(tmp_path / "a.zarr", header)
    command = [sys.executable, "-c", script, str(tmp_path / "array.npy"), str(tmp_path / "a.zarr")]
    with commands.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        other.stdout.readline()
        other.stdin.write("\n")
        other.stdin.flush()
        for row in range(0, 128, 2):
            writer.write(Region((row, 0), (row + 1, 200)), array[row : row + 1])
            writer.flush()
    assert other.returncode == 0
    writer.publish()
    assert_same_bits(read_whole(FORMAT, tmp_path / "a.zarr"), array)


@pytest.mark.parametrize("shards", [None, (64, 64)])
def test_parts_of_a_file_are_encoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: tuple[int, ...] | None
) -> None:
    header = ImageHeader(shape=(130, 200), axes="YX", dtype=np.dtype("uint16"))
    array, encoded = samples(header), Counter[tuple[int, ...]]()
    encode_alone = ChunkCodec.encode

    def counted(self: ChunkCodec, chunk: Any) -> Any:
        encoded[chunk.shape] += 1
        return encode_alone(self, chunk)

    def counted_together(*given: Any) -> Any:
        encoded[32, 32] += len(given[4])
        return write_together(*given)

    def counted_in_shard(*given: Any) -> Any:
        encoded[32, 32] += len(given[2])
        return encode(*given)

    monkeypatch.setattr(ChunkCodec, "encode", counted)
    monkeypatch.setattr("pipeline.formats.image.zarr.together.write_together", counted_together)
    monkeypatch.setattr("pipeline.formats.image.zarr.together.encode", counted_in_shard)
    writer = Zarr(Storage(chunks=(32,), shards=shards)).create(tmp_path / "a.zarr", header)
    rows = [Region((row, 0), (min(row + 13, 130), 200)) for row in range(0, 130, 13)]
    for band in rows:
        writer.write(band, array[band.slices])
    assert encoded[32, 32] == 5 * 7
    writer.publish()
    assert encoded[32, 32] == 5 * 7
    assert_same_bits(read_whole(FORMAT, tmp_path / "a.zarr"), array)


@pytest.mark.parametrize("held_bytes", [0, 1 << 12, 1 << 30])
@pytest.mark.parametrize("when", ["flush", "resume", "cut anew"])
def test_parts_that_are_held_are_never_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_bytes: int, when: str
) -> None:
    monkeypatch.setattr(array_writer, "_HELD_BYTES", held_bytes)
    header = ImageHeader(shape=(128, 200), axes="YX", dtype=np.dtype("uint16"))
    array, path, form = samples(header), tmp_path / "a.zarr", Zarr(Storage(chunks=(32,)))
    writer = form.create(path, header)
    for number, row in enumerate(range(0, 128, 8)):
        if number == 5 and when == "flush":
            writer.flush()
            joined = form.create(path, header, Opening.JOIN)  # it finds on disk what the ledger may name
            joined.write(Region((0, 0), (1, 200)), array[:1])
            joined.flush()
            joined.keep()
        if number == 5 and when == "resume":
            writer.keep()
            writer = form.create(path, header, Opening.RESUME)
        if number == 5 and when == "cut anew":  # other parts of the same rows
            for first in range(0, 40, 5):
                writer.write(
                    Region((first, 3), (first + 5, 150)), np.ascontiguousarray(array[first : first + 5, 3:150])
                )
        writer.write(Region((row, 0), (row + 8, 200)), array[row : row + 8])
    writer.publish()
    assert_same_bits(read_whole(FORMAT, path), array)


def test_a_pyramid_of_others_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    save_ome(path, volume(20, 21), "yx", "0.5")
    header = ImageHeader(shape=(20, 21), axes="YX", dtype=np.dtype("uint16"))
    with pytest.raises(OutputError):
        FORMAT.create(path, header)
    shutil.rmtree(path)
    FORMAT.create(path, header).discard()


def test_an_output_removed_while_it_is_written_is_told_from_a_folder_that_takes_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removal under way: what is inside has gone, and the name still stands when it is looked at."""
    header = ImageHeader(shape=(30, 31), axes="YX", dtype=np.dtype("uint16"))
    writer = FORMAT.create(tmp_path / "a.zarr", header)
    shutil.rmtree(tmp_path / "a.zarr.partial")
    with monkeypatch.context() as patched:
        patched.setattr(partial, "is_at", lambda *_: True)
        with pytest.raises(OutputError, match=r"a\.zarr\.partial: was removed or replaced while it was written"):
            writer.write(Region.whole(header.shape), samples(header))
    writer.discard()


@pytest.mark.parametrize("is_cut", [False, True])  # files written together, or one after another
def test_chunks_of_zstandard_have_large_blocks(is_cut: bool, tmp_path: Path) -> None:
    image = np.random.default_rng(4).integers(0, 999, (1024, 1024)).astype(np.uint16)
    header = ImageHeader(shape=image.shape, axes="YX", dtype=image.dtype)
    writer = Zarr(Storage(chunks=(1024, 1024))).create(tmp_path / "a.zarr", header)
    for first, last in ((0, 500), (500, 1024)) if is_cut else ((0, 1024),):
        writer.write(Region((first, 0), (last, 1024)), image[first:last])
    writer.publish()
    chunk = (tmp_path / "a.zarr/0/c/0/0").read_bytes()
    assert chunk[3] == image.itemsize  # shuffled
    assert int.from_bytes(chunk[8:12], "little") == 512 << 10
    (blosc,) = json.loads((tmp_path / "a.zarr/0/zarr.json").read_text())["codecs"][1:]
    assert blosc["configuration"]["blocksize"] == 512 << 10
    assert_same_bits(zarr.open_group(tmp_path / "a.zarr")["0"][...], image)
