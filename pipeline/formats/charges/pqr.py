"""PQR: a PDB file whose last two columns hold charge and radius.

Source: https://apbs.readthedocs.io/en/latest/formats/pqr.html. Spaces separate the fields, yet many programs write them
in the PDB's fixed columns, where wide numbers touch (-67.825-100.826). Each line is split at its spaces first, and by
columns if that fails.
"""

from __future__ import annotations

import math
import re
from array import array
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import InputError, counted
from pipeline.formats.charges.base import Array, Molecule, cell_vectors
from pipeline.storage.positional import PositionalFile

_NAMES = ("x coordinate", "y coordinate", "z coordinate", "charge", "radius")
# The residue's number, optionally with a chain letter before it or an insertion code after it.
_RESIDUE = re.compile(r"[A-Za-z]?-?\d+[A-Za-z]?")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
# x, y and z as %8.3f from column 31; charge and radius after them.
_COORDINATE_COLUMNS = ((30, 38), (38, 46), (46, 54))
_COORDINATE = re.compile(r" *-?\d*\.\d{3}")
_CHARGE_COLUMN = 54
# PDB2PQR writes the charge as %8.4f and the radius as %7.4f: "-0.834010.0000" where they touch.
_TOUCHING = re.compile(r" *(-?\d*\.\d{4})(\d+\.\d{4})(?= |$)")
# As many programs accept them: indented, or in lower case.
_LOOSE_ATOM = re.compile(r"\s*(ATOM|HETATM)\s", re.IGNORECASE)
_CELL = re.compile(r"\s*CRYST1", re.IGNORECASE)
_END, _MODEL = re.compile(r"END|(?i:\s*(END|ENDMDL)\b)"), re.compile(r"MODEL|(?i:\s*MODEL\b)")
_LONGEST_QUOTE = 40
BLOCK_BYTES = 1 << 18
# Any whole number of so many digits is a float64, and so are these powers of ten.
_MOST_DIGITS = 15
_POWERS = 10.0 ** np.arange(_MOST_DIGITS + 1)
_ATOM, _HETATM = (np.frombuffer(name, np.uint8) for name in (b"ATOM", b"HETATM"))

Five = tuple[float, float, float, float, float]


def read_pqr(path: Path) -> Molecule:
    """Every ATOM and HETATM of the file, and the cell if a CRYST1 line states one.

    Raises InputError, with the line's number, if a line cannot be read or a value is not finite; also if there are no
    atoms, or several models, or the file is not text.
    """
    file = PositionalFile(path)
    try:
        data = file.head(file.size)
    finally:
        file.close()
    lines = _Lines(path)
    for block in _blocks(_text_of(path, data)):
        lines.read_block(block)
    values, cell = lines.values, lines.cell
    if len(values) == 0:
        raise InputError(f"{path}: has no ATOM or HETATM line; a PQR file has one for each atom")
    table = np.frombuffer(values).reshape(-1, 5)
    return Molecule(
        coordinates=np.ascontiguousarray(table[:, :3]),
        cell=cell,
        charges=np.ascontiguousarray(table[:, 3]),
        radii=np.ascontiguousarray(table[:, 4]),
    )


def stated_cell(path: Path, data: bytes) -> Array | None:
    """Only the cell, from the content of a PQR file. InputError if its line cannot be read."""
    lines = _Lines(path)
    lines.read(line if _CELL.match(line) else "" for line in _lines(_text_of(path, data)))
    return lines.cell


def _text_of(path: Path, data: bytes) -> bytes:
    """The file's content with line feeds alone. InputError if it is not text."""
    if b"\0" in data:
        raise InputError(f"{path}: holds NUL bytes: is it compressed, in UTF-16 or damaged? Save it as plain text")
    data = data.removeprefix(BOM_UTF8)
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    return data


def _blocks(data: bytes) -> Iterator[bytes]:
    """The content in runs of whole lines."""
    start = 0
    while start < len(data):
        stop = data.find(b"\n", start + BLOCK_BYTES) + 1 or len(data)
        yield data[start:stop]
        start = stop


def _lines(data: bytes) -> Iterator[str]:
    """The lines, one at a time: all together take many times the file's size. Latin-1 decodes every byte; the relevant
    fields are ASCII."""
    return (line.rstrip(b"\n").decode("latin-1") for line in BytesIO(data))


