"""The drawing of a dashboard for documents: numbers read as Grafana's do, and every panel is drawn."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from deploy.grafana.expressions import dashboards, panels
from deploy.grafana.picture import POINTS, Window, draw, shown

WINDOW = Window("http://127.0.0.1:1", 0.0, 600.0, "1m")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.773, "percentunit", "77.3 %"),
        (11.5e6, "Bps", "11.5 MB/s"),
        (60e9, "bytes", "55.9 GiB"),
        (250e6, "sishort", "250 M"),
        (0.0, "s", "0 s"),
        (0.045, "s", "45 ms"),
        (90.0, "s", "1.5 min"),
        (7200.0, "s", "2 h"),
        (80.0, "suffix: jobs/min", "80 jobs/min"),
        (500.0, "watt", "500 W"),
        (60.0, "celsius", "60 °C"),
        (3.0, "none", "3"),
        (float("nan"), "Bps", "–"),
    ],
)
def test_numbers_are_written_as_grafana_does(value, unit, text):
    assert shown(value, unit) == text


def made_series(self, expr, legend):
    """In place of a Prometheus: zero, gaps and a large number for every query; buckets where it asks for those."""
    minutes = np.linspace(0, 10, POINTS + 1)
    names = ("0.1", "1.0", "+Inf") if legend == "{{le}}" else ("zero", "gaps", "large")
    found = [(name, minutes, np.full(POINTS + 1, value)) for name, value in zip(names, (0.0, np.nan, 1e9), strict=True)]
    return found[1:] if expr.endswith("> 0") else found


@pytest.mark.parametrize("series", [made_series, lambda *_: []], ids=["some", "none"])
@pytest.mark.parametrize("board", dashboards(), ids=lambda board: board["uid"])
def test_every_panel_is_drawn(board, series, tmp_path, monkeypatch):
    """On linear and logarithmic axes, whether or not there is something to draw."""
    monkeypatch.setattr(Window, "series", series)
    draw(board, WINDOW, str(tmp_path / "board.png"))
    with Image.open(tmp_path / "board.png") as drawn:
        found = np.asarray(drawn.convert("RGBA")).view(np.uint32)[..., 0]  # a number for each colour
    for panel in panels(board):
        assert len(np.unique(_within(found, panel, board))) > 2, panel["title"]


def _within(pixels, panel, board):
    """The pixels of one panel, by its place on the grid."""
    rows = max(each["gridPos"]["y"] + each["gridPos"]["h"] for each in board["panels"])
    down, across = pixels.shape[0] / rows, pixels.shape[1] / 24
    place = panel["gridPos"]
    top, left = round(place["y"] * down), round(place["x"] * across)
    return pixels[top : top + round(place["h"] * down), left : left + round(place["w"] * across)]
