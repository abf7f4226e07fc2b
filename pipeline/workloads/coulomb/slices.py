"""Three slices through the middle of a map, for a preview, gathered while chunks are written."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.formats.grid.base import GridHeader
from pipeline.formats.image.base import Region
from pipeline.formats.image.preview.figure import Axis, ColourBar, Panel, figure

LONGEST_SIDE = 512
SMALLEST_SIDE = 256
# Of the outline: an atom's radius, about 1.7, and that of a water molecule, so that solvent is one body.
REACH_ANGSTROM = 3.1
_OUTLINE = (90, 90, 90)
_SHARE_SHOWN = 95  # percent of the points that the colours resolve; near atoms values grow without limit
_WHITE, _RED, _BLUE = (np.array(colour, np.float64) for colour in ((255, 255, 255), (202, 0, 32), (5, 80, 200)))


class MiddleSlices:
    """The planes of the map [x, y, z] at the middle of z, of y and of x; large planes are subsampled by `step`."""

    def __init__(self, header: GridHeader) -> None:
        self._header = header
        self._shape = shape = header.shape
        self.step = -(-max(shape) // LONGEST_SIDE)
        self._planes: list[NDArray[np.float32]] = [
            np.zeros([len(range(0, n, self.step)) for axis, n in enumerate(shape) if axis != across], np.float32)
            for across in range(3)
        ]
        self._missing = sum(plane.size for plane in self._planes)
        self._atoms: NDArray[Any] = np.zeros((0, 3))
        self._lock = threading.Lock()

    @property
    def is_complete(self) -> bool:
        return self._missing == 0

    def regions(self) -> list[Region]:
        """The planes as boxes of the map, one point thick."""
        middle = [n // 2 for n in self._shape]
        found = []
        for across in range(3):
            start = tuple(middle[across] if axis == across else 0 for axis in range(3))
            stop = tuple(middle[across] + 1 if axis == across else n for axis, n in enumerate(self._shape))
            found.append(Region(start, stop))
        return found

    def note(self, region: Region, values: NDArray[Any]) -> None:
        """Copy a chunk's part of the planes; each chunk once."""
        for across, plane in enumerate(self.regions()):
            start = np.maximum(region.start, plane.start)
            stop = np.minimum(region.stop, plane.stop)
            if (start >= stop).any():
                continue
            taken, put = [], []
            for axis in range(3):
                if axis == across:
                    taken.append(slice(start[axis] - region.start[axis], stop[axis] - region.start[axis]))
                    continue
                first = -(-int(start[axis]) // self.step)  # in shown points
                last = -(-int(stop[axis]) // self.step)
                offset = first * self.step - region.start[axis]
                taken.append(slice(offset, int(stop[axis]) - region.start[axis], self.step))
                put.append(slice(first, last))
            part = values[tuple(taken)].squeeze(axis=across)
            with self._lock:
                self._planes[across][tuple(put)] = part
                self._missing -= part.size

    def outline(self, coordinates: NDArray[Any]) -> None:
        """Draw the outline of these atoms, [n, 3] in angstrom. Keeps those near a plane."""
        near = np.abs(coordinates - self._middle()) < REACH_ANGSTROM
        self._atoms = coordinates[near.any(axis=1)]

    def _middle(self) -> NDArray[np.float64]:
        header = self._header
        indices = np.array([n // 2 for n in header.shape])
        return np.asarray(np.array(header.origin) + indices * np.array(header.spacing))

    def pixels(self) -> NDArray[np.uint8]:
        """The planes xy, xz and yz side by side: blue positive, red negative, white zero; rows × columns × RGB."""
        magnify = -(-SMALLEST_SIDE // max(max(plane.shape) for plane in self._planes))
        shown = np.abs(np.concatenate([plane.ravel() for plane in self._planes]))
        limit = float(np.percentile(shown, _SHARE_SHOWN)) or float(shown.max()) or 1.0
        colours = coloured(np.linspace(-limit, limit, 255), limit)
        panels = [self._panel(across, limit, magnify) for across in (2, 1, 0)]
        return figure(
            panels, ColourBar(colours=colours, scale=Axis(label=self._header.units, first=-limit, last=limit))
        )

    def _panel(self, across: int, limit: float, magnify: int) -> Panel:
        """A panel across one axis. Of the others, the first runs to the right and the second upwards, as in a plot."""
        right, up = (axis for axis in range(3) if axis != across)
        plane = self._planes[across]
        pixels = coloured(plane.T[::-1], limit).repeat(magnify, 0).repeat(magnify, 1)
        pixels[self._edge(across, plane.shape, magnify)] = _OUTLINE
        axes = [
            Axis(label=f"{'xyz'[axis]} (angstrom)", first=first, last=first + (n - 1) * self.step * spacing)
            for axis, n in zip((right, up), plane.shape, strict=True)
            for first, spacing in [(self._header.origin[axis], self._header.spacing[axis])]
        ]
        title = f"{'xyz'[across]} = {self._middle()[across]:.1f} angstrom"
        return Panel(pixels=pixels, title=title, across=axes[0], up=axes[1])

    def _edge(self, across: int, shape: tuple[int, ...], magnify: int) -> NDArray[np.bool_]:
        """Where the plane's pixels leave the spheres of `REACH_ANGSTROM` around the atoms."""
        from PIL import Image, ImageDraw

        others = [axis for axis in range(3) if axis != across]
        pixels = magnify / (np.array(self._header.spacing)[others] * self.step)  # in an angstrom
        offsets = self._atoms[:, across] - self._middle()[across]
        near = np.abs(offsets) < REACH_ANGSTROM
        centres = (self._atoms[near][:, others] - np.array(self._header.origin)[others]) * pixels + (magnify - 1) / 2
        radii = np.sqrt(REACH_ANGSTROM**2 - offsets[near] ** 2)[:, None] * pixels
        mask = Image.new("1", (shape[0] * magnify, shape[1] * magnify))
        draw = ImageDraw.Draw(mask)
        for low, high in zip((centres - radii).tolist(), (centres + radii).tolist(), strict=True):
            draw.ellipse((*low, *high), fill=1)
        inside = np.asarray(mask)[::-1]
        beside = np.pad(inside, 1, mode="edge")
        core = beside[:-2, 1:-1] & beside[2:, 1:-1] & beside[1:-1, :-2] & beside[1:-1, 2:]
        return np.asarray(inside & ~core)


def coloured(plane: NDArray[Any], limit: float) -> NDArray[np.uint8]:
    """RGB of values from -limit, red, through 0, white, to limit, blue."""
    share = np.clip(np.nan_to_num(plane.astype(np.float64)) / limit, -1, 1)[..., None]
    colours = np.where(share > 0, _BLUE, _RED) * np.abs(share) + _WHITE * (1 - np.abs(share))
    return np.asarray(np.rint(colours), np.uint8)
