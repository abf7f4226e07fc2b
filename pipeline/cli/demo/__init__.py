"""Synthetic inputs with known content, of any size, in bounded memory: the same seed gives the same bytes."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from pipeline.formats import image as images
from pipeline.cli.demo.molecule import make_helix
from pipeline.cli.demo.scan import make_scan
from pipeline.errors import MillraceError, OutputError
from pipeline.formats.image.base import ImageHeader, Region
from pipeline.formats.image.metadata import Calibration, Step

# Rows generated at a time; fixed, because each band's noise is seeded by its number.
BAND_ROWS = 64
CELLS_PER_MEGAPIXEL = 60
# Full scale of the noisy sensor: photons that saturate a pixel.
FULL_WELL_PHOTONS = 60.0
PIXEL_MICROMETRES = 0.5
# The molecule has two turns; the scan a third of the readouts that its image would need without coils.
BASE_PAIRS = 20
SCAN_PIXELS, SPOKES, COILS = 128, 64, 6


def make_cells(path: Path, rows: int, columns: int, seed: int) -> None:
    """Write a microscope-like 16-bit RGB image: bright soft discs on an uneven background, with photon noise."""
    known = Calibration(steps=dict.fromkeys("YX", Step(PIXEL_MICROMETRES, "micrometer")))
    header = ImageHeader(shape=(rows, columns, 3), axes="YXS", dtype=np.dtype(np.uint16), calibration=known)
    cells = _scatter_cells(rows, columns, seed)
    writer = images.create_image(path, header)
    try:
        for band, top in enumerate(range(0, rows, BAND_ROWS)):
            bottom = min(top + BAND_ROWS, rows)
            light = _light(cells, top, bottom, rows, columns)
            photons = np.random.default_rng([seed, band]).poisson(light * FULL_WELL_PHOTONS)
            samples = np.clip(photons * (65535 / FULL_WELL_PHOTONS) + 0.5, 0, 65535).astype(np.uint16)
            writer.write(Region((top, 0, 0), (bottom, columns, 3)), samples)
        writer.publish()
    finally:
        writer.discard()


def make_demo_inputs(folder: Path, size: int, seed: int) -> list[Path]:
    """An input for every workload in `folder`, `size` rows and columns of the image; returns their paths.

    Raises OutputError, and writes nothing, if files with these names hold anything else.
    """
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: {error.strerror}; name a folder that can be made") from error
    try:
        with _own_folder(folder) as made:
            make_cells(made / "cells.tif", size, size, seed)
            make_helix(made / "helix.pqr", BASE_PAIRS)
            make_scan(made / "scan.npz", SCAN_PIXELS, SPOKES, COILS, seed)
            return _moved(sorted(made.iterdir()), folder)
    except BaseException:
        if is_new:
            with suppress(OSError):  # it is not empty
                folder.rmdir()
        raise


@contextmanager
def _own_folder(folder: Path) -> Iterator[Path]:
    try:
        made = TemporaryDirectory(prefix=".making-", dir=folder)
    except OSError as error:
        raise OutputError(f"{folder}: {error.strerror}; name a folder that can be written") from error
    with made as name:
        try:
            yield Path(name)
        except MillraceError as error:  # name the user's folder, not the temporary one
            raise type(error)(str(error).replace(name, str(folder))) from error


def _moved(made: Sequence[Path], folder: Path) -> list[Path]:
    targets = [folder / path.name for path in made]
    for path, target in zip(made, targets, strict=True):
        if os.path.lexists(target) and not (target.is_file() and filecmp.cmp(path, target, shallow=False)):
            raise OutputError(f"{target} exists with other content: move it, or name another folder")
    for path, target in zip(made, targets, strict=True):
        path.replace(target)
    return targets


def _scatter_cells(rows: int, columns: int, seed: int) -> NDArray[np.float64]:
    """One row for each cell: y, x and radius in pixels, then red, green and blue brightness."""
    generator = np.random.default_rng(seed)
    count = max(8, round(rows * columns * CELLS_PER_MEGAPIXEL / 1e6))
    places = generator.uniform((0, 0), (rows, columns), (count, 2))
    radii = generator.uniform(0.02, 0.06, (count, 1)) * min(rows, columns, 1024)
    colours = generator.dirichlet((0.6, 0.6, 0.6), count) * generator.uniform(0.3, 0.8, (count, 1))
    return np.concatenate([places, radii, colours], axis=1)


def _light(cells: NDArray[np.float64], top: int, bottom: int, rows: int, columns: int) -> NDArray[np.float64]:
    """Brightness 0 … 1 of the rows top … bottom before noise: (bottom - top, columns, 3)."""
    y, x = np.arange(top, bottom)[:, None], np.arange(columns)[None, :]
    vignette = 0.05 + 0.04 * np.cos(np.pi * (y / rows - 0.5)) * np.cos(np.pi * (x / columns - 0.5))
    light = np.repeat(vignette[..., None], 3, axis=2)
    reach = 1.3 * cells[:, 2]
    near = cells[(cells[:, 0] + reach >= top) & (cells[:, 0] - reach < bottom)]
    for centre_y, centre_x, radius, *colour in near:
        left = max(0, int(centre_x - 1.3 * radius))
        right = min(columns, int(centre_x + 1.3 * radius) + 1)
        distance = np.hypot(y - centre_y, x[:, left:right] - centre_x) / radius
        edge = np.clip((1.15 - distance) / 0.3, 0, 1)
        light[:, left:right] += (edge * (0.6 + 0.4 * np.cos(14 * distance)))[..., None] * colour
    return np.clip(light, 0, 1)
