"""OpenDX (.dx, .dx.gz): regular positions, regular connections, scalar data, as APBS writes it.

Source: the native format of IBM's Data Explorer, appendix B.2 of its user's guide. Readers accept only part of it:
PyMOL needs `type double` without quotes, single spaces, at most 20 characters for each number of the origin and one
field name; VMD the lines in exactly this order; Chimera single spaces; GridDataFormats the steps in full precision.
"""

from __future__ import annotations

from pipeline.formats.grid.base import GridHeader
from pipeline.formats.grid.fixed_decimals import NumberStyle
from pipeline.formats.grid.text import TextGrid, TextLayout

_STYLE = NumberStyle(decimals=7, letter="e", per_line=3)
_LONGEST_COMMENT = 76
_LONGEST_ORIGIN = 20
_TAIL = (
    b'attribute "dep" string "positions"\n'
    b'object "regular positions regular connections" class field\n'
    b'component "positions" value 1\n'
    b'component "connections" value 2\n'
    b'component "data" value 3\n'
)


class OpenDx(TextGrid):
    """x slowest, z fastest, three values per line. Any three steps that span a volume, though ChimeraX supports only
    right angles.
    """

    name = "OpenDX"
    suffixes = (".dx", ".dx.gz")
    style = _STYLE

    def layout(self, header: GridHeader) -> TextLayout:
        return TextLayout(head=_head(header), tail=_TAIL, style=_STYLE, row_length=header.points, values=header.points)


def _head(header: GridHeader) -> bytes:
    counts = " ".join(map(str, header.shape))
    lines = [
        f"# {header.line(_LONGEST_COMMENT)}",
        "# x changes slowest, z fastest; lengths in angstrom",
        f"object 1 class gridpositions counts {counts}",
        "origin " + " ".join(_short(value) for value in header.origin),
        *("delta " + " ".join(_full(value) for value in vector) for vector in header.vectors),
        f"object 2 class gridconnections counts {counts}",
        f"object 3 class array type double rank 0 items {header.points} data follows",
    ]
    return "".join(f"{line}\n" for line in lines).encode("ascii")


def _full(value: float) -> str:
    """The shortest digits that identify the number; 0 for both zeros."""
    return repr(float(value)) if value else "0"


def _short(value: float) -> str:
    text = _full(value)
    return text if len(text) <= _LONGEST_ORIGIN else f"{value:.12e}"
