"""Draws one plane of a molecule's potential by every scheme, on one colour scale, as docs/coulomb.md shows it.

python docs/pictures/coulomb_schemes.py 1a63.pqr 1a63.png
python docs/pictures/coulomb_schemes.py adk_oplsaa.tpr adk.png --trajectory adk_oplsaa.xtc --select protein
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from pipeline.formats.image.preview import write_pixels
from pipeline.formats.image.preview.figure import Axis, ColourBar, Panel, figure
from pipeline.workloads.coulomb.slices import coloured

MAGNIFIED = 2
SHARE_SHOWN = 95  # percent of the points that the colours resolve


def computed(folder: Path, source: str, scheme: str, more: list[str]) -> tuple[np.ndarray, dict]:
    output = folder / f"{scheme}.npy"
    command = [sys.executable, "-m", "pipeline", "run", "coulomb", source, str(output), "--scheme", scheme, "--quiet"]
    subprocess.run([*command, *more], check=True)
    return np.load(output), json.loads(output.with_name(f"{output.name}.receipt.json").read_text())["image"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--trajectory")
    parser.add_argument("--select", help="atoms to draw, in MDAnalysis' language")
    parser.add_argument("--spacing", type=float, default=0.75, help="in angstrom")
    options = parser.parse_args()
    periodic = options.trajectory is not None
    more = ["--trajectory", options.trajectory] if periodic else []
    more += ["--select", options.select] if options.select else []
    with tempfile.TemporaryDirectory() as scratch:
        # The box of the molecule at a coarse spacing, and of it the plane through the middle.
        _, box = computed(Path(scratch), options.source, "shift", ["--spacing", "3", *more])
        x, y, z = np.array(box["origin_angstrom"])
        columns, rows, planes = (round(n * 3 / options.spacing) for n in box["shape"])
        middle = z + planes // 2 * options.spacing
        plane = [f"--origin={x},{y},{middle}", f"--shape={columns},{rows},1", "--spacing", str(options.spacing)]
        schemes = ["shift", "taylor2", "truncate", *(["ewald"] if periodic else []), "full"]
        values = [computed(Path(scratch), options.source, each, [*plane, *more])[0][:, :, 0] for each in schemes]
    limit = float(np.percentile(np.abs(values), SHARE_SHOWN))
    ends = [(first, first + (n - 1) * options.spacing) for first, n in ((x, columns), (y, rows))]
    across, up = (Axis(label=f"{name} (angstrom)", first=a, last=b) for name, (a, b) in zip("xy", ends, strict=True))
    shown = [coloured(each.T[::-1], limit).repeat(MAGNIFIED, 0).repeat(MAGNIFIED, 1) for each in values]
    panels = [Panel(pixels=each, title=name, across=across, up=up) for name, each in zip(schemes, shown, strict=True)]
    scale = Axis(label="kT/e at 298.15 K", first=-limit, last=limit)
    write_pixels(
        options.picture,
        figure(panels, ColourBar(colours=coloured(np.linspace(-limit, limit, 255), limit), scale=scale)),
    )


if __name__ == "__main__":
    main()
