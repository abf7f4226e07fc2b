"""Gaussian cube (.cube, .cub): lengths in bohr; x slowest, z fastest, six values a line, a new line for each row of z.

Source: https://gaussian.com/cubegen. The values keep the map's units, which the second line states; they are not
converted to atomic units.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.formats.grid.base import GridHeader
from pipeline.formats.grid.fixed_decimals import NumberStyle
from pipeline.formats.grid.text import TextGrid, TextLayout

BOHR_ANGSTROM = 0.529177210903  # CODATA 2018
# The atom count has five columns; maps of more atoms are written without them.
MOST_ATOMS = 99_999

_STYLE = NumberStyle(decimals=6, letter="E", per_line=6)
_LONGEST_TITLE = 78


class Cube(TextGrid):
    """Any three steps that span a volume. Up to 99,999 atoms are written with their charges, as unknown elements.

    If there are more, or none, one such atom without charge is written at the origin: VMD takes a cube without atoms
    for a set of orbitals.
    """

    name = "cube"
    suffixes = (".cube", ".cub")
    shows_atoms = True
    style = _STYLE

    def layout(self, header: GridHeader) -> TextLayout:
        return TextLayout(head=_head(header), tail=b"", style=_STYLE, row_length=header.shape[2], values=header.points)


def _head(header: GridHeader) -> bytes:
    atoms = header.atoms
    if atoms is None or not 0 < len(atoms) <= MOST_ATOMS:
        atoms = np.array([[*header.origin, 0.0]])
    lines = [
        header.line(_LONGEST_TITLE),
        f"Values in {header.units.encode('ascii', 'replace').decode('ascii')}; lengths in bohr",
        f"{len(atoms):5d} {_bohr(header.origin)}",
        *(f"{count:5d} {_bohr(step)}" for count, step in zip(header.shape, header.vectors, strict=True)),
        *(f"{0:5d} {charge:12.6f} {_bohr(place)}" for *place, charge in atoms),
    ]
    return "".join(f"{line}\n" for line in lines).encode("ascii")


def _bohr(lengths: Sequence[float]) -> str:
    """With 10 decimals instead of Gaussian's 6, which would shift the end of a thousand steps by 3·10^-4 Å."""
    return " ".join(f"{length / BOHR_ANGSTROM:16.10f}" for length in lengths)