class _Lines:
    """Reads the lines once; only atoms, the cell and ends of models count."""

    def __init__(self, path: Path) -> None:
        self.values = array("d")  # x, y, z, charge and radius of each atom, one after another
        self.cell: Array | None = None
        self._path = path
        self._count = 0  # of lines
        self._ended: tuple[int, str] | None = None

    def read_block(self, block: bytes) -> None:
        """Reads whole lines, at once if they are alike."""
        found = _alike(block) if self._ended is None else None
        if found is None:
            self.read(_lines(block))
            return
        self.values.frombytes(found.tobytes())
        self._count += len(found)

    def read(self, lines: Iterable[str]) -> None:
        """Reads them one by one."""
        values, finite = self.values, math.isfinite
        append = values.extend
        for number, line in enumerate(lines, self._count + 1):
            self._count = number
            if line.startswith(("ATOM", "HETATM")) or _LOOSE_ATOM.match(line):
                if self._ended is not None:
                    raise self._second_model(number)
                five = _by_spaces(line) or _by_spaces(line.rstrip().rpartition(" ")[0])
                five = five or self._by_columns(number, line)
                if not finite(sum(five)):
                    self._refuse_values(number, five)
                append(five)
            elif _CELL.match(line):
                self._note_cell(number, self._cell_of(number, line.lstrip()))
            elif self._ended is None and (_END.match(line) or (values and _MODEL.match(line))):
                self._ended = number, _quoted(line.split()[0])

    def _by_columns(self, number: int, line: str) -> Five:
        cut = [line[start:stop] for start, stop in _COORDINATE_COLUMNS]
        if not all(map(_COORDINATE.fullmatch, cut)):
            raise self._malformed(number, line)
        rest = line[_CHARGE_COLUMN:]
        touching = _TOUCHING.match(rest)
        two = list(touching.groups()) if touching else rest.split()[:2]
        if len(two) < 2 or not all(map(_NUMBER.fullmatch, two)):
            missing = "no charge and radius" if not two else "no radius" if len(two) < 2 else "no number for each"
            raise self._fault(number, f"{missing} after the coordinates (column 55 on); a PQR line ends with both")
        x, y, z, q, r = (float(text) for text in (*cut, *two))
        return x, y, z, q, r

    def _cell_of(self, number: int, line: str) -> Array | None:
        name, *fields = line.split()[:7]
        fields = fields if len(name) == len("CRYST1") else []  # "CRYST1100.000": a length touches it
        columns = ((6, 15), (15, 24), (24, 33), (33, 40), (40, 47), (47, 54))
        for six in (fields, [line[start:stop].strip() for start, stop in columns]):
            if len(six) == 6 and all(map(_NUMBER.fullmatch, six)):
                try:
                    return cell_vectors(np.array(six[:3], np.float64), np.array(six[3:], np.float64))
                except ValueError as exc:
                    raise self._fault(number, f"CRYST1: {exc}; correct the line or remove it") from exc
        raise self._fault(number, "CRYST1 needs three lengths and three angles; correct the line or remove it")

    def _note_cell(self, number: int, cell: Array | None) -> None:
        if cell is None:
            return
        if self.cell is not None and not np.array_equal(cell, self.cell):
            raise self._fault(number, "this CRYST1 differs from an earlier one; keep one of them")
        self.cell = cell

    def _second_model(self, number: int) -> InputError:
        assert self._ended is not None
        line, word = self._ended
        return self._fault(
            number, f"an atom after the {word} of line {line:,}: a second model or file; keep one, or remove that line"
        )

    def _malformed(self, number: int, line: str) -> InputError:
        """The error for a line that can be split neither at its spaces nor by columns."""
        fields = line.split()
        if len(fields) < 10:
            return self._fault(number, f"has {counted(len(fields), 'field')}; {_layout()}")
        for name, field in zip(_NAMES, fields[-5:], strict=True):
            if not _NUMBER.fullmatch(field):
                return self._fault(number, f"'{_quoted(field)}' in place of the {name}; {_layout()}")
        return self._fault(
            number, f"'{_quoted(fields[-6])}' in place of the residue's number, so a field is missing; {_layout()}"
        )

    def _refuse_values(self, number: int, five: Five) -> None:
        for name, value in zip(_NAMES, five, strict=True):
            if not math.isfinite(value):
                raise self._fault(number, f"the {name} is {value}; it must be a finite number")
        raise self._fault(number, "the sum of its numbers overflows; check the line")

    def _fault(self, number: int, what: str) -> InputError:
        return InputError(f"{self._path}:{number}: {what}")


