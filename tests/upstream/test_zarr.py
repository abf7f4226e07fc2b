"""zarr-python and numcodecs: where chunks are decoded, and how other codecs take the place of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec
from zarr.registry import get_codec_class
from zarr.storage import LocalStore

from pipeline.codecs import bounded
from pipeline.codecs.zarr_codecs import use_bounded_codecs
from pipeline.formats.image.zarr.lazy_store import RegularFiles

SAMPLES = np.arange(400, dtype=np.uint16).reshape(20, 20)


def stored(folder: Path, zarr_format: int) -> Path:
    compressor: Any = BloscCodec() if zarr_format == 3 else numcodecs.Blosc()
    array = zarr.create_array(
        store=str(folder), shape=SAMPLES.shape, dtype=SAMPLES.dtype, chunks=(10, 20), compressors=compressor,
        zarr_format=zarr_format,
    )  # fmt: skip
    array[:] = SAMPLES
    return folder


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_every_chunk_passes_through_the_bounded_decoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zarr_format: int
) -> None:
    """A way to the decoder past `_decode_single` and `_decode_sync` would let a damaged chunk end the process."""
    use_bounded_codecs()
    checked: list[int] = []
    blosc = bounded.DECODERS["blosc"]

    def noted(data: Any, limit: int) -> Any:
        checked.append(limit)
        return blosc(data, limit)

    monkeypatch.setitem(bounded.DECODERS, "blosc", noted)
    array = zarr.open_array(store=str(stored(tmp_path / "a.zarr", zarr_format)), mode="r")
    np.testing.assert_array_equal(array[:], SAMPLES)
    assert len(checked) == 2


def test_the_registries_give_the_bounded_classes() -> None:
    use_bounded_codecs()
    for name in ("blosc", "gzip", "zstd"):
        assert get_codec_class(name).__qualname__.startswith("Bounded")
    assert issubclass(get_codec_class("blosc"), BloscCodec)
    for name, base in (("blosc", numcodecs.Blosc), ("zlib", numcodecs.Zlib), ("lzma", numcodecs.LZMA)):
        found = numcodecs.get_codec({"id": name})
        assert isinstance(found, base)
        assert type(found) is not base


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_all_files_are_read_through_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zarr_format: int) -> None:
    """`RegularFiles` overrides `get` and `get_sync`: a third way would open named pipes."""
    folder = stored(tmp_path / "a.zarr", zarr_format)
    opened: list[Path] = []
    looked_at: list[Path] = []
    open_path = Path.open

    def watched(path: Path, *arguments: Any, **options: Any) -> Any:
        opened.append(path)
        return open_path(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", watched)
    monkeypatch.setattr("pipeline.formats.image.zarr.lazy_store._require_regular", looked_at.append)
    array = zarr.open_array(store=RegularFiles(folder, read_only=True), mode="r", zarr_format=zarr_format)
    np.testing.assert_array_equal(array[:], SAMPLES)
    assert len(opened) >= 3  # the metadata and two chunks
    assert set(opened) <= set(looked_at)


def test_a_store_has_a_root_and_both_ways_to_get() -> None:
    assert LocalStore(".").root == Path()
    for name in ("get", "get_sync"):
        assert callable(getattr(LocalStore, name))


def test_metadata_as_a_dict_names_every_codec(tmp_path: Path) -> None:
    """Codecs that run what they read are refused by these names."""
    three = zarr.open_array(store=str(stored(tmp_path / "3.zarr", 3)), mode="r").metadata.to_dict()
    assert "blosc" in [codec["name"] for codec in three["codecs"]]
    two = zarr.open_array(store=str(stored(tmp_path / "2.zarr", 2)), mode="r").metadata.to_dict()
    assert two["compressor"]["id"] == "blosc"


def test_with_config_takes_write_empty_chunks(tmp_path: Path) -> None:
    array = zarr.open_array(store=str(stored(tmp_path / "a.zarr", 3)), mode="r+").with_config(
        {"write_empty_chunks": True}
    )
    assert array.config.write_empty_chunks is True
