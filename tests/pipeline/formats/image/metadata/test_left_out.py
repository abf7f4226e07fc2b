"""What an input has and no result of it: named before the run, whatever the output."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import zarr
from PIL import Image

from pipeline.formats import image as images
from tests.images import write_image
from tests.pipeline.formats.image.contract import input_error

SAMPLES = np.random.default_rng(2).integers(0, 99, (17, 23)).astype(np.uint16)


def said(source: Path, target: str) -> str | None:
    with images.open_image(source) as reader:
        return images.not_kept(reader.header, source.with_name(target))


@pytest.mark.parametrize("target", ["b.zarr", "b.tif", "b.png"])
def test_attributes_and_labels_of_a_zarr(target: str, tmp_path: Path) -> None:
    write_image(tmp_path / "a.zarr", SAMPLES, "YX")
    assert said(tmp_path / "a.zarr", target) is None
    group = zarr.open_group(tmp_path / "a.zarr")
    group.attrs["stain"] = {"name": "H&E"}
    group.create_group("labels").attrs["ome"] = {"version": "0.5", "labels": ["cells"]}
    assert said(tmp_path / "a.zarr", target) == "attributes stain, labels"
    array = zarr.create_array(tmp_path / "b.zarr", data=SAMPLES, dimension_names=("y", "x"))
    array.attrs.update({"units": "K", "long_name": "temperature"})
    assert said(tmp_path / "b.zarr", target) == "attributes units, long_name"


def test_a_complex_zarr_by_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zarr.create_array(tmp_path / "c.zarr", data=SAMPLES.astype(np.complex64))
    monkeypatch.chdir(tmp_path)
    with input_error(Path("c.zarr"), "complex samples are not filtered: save the magnitude"):
        images.open_image(Path("c.zarr"))


@pytest.mark.parametrize("target", ["b.png", "b.tif"])
def test_chunks_of_a_png(target: str, tmp_path: Path) -> None:
    Image.fromarray(SAMPLES).save(tmp_path / "a.png")
    assert said(tmp_path / "a.png", target) is None
    data = (tmp_path / "a.png").read_bytes()
    more = b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in ((b"bKGD", b"\0\7"), (b"tIME", bytes(7)), (b"caNv", bytes(16)))
    )
    (tmp_path / "a.png").write_bytes(data[:33] + more + data[33:])
    assert said(tmp_path / "a.png", target) == "chunks bKGD, caNv of the PNG"
