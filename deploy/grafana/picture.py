"""Draws a dashboard as it stands, from a Prometheus, without Grafana: the same queries, units, places and limits.

python -m deploy.grafana.picture millrace-throughput OUTPUT.png [--prometheus URL] [--minutes 15] [--until UNIX_SECONDS]

It needs Matplotlib (`pip install '.[bench]'`), and is for documents: Grafana's own lines and letters look different.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode
from urllib.request import urlopen

import numpy as np
from PIL import Image

from deploy.grafana.expressions import dashboards, panel_expressions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN_INCHES, ROW_INCHES, GAP_INCHES = 0.62, 0.38, 0.16
POINTS = 240
COLOURS = {
    "blue": "#3274d9", "light-blue": "#8ab8ff", "purple": "#a352cc", "green": "#56a64b", "orange": "#ff780a",
    "red": "#e02f44", "yellow": "#f2cc0c", "text": "#333333",
}  # fmt: skip
SERIES = ("#56a64b", "#3274d9", "#ff780a", "#a352cc", "#f2cc0c", "#e02f44", "#37872d", "#8ab8ff")
# Seconds from one tick to the next, where decimal steps would read "1.67 min".
STEPS_S = (30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600)
# The height of a legend's row, the letters it has room for where a panel is as wide as the dashboard, and how many of
# them a series' mark takes.
LEGEND_INCHES, LEGEND_LETTERS, LEGEND_MARK_LETTERS = 0.14, 250, 6
BINARY = ((2.0**40, "Ti"), (2.0**30, "Gi"), (2.0**20, "Mi"), (2.0**10, "Ki"), (1.0, ""))
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


@dataclass(frozen=True)
class Window:
    """From when to when, in Unix seconds, in steps of seconds; `rate_interval` as PromQL writes it."""

    url: str
    start: float
    end: float
    rate_interval: str

    @property
    def step_s(self) -> float:
        return (self.end - self.start) / POINTS

    def series(self, expr: str, legend: str) -> list[tuple[str, np.ndarray, np.ndarray]]:
        """(name, minutes since the start, values) of each series; where there is no sample, NaN."""
        asked = {"query": expr, "start": self.start, "end": self.end, "step": self.step_s}
        with urlopen(f"{self.url}/api/v1/query_range?{urlencode(asked)}", timeout=60) as answer:
            found = json.load(answer)["data"]["result"]
        grid = self.start + self.step_s * np.arange(POINTS + 1)
        named = []
        for each in found:
            values = np.full(len(grid), np.nan)
            for at, value in each["values"]:
                values[round((at - self.start) / self.step_s)] = float(value)
            named.append((_named(legend, each["metric"]), (grid - self.start) / 60, values))
        return sorted(named, key=lambda each: each[0])


def _named(legend: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), legend)


def shown(value: float, unit: str) -> str:
    """A number as Grafana writes it in such a unit."""
    if not np.isfinite(value):
        return "–"
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        steps = ((3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "µs"))
        size, name = next((step for step in steps if abs(value) >= step[0]), (1, "s"))
        return f"{value / size:.3g} {name}"
    after = {"Bps": "B/s", "bytes": "B", "watt": "W", "celsius": "°C"}.get(unit, "")
    if after in ("", "°C"):
        after = unit.removeprefix("suffix:").strip() if unit.startswith("suffix:") else after
        prefixes = PREFIXES if unit == "sishort" or abs(value) >= 1e4 else PREFIXES[-1:]
    else:
        prefixes = BINARY if unit == "bytes" else PREFIXES
    size, prefix = next((each for each in prefixes if abs(value) >= each[0]), (1.0, ""))
    return f"{value / size:.3g} {prefix}{after}".strip()


def _colour(panel: dict[str, Any], name: str, number: int) -> str:
    for override in panel["fieldConfig"]["overrides"]:
        if override["matcher"]["options"] == name:
            fixed = override["properties"][0]["value"]["fixedColor"]
            return COLOURS.get(fixed, fixed)
    return SERIES[number % len(SERIES)]


def _draw_number(axes: Axes, panel: dict[str, Any], series: list[tuple[str, np.ndarray, np.ndarray]]) -> None:
    axes.set_axis_off()
    defaults = panel["fieldConfig"]["defaults"]
    by_name = panel["options"]["textMode"] == "name"
    said, colour = "No data", "#999999"
    for name, minutes, values in series:
        known = values[np.isfinite(values)]
        if len(known):
            said = name if by_name else shown(known[-1], defaults["unit"])
            steps = defaults["thresholds"]["steps"]
            colour = [step["color"] for step in steps if step["value"] is None or known[-1] >= step["value"]][-1]
            if not by_name:
                low = axes.inset_axes((0, 0, 1, 0.35))
                low.fill_between(minutes, values, color=COLOURS.get(colour, colour), alpha=0.25, linewidth=0)
                low.set(ylim=(0, max(float(known.max()), 1e-9)), xlim=(minutes[0], minutes[-1]))
                low.set_axis_off()
    axes.text(0.5, 0.55, said, color=COLOURS.get(colour, colour), fontsize=15, ha="center", va="center")


def _draw_graph(axes: Axes, panel: dict[str, Any], series: list[tuple[str, np.ndarray, np.ndarray]]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    stacked = defaults["custom"].get("stacking", {}).get("mode") == "normal"
    below = np.zeros(POINTS + 1)
    for number, (name, minutes, values) in enumerate(series):
        colour = _colour(panel, name, number)
        if stacked:
            top = below + np.nan_to_num(values)
            axes.fill_between(minutes, below, top, color=colour, alpha=0.4, linewidth=0)
            axes.plot(minutes, top, color=colour, linewidth=0.9, label=name)
            below = top
        else:
            axes.plot(minutes, values, color=colour, linewidth=1.2, label=name)
            axes.fill_between(minutes, 0, values, color=colour, alpha=0.08, linewidth=0)
    _scale(axes, defaults)
    top = axes.get_ylim()[1]
    for step in defaults.get("thresholds", {}).get("steps", [])[1:]:
        if step["value"] <= top:
            axes.axhline(step["value"], color=COLOURS[step["color"]], linestyle="--", linewidth=0.8)
    axes.grid(alpha=0.25, linewidth=0.5)
    if series:
        axes.legend(
            fontsize=6.5, loc="upper left", bbox_to_anchor=(0, -0.08), ncols=_legend_shape(panel, series)[1],
            frameon=False,
        )  # fmt: skip
    else:
        axes.text(0.5, 0.5, "No data", transform=axes.transAxes, ha="center", va="center", color="#999999")


def _scale(axes: Axes, defaults: dict[str, Any]) -> None:
    """The y axis, from zero unless it is logarithmic, with ticks that read well in its unit."""
    from matplotlib.ticker import MaxNLocator, MultipleLocator

    if defaults["custom"].get("scaleDistribution", {}).get("type") == "log":
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, defaults.get("max"))
        top = axes.get_ylim()[1]
        if defaults["unit"] == "none":
            axes.set_ylim(0, max(top, 1))
            axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        elif defaults["unit"] == "s" and 60 < top <= 8 * STEPS_S[-1]:
            axes.yaxis.set_major_locator(MultipleLocator(next(step for step in STEPS_S if top <= 8 * step)))
    axes.yaxis.set_major_formatter(lambda value, _: shown(value, defaults["unit"]) if value else "0")


def _draw_spread(axes: Axes, panel: dict[str, Any], series: list[tuple[str, np.ndarray, np.ndarray]]) -> None:
    ordered = sorted(series, key=lambda each: float(each[0]))
    if not ordered:
        axes.text(0.5, 0.5, "No data", transform=axes.transAxes, ha="center", va="center", color="#999999")
        return
    from matplotlib.colors import LogNorm

    cumulated = np.array([values for _, _, values in ordered])
    each = np.diff(cumulated, axis=0, prepend=0)
    each[~(each > 1e-9)] = np.nan
    axes.pcolormesh(ordered[0][1], np.arange(len(ordered)), each, cmap="Oranges", norm=LogNorm(), shading="nearest")
    axes.set_yticks(range(0, len(ordered), 2), [shown(float(name), "s") for name, _, _ in ordered][::2])


DRAWN = {"timeseries": _draw_graph, "stat": _draw_number, "heatmap": _draw_spread}


def draw(dashboard: dict[str, Any], window: Window, output: str) -> None:
    """The whole dashboard as one PNG."""
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 7.5, "axes.titlesize": 9, "axes.titleweight": "bold"})
    rows = max(each["gridPos"]["y"] + each["gridPos"]["h"] for each in dashboard["panels"])
    figure = plt.figure(figsize=(24 * COLUMN_INCHES, rows * ROW_INCHES), dpi=80, facecolor="#f4f5f5")
    for panel in dashboard["panels"]:
        left, bottom, wide, high = _place(figure, panel)
        if panel["type"] == "row":
            figure.text(left + 0.1 * wide / 24, bottom + 0.3 * high, panel["title"], fontsize=9, color="#555555")
            continue
        asked = panel_expressions(dashboard, panel, rate_interval=window.rate_interval)
        series = [each for query in asked for each in window.series(query.expr, query.legend)]
        axes = _axes(figure, panel, legend_inches=LEGEND_INCHES * _legend_shape(panel, series)[0])
        DRAWN[panel["type"]](axes, panel, series)
        if panel["type"] != "stat":
            axes.set_xlim(0, (window.end - window.start) / 60)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} min")
    drawn = io.BytesIO()
    figure.savefig(drawn)
    plt.close(figure)
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(output, optimize=True)


def _place(figure: Figure, panel: dict[str, Any]) -> tuple[float, float, float, float]:
    """Left, bottom, width and height, as shares of the picture's."""
    width, height = figure.get_size_inches()
    place = panel["gridPos"]
    wide, high = place["w"] * COLUMN_INCHES / width, place["h"] * ROW_INCHES / height
    return place["x"] * COLUMN_INCHES / width, 1 - place["y"] * ROW_INCHES / height - high, wide, high


