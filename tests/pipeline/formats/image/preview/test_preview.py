from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray

from pipeline.formats import image as images
from pipeline.formats.image import preview
from pipeline.formats.image.base import ImageHeader, Region
from pipeline.formats.image.metadata import Calibration, Channel, Step
from pipeline.formats.image.preview import write_preview
from pipeline.formats.image.preview.marks import scale_bar
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
@pytest.mark.parametrize(("shape", "axes"), [((31, 23, 3), "YXS"), ((3, 23, 31), "ZYX"), ((2, 29, 7, 5), "ZYXS")])
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


@pytest.mark.parametrize("axes", ["YX", "CYX", "YXS"])
@pytest.mark.parametrize("suffix", [".zarr", ".tif"])
def test_of_a_pyramid_a_level_is_read(axes: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = [{"Y": 1600, "X": 1597}.get(letter, 3) for letter in axes]
    image = np.random.default_rng(5).integers(0, 256, shape).astype(np.uint8)
    size = {letter: Step(0.5, "micrometer") for letter in "YX"}
    channels = tuple(Channel(name, None) for name in ("DAPI", "GFP", "")) if "C" in axes else ()
    header = ImageHeader(
        shape=image.shape, axes=axes, dtype=image.dtype, calibration=Calibration(size, channels=channels)
    )
    for name, levels in (("a", 1), ("b", 6)):
        writer = images.create_image(tmp_path / f"{name}{suffix}", header, storage=images.Storage(levels=levels))
        writer.write(Region.whole(image.shape), image)
        writer.publish()
    read: list[tuple[int, ...]] = []
    averaged_in = preview._averaged
    monkeypatch.setattr(preview, "_averaged", lambda *given: read.append(given[0].header.shape) or averaged_in(*given))
    for name in ("a", "b"):
        write_preview(tmp_path / f"{name}{suffix}", tmp_path / f"{name}.png", longest_side=100)
    assert {max(each) for each in read} == {1600, 400}
    whole, found = (read_image(tmp_path / f"{name}.png").astype(int) for name in ("a", "b"))
    assert whole.shape[:2] == (100, 100)
    assert whole.min() == 0, "it has marks"
    # Levels count an odd last column twice; three channels are added.
    np.testing.assert_allclose(found[:, :-1], whole[:, :-1], rtol=0, atol=3 if "C" in axes else 1)


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


def test_contrast_leaves_out_one_pixel_in_a_thousand_at_each_end(tmp_path: Path) -> None:
    image = np.random.default_rng(5).permutation(np.arange(10_000, 40_000, dtype=np.uint16)).reshape(150, 200)
    image[3, 4], image[5, 6] = 0, 65535  # a dead pixel and a hot one
    write_image(tmp_path / "a.npy", image, "YX")
    write_preview(tmp_path / "a.npy", tmp_path / "p.png")
    low, high = np.sort(image.ravel())[[29, 29_969]].astype(float)
    expected = np.clip((image - low) / (high - low), 0, 1) * 255
    assert np.abs(read_image(tmp_path / "p.png") - expected).max() <= 0.51


def save(path: Path, samples: NDArray[Any], axes: str, known: Calibration) -> None:
    header = ImageHeader(shape=samples.shape, axes=axes, dtype=samples.dtype, calibration=known)
    writer = images.create_image(path, header)
    writer.write(Region.whole(samples.shape), samples)
    writer.publish()


def test_channels_are_shown_together_in_their_colours(tmp_path: Path) -> None:
    samples = np.zeros((3, 40, 60), np.uint8)
    samples[0, :20], samples[1, 10:30], samples[2, :, 50:] = 200, 100, 255
    save(
        tmp_path / "a.zarr", samples, "CYX", Calibration(channels=(Channel("a", "FF0000"), Channel("b"), Channel("c")))
    )
    write_preview(tmp_path / "a.zarr", tmp_path / "p.png")
    found = read_image(tmp_path / "p.png")
    assert found[5, 5].tolist() == [200, 0, 0]
    assert found[25, 5].tolist() == [100, 100, 100]  # OME-Zarr must name a colour: white
    assert found[15, 5].tolist() == [255, 100, 100]
    assert found[35, 55].tolist() == [255, 255, 255]


@pytest.mark.parametrize(
    ("size", "unit", "step", "columns", "bar"),
    [
        (0.5, "micrometer", 1, 1000, (200, "100 µm")),
        (0.5, "micrometer", 4, 1000, (250, "500 µm")),
        (1.0, "nanometer", 1, 300, (50, "50 nm")),
        (20.0, "meter", 3, 1000, (167, "10 km")),
        (300.0, "nanometer", 1, 1000, (167, "50 µm")),
        (0.1, "inch", 1, 1000, None),
        (0.1, "second", 1, 1000, None),
        (0.1, None, 1, 1000, None),
    ],
)
def test_a_scale_bar_has_a_round_length(size: float, unit: str | None, step: int, columns: int, bar: Any) -> None:
    known = Calibration({"Y": Step(size, unit), "X": Step(size, unit)})
    assert scale_bar(known, step, columns) == bar
    assert scale_bar(Calibration({"Y": Step(2 * size, unit), "X": Step(size, unit)}), step, columns) is None


@pytest.mark.parametrize(("axes", "shape"), [("YX", (120, 200)), ("YXS", (120, 200, 2)), ("YXS", (120, 200, 4))])
def test_the_bar_and_the_name_are_drawn_and_nothing_else(tmp_path: Path, axes: str, shape: tuple[int, ...]) -> None:
    samples = np.full(shape, 90, np.uint8)
    steps = {"Y": Step(1.0, "micrometer"), "X": Step(1.0, "micrometer")}
    save(tmp_path / "a.ome.tif", samples, axes, Calibration(steps, channels=(Channel("GFP"),)))
    write_preview(tmp_path / "a.ome.tif", tmp_path / "p.png")
    found = read_image(tmp_path / "p.png").reshape(120, 200, -1)
    assert (found[108:112, 142:192, 0] == 255).all()  # 50 of 200 pixels
    assert (found[108:112, 142:192, -1] == 255).all()
    changed = (found != 90).any(axis=-1)
    assert changed[:30, :50].any()  # the name
    assert not changed[30:80].any()
    assert not changed[:, 60:130].any()
