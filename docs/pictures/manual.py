#!/usr/bin/env python3
"""Draws the pictures of quick starts and tutorials from the inputs that `millrace demo` makes. Usage: manual.py"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

FOLDER = Path(__file__).resolve().parent
GAP = 8
COMMANDS = (
    "demo . --size 512",
    "run smooth cells.tif raw.tif --size 1 --crop Y=96:416,X=96:416 --preview raw.png",
    "run smooth cells.tif smooth.tif --filter gaussian --sigma 2 --crop Y=96:416,X=96:416 --preview smooth.png",
    "run coulomb helix.pqr helix.dx --preview helix.png",
    "run mri scan.npz gridding.nii --method gridding --preview gridding.png",
    "run mri scan.npz sense.nii --preview sense.png",
    "run median cells.tif median.tif --size 5 --crop Y=96:416,X=96:416 --preview median.png",
    "run chain cells.tif spots.tif --step 'median size=5' --step 'tophat size=91' --step 'gaussian sigma=4' "
    "--crop Y=96:416,X=96:416 --preview spots.png",
    "run coulomb helix.pqr shift.npy --spacing 1 --units mV --preview shift.png",
    "run coulomb helix.pqr full.npy --scheme full --spacing 1 --units mV --preview full.png",
    "run mri scan.npz whole.npy --iterations 20 --preview whole.png",
    "run mri few.npz few-gridding.npy --method gridding --preview few-gridding.png",
    "run mri few.npz few-sense.npy --preview few-sense.png",
    "run mri few.npz few-tv.npy --regularizer tv --iterations 30 --preview few-tv.png",
)


# What is written into the upper left corner of a picture.
LABELS = {
    "raw": "input", "smooth": "Gaussian, σ = 2", "gridding": "gridding", "sense": "CG-SENSE", "median": "median",
    "spots": "median, top-hat, Gaussian", "whole": "64 spokes, CG-SENSE", "few-gridding": "16 spokes, gridding",
    "few-sense": "16 spokes, CG-SENSE", "few-tv": "16 spokes, total variation",
}  # fmt: skip


def labelled(picture: Image.Image, text: str) -> Image.Image:
    font = ImageFont.truetype("DejaVuSans.ttf", 15)
    ImageDraw.Draw(picture).text((8, 6), text, "white", font=font, stroke_width=2, stroke_fill="black")
    return picture


def beside(pictures: Sequence[Image.Image], *, across: bool = True) -> Image.Image:
    """Pictures of one size side by side, or below one another, with a transparent gap."""
    width, height = pictures[0].size
    steps = [(number * (width + GAP), 0) if across else (0, number * (height + GAP)) for number in range(len(pictures))]
    joined = Image.new("RGBA", (steps[-1][0] + width, steps[-1][1] + height), (0, 0, 0, 0))
    for picture, step in zip(pictures, steps, strict=True):
        joined.paste(picture, step)
    return joined


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            started = [sys.executable, "-m", "pipeline", *shlex.split(command)]
            subprocess.run(started, check=True, cwd=folder, env={"PYTHONPATH": str(FOLDER.parents[1])})
            if command.startswith("demo"):  # every fourth spoke, as in the tutorial
                scan = dict(np.load(f"{folder}/scan.npz"))
                np.savez(f"{folder}/few.npz", **scan | {"kspace": scan["kspace"][:, ::4], "traj": scan["traj"][::4]})

        def previews(*names: str, across: bool = True) -> Image.Image:
            opened = [Image.open(f"{folder}/{name}.png").convert("RGB") for name in names]
            return beside([labelled(each, LABELS.get(name, "")) for each, name in zip(opened, names, strict=True)],
                          across=across)  # fmt: skip

        drawn = {
            "start-images": previews("raw", "smooth"),
            "start-molecules": previews("helix"),
            "start-mri": previews("gridding", "sense"),
            "tutorial-spots": previews("raw", "median", "spots"),
            "tutorial-potential": previews("shift", "full", across=False),
            "tutorial-spokes": previews("whole", "few-gridding", "few-sense", "few-tv"),
        }
        for name, picture in drawn.items():
            picture.save(FOLDER / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
