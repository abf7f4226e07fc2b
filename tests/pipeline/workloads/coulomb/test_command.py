"""`millrace run coulomb` as its user meets it: results, plans, and one clear line for every mistake."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import format_bytes
from pipeline.workloads.coulomb.parameters import CoulombParameters
from tests import commands
from tests.images import names_in, read_image
from tests.pipeline.formats.charges.real_molecules import real_molecule
from tests.pipeline.workloads.coulomb.coulomb_jobs import BOX, molecule, write_npz, write_pqr, write_trajectory


@pytest.fixture
def folder(tmp_path, monkeypatch, own_settings):
    monkeypatch.chdir(tmp_path)
    write_pqr(tmp_path / "in.pqr", molecule())
    return tmp_path


@pytest.fixture
def coulomb(millrace):
    """`millrace run coulomb` with these arguments; returns exit code, stdout and stderr."""
    return lambda *arguments: millrace("run", "coulomb", *arguments)


def test_a_map_a_receipt_and_a_preview(folder, coulomb):
    code, out, err = coulomb("in.pqr", "out.dx", "--spacing", "1", "--preview", "small.png", "--device", "cpu")
    assert (code, err) == (0, "")
    assert "out.dx: 1 chunk on cpu" in out
    assert re.search(r"; \d+ points verified, worst error \S+ of the sum of the terms' sizes \(tolerated: ", out)
    receipt = json.loads((folder / "out.dx.receipt.json").read_text())
    assert receipt["image"]["units"] == "kT/e at 298.15 K"
    assert len(receipt["input"]["sha256"]) == 64
    assert set(receipt["stages"]) == {"read", "upload", "compute", "download", "write"}
    assert read_image(folder / "small.png").shape[2] == 3
    assert names_in(folder) == ["in.pqr", "out.dx", "out.dx.receipt.json", "small.png"]


def test_bits_do_not_depend_on_threads_or_memory(folder, coulomb):
    common = ("--spacing", "0.2,0.3,0.25", "--quiet", "--device", "cpu")
    for name, options in (
        ("a.npy", ("--threads", 1)),
        ("b.npy", ("--threads", 3, "--memory", "1MiB")),
        ("c.npy", ("--chunk-bytes", "200KB", "--overlap", 1)),
    ):
        assert coulomb("in.pqr", name, *common, *options) == (0, "", "")
    first, *others = [(folder / f"{name}.npy").read_bytes() for name in "abc"]
    assert others == [first, first]


@pytest.mark.parametrize("frames", [1, 2000])
def test_a_chunk_of_half_an_hour_does_not_keep_a_signal_waiting(folder, frames):
    """Of a million atoms, or of many frames: what is computed is left between two of its parts."""
    rng = np.random.default_rng(4)
    if frames == 1:
        atoms = np.column_stack((rng.random((1_000_000, 3)) * 99, rng.choice((-1.0, 1.0), 1_000_000)))
        np.save("long.npy", atoms)
        job = ("long.npy", "out.npy", "--scheme", "direct", "--origin", "0,0,0", "--shape", "160,160,160")
    else:
        write_trajectory(folder, frames)
        job = ("a.pqr", "out.npy", "--trajectory", "a.dcd", "--spacing", "0.1", "--chunk-bytes", "100MiB")
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with commands.Popen(
        [sys.executable, "-m", "pipeline", "run", "coulomb", *job, "--device", "cpu", "--quiet"],
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        while not list(folder.glob("out.npy.partial*")):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        time.sleep(2)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (143, "millrace: stopped by SIGTERM; nothing was published\n")
    used_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert used_s < 60  # a part is two seconds of a processor, a slow one's five; the whole job, an hour
    assert not list(folder.glob("out.npy*"))


def test_dry_run(folder, coulomb):
    code, out, _ = coulomb("in.pqr", "out.mrc", "--dry-run", "--device", "cpu", "--scheme", "direct")
    assert code == 0
    for words in ("scheme direct", "(XYZ), float32", "atoms 60", "spacing_angstrom 0.5,0.5,0.5", "units kT/e at 298"):
        assert words in out
    code, out, _ = coulomb("in.pqr", "out.mrc", "--dry-run", "--json")
    assert json.loads(out)["image"]["frames"] == 1
    for name in ("out.dx", "out.cube"):  # text, whose size is known
        written = json.loads(coulomb("in.pqr", name, "--dry-run", "--json")[1])["image"]["file_bytes"]
        assert f"writes       {format_bytes(written)}\n" in coulomb("in.pqr", name, "--dry-run")[1]
        assert coulomb("in.pqr", name)[0] == 0
        assert written == (folder / name).stat().st_size
        (folder / name).unlink()
        (folder / f"{name}.receipt.json").unlink()
    assert "file_bytes" not in json.loads(coulomb("in.pqr", "out.dx.gz", "--dry-run", "--json")[1])["image"]
    assert names_in(folder) == ["in.pqr"]


def test_no_charge_is_not_minus_nought(folder, coulomb):
    np.save("pair.npy", [[0, 0, 0, -0.1], [1, 0, 0, -0.2], [0, 2, 0, 0.3]])
    assert "charge_e 0.0," in coulomb("pair.npy", "out.npy", "--dry-run", "--device", "cpu")[1]


def test_help_names_every_option(folder, coulomb):
    code, out, _ = coulomb("--help")
    assert code == 0
    for name in CoulombParameters.model_fields:
        assert f"--{name.replace('_', '-')} " in out
    assert "[default: 0.5]" in out


SHORT = "ATOM 1 CA MET A 1 1.0 2.0 3.0 0.5"
GOOD = "ATOM 1 CA MET A 1 1.0 2.0 3.0 0.5 1.5"
TRAJECTORY = ("--trajectory", "a.dcd", "--cell", "none")

_NO_ROOM = "are free in {folder}: choose a larger --spacing"
MISTAKES = [
    (("none.pqr", "out.dx"), "none.pqr: no such file"),
    (("short.pqr", "out.dx"), "short.pqr:2: "),
    (("words.pqr", "out.dx"), "words.pqr:1: "),
    (("nan.pqr", "out.dx"), "nan.pqr:2: the x coordinate is nan"),
    (("empty.pqr", "out.dx"), "empty.pqr"),
    (("neutral.pqr", "out.dx"), "no charge of 1 atom differs from 0"),
    (("nan.npy", "out.dx"), "nan.npy: row 1: the position is not finite"),
    (("far.npy", "out.dx"), "far.npy: an atom lies 1e+07 Å from the origin"),
    (("hot.npy", "out.dx"), "hot.npy: a charge passes 1e+12 e"),
    (("cold.npy", "out.dx"), "cold.npy: its largest charge is 1.6e-19 e; charges are counted in elementary charges"),
    (("three.npy", "out.dx"), "three.npy: has the shape (5, 3)"),
    (("in.pqr", "out.dx", "--select", "resname XYZ"), "--select 'resname XYZ': chooses none of 60 atoms"),
    (("in.pqr", "out.dx", "--select", "((("), "--select '((('"),
    (("in.pqr", "out.dx", "--frames", "1"), "--frames 1: chooses none; in.pqr has 1, "),
    (("in.pqr", "out.dx", "--frames", "1-2"), "--frames: '1-2' is no range: write start:stop:step"),
    (("a.pqr", "out.dx", *TRAJECTORY, "--frames", "4"), "has 3, numbered 0 to 2"),
    (("a.pqr", "out.dx", *TRAJECTORY, "--combine", "none"), "--combine none: 3 frames are chosen"),
    (
        ("a.pqr", "out.dx", *TRAJECTORY, "--frames", "1", "--combine", "std"),
        "--combine std: one frame has no deviation",
    ),
    (("in.pqr", "out.dx", "--combine", "sum"), "'sum' is not one of"),
    (("in.pqr", "out.dx", "--trajectory", "none.dcd"), "none.dcd: no such file"),
    (("a.pqr", "a.dcd", "--trajectory", "a.dcd"), "a.dcd: unsupported map format .dcd"),
    (("a.pqr", "a.dcd.npy", "--trajectory", "a.dcd.npy"), "a.dcd.npy is the input itself"),
    (("in.pqr", "in.pqr"), "in.pqr: unsupported map format .pqr"),
    (("charges.npy", "charges.npy"), "charges.npy is the input itself"),
    (("in.pqr", "out"), "out: the name has no suffix; end it with .dx"),
    (("in.pqr", "out.png"), "out.png: unsupported map format .png"),
    (("in.pqr", "nowhere/out.dx"), "nowhere does not exist"),
    (("in.pqr", "out.dx", "--scheme", "pme"), "'pme' is not one of"),
    (("in.pqr", "out.dx", "--cutoff", "0"), "--cutoff"),
    (("in.pqr", "out.dx", "--cutoff", "-3"), "--cutoff"),
    (("in.pqr", "out.dx", "--cutoff", "nan"), "--cutoff"),
    (("in.pqr", "out.dx", "--cutoff", "far"), "--cutoff"),
    (("in.pqr", "out.dx", "--scheme", "direct", "--cutoff", "9"), "--scheme direct has no cutoff"),
    (("in.pqr", "out.dx", "--scheme", "direct", "--cell", "40,40,40"), "--scheme direct has no images"),
    (("in.pqr", "out.dx", "--cell", "20,20"), "--cell: file, none, or 3 lengths"),
    (("in.pqr", "out.dx", "--cell", "1,1,1"), "--cell: '1,1,1' stands for no cell"),
    (("in.pqr", "out.dx", "--cell", "20,20,20,10,10,90"), "--cell: "),
    (("in.pqr", "out.dx", "--cell", "20,30,40"), "--cutoff: in.pqr: cutoff 12 Å passes half the cell's shortest width"),
    (("in.pqr", "out.dx", "--cell", "9,9,1e-3"), "in.pqr: a cell of 0.001 Å between opposite faces is too narrow"),
    (
        ("in.pqr", "out.dx", "--cell", "0.2,0.2,0.2", "--cutoff", "0.1", "--spacing", "5"),
        "periodic cells: at most 1048576; check the cell's lengths, choose a smaller grid, or --cell none",
    ),
    (("cell.npz", "out.dx"), "--cutoff: cell.npz: cutoff 12 Å passes half the cell's shortest width (13 Å"),
    (
        ("cell.npz", "out.dx", "--cutoff", "3", "--exclude-radius", "8"),
        "--exclude-radius: cell.npz: exclude radius 8 Å",
    ),
    (("in.pqr", "out.dx", "--dielectric", "0"), "--dielectric: a number from 0.001 to 1e+12"),
    (("in.pqr", "out.dx", "--dielectric", "9e-4"), "--dielectric: a number from 0.001"),
    (("in.pqr", "out.dx", "--dielectric", "4rr"), "--dielectric: a number from 0.001"),
    (("in.pqr", "out.dx", "--dielectric", "inf"), "--dielectric: a number from 0.001"),
    (("in.pqr", "out.dx", "--exclude-radius", "-1"), "--exclude-radius"),
    (("in.pqr", "out.dx", "--spacing", "0"), "--spacing: one length or three, 1e-6"),
    (("in.pqr", "out.dx", "--spacing", "1,2"), "--spacing: one length or three, 1e-6"),
    (("in.pqr", "out.dx", "--spacing", "nan"), "--spacing: one length or three, 1e-6"),
    (("in.pqr", "out.dx", "--spacing", "a"), "--spacing"),
    (("in.pqr", "out.dx", "--spacing", "0.0005"), _NO_ROOM),
    (("in.pqr", "out.dx", "--spacing", "1e-9"), "--spacing: one length or three, 1e-6"),
    (("in.pqr", "out.dx", "--spacing", "1e-6", "--padding", "9999"), "points, which takes "),
    (("in.pqr", "out.dx", "--spacing", "1e-6,1,1", "--padding", "100"), "--spacing: grid shape"),
    (("in.pqr", "out.dx", "--padding", "-1"), "--padding"),
    (("in.pqr", "out.dx", "--origin", "1,2,3"), "--origin and --shape go together"),
    (("in.pqr", "out.dx", "--shape", "5,5,5"), "--origin and --shape go together"),
    (("in.pqr", "out.dx", "--origin", "1,2,3", "--shape", "5,5,5", "--padding", "1"), "--padding is for a grid around"),
    (("in.pqr", "out.dx", "--origin", "1,2", "--shape", "5,5,5"), "--origin: three numbers of at most 1e+06 Å"),
    (("in.pqr", "out.dx", "--origin", "1,2,inf", "--shape", "5,5,5"), "--origin: three numbers of at most"),
    (("in.pqr", "out.dx", "--origin", "1,2,3", "--shape", "5,5,0"), "--shape: three numbers of points, 1 or more"),
    (("in.pqr", "out.dx", "--origin", "1,2,3", "--shape", "5,5,5.5"), "--shape"),
    (("in.pqr", "out.dx", "--origin", "1,2,3", "--shape", "100000,100000,100000"), _NO_ROOM),
    (("in.pqr", "out.dx", "--trajectory", ""), "--trajectory: the name is empty"),
    (("in.pqr", "out.dx", "--units", "eV"), "'eV' is not one of"),
    (("in.pqr", "out.dx", "--units", "V", "--temperature", "300"), "--temperature matters to --units kT/e alone"),
    (("in.pqr", "out.dx", "--temperature", "0"), "--temperature"),
    (("in.pqr", "out.dx", "--temperature", "1e-300"), "--temperature"),
    (("in.pqr", "out.dx", "--dielectric", "1e-20r"), "--dielectric: a number from 0.001"),
    (("in.pqr", "out.dx", "--origin", "1,2,1e300", "--shape", "5,5,5"), "--origin: three numbers of at most"),
    (("in.pqr", "out.dx", "--preview", "out.jpg"), "--preview out.jpg: a preview is a PNG"),
    (("in.pqr", "out.dx", "--bogus"), "No such option"),
    (("one.cif", "out.dx"), "one.cif: MMCIFParser: To read a Topology from an mmCIF file, please install gemmi\n"),
    (("in.pqr",), "Missing argument 'OUTPUT'"),
    (("in.pqr", "out.dx", "--chunk-bytes", "1GiB"), "--chunk-bytes 1.0 GiB: "),
]


@pytest.fixture
def mistaken(folder):
    """Every file that the mistakes name; returns what must still be there afterwards."""
    Path("short.pqr").write_text(f"{GOOD}\n{SHORT}\n")
    Path("words.pqr").write_text("ATOM 1 CA MET A one two three\n")
    Path("nan.pqr").write_text(f"{GOOD}\nATOM 2 CA MET A 2 nan 2.0 3.0 0.5 1.5\n")
    Path("empty.pqr").write_text("REMARK nothing\n")
    Path("one.cif").write_text("data_one\n")
    Path("neutral.pqr").write_text("ATOM 1 CA MET A 1 1.0 2.0 3.0 0.0 1.5\n")
    np.save("nan.npy", [[np.nan, 0, 0, 1]])
    np.save("far.npy", [[1e7, 0, 0, 1]])
    np.save("hot.npy", [[0, 0, 0, 1e13]])
    np.save("cold.npy", [[0, 0, 0, -1.6e-19]])
    np.save("three.npy", np.zeros((5, 3)))
    np.save("charges.npy", np.ones((5, 4)))
    write_npz(Path("cell.npz"), molecule(), BOX)
    write_trajectory(folder, 3)
    Path("a.dcd.npy").write_bytes(Path("a.dcd").read_bytes())
    Path("out.dx").write_text("an older result")
    return {path: path.read_bytes() for path in Path().iterdir()}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(case[0])[:70] for case in MISTAKES])
def test_a_mistake_gets_one_line_and_exit_code_2(mistaken, coulomb, arguments, message):
    code, out, err = coulomb(*arguments)
    assert err.startswith("millrace: ")
    assert err.count("\n") == 1
    assert message.replace("{folder}", str(Path.cwd())) in err
    assert (code, out) == (2, "")
    assert {path: path.read_bytes() for path in Path().iterdir()} == mistaken


def test_an_enormous_grid_says_what_it_would_take(folder, coulomb):
    code, _, err = coulomb("in.pqr", "out.cube", "--spacing", "0.001")
    assert code == 2
    assert "points takes" in err
    assert "TiB) as cube" in err


def test_a_real_trajectory_by_its_command(folder, coulomb):
    topology, trajectory = real_molecule("adk_oplsaa.tpr"), real_molecule("adk_oplsaa.xtc")
    arguments = ("--trajectory", trajectory, "--select", "protein", "--frames", "0:10:5", "--spacing", "4", "--json")
    code, out, err = coulomb(topology, "out.mrc", *arguments)
    assert (code, err) == (0, "")
    receipt = json.loads(out)
    assert (receipt["image"]["atoms"], receipt["image"]["frames"]) == (3341, 2)