def _axes(figure: Figure, panel: dict[str, Any], *, legend_inches: float) -> Axes:
    """Axes within the panel's white box, under its title, with room for a legend below them."""
    from matplotlib.patches import Rectangle

    width, height = figure.get_size_inches()
    left, bottom, wide, high = _place(figure, panel)
    across, up = GAP_INCHES / width, GAP_INCHES / height
    figure.add_artist(Rectangle(
        (left + across / 4, bottom + up / 4), wide - across / 2, high - up / 2, facecolor="white", edgecolor="#dddddd",
        linewidth=0.6, zorder=-1, transform=figure.transFigure,
    ))  # fmt: skip
    margin = (0.2 if panel["type"] == "stat" else 0.95) / width
    below = (0.35 + legend_inches) / height
    axes = figure.add_axes((left + margin, bottom + below, wide - margin - 0.25 / width, high - below - 0.37 / height))
    axes.set_title(panel["title"], loc="left")
    return axes


def _legend_shape(panel: dict[str, Any], series: list[tuple[str, np.ndarray, np.ndarray]]) -> tuple[int, int]:
    """Rows and columns of a panel's legend."""
    if panel["type"] != "timeseries" or not series:
        return 0, 1
    letters = LEGEND_LETTERS * panel["gridPos"]["w"] // 24
    columns = max(1, letters // (LEGEND_MARK_LETTERS + max(len(name) for name, _, _ in series)))
    return math.ceil(len(series) / columns), columns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("uid", choices=[each["uid"] for each in dashboards()])
    parser.add_argument("output")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--until", type=float, default=None, help="Unix seconds; default now")
    parser.add_argument("--rate-interval", default="1m")
    asked = parser.parse_args()
    end = time.time() if asked.until is None else asked.until
    window = Window(asked.prometheus, end - 60 * asked.minutes, end, asked.rate_interval)
    draw(next(each for each in dashboards() if each["uid"] == asked.uid), window, asked.output)


if __name__ == "__main__":
    main()
