#!/usr/bin/env python3
"""Draws the charts of docs/performance.md from performance.toml: bars on a logarithmic scale. Usage: performance.py"""

from __future__ import annotations

import math
import tomllib
from html import escape
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
WIDTH, LEFT, RIGHT, BAR, GROUP = 560, 100, 90, 16, 26
COLOURS = {"Millrace": "#0f766e"}
RIVALS = ("#94a3b8", "#b8a57a", "#a78fb0", "#8fae8b")


def chart(title: str, unit: str, rows: list[tuple[str, dict[str, float]]]) -> str:
    """An SVG: a group of bars for each row, all on one logarithmic axis that starts at a power of ten."""
    values = [value for _, bars in rows for value in bars.values()]
    low, high = math.floor(math.log10(min(values)) - 1e-9), math.ceil(math.log10(max(values)) + 1e-9)
    alone = all(len(bars) == 1 for _, bars in rows)
    left = 20 if alone else LEFT
    width = WIDTH - left - RIGHT
    names = list(dict.fromkeys(name for _, bars in rows for name in bars))
    colours = COLOURS | dict(zip((name for name in names if name not in COLOURS), RIVALS, strict=False))

    def x(value: float) -> float:
        return left + width * (math.log10(value) - low) / (high - low)

    parts = [f'<text x="20" y="30" class="title">{escape(title)}</text>']
    y = 62.0
    for label, bars in rows:
        parts.append(f'<text x="20" y="{y:.0f}">{escape(label)}</text>')
        y += 7
        for name, value in bars.items():
            own = name == "Millrace"
            parts.append(f'<rect x="{left}" y="{y:.0f}" width="{x(value) - left:.1f}" height="{BAR - 3}" '
                         f'fill="{colours[name]}"/>')  # fmt: skip
            middle = y + BAR - 6
            if not alone:
                bold = ' class="own"' if own else ""
                parts.append(f'<text x="{left - 8}" y="{middle:.0f}" text-anchor="end"{bold}>{escape(name)}</text>')
            text = f"{value:g} {unit}".strip() if unit != "×" else f"{value:g}×"
            parts.append(f'<text x="{x(value) + 6:.1f}" y="{middle:.0f}">{text}</text>')
            y += BAR
        y += GROUP
    y -= GROUP - 6
    ticks = []
    for power in range(low, high + 1):
        at = x(10.0**power)
        ticks.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="44" y2="{y:.0f}"/>')
        parts.append(f'<text x="{at:.1f}" y="{y + 16:.0f}" text-anchor="middle" class="tick">{10.0**power:g}</text>')
    height = y + 30
    style = (
        "text{font:13px system-ui,sans-serif;fill:#1f2933}.title{font-size:16px;font-weight:600}"
        ".own{font-weight:600}.tick{fill:#52606d;font-size:12px}line{stroke:#d5dbe1}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{escape(title)}"><style>{style}</style>'
        f'<rect width="{WIDTH}" height="{height:.0f}" rx="6" fill="#fff"/>{"".join(ticks)}{"".join(parts)}</svg>\n'
    )


def charts() -> dict[str, str]:
    """File name and text of each chart."""
    described: dict[str, Any] = tomllib.loads((FOLDER / "performance.toml").read_text())
    return {f"performance-{name}.svg": chart(**each) for name, each in described.items()}


if __name__ == "__main__":
    for name, text in charts().items():
        (FOLDER / name).write_text(text)
