"""The preview of a reconstruction: one plane with its window, its slice, the patient's directions and a scale bar."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import StorageError
from pipeline.formats.image.metadata import Calibration, Step
from pipeline.formats.image.preview.marks import lettered, marked
from pipeline.formats.series.base import SeriesHeader
from pipeline.formats.series.png import BRIGHTEST

_WIDEST = 512  # pixels of a plane that is sent between processes
_WIDTH = 384  # pixels; smaller planes are enlarged by a whole factor, so that their labels have room
# Towards which side of the patient an axis of NIfTI points, and its opposite.
_SIDES = (("R", "L"), ("A", "P"), ("S", "I"))


@dataclass(frozen=True, eq=False)
class Plane:
    """Magnitudes (y, x) in shades of grey.

    white : the value shown as white; the brightest few pixels are above it
    step  : pixels of the image along each side of one of the plane
    """

    shades: NDArray[np.uint8]
    white: float
    step: int = 1

    @classmethod
    def of(cls, values: NDArray[Any]) -> Plane:
        magnitudes = np.abs(values)
        white = float(np.percentile(magnitudes, BRIGHTEST)) or float(magnitudes.max()) or 1.0
        return cls(np.rint(np.clip(magnitudes / white, 0, 1) * 255).astype(np.uint8), white)

    def packed(self) -> dict[str, Any]:
        """Ready for JSON; wide planes are subsampled."""
        step = -(-max(self.shades.shape) // _WIDEST)
        thinned = np.ascontiguousarray(self.shades[::step, ::step])
        pixels = base64.b64encode(zlib.compress(thinned.tobytes())).decode()
        return {"shape": list(thinned.shape), "zlib": pixels, "white": self.white, "step": step * self.step}

    @classmethod
    def unpacked(cls, found: Mapping[str, Any]) -> Plane:
        """Raises StorageError if it is damaged."""
        try:
            shades = np.frombuffer(zlib.decompress(base64.b64decode(found["zlib"])), np.uint8).reshape(found["shape"])
            return cls(shades, float(found["white"]), int(found["step"]))
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise StorageError(f"the preview that another process made is damaged: {error}") from error

    def drawn(self, header: SeriesHeader, *, is_placed: bool) -> NDArray[np.uint8]:
        """The picture with its labels.

        is_placed : the header's affine comes from the file, which is needed for the patient's directions
        """
        factor = max(1, _WIDTH // max(self.shades.shape))
        picture = self.shades.repeat(factor, axis=0).repeat(factor, axis=1)
        if header.voxel_mm is not None:
            steps = {
                axis: Step(size * self.step / factor, "millimeter")
                for axis, size in zip("XY", header.voxel_mm, strict=False)
            }
            picture = marked(picture, Calibration(steps=steps), 1, ())
        rows, columns = picture.shape
        texts = [(f"window 0 to {self.white:.3g}{_slice(header)}", (6, rows - 6), "lb")]
        if is_placed and header.affine is not None:
            middles = ((6, rows // 2), (columns - 6, rows // 2)), ((columns // 2, 6), (columns // 2, rows - 6))
            anchors = ("lm", "rm"), ("mt", "mb")
            for axis in range(2):
                texts += zip(_letters(header.affine[:3, axis]), middles[axis], anchors[axis], strict=True)
        return lettered(picture, texts)


def _slice(header: SeriesHeader) -> str:
    """The slice shown, counted from 1, if there are several."""
    slices = header.shape[1]
    return f", slice {slices // 2 + 1} of {slices}" if slices > 1 else ""


def _letters(direction: NDArray[np.float64]) -> tuple[str, str]:
    """The patient's sides at the beginning and at the end of an axis of the image, by its largest component."""
    axis = int(np.argmax(np.abs(direction)))
    positive, negative = _SIDES[axis]
    return (negative, positive) if direction[axis] > 0 else (positive, negative)
