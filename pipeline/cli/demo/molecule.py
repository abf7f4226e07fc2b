"""A molecule: the backbones of an ideal double helix of B-DNA with its counter-ions, as PQR."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from pipeline.storage.partial import PartialFile, behind_link

# B-DNA: a turn of 36 degrees and a rise of 3.38 Å from one pair of bases to the next.
TURN_DEGREES = 36.0
RISE_ANGSTROM = 3.38
# Between the strands: makes one groove narrow and one wide.
GROOVE_DEGREES = 155.0
# A nucleotide's backbone: name, distance from the axis in Å, turn in degrees, height in Å, charge in e, radius in Å.
# Charges are rounded from common force fields so that a nucleotide carries -1 e, and is neutral with its sodium ion.
SITES = (
    ("P", 8.9, 0.0, 0.0, 1.17, 1.9),
    ("O1P", 9.9, 4.0, 0.9, -0.78, 1.6),
    ("O2P", 9.6, -7.0, -0.9, -0.78, 1.6),
    ("O5'", 7.8, 9.0, 0.6, -0.50, 1.65),
    ("C5'", 7.7, 18.0, 0.9, 0.19, 1.9),
    ("C1'", 5.9, 25.0, 1.4, 0.22, 1.9),
    ("O3'", 8.6, 33.0, 2.6, -0.52, 1.65),
    ("NA", 12.5, -2.0, 0.0, 1.00, 1.37),
)


def make_helix(path: Path, base_pairs: int) -> None:
    """Write the helix, its axis along z and its middle at the origin; lengths in Å, charges in e."""
    text = "".join(_lines(base_pairs)).encode()
    file = PartialFile(behind_link(path), len(text))
    try:
        file.write_at(0, text)
        file.publish()
    finally:
        file.discard()


def _lines(base_pairs: int) -> Iterator[str]:
    serial = 0
    for strand, (offset, direction) in enumerate(((0.0, 1), (GROOVE_DEGREES, -1))):
        for pair in range(base_pairs):
            middle = (pair - (base_pairs - 1) / 2) * RISE_ANGSTROM
            for name, distance, turn, height, charge, radius in SITES:
                angle = math.radians(offset + TURN_DEGREES * pair + direction * turn)
                x, y, z = distance * math.cos(angle), distance * math.sin(angle), middle + direction * height
                serial += 1
                residue = strand * base_pairs + pair + 1
                yield (
                    f"ATOM {serial:6d} {name:<4} {'NA' if name == 'NA' else 'DN':<3} {residue:5d} "
                    f"{x:10.3f} {y:10.3f} {z:10.3f} {charge:7.3f} {radius:6.3f}\n"
                )
    yield "END\n"
