"""Measured ladders as plots (SVG) and as one self-contained page (HTML)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from kernels.runtime.measure import NEAR, SAME, unpaid

if TYPE_CHECKING:
    from kernels.runtime.measure import DeviceFacts, LadderResult, Rung

GIGA = 1e9
WIDTH, LEFT, RIGHT, ROW, TOP = 860, 210, 230, 24, 46
LOG_BELOW = 0.05  # a ladder with a rung below this fraction is plotted on a logarithmic scale
COLOURS = {"memory": "#2f7d4f", "instruction": "#b3541e", "latency": "#5b6fa8", "other": "#7a4f8f"}
LIBRARY, UPPER = "#8a8f98", "#c9b458"
LIMIT_NAMES = {
    "copy": "bytes copied (read and written)", "read": "bytes read", "fma": "float32 fused multiply-adds",
    "roots": "float32 inverse roots",
}  # fmt: skip
UNITS = {"copy": "GB/s", "read": "GB/s", "fma": "GFMA/s", "roots": "Groots/s"}

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1d2430; }
h1 { font-size: 1.7rem; margin-bottom: .2rem } h2 { margin-top: 2.8rem; border-bottom: 2px solid #d8dce3 }
h3 { margin-bottom: .3rem } svg { width: 100%; height: auto; display: block }
table { border-collapse: collapse; width: 100%; font-size: .86rem; font-variant-numeric: tabular-nums; margin: .4rem 0 }
th, td { padding: .2rem .5rem; border-bottom: 1px solid #e6e9ee; text-align: right; vertical-align: top }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left }
tr.library td { color: #6a7079 } tr.bound td { font-style: italic }
.unpaid { background: #fff4e0; border-left: 4px solid #d9902f; padding: .4rem .8rem; margin: .5rem 0 }
.failed { background: #fde8e6; border-left: 4px solid #c0392b; padding: .4rem .8rem; margin: .5rem 0 }
.wide { overflow-x: auto } nav a { margin-right: .8rem } .small { color: #5d6572; font-size: .88rem }
.key span { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; border-radius: 2px }
"""


