"""The size, position and meaning of an image's pixels: one type for all formats."""

from __future__ import annotations

from pipeline.formats.image.metadata.calibration import Calibration, Channel, Step
from pipeline.formats.image.metadata.units import in_unit, unit_named

__all__ = ["Calibration", "Channel", "Step", "in_unit", "unit_named"]