def _alike(block: bytes) -> Array | None:
    """(atoms, 5): the last fields of lines that are all atoms with as many fields, three times as fast as line
    by line. None if some are otherwise: `_by_spaces` takes more, and messages name the line."""
    text = np.frombuffer(block, np.uint8)
    is_blank = (text == ord(" ")) | (text == ord("\n"))
    if ((text < ord("!")) & ~is_blank).any() or (text > ord("~")).any():
        return None
    starts = np.concatenate([[0], np.flatnonzero(text[:-1] == ord("\n")) + 1])
    fields = np.flatnonzero(~is_blank & np.concatenate([[True], is_blank[:-1]]))
    count = len(fields) // len(starts)
    # With a chain or without: ATOM serial name residue [chain] number x y z charge radius.
    if count not in (10, 11) or len(fields) != count * len(starts):
        return None
    begins = fields.reshape(-1, count)
    ends = np.flatnonzero(~is_blank & np.concatenate([is_blank[1:], [True]])).reshape(-1, count) + 1
    in_their_lines = (begins[:, 0] == starts).all() and (ends[:-1, -1] < starts[1:]).all()
    if not in_their_lines or not _begin_atoms(text, starts):
        return None
    if not _are_digits(text, begins[:, -6], ends[:, -6]):
        return None
    return _decimals(text, begins[:, -5:], ends[:, -5:])


def _are_digits(text: NDArray[np.uint8], starts: NDArray[np.intp], ends: NDArray[np.intp]) -> bool:
    """Whether the fields hold nothing else."""
    others = np.concatenate([[0], np.cumsum((text < ord("0")) | (text > ord("9")), dtype=np.int32)])
    return bool((others[ends] == others[starts]).all())


def _decimals(text: NDArray[np.uint8], starts: NDArray[np.intp], ends: NDArray[np.intp]) -> Array | None:
    """The numbers -1.25 of these fields; None if one is written otherwise or has more digits than a float64.

    A quotient of a whole number below 2⁵³ and a power of ten below 10²³ has the bits that `float` finds.
    """
    lengths = ends - starts
    longest = int(lengths.max())
    if longest > _MOST_DIGITS + 2:
        return None
    whole, decimals, digits = (np.zeros(starts.shape, np.int64) for _ in range(3))
    has_point = np.zeros(starts.shape, np.bool_)
    for place in range(longest):
        inside = place < lengths
        byte = text[np.minimum(starts + place, len(text) - 1)]
        digit = byte - np.uint8(ord("0"))  # wraps around below
        is_digit, is_point = (digit < 10) & inside, (byte == ord(".")) & inside
        is_sign = (byte == ord("-")) & (place == 0)
        if not (is_digit | (is_point & ~has_point) | is_sign | ~inside).all():
            return None
        whole = np.where(is_digit, 10 * whole + digit, whole)
        digits += is_digit
        decimals += is_digit & has_point
        has_point |= is_point
    if (digits == 0).any() or (digits > _MOST_DIGITS).any():
        return None
    numbers = whole / _POWERS[decimals]
    return np.where(text[starts] == ord("-"), -numbers, numbers)


def _begin_atoms(text: NDArray[np.uint8], starts: NDArray[np.intp]) -> bool:
    """Whether each line begins with ATOM or HETATM; lines have ten fields, so that none ends before."""
    first = text[starts[:, None] + np.arange(6)]
    return bool(((first[:, :4] == _ATOM).all(axis=1) | (first == _HETATM).all(axis=1)).all())


def _by_spaces(line: str) -> Five | None:
    """The last five fields, if they are numbers that follow a residue's number."""
    try:
        before, residue, x, y, z, charge, radius = fields = line.rsplit(None, 6)
        found = float(x), float(y), float(z), float(charge), float(radius)
    except ValueError:
        return None
    # A residue's name or a chain in its place means that a field is missing. float() takes 1_000 for a thousand.
    names = before.split()
    if not (residue.isdigit() or _RESIDUE.fullmatch(residue)) or len(names) < 3:
        return None
    if (
        len(names) > 5 and names[-1].isdigit()
    ):  # this is the residue's number, and `residue` is x: an extra column follows
        return None
    return None if "_" in line and any("_" in field for field in fields[2:]) else found


def _layout() -> str:
    return "an atom's line is: ATOM serial name residue [chain] number x y z charge radius"


def _quoted(field: str) -> str:
    text = field.encode("ascii", "backslashreplace").decode("ascii")
    return text if len(text) <= _LONGEST_QUOTE else text[:_LONGEST_QUOTE] + "…"
