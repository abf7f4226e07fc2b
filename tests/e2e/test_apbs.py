"""Potential maps against APBS, an independent program: units, orientation and origin."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest

from tests import commands
from tests.commands import COMMAND

POINTS, SPACING, CENTRE = (97, 65, 65), (0.5, 0.4, 0.45), (1.0, 2.0, 3.0)
ATOMS = 14
FAR_ANGSTROM = 4.0  # nearer, APBS's spreading of charges over its grid shows
TOLERANCE = 3e-3

INPUT = f"""read
  mol pqr molecule.pqr
end
elec
  mg-manual
  dime {" ".join(map(str, POINTS))}
  grid {" ".join(map(str, SPACING))}
  gcent {" ".join(map(str, CENTRE))}
  mol 1
  lpbe
  bcfl mdh
  pdie 1.0
  sdie 1.0
  chgm spl2
  srfm mol
  srad 1.4
  swin 0.3
  sdens 10.0
  temp 298.15
  calcenergy no
  calcforce no
  write pot dx apbs
end
quit
"""


def write_molecule(path):
    """A cloud of charges that is unlike any mirror image of itself; returns where they are, as the file has it."""
    rng = np.random.default_rng(7)
    places = (rng.uniform(-1, 1, (ATOMS, 3)) * [8, 3, 2] + CENTRE).round(3)
    charges = rng.uniform(-1, 1, ATOMS).round(3)
    lines = [
        f"ATOM  {number:5d}  C   RES A{number:4d}    {x:8.3f}{y:8.3f}{z:8.3f} {q:7.4f} 1.5000\n"
        for number, ((x, y, z), q) in enumerate(zip(places, charges, strict=True), 1)
    ]
    path.write_text("".join(lines))
    return places


def test_the_potential_in_vacuum_is_that_of_apbs(tmp_path):
    if shutil.which("apbs") is None:
        pytest.skip("APBS is not installed (Debian: apt-get install apbs)")
    from gridData import Grid

    places = write_molecule(tmp_path / "molecule.pqr")
    (tmp_path / "apbs.in").write_text(INPUT)
    subprocess.run(["apbs", "apbs.in"], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    origin = [c - (n - 1) / 2 * h for c, n, h in zip(CENTRE, POINTS, SPACING, strict=True)]
    grid = [f"--{name}={','.join(map(str, values))}" for name, values in
            (("origin", origin), ("shape", POINTS), ("spacing", SPACING))]  # fmt: skip
    job = ["run", "coulomb", "molecule.pqr", "ours.dx", "--scheme", "direct", "--quiet", "--device", "cpu"]
    commands.run([*COMMAND, *job, *grid], cwd=tmp_path, check=True, timeout=120)
    (theirs_path,) = tmp_path.glob("apbs*.dx")
    theirs, ours = Grid(str(theirs_path)), Grid(str(tmp_path / "ours.dx"))
    np.testing.assert_allclose(ours.origin, theirs.origin, atol=1e-5)
    np.testing.assert_allclose(ours.delta, theirs.delta, atol=1e-6)
    axes = [start + step * np.arange(count) for start, step, count in zip(origin, SPACING, POINTS, strict=True)]
    points = np.stack(np.meshgrid(*axes, indexing="ij"), -1)
    nearest = np.min([np.linalg.norm(points - place, axis=-1) for place in places], axis=0)
    far = nearest > FAR_ANGSTROM
    assert far.mean() > 0.5
    error = np.linalg.norm((ours.grid - theirs.grid)[far]) / np.linalg.norm(theirs.grid[far])
    assert error < TOLERANCE
    mirrored = np.linalg.norm((ours.grid[::-1] - theirs.grid)[far]) / np.linalg.norm(theirs.grid[far])
    assert mirrored > 10 * TOLERANCE
