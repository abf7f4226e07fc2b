#!/usr/bin/env python3
"""Draws the pictures of docs/mri.md and prints the figures of their captions. Usage: mri.py FOLDER

FOLDER holds cardiac_radial.h5 (gpuNUFFT's demo) and phantom_spiral.h5 (OCTOPUS) as ISMRMRD files in cycles/pixel;
BART and SigPy must be installed.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.mri import quality  # noqa: E402
from docs.pictures.manual import beside, labelled  # noqa: E402
from kernels.sense import cg_sense  # noqa: E402
from tests.kernels.sense import phantom  # noqa: E402

HEART = (slice(20, 188), slice(6, 246))  # rows and columns with the heart
STRENGTH = {"l1-wavelet": 0.008, "tv": 0.004}  # of the heart
N, COILS, SPOKES, NOISE = 128, 8, 24, 0.1


def picture(image: Any, label: str, white: float, zoom: float = 1) -> Image.Image:
    """Magnitudes from black at 0 to `white`."""
    grey = np.clip(np.abs(image) / white * 255, 0, 255).astype(np.uint8)
    drawn = Image.fromarray(grey).convert("RGB")
    size = round(drawn.width * zoom), round(drawn.height * zoom)
    return labelled(drawn.resize(size, Image.Resampling.BICUBIC), label)


def reconstructed(scan: Path, options: str, folder: str) -> Any:
    command = f"run mri {scan} {folder}/out.npy --traj-units cycles/pixel --quiet {options}"
    subprocess.run([sys.executable, "-m", "pipeline", *shlex.split(command)], check=True, cwd=ROOT)
    return np.load(f"{folder}/out.npy").squeeze()


def of_a_scan(scan: Path, asked: dict[str, str], part: Any, folder: str, zoom: float) -> Image.Image:
    """The scan by each of the commands' options, with a window of its own."""
    found = {label: reconstructed(scan, options, folder)[part] for label, options in asked.items()}
    return beside([picture(each, label, float(np.quantile(each, 0.997)), zoom) for label, each in found.items()])


def regularised_heart(scan: Path, folder: str) -> Image.Image:
    """All readouts by three programs, with the same maps and strengths: a row for each penalty."""
    whole = quality.spirals(scan)
    part = quality.part_of(quality.Scan(name="heart", kspace=whole.kspace, points=whole.points, shape=whole.shape,
                                        kept=slice(None)))  # fmt: skip
    normal, right = part.normal_and_right()
    few, many = (cg_sense(normal, right, iterations=count)[0] for count in (10, 30))
    white = float(np.quantile(np.abs(few), 0.997))
    rows = []
    for name, short, label, first in (
        ("l1-wavelet", "wavelets", "CG-SENSE, 10 iterations", few),
        ("tv", "TV", "CG-SENSE, 30 iterations", many),
    ):
        images = {label: first}
        for program, run in programs(part, whole.points.shape[1], folder).items():
            image = run(name, STRENGTH[name])
            images[f"{short}, {program}"] = image * np.vdot(image, few) / np.vdot(image, image)
        rows.append(beside([picture(each.T[HEART], label, white) for label, each in images.items()]))
    return beside(rows, across=False)


def programs(part: quality.Part, samples: int, folder: str) -> dict[str, Callable[[str, float], Any]]:
    return {
        "Millrace": quality.ours(part),
        "BART": quality.by_bart(part, samples, Path(folder)),
        "SigPy": quality.by_sigpy(part),
    }


def wavelets(folder: str) -> Image.Image:
    """A phantom with its true maps; each program at the best of its strengths."""
    points, maps = phantom.radial(SPOKES, 2 * N, N), phantom.coil_maps(COILS, N)
    size = np.linalg.norm(maps, axis=0)
    kspace = phantom.samples(points.reshape(-1, 2), COILS, N)
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(kspace.shape) + 1j * rng.standard_normal(kspace.shape)
    kspace = kspace + NOISE * np.sqrt(np.mean(np.abs(kspace) ** 2) / 2) * noise
    truth = phantom.image(N) * size
    part = quality.Part(data=kspace.astype(np.complex64), flat=points.reshape(-1, 2), shape=(N, N),
                        maps=(maps / size).astype(np.complex64), reference=truth)  # fmt: skip
    normal, right = part.normal_and_right()
    images: dict[str, Any] = {"CG-SENSE": cg_sense(normal, right, iterations=10)[0]}
    for program, run in (("Millrace", quality.ours(part)), ("BART", quality.by_bart(part, 2 * N, Path(folder)))):
        tried = [run("l1-wavelet", strength) for strength in quality.STRENGTHS[::2]]
        images[f"wavelets, {program}"] = min(tried, key=lambda image: quality.errors(image, truth)[0])
    white = float(truth.max())
    rows = [[picture(truth.T, "truth", white, 2)], [picture(0 * truth, "", white, 2)]]
    for label, image in images.items():
        image = image * np.vdot(image, truth) / np.vdot(image, image)
        print(f"phantom, {label}: normalised error {quality.errors(image, truth)[0]:.4f}")
        rows[0].append(picture(image.T, label, white, 2))
        rows[1].append(picture(4 * np.abs(image - truth).T, "4 × error", white, 2))
    return beside([beside(row) for row in rows], across=False)


def main(arguments: Sequence[str]) -> None:
    data = Path(arguments[0]).resolve()
    heart, spirals = data / "cardiac_radial.h5", data / "phantom_spiral.h5"
    steps = {"gridding": "--method gridding", "CG-SENSE, 3 iterations": "--iterations 3",
             "CG-SENSE, 10 iterations": "--iterations 10"}  # fmt: skip
    maps = {"gridding": "--method gridding", "CG-SENSE, Walsh maps": "",
            "CG-SENSE, ESPIRiT maps": "--sensitivities espirit"}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        drawn = {
            "mri-heart": of_a_scan(heart, steps, HEART, folder, 1.4),
            "mri-phantom": of_a_scan(spirals, maps, (slice(20, 172),) * 2, folder, 2),
            "mri-regularized": regularised_heart(heart, folder),
            "mri-wavelets": wavelets(folder),
        }
    for name, joined in drawn.items():
        joined.save(FOLDER / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
