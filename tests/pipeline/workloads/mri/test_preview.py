"""The picture of a reconstruction: its shades, its labels, and what is sent of it between processes."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.errors import StorageError
from pipeline.formats.series.base import SeriesHeader
from pipeline.workloads.mri.series import preview
from pipeline.workloads.mri.series.preview import Plane

MAGNITUDES = np.abs(np.random.default_rng(7).normal(size=(53, 47)) + 1j).astype(np.float32)


def header(*, slices=1, voxel=(1.5, 1.5, 4.0), affine=None):
    return SeriesHeader(
        shape=(1, slices, 53, 47), dtype=np.dtype(np.float32), is_volume=False, voxel_mm=voxel, affine=affine
    )


def drawn(monkeypatch, plane, **options):
    """The picture, and the texts with their places in it."""
    texts, letter = [], preview.lettered
    monkeypatch.setattr(preview, "lettered", lambda pixels, found: [texts.extend(found), letter(pixels, found)][1])
    is_placed = options.pop("is_placed", False)
    return plane.drawn(header(**options), is_placed=is_placed), texts


def test_the_window_ends_at_the_brightest_but_a_few():
    plane = Plane.of(MAGNITUDES * np.exp(2j))
    white = np.percentile(MAGNITUDES, 99.7)
    np.testing.assert_allclose(plane.white, white, rtol=1e-5)
    np.testing.assert_allclose(plane.shades, np.clip(MAGNITUDES / white, 0, 1) * 255, atol=0.51)
    assert Plane.of(np.zeros((3, 5))).white == 1.0


def test_a_small_plane_is_enlarged_and_its_window_and_slice_are_written(monkeypatch):
    plane = Plane.of(MAGNITUDES)
    picture, texts = drawn(monkeypatch, plane, slices=5)
    assert picture.shape == (7 * 53, 7 * 47)
    assert texts == [(f"window 0 to {plane.white:.3g}, slice 3 of 5", (6, 365), "lb")]
    middle = np.s_[7 * 15 : 7 * 38, 7 * 2 : 7 * 45]  # without the labels
    np.testing.assert_array_equal(picture[middle], plane.shades[15:38, 2:45].repeat(7, 0).repeat(7, 1))
    dark, _ = drawn(monkeypatch, Plane.of(np.zeros((53, 47))))
    bar = np.flatnonzero((dark[-12:-8, 200:] == 255).all(axis=0)) + 200
    assert bar[[0, -1]].tolist() == [329 - 8 - round(10 / 1.5 * 7), 329 - 8 - 1]  # 10 mm


def test_a_scan_without_a_field_of_view_has_no_scale(monkeypatch):
    picture, _ = drawn(monkeypatch, Plane.of(np.zeros((53, 47))), voxel=None)
    assert not picture[:, 200:].any()


@pytest.mark.parametrize(
    ("x", "y", "letters"),
    [
        ((-1, 0, 0), (0, -1, 0), "RLAP"),  # axial, as on a screen: the patient's right is on the left
        ((0, -1, 0), (0, 0, -1), "APSI"),  # sagittal
        ((0.8, 0.6, 0), (0.1, 0.2, 0.97), "LRIS"),  # oblique: the largest part decides
    ],
)
def test_the_patients_sides_are_at_the_edges(monkeypatch, x, y, letters):
    affine = np.eye(4)
    affine[:3, 0], affine[:3, 1] = np.array(x) * 1.5, np.array(y) * 1.5
    picture, texts = drawn(monkeypatch, Plane.of(MAGNITUDES), affine=affine, is_placed=True)
    rows, columns = picture.shape
    sides = {(6, rows // 2): 0, (columns - 6, rows // 2): 1, (columns // 2, 6): 2, (columns // 2, rows - 6): 3}
    assert {sides[place]: text for text, place, _ in texts[1:]} == dict(enumerate(letters))
    _, texts = drawn(monkeypatch, Plane.of(MAGNITUDES), affine=affine)
    assert len(texts) == 1  # an affine that nobody measured has no sides


def test_a_plane_survives_the_way_between_processes():
    wide = Plane.of(np.abs(np.random.default_rng(5).normal(size=(1031, 700))))
    found = Plane.unpacked(wide.packed())
    np.testing.assert_array_equal(found.shades, wide.shades[::3, ::3])
    assert (found.white, found.step) == (wide.white, 3)
    for damage in ({"zlib": "eJw="}, {"shape": [2, 2]}, {"white": None}):
        with pytest.raises(StorageError, match="the preview that another process made is damaged"):
            Plane.unpacked({**wide.packed(), **damage})
