"""Looking at a file of any format: one plane of it as a small picture.

`open_stack` opens images, potential maps and MRI series by their content alone, unlike the formats' own `open`, which
need to know what the file holds. `describe` and `draw` are what the service's pages show.
"""

from __future__ import annotations

from pipeline.formats.slices.drawing import Cut, Part, Picture, Stack, describe, draw
from pipeline.formats.slices.stacks import SUFFIXES, open_stack

__all__ = ["SUFFIXES", "Cut", "Part", "Picture", "Stack", "describe", "draw", "open_stack"]
