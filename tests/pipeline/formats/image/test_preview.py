from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray

from pipeline.formats.image import preview
from pipeline.formats.image.preview import write_preview
from tests.images import read_image, write_image


def averaged(plane: NDArray[Any], step: int) -> NDArray[np.float64]:
    """By the definition: rows × columns × channels, block by block."""
    rows, columns = (-(-size // step) for size in plane.shape[:2])
    blocks = [
        [np.nanmean(plane[r * step : (r + 1) * step, c * step : (c + 1) * step], axis=(0, 1)) for c in range(columns)]
        for r in range(rows)
    ]
    return np.array(blocks, np.float64)


@pytest.mark.parametrize("tile_samples", [1, 7, 100, 5000, 1 << 20])
@pytest.mark.parametrize(("shape", "axes"), [((53, 37, 3), "YXS"), ((3, 37, 53), "ZYX"), ((2, 41, 7, 5), "ZYXS")])
@pytest.mark.parametrize("suffix", [".zarr", ".tif"])
def test_the_mean_of_each_block_however_it_is_read(
    tile_samples: int, shape: tuple[int, ...], axes: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview, "TILE_SAMPLES", tile_samples)
    monkeypatch.setattr("pipeline.formats.image.zarr._CHUNK_ROWS", 8)
    monkeypatch.setattr("pipeline.formats.image.zarr._SMALLEST_BYTES", 1)
    image = np.random.default_rng(5).integers(0, 256, shape).astype(np.uint8)
    write_image(tmp_path / f"a{suffix}", image, axes)
    write_preview(tmp_path / f"a{suffix}", tmp_path / "p.png", longest_side=10)
    plane = image[shape[0] // 2] if "Z" in axes else image
    plane = plane if "S" in axes else plane[..., None]
    expected = averaged(plane[..., :1] if plane.shape[2] > 4 else plane, -(-max(plane.shape[:2]) // 10))
    found = read_image(tmp_path / "p.png").reshape(expected.shape)
    assert np.abs(found - expected).max() <= 0.5


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extreme_values_are_drawn_without_a_warning(dtype: type, tmp_path: Path) -> None:
    largest = np.finfo(dtype).max
    image = np.array([[-largest, largest], [0, np.nan], [np.inf, -np.inf]], dtype)
    write_image(tmp_path / "a.npy", image, "YX")
    write_preview(tmp_path / "a.npy", tmp_path / "p.png")
    assert read_image(tmp_path / "p.png").tolist() == [[0, 255], [128, 0], [255, 0]]
    write_image(tmp_path / "long.npy", np.tile(image, (1000, 1)), "YX")
    write_preview(tmp_path / "long.npy", tmp_path / "p.png")
    assert read_image(tmp_path / "p.png").shape == (1000, 1)


@pytest.mark.parametrize("shape", [(4, 3_000_000), (3_000_000, 4), (3000, 4000)])
def test_it_takes_the_same_memory_for_every_shape(shape: tuple[int, int], tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones(shape, np.float64))
    tracemalloc.start()
    try:
        write_preview(tmp_path / "a.npy", tmp_path / "p.png")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 64 << 20


def test_what_a_tiff_calls_its_samples_is_drawn_as_that(tmp_path: Path) -> None:
    generator = np.random.default_rng(6)
    channels = generator.integers(0, 256, (11, 13, 4)).astype(np.uint8)
    gray = channels[..., 0].copy()
    cyan, magenta, yellow, black = np.moveaxis(1 - channels / 255, 2, 0)
    inks = np.rint(255 * black[..., None] * np.stack([cyan, magenta, yellow], axis=2)).astype(np.uint8)
    cases: list[tuple[NDArray[Any], dict[str, Any], NDArray[Any]]] = [
        (gray, {"photometric": "miniswhite"}, 255 - gray),
        (channels, {"photometric": "separated"}, inks),
        (channels, {"photometric": "rgb", "extrasamples": ["assocalpha"]}, channels[..., :3]),
        (channels, {"photometric": "rgb", "extrasamples": ["unspecified"]}, channels[..., :3]),
        (channels, {"photometric": "rgb", "extrasamples": ["unassalpha"]}, channels),
        (channels[..., :2].copy(), {"photometric": "minisblack", "extrasamples": ["assocalpha"]}, gray),
    ]
    for samples, what, expected in cases:
        tifffile.imwrite(tmp_path / "a.tif", samples, **what)
        write_preview(tmp_path / "a.tif", tmp_path / "p.png")
        np.testing.assert_array_equal(read_image(tmp_path / "p.png").squeeze(), expected, err_msg=str(what))