def page(device: DeviceFacts, results: Sequence[LadderResult], summaries: Mapping[str, str]) -> str:
    """The whole report."""
    operations = list(dict.fromkeys(result.operation for result in results))
    links = " ".join(f'<a href="#{escape(name)}">{escape(name)}</a>' for name in operations)
    sections = "".join(_section(name, summaries.get(name, ""), results) for name in operations)
    key = "".join(
        f'<span style="background:{colour}"></span>{escape(name)}'
        for name, colour in (
            *((f"bound by {bound}", colour) for bound, colour in COLOURS.items()),
            ("a library", LIBRARY),
            ("upper bound, not a step", UPPER),
        )
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Millrace kernels on {escape(device.model)}</title><style>{STYLE}</style></head><body>
<h1>Millrace kernels, step by step</h1>
<p>{escape(device.model)}, {device.multiprocessors} multiprocessors, {device.l2_bytes / 2**20:.0f} MiB of L2,
CUDA driver {escape(device.driver)}; measured {escape(device.measured)}.</p>
{_limits_table(device)}
<p class="small">Each rung was timed by CUDA events after a warm-up, interleaved with the limit that its ladder is
compared with; the table shows medians. Inputs exceed the L2 cache, or the cache is overwritten before each call. GB/s
counts the minimum traffic of the operation, not the bytes that a rung moves. A rung within a factor of
{1 / NEAR:.2g} of its memory or arithmetic limit is bound by it; a rung far from both is bound by latency; a rung above
a limit does fewer operations than the definition counts, or uses tensor cores: other. Occupancy is that of the largest
launch.</p>
<p class="key small">{key}</p>
{_remarks(results)}
<nav>{links}</nav>
{sections}
</body></html>
"""


def plots(results: Sequence[LadderResult]) -> str:
    """One SVG plot with the ladders one below another."""
    heights = [_height(result) for result in results]
    parts = [f'<g transform="translate(0,{sum(heights[:k])})">{_bars(result)}</g>' for k, result in enumerate(results)]
    return _svg("".join(parts), sum(heights), "ladders")


def _limits_table(device: DeviceFacts) -> str:
    rows = "".join(
        f"<tr><td>{escape(LIMIT_NAMES[name])}</td><td>{rate / GIGA:,.0f} {UNITS[name]}</td><td></td></tr>"
        for name, rate in device.limits.items()
    )
    return f"<table><tr><th>limit</th><th>measured</th><th></th></tr>{rows}</table>"


def _remarks(results: Sequence[LadderResult]) -> str:
    """The steps of classic advice that do not pay on this device."""
    found = [(result, sentence) for result in results for sentence in unpaid(result)]
    if not found:
        return ""
    items = "".join(
        f"<li>{escape(result.operation)}, {escape(result.ladder)}: {escape(sentence)}</li>"
        for result, sentence in found
    )
    return (
        f'<div class="unpaid"><b>Steps that do not pay on this card</b> (slower than the step before, or within '
        f"{100 * SAME:.0f} % of it)<ul>{items}</ul></div>"
    )


def _section(name: str, summary: str, results: Sequence[LadderResult]) -> str:
    ladders = "".join(_ladder(result) for result in results if result.operation == name)
    return f'<h2 id="{escape(name)}">{escape(name)}</h2><p>{escape(summary)}</p>{ladders}'


def _ladder(result: LadderResult) -> str:
    rows = "".join(_row(rung, result) for rung in result.rungs)
    rows += "".join(_row(rung, result, library=True) for rung in result.libraries)
    steps = unpaid(result)
    remarks = f'<p class="unpaid">Does not pay here: {escape("; ".join(steps))}.</p>' if steps else ""
    failed = "".join(
        f'<p class="failed">{escape(what)} was not measured: {escape(why)}</p>'
        for what, why in (*result.failures.items(), *result.missing.items())
    )
    limit = f"{LIMIT_NAMES[result.limit]}, {result.limit_per_s / GIGA:,.0f} {UNITS[result.limit]}"
    return (
        f"<h3>{escape(result.ladder)}</h3>"
        f'<p class="small">{result.bytes / GIGA:,.3g} GB to move, {result.flops / GIGA:,.3g} GFLOP; limit: {limit}</p>'
        f"{_svg(_bars(result), _height(result), result.ladder)}"
        '<div class="wide"><table><tr><th>rung</th><th>ms</th><th>GB/s</th><th>GFLOP/s</th><th>of limit</th><th>active '
        "warps</th><th>registers</th><th>shared, bytes</th><th>bound by</th><th>what the step does</th></tr>"
        f"{rows}</table></div>{remarks}{failed}"
    )


def _row(rung: Rung, result: LadderResult, *, library: bool = False) -> str:
    upper = rung.name == result.bound_rung
    kind = "library" if library else "bound" if upper else ""
    filled = rung.occupancy
    occupancy = (
        (f"{filled.active_warps} of {filled.most_warps}", str(filled.registers), f"{filled.shared_bytes:,}")
        if filled
        else ("", "", "")
    )
    flops = f"{rung.flops_per_s / GIGA:,.0f}" if result.flops else ""
    cells = (
        rung.name, f"{1e3 * rung.seconds:,.4g}", f"{rung.bytes_per_s / GIGA:,.0f}", flops, f"{rung.fraction:.3g}",
        *occupancy, "" if upper else rung.bound, rung.summary,
    )  # fmt: skip
    return f'<tr class="{kind}">{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'


def _height(result: LadderResult) -> int:
    return TOP + ROW * (len(result.rungs) + len(result.libraries)) + 26


def _svg(content: str, height: int, label: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(label)}" font-family="system-ui, sans-serif" font-size="12">{content}</svg>'
    )


def _bars(result: LadderResult) -> str:
    """One bar per rung, proportional to its fraction of the limit."""
    everything = [*result.rungs, *result.libraries]
    if not everything:
        return f'<text x="0" y="20">{escape(result.operation)}: {escape(result.ladder)}: nothing was measured</text>'
    smallest = min(rung.fraction for rung in everything)
    decades = math.ceil(-math.log10(max(smallest, 1e-9))) if smallest < LOG_BELOW else 0
    bottom = TOP + ROW * len(everything)
    parts = [
        f'<text x="0" y="16" font-size="14" font-weight="600">{escape(f"{result.operation}: {result.ladder}")}</text>',
        *(_grid_line(mark, decades, bottom) for mark in _marks(decades)),
    ]
    for row, rung in enumerate(everything):
        y = TOP + ROW * row
        colour = LIBRARY if row >= len(result.rungs) else COLOURS[rung.bound]
        colour = UPPER if rung.name == result.bound_rung else colour
        length = _x(rung.fraction, decades) - LEFT
        is_bytes = result.limit in ("copy", "read")
        rate = f"{(rung.bytes_per_s if is_bytes else rung.flops_per_s) / GIGA:,.0f} {'GB/s' if is_bytes else 'GFLOP/s'}"
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(rung.name)}</text>'
            f'<rect x="{LEFT}" y="{y + 3}" width="{max(length, 1):.1f}" height="{ROW - 7}" rx="2" fill="{colour}"/>'
            f'<text x="{LEFT + max(length, 1) + 6:.1f}" y="{y + 15}">{rung.fraction:.3g} · {rate}</text>'
        )
    scale = "fraction of the limit" + (", logarithmic" if decades else "")
    parts.append(
        f'<text x="{LEFT}" y="{bottom + 16}" fill="#5d6572">{scale}: {escape(LIMIT_NAMES[result.limit])}</text>'
    )
    return "".join(parts)


def _marks(decades: int) -> list[float]:
    return [10.0**-k for k in range(decades, -1, -1)] if decades else [0.0, 0.25, 0.5, 0.75, 1.0]


def _x(fraction: float, decades: int) -> float:
    """The x coordinate of a fraction of the limit; fractions above 1 (from cache) may extend into the margin."""
    span = WIDTH - LEFT - RIGHT
    share = 1 + math.log10(max(fraction, 10.0**-decades)) / decades if decades else fraction
    return LEFT + span * min(share, 1.1)


def _grid_line(mark: float, decades: int, bottom: int) -> str:
    x = _x(mark, decades)
    return (
        f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{bottom}" stroke="#dfe3e9"/>'
        f'<text x="{x:.1f}" y="{TOP - 10}" text-anchor="middle" fill="#5d6572">{mark:g}</text>'
    )
