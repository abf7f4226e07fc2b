"""Labelled pictures: what is drawn is where its axes put it."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.formats.image.preview.figure import Axis, ColourBar, Panel, figure, plot

BLUE = (5, 80, 200)


@pytest.mark.parametrize(
    ("first", "last", "texts"),
    [
        (-37.3, 41.9, ["-20", "0", "20", "40"]),
        (41.9, -37.3, ["-20", "0", "20", "40"]),
        (0.0, 0.5, ["0.0", "0.1", "0.2", "0.3", "0.4", "0.5"]),
        (-2.0e-4, 3.1e-4, ["-0.0002", "-0.0001", "0.0000", "0.0001", "0.0002", "0.0003"]),
        (7.0, 7.0, ["7"]),
    ],
)
def test_ticks_are_round_values_within_the_axis(first, last, texts):
    ticks = Axis(label="", first=first, last=last).ticks(6)
    assert [text for _, text in ticks] == texts
    assert [float(text) for text in texts] == pytest.approx([value for value, _ in ticks])


def test_places_are_counted_from_the_middle_of_the_first_pixel():
    axis = Axis(label="", first=10.0, last=30.0)
    assert [axis.place(value, 101) for value in (10, 20, 30)] == [0, 50, 100]


def test_panels_stand_on_one_line_untouched_beside_the_bar():
    rng = np.random.default_rng(1)
    axis = Axis(label="x (angstrom)", first=-5.0, last=5.0)
    pixels = [rng.integers(0, 256, (rows, columns, 3)).astype(np.uint8) for rows, columns in ((131, 97), (60, 41))]
    colours = rng.integers(0, 256, (97, 3)).astype(np.uint8)
    panels = [Panel(pixels=each, title=f"z = {n}", across=axis, up=axis) for n, each in enumerate(pixels)]
    page = figure(panels, ColourBar(colours=colours, scale=Axis(label="kT/e", first=-1.0, last=1.0)))
    ends = [_place_of(page, each) for each in pixels]
    assert ends[0][0] + 131 == ends[1][0] + 60
    assert ends[0][1] + 97 < ends[1][1]
    bar = np.repeat(colours[np.linspace(96, 0, 131).round().astype(int)][:, None], 16, 1)
    top, left = _place_of(page, bar)
    assert top == ends[0][0]
    assert left > ends[1][1] + 41


def _place_of(page, part):
    rows, columns, _ = part.shape
    corners = np.argwhere((page[: len(page) - rows + 1, : page.shape[1] - columns + 1] == part[0, 0]).all(2))
    found = [(y, x) for y, x in corners.tolist() if (page[y : y + rows, x : x + columns] == part).all()]
    assert len(found) == 1
    return found[0]


def test_a_line_goes_through_its_points_and_leaves_gaps():
    x = np.linspace(0, 1, 11)
    page = plot(x, np.where(x == 0.5, np.nan, np.sin(6 * x)), "x (angstrom)", "mean potential (V)")
    line = (page == BLUE).all(2)
    columns = np.flatnonzero(line.any(0))
    left, right = columns[0], columns[-1]
    assert right - left == pytest.approx(639, abs=2)
    at = [line[:, round(left + share * (right - left))].any() for share in (0.0, 0.2, 0.39, 0.45, 0.55, 0.61, 0.8, 1.0)]
    assert at == [True, True, True, False, False, True, True, True]
    heights = [
        np.flatnonzero(line[:, round(left + share * (right - left))]).mean() for share in (0.1, 0.3, 0.7, 0.8, 0.9)
    ]
    up = np.sin(6 * np.array([0.1, 0.3, 0.7, 0.8, 0.9]))
    np.testing.assert_allclose(np.polyval(np.polyfit(up, heights, 1), up), heights, atol=1.5)


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0], [np.nan, np.nan, np.nan], [3.0, 3.0, 3.0]])
def test_flat_lines_and_none_are_drawn(values):
    line = (plot(np.arange(3.0), np.array(values), "x", "y") == BLUE).all(2)
    assert line.any() == np.isfinite(values).all()
