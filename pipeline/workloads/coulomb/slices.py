"""Three slices through the middle of a map, for a preview, gathered while chunks are written."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.formats.image.base import Region

LONGEST_SIDE = 512
SMALLEST_SIDE = 192
_GAP = 6
_SHARE_SHOWN = 95  # percent of the points that the colours resolve; near atoms values grow without limit
_WHITE, _RED, _BLUE = (np.array(colour, np.float64) for colour in ((255, 255, 255), (202, 0, 32), (5, 80, 200)))


class MiddleSlices:
    """The planes of the map [x, y, z] at the middle of z, of y and of x; large planes are subsampled by `step`."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self._shape = shape
        self.step = -(-max(shape) // LONGEST_SIDE)
        self._planes: list[NDArray[np.float32]] = [
            np.zeros([len(range(0, n, self.step)) for axis, n in enumerate(shape) if axis != across], np.float32)
            for across in range(3)
        ]
        self._missing = sum(plane.size for plane in self._planes)
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

    def pixels(self) -> NDArray[np.uint8]:
        """The planes xy, xz and yz side by side, rows × columns × RGB: blue positive, red negative, white zero.

        The first axis runs to the right and the second upwards, as in a plot.
        """
        planes = [self._planes[across].T[::-1] for across in (2, 1, 0)]
        magnify = max(1, SMALLEST_SIDE // max(max(plane.shape) for plane in planes))
        shown = np.abs(np.concatenate([plane.ravel() for plane in planes]))
        limit = float(np.percentile(shown, _SHARE_SHOWN)) or float(shown.max()) or 1.0
        tiles = [_coloured(plane.repeat(magnify, 0).repeat(magnify, 1), limit) for plane in planes]
        height, width = max(len(tile) for tile in tiles), sum(tile.shape[1] for tile in tiles) + 2 * _GAP
        canvas = np.full((height, width, 3), 255, np.uint8)
        left = 0
        for tile in tiles:
            canvas[height - len(tile) :, left : left + tile.shape[1]] = tile
            left += tile.shape[1] + _GAP
        return canvas


def _coloured(plane: NDArray[Any], limit: float) -> NDArray[np.uint8]:
    share = np.clip(np.nan_to_num(plane.astype(np.float64)) / limit, -1, 1)[..., None]
    colours = np.where(share > 0, _BLUE, _RED) * np.abs(share) + _WHITE * (1 - np.abs(share))
    return np.asarray(np.rint(colours), np.uint8)
