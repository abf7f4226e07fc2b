from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import MillraceError, OutputError, StorageError
from pipeline.formats.image import FORMATS, create_image, format_for_output, open_image
from pipeline.formats.image.base import ImageFormat, ImageHeader, Region
from tests.pipeline.formats.image.contract import Case, assert_same_bits, input_error, one_line, samples

STORABLE = [
    Case(suffix=suffix, axes="YXS" if suffix == ".ppm" else "YX", dtype="uint16")
    for form in FORMATS
    for suffix in form.suffixes
]


@pytest.mark.parametrize("case", STORABLE, ids=str)
def test_every_suffix_writes_a_file_that_its_own_format_opens(case: Case, tmp_path: Path) -> None:
    path, image = tmp_path / f"image{case.suffix}", samples(case.header)
    writer = create_image(path, case.header)
    writer.write(Region.whole(image.shape), image)
    writer.publish()
    with open_image(path) as reader:
        out = np.empty(reader.header.shape, reader.header.dtype)
        reader.read(Region.whole(out.shape), out)
    assert_same_bits(out, image)


@pytest.mark.parametrize("case", STORABLE, ids=str)
def test_the_first_bytes_decide_not_the_suffix(case: Case, tmp_path: Path) -> None:
    path = tmp_path / f"image{case.suffix}"
    writer = create_image(path, case.header)
    writer.write(Region.whole(case.header.shape), samples(case.header))
    writer.publish()
    for name in ("renamed.dat", "renamed.png", "renamed"):
        path = path.rename(tmp_path / name)
        with open_image(path) as reader:
            assert reader.header.shape == case.header.shape


def test_suffixes_are_distinct_and_of_any_case() -> None:
    suffixes = [suffix for form in FORMATS for suffix in form.suffixes]
    assert len(set(suffixes)) == len(suffixes)
    for form in FORMATS:
        for suffix in form.suffixes:
            assert format_for_output(Path(f"x{suffix.upper()}")) is form


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_name_and_noise_is_of_no_format(form: ImageFormat, tmp_path: Path) -> None:
    assert not form.recognises(tmp_path / f"x{form.suffixes[0]}", b"\0noise" * 10)


@pytest.mark.parametrize("name", ["image.xyz", "image", "image.jpeg", ".png"])
def test_an_unknown_suffix_lists_the_known_ones(name: str, tmp_path: Path) -> None:
    with pytest.raises(OutputError) as caught:
        format_for_output(tmp_path / name)
    one_line(caught.value, name, ".tif", ".npy", ".zarr", ".png", ".ppm")


def test_what_a_format_cannot_hold_is_not_created(tmp_path: Path) -> None:
    header = ImageHeader(shape=(5, 7), axes="YX", dtype=np.dtype(np.float32))
    with pytest.raises(OutputError) as caught:
        create_image(tmp_path / "a.png", header)
    one_line(caught.value, "a.png", "float32")
    assert list(tmp_path.iterdir()) == []


# Inputs that are none


def test_a_missing_file(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.tif", tmp_path / "absent" / "a.ppm"):
        with input_error(path, "no such file"):
            open_image(path)


def test_a_file_for_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    path = tmp_path / "file" / "a.png"
    with input_error(path):
        open_image(path)


def test_an_empty_file(tmp_path: Path) -> None:
    for name in ("a.png", "a.tif", "a"):
        (tmp_path / name).touch()
        with input_error(tmp_path / name, "empty"):
            open_image(tmp_path / name)


def test_a_folder_that_is_no_zarr(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with input_error(tmp_path / "folder", "Zarr"):
        open_image(tmp_path / "folder")


def test_an_unknown_format_lists_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "photo.jpeg"
    path.write_bytes(b"\xff\xd8\xff\xe0" + bytes(100))
    with input_error(path, "TIFF", "Zarr", "PNG", "PNM", "NPY", ".tif"):
        open_image(path)


@pytest.mark.parametrize("suffix", [".tif", ".png", ".ppm", ".npy", ".zarr"])
def test_a_file_of_noise_under_a_known_suffix(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"noise{suffix}"
    path.write_bytes(b"\x05noise" * 50)
    with input_error(path):
        open_image(path)


def test_an_image_beyond_any_file_is_refused_before_it_is_cut_into_chunks(tmp_path: Path) -> None:
    """A few bytes can promise it: chunks that are not stored have the fill value."""
    for shape in ((10**12, 10**12), (10**20, 5)):
        path = tmp_path / f"{shape[1]}.zarr"
        path.mkdir()
        fields = {"zarr_format": 2, "chunks": [1000, 5], "dtype": "|u1", "fill_value": 0, "order": "C"}
        (path / ".zarray").write_text(json.dumps({**fields, "shape": shape, "compressor": None, "filters": None}))
        with input_error(path, f"{shape[0]} × {shape[1]}", "beyond any file"):
            open_image(path)


def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.ppm")
    with input_error(tmp_path / "a.ppm", "regular"):
        open_image(tmp_path / "a.ppm")


def test_a_circle_of_links(tmp_path: Path) -> None:
    (tmp_path / "a.ppm").symlink_to(tmp_path / "b.ppm")
    (tmp_path / "b.ppm").symlink_to(tmp_path / "a.ppm")
    with input_error(tmp_path / "a.ppm"):
        open_image(tmp_path / "a.ppm")


@pytest.mark.parametrize(
    ("code", "kind", "word"),
    [
        (errno.EACCES, "InputError", "permissions"),
        (errno.EIO, "StorageError", "EIO"),
        (errno.EMFILE, "StorageError", "ulimit -n"),
        (errno.ENFILE, "StorageError", "fs.file-max"),
    ],
)
def test_a_file_that_cannot_be_read(
    code: int, kind: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.ppm"
    path.write_bytes(b"P6 1 1 255 abc")

    def failing(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("os.open", failing)
    with pytest.raises(MillraceError) as caught:
        open_image(path)
    monkeypatch.undo()
    assert type(caught.value).__name__ == kind
    assert isinstance(caught.value.__cause__, OSError)
    one_line(caught.value, "a.ppm", word)
    assert ("check the disk" in str(caught.value)) == (code == errno.EIO)


def test_a_disk_that_fails_while_reading_is_no_fault_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.ppm"
    path.write_bytes(b"P6 1 1 255 abc")

    def failing(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with open_image(path) as reader:
        monkeypatch.setattr("os.preadv", failing)
        with pytest.raises(StorageError) as caught:
            reader.read(Region.whole((1, 1, 3)), np.empty((1, 1, 3), np.uint8))
    one_line(caught.value, "a.ppm", "EIO")


def test_a_simple_job_starts_without_the_heavy_libraries(tmp_path: Path) -> None:
    (tmp_path / "a.ppm").write_bytes(b"P6 1 1 255 abc")
    script = (
        "import sys; from pathlib import Path; from pipeline.formats.image import create_image, open_image\n"
        "create_image(Path(sys.argv[2]), open_image(Path(sys.argv[1])).header).discard()\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "a.ppm"), str(tmp_path / "b.ppm")]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert "pipeline" in loaded
    assert not {"tifffile", "zarr", "imagecodecs", "numba", "cupy", "scipy"} & {*loaded}
