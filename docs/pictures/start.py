#!/usr/bin/env python3
"""Draws the pictures of the quick starts from the inputs that `millrace demo` makes. Usage: docs/pictures/start.py"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

FOLDER = Path(__file__).resolve().parent
GAP = 8
COMMANDS = (
    "demo . --size 512",
    "run smooth cells.tif raw.tif --size 1 --crop Y=96:416,X=96:416 --preview raw.png",
    "run smooth cells.tif smooth.tif --filter gaussian --sigma 2 --crop Y=96:416,X=96:416 --preview smooth.png",
    "run coulomb helix.pqr helix.dx --preview helix.png",
    "run mri scan.npz gridding.nii --method gridding --preview gridding.png",
    "run mri scan.npz sense.nii --preview sense.png",
)


def beside(names: Sequence[str], folder: str, scale: int) -> Image.Image:
    pictures = [Image.open(f"{folder}/{name}.png").convert("RGB") for name in names]
    width, height = pictures[0].size
    joined = Image.new("RGBA", ((width * scale + GAP) * len(names) - GAP, height * scale), (0, 0, 0, 0))
    for number, picture in enumerate(pictures):
        joined.paste(picture.resize((width * scale, height * scale)), (number * (width * scale + GAP), 0))
    return joined


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            started = [sys.executable, "-m", "pipeline", *shlex.split(command)]
            subprocess.run(started, check=True, cwd=folder, env={"PYTHONPATH": str(FOLDER.parents[1])})
        drawn = {
            "start-images": beside(["raw", "smooth"], folder, 1),
            "start-molecules": beside(["helix"], folder, 1),
            "start-mri": beside(["gridding", "sense"], folder, 2),
        }
        for name, picture in drawn.items():
            picture.quantize(128, method=Image.Quantize.FASTOCTREE).save(FOLDER / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
