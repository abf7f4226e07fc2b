"""Many files in one run, as their user meets it: the same bytes as one run for each, and one line for every mistake."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import tifffile

from pipeline.cli.many import _result_line
from pipeline.engine import many
from tests import commands
from tests.commands import COMMAND
from tests.images import names_in, read_image, version, write_image
from tests.pipeline.workloads.coulomb.coulomb_jobs import molecule, write_pqr

CPU = ("--device", "cpu")
KILLER = """
import os, signal

def double(block):
    if os.path.exists("armed") and (block == 777).any():
        os.kill(os.getpid(), signal.SIGKILL)
    return block * 2

def picky(block):
    if (block == 777).any():
        raise ValueError("seven")
    return block
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, own_settings):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "in").mkdir()
    return tmp_path


def images(folder, count, shape=(37, 41), dtype=np.uint16, suffix=".tif", first=0):
    """So many images in the folder `in`, of one kind."""
    random = np.random.default_rng(first)
    for number in range(first, first + count):
        samples = (random.random(shape) * 60_000).astype(dtype)
        write_image(folder / "in" / f"i{number}{suffix}", samples, "YXS" if len(shape) == 3 else "YX")


def table(folder, name="out"):
    """The newest run's rows, by the input's name: the result's name and the error."""
    run = json.loads((folder / name / many.TABLE).read_text())["runs"][-1]
    return {os.path.basename(row[0]): (row[3], row[4]) for row in run["files"]}  # noqa: PTH119


@pytest.mark.parametrize(
    "command",
    [
        ("smooth", "--size", "5"),
        ("smooth", "--filter", "gaussian", "--sigma", "2,1", "--axes", "X,Y", "--mode", "wrap"),
        ("median", "--size", "3,5"),
        ("maximum", "--footprint", "disk", "--radius", "2"),
        ("map", "--function", "own:double", "--halo", "1"),
        ("smooth", "--size", "3", "--compression", "deflate"),
    ],
    ids=lambda command: " ".join(command[:3]),
)
def test_gives_the_same_bytes_as_one_run_for_each(folder, millrace, command):
    (folder / "own.py").write_text(KILLER)
    images(folder, 3)
    images(folder, 1, shape=(64, 23, 3), dtype=np.uint8, first=10)
    images(folder, 1, shape=(31, 29), dtype=np.float32, first=20)
    tifffile.imwrite(folder / "in/big-endian.tif", np.arange(37 * 41, dtype=">u2").reshape(37, 41), byteorder=">")
    tifffile.imwrite(folder / "in/packed.tif", np.arange(37 * 41, dtype=np.uint16).reshape(37, 41), compression="zlib")
    tifffile.imwrite(
        folder / "in/hyper.tif", np.ones((3, 2, 17, 19), np.uint16), imagej=True, metadata={"axes": "ZCYX"}
    )
    if "--compression" not in command:
        images(folder, 1, suffix=".npy", first=30)
        images(folder, 1, suffix=".pgm", first=40)
        write_image(folder / "in/z.zarr", np.ones((20, 30), np.uint16), "YX")
    code, out, err = millrace("run", command[0], "in", "out", *command[1:], *CPU)
    assert (code, err) == (0, "")
    inputs = names_in(folder / "in")
    assert f"{len(inputs)} files on cpu" in out
    made = {name for name in names_in(folder / "out") if not name.endswith(".receipt.json")}
    assert made == {*inputs, many.TABLE}
    for name in inputs:
        assert millrace("run", command[0], f"in/{name}", f"one-{name}", *command[1:], *CPU)[0] == 0
        one, other = folder / f"one-{name}", folder / "out" / name
        np.testing.assert_array_equal(read_image(other), read_image(one))
        if name != "hyper.tif" and one.is_file():  # its description holds the name
            assert other.read_bytes() == one.read_bytes()
    assert table(folder) == {name: (name, None) for name in inputs}


def test_the_result_line_counts_the_samples_checked_in_files_that_run_alone(folder, millrace):
    for number in range(2):
        write_image(folder / f"in/z{number}.zarr", np.ones((20, 30), np.uint16), "YX")
    images(folder, 2)
    (folder / "out").mkdir()
    older = {"finished": "2020-01-01T00:00:00+00:00", "audit": {"samples": 10**6}}
    (folder / "out/i0.tif.receipt.json").write_text(json.dumps(older))
    code, out, _ = millrace("run", "smooth", "in", "out", "--size", "3", *CPU)
    run = json.loads((folder / "out" / many.TABLE).read_text())["runs"][-1]
    alone = [json.loads((folder / f"out/z{number}.zarr.receipt.json").read_text()) for number in range(2)]
    assert [len(run["jobs"]), code] == [1, 0]
    assert f"{sum(job['audit']['samples'] for job in (*run['jobs'], *alone)):,} samples checked" in out


@pytest.mark.parametrize(
    ("done", "seconds", "said"),
    [(1, 1.02, "1 file on cpu in 1.02 s (1 file/s)"), (1, 4, "(0.2 files/s)"), (3, 2, "(1.5 files/s)"),
     (2, 1, "(2 files/s)"), (9_950, 1, "(9,950 files/s)")],
)  # fmt: skip
def test_the_rate_of_slow_runs_is_not_rounded_to_none(tmp_path, done, seconds, said):
    receipt = {"output": tmp_path, "device": {"name": "cpu"}, "wall_seconds": seconds, "published": done, "skipped": 0}
    assert said in _result_line({**receipt, "failed": 0, "jobs": [], "files": []})


def test_patterns_and_several_arguments_name_files_once(folder, millrace):
    images(folder, 3)
    (folder / "in/notes.txt").write_text("no image")
    code, _, err = millrace(
        "run", "smooth", "in/i*.tif", "in/i1.tif", "in", "out", "--output", "{index}-{stem}-s{suffix}", *CPU
    )
    assert (code, err) == (0, "")
    assert names_in(folder / "out") == ["0-i0-s.tif", "1-i1-s.tif", "2-i2-s.tif", many.TABLE]


def test_other_formats_by_the_names_of_the_results(folder, millrace):
    images(folder, 3)
    assert millrace("run", "smooth", "in", "out", "--output", "{stem}.npy", "--size", "1", *CPU)[0] == 0
    for number in range(3):
        np.testing.assert_array_equal(
            read_image(folder / f"out/i{number}.npy"), read_image(folder / f"in/i{number}.tif")
        )


def test_results_may_lie_beside_their_inputs_and_other_files_stay(folder, millrace):
    images(folder, 2)
    (folder / "in/i0-s.tif").write_bytes(b"older")
    (folder / "in/i0-s.tif").chmod(0o600)
    (folder / "in/keep.txt").write_text("mine")
    assert millrace("run", "smooth", "in/i[01].tif", "in", "--output", "{stem}-s{suffix}", *CPU)[0] == 0
    assert names_in(folder / "in") == ["i0-s.tif", "i0.tif", "i1-s.tif", "i1.tif", "keep.txt", many.TABLE]
    assert (folder / "in/i0-s.tif").stat().st_mode & 0o777 == 0o600
    assert (folder / "in/keep.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["out/", "out"])
def test_one_file_into_a_folder(folder, millrace, name):
    """As by a pattern that the shell expands to one file."""
    images(folder, 1)
    if not name.endswith("/"):
        (folder / name).mkdir()
    assert millrace("run", "smooth", "in/i0.tif", name, "--size", "3", *CPU)[0] == 0
    assert names_in(folder / "out") == ["i0.tif", many.TABLE]
    code, _, err = millrace("run", "smooth", "in/i0.tif", "missing", "--size", "3", *CPU)
    assert (code, "missing: the name has no suffix" in err) == (2, True)
    assert millrace("run", "smooth", "in/i0.tif", "z.zarr/", "--size", "3", *CPU)[0] == 0
    assert (folder / "z.zarr/zarr.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("in/*.png", "out"), "in/*.png: matches no file"),
        (("empty", "out"), "empty: holds no image"),
        (("in", "file"), "in: is a folder; name a folder for the results, not the file file"),
        (("in/*.tif", "new.tif"), "several inputs; name a folder for the results, not the file new.tif"),
        (("in/i0.tif", "new.tif", "--output", "{stem}.tif"), "--output belongs to several inputs; name a folder"),
        (("in", "in"), "in/i0.tif is an input itself: give --output"),
        (("in", "out", "--output", "same.tif"), "in/i0.tif and in/i1.tif would both become out/same.tif"),
        (("in", "out", "--output", "{stem}{date}"), "--output {stem}{date}: {date} is none of {stem}"),
        (("in", "out", "--output", "{stem"), "--output {stem: close or remove the brace"),
        (("in", "out", "--output", "../{name}"), "--output ../{name}: must name a file in OUTPUT"),
        (("in", "out", "--output", "{stem}.bmp"), "unsupported image format .bmp"),
        (("in/*0.tif", "in/i1.tif", "there"), "there/i0.tif: is not a regular file and would be replaced"),
        (("in", "out", "--preview", "p.png"), "--preview: belongs to one input"),
        (("in", "out", "--checksum"), "--checksum: belongs to one input"),
        (("in", "out", "--sigma", "1"), "--sigma belongs to --filter gaussian"),
        (("in", "out", "--size", "3,3,3"), "in/i0.tif and 1 other file of its kind"),
        (("in/i0.tif", "in/i1.tif", "out/deep/x", "--scheduler", "x"), "--scheduler"),
    ],
)
def test_every_mistake_is_one_line_and_leaves_nothing(folder, millrace, arguments, said):
    images(folder, 2)
    (folder / "file").write_text("mine")
    (folder / "empty").mkdir()
    (folder / "there/i0.tif").mkdir(parents=True)
    code, out, err = millrace("run", "smooth", *arguments, *CPU)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert [name for name in names_in(folder) if name != "out"] == ["empty", "file", "in", "there"]
    assert not (folder / "out").exists() or not [*(folder / "out").glob("*")]


def test_damaged_files_do_not_stop_the_others(folder, millrace):
    images(folder, 6)
    (folder / "in/i1.tif").write_bytes((folder / "in/i1.tif").read_bytes()[:-7])
    (folder / "in/i2.tif").write_text("not a TIFF at all")
    tifffile.imwrite(folder / "in/p0.tif", np.arange(9000, dtype=np.uint16).reshape(90, 100), compression="zlib")
    tifffile.imwrite(folder / "in/p1.tif", np.arange(9000, dtype=np.uint16).reshape(90, 100), compression="zlib")
    packed = bytearray((folder / "in/p1.tif").read_bytes())
    with tifffile.TiffFile(folder / "in/p1.tif") as file:
        start = file.pages[0].dataoffsets[0]
    packed[start + 4 : start + 40] = bytes(36)
    (folder / "in/p1.tif").write_bytes(packed)
    os.mkfifo(folder / "in/i9.tif")
    code, out, err = millrace("run", "smooth", "in", "in/absent.tif", "out", "--size", "3", *CPU)
    assert code == many_exit()
    assert "6 files on cpu" not in out
    assert "5 failed" in out
    found = table(folder)
    bad = ["absent.tif", "i1.tif", "i2.tif", "i9.tif", "p1.tif"]
    assert sorted(name for name, (_, error) in found.items() if error) == bad
    assert err.count("\n") == len(bad)
    for name in bad:
        assert f"in/{name}" in found[name][1]
        assert f"in/{name}" in err
    assert names_in(folder / "out") == ["i0.tif", "i3.tif", "i4.tif", "i5.tif", many.TABLE, "p0.tif"]


def many_exit():
    from pipeline.cli.many import SOME_FAILED

    return SOME_FAILED


def test_a_file_that_cannot_be_computed_stops_no_other(folder, millrace):
    images(folder, 5, dtype=np.float32)
    samples = read_image(folder / "in/i2.tif")
    samples[3, 4] = np.nan
    write_image(folder / "in/i2.tif", samples, "YX")
    code, _, err = millrace("run", "smooth", "in", "out", "--nan-policy", "raise", "--size", "3", *CPU)
    assert code == many_exit()
    assert f"{folder / 'in/i2.tif'}, among samples (0, 0) to " in err
    assert "NaN" in err
    assert names_in(folder / "out") == ["i0.tif", "i1.tif", "i3.tif", "i4.tif", many.TABLE]
    assert millrace("run", "smooth", "in/i3.tif", "one.tif", "--size", "3", *CPU)[0] == 0
    assert (folder / "out/i3.tif").read_bytes() == (folder / "one.tif").read_bytes()


def test_a_function_that_fails_at_one_file_stops_no_other(folder, millrace):
    (folder / "own.py").write_text(KILLER)
    images(folder, 4)
    samples = read_image(folder / "in/i1.tif")
    samples[0, 0] = 777
    write_image(folder / "in/i1.tif", samples, "YX")
    code, _, err = millrace("run", "map", "in", "out", "--function", "own:picky", *CPU)
    assert code == many_exit()
    assert f"{folder / 'in/i1.tif'}: operator own:picky: ValueError: seven (" in err
    assert ", samples (0, 0) to " in err
    assert names_in(folder / "out") == ["i0.tif", "i2.tif", "i3.tif", many.TABLE]


@pytest.mark.parametrize("what", ["removed", "rewritten"])
def test_inputs_that_vanish_or_change_after_they_were_listed(folder, millrace, monkeypatch, what):
    images(folder, 4)
    scanned = many.Scan.add

    def scan(self, wanted):
        scanned(self, wanted)
        if wanted.input.name == "i2.tif":
            wanted.input.unlink()
            if what == "rewritten":
                images(folder, 1, first=2)

    monkeypatch.setattr(many.Scan, "add", scan)
    code, _, err = millrace("run", "median", "in", "out", *CPU)
    assert code == many_exit()
    assert ("no such file" if what == "removed" else "changed while it was read") in err
    assert names_in(folder / "out") == ["i0.tif", "i1.tif", "i3.tif", many.TABLE]


def test_resume_does_only_what_is_left(folder, millrace):
    images(folder, 4)
    whole = (folder / "in/i1.tif").read_bytes()
    (folder / "in/i1.tif").write_bytes(whole[:100])
    assert millrace("run", "smooth", "in", "out", *CPU)[0] == many_exit()
    (folder / "in/i1.tif").write_bytes(whole)
    before = version(folder / "out/i0.tif")
    (folder / "out/i3.tif").unlink()
    code, out, _ = millrace("run", "smooth", "in", "out", "--resume", *CPU)
    assert code == 0
    assert "2 files on cpu" in out
    assert "2 published by an earlier run" in out
    assert version(folder / "out/i0.tif") == before
    assert table(folder) == {f"i{n}.tif": (f"i{n}.tif", None) for n in range(4)}
    images(folder, 1, first=0)  # a newer input of the same name
    assert "1 file on cpu" in millrace("run", "smooth", "in", "out", "--resume", *CPU)[1]
    code, out, _ = millrace("run", "smooth", "in", "out", "--resume", "--size", "5", *CPU)
    assert "4 files on cpu" in out  # of another job


def test_goes_on_after_kill_9(folder, millrace):
    (folder / "own.py").write_text(KILLER)
    images(folder, 9)
    write_image(folder / "in/z.zarr", np.ones((5, 6), np.uint16), "YX")
    samples = read_image(folder / "in/i7.tif")
    samples[0, 0] = 777
    write_image(folder / "in/i7.tif", samples, "YX")
    (folder / "armed").touch()
    start = f"import sys; sys.path.insert(0, {str(folder)!r}); from pipeline.engine import many; many.GROUP_FILES = 3; "
    command = ["run", "map", "in", "out", "--function", "own:double", *CPU]
    died = commands.run([*COMMAND[:2], start + COMMAND[2], *command], cwd=folder, check=False)
    assert died.returncode == -9
    published = [name for name in names_in(folder / "out") if name.endswith(".tif")]
    assert published == [f"i{n}.tif" for n in range(6)]
    (folder / "armed").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(many, "GROUP_FILES", 3)
        code, out, err = millrace(*command, "--resume")
    assert (code, err) == (0, "")
    assert "4 files on cpu" in out
    for n in range(9):
        np.testing.assert_array_equal(read_image(folder / f"out/i{n}.tif"), read_image(folder / f"in/i{n}.tif") * 2)
    assert not (folder / "out/.millrace").exists()
    assert "4 files" not in millrace(*command, "--resume")[1]


def test_resume_of_another_job_is_refused(folder, millrace):
    images(folder, 2)
    (folder / "out/.millrace").mkdir(parents=True)
    (folder / "out/.millrace/job.json").write_text('{"workload": "median"}')
    code, _, err = millrace("run", "smooth", "in", "out", "--resume", *CPU)
    assert code == 2
    assert "is of another job; run again without --resume" in err
    assert millrace("run", "smooth", "in", "out", *CPU)[0] == 0


def test_a_dry_run_writes_nothing(folder, millrace):
    images(folder, 3)
    images(folder, 1, shape=(20, 20, 3), first=5)
    (folder / "in/bad.tif").write_text("no")
    code, out, _ = millrace("run", "smooth", "in", "out", "--dry-run", *CPU)
    assert code == 0
    assert "5 files → out" in out
    assert "3 files of one kind" in out
    assert "cannot be used: in/bad.tif" in out
    code, out, _ = millrace("run", "smooth", "in", "out", "--dry-run", "--json", *CPU)
    plan = json.loads(out)
    assert sorted(each["files"] for each in plan["plans"]) == [1, 3]
    assert names_in(folder) == ["in"]


def test_many_files_share_chunks_on_the_cpu(folder, millrace):
    """A chunk takes a 64th of all, here two files; one of 8 MiB, enough for a large image, would take one."""
    header = {"descr": "|u1", "fortran_order": False, "shape": (2048, 4096)}
    with (folder / "in/0.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + 2048 * 4096)  # takes no room
    for number in range(1, 160):
        os.link("in/0.npy", f"in/{number}.npy")
    code, out, _ = millrace("run", "smooth", "in", "out", "--dry-run", "--json", *CPU)
    (plan,) = json.loads(out)["plans"]
    assert (code, plan["chunks"], plan["chunk_shape"][0]) == (0, 80, 2)


def test_json_is_the_tables_newest_run(folder, millrace):
    images(folder, 3)
    code, out, _ = millrace("run", "smooth", "in", "out", "--json", *CPU)
    assert code == 0
    assert json.loads(out) == json.loads((folder / "out" / many.TABLE).read_text())["runs"][-1]
    run = json.loads(out)
    assert (run["published"], run["failed"], run["skipped"]) == (3, 0, 0)
    assert 90 < run["jobs"][0]["audit"]["samples"] <= 100
    assert run["files"][1] == [
        str(folder / "in/i1.tif"), (folder / "in/i1.tif").stat().st_size,
        (folder / "in/i1.tif").stat().st_mtime_ns, "i1.tif", None,
    ]  # fmt: skip


def test_the_table_keeps_what_other_runs_made(folder, millrace):
    images(folder, 4)
    assert millrace("run", "smooth", "in/i0.tif", "in/i1.tif", "out", *CPU)[0] == 0
    assert millrace("run", "median", "in/i1.tif", "in/i2.tif", "out", *CPU)[0] == 0
    runs = json.loads((folder / "out" / many.TABLE).read_text())["runs"]
    assert [[row[3] for row in run["files"]] for run in runs] == [["i0.tif"], ["i1.tif", "i2.tif"]]


def test_a_crop_is_of_each_file(folder, millrace):
    images(folder, 3)
    assert millrace("run", "smooth", "in", "out", "--crop", "Y=3:20,X=5:9", "--size", "3", *CPU)[0] == 0
    for number in range(3):
        assert (
            millrace("run", "smooth", f"in/i{number}.tif", "one.tif", "--crop", "Y=3:20,X=5:9", "--size", "3", *CPU)[0]
            == 0
        )
        assert (folder / f"out/i{number}.tif").read_bytes() == (folder / "one.tif").read_bytes()
    code, _, err = millrace("run", "smooth", "in", "files", "--crop", "N=0:2", *CPU)
    assert code in (2, many_exit())
    assert err.count("N") >= 1
    assert not [*(folder / "files").glob("*.tif")]


def test_jobs_that_cannot_share_chunks_run_one_after_the_other(folder, millrace):
    images(folder, 2)
    assert millrace("run", "smooth", "in", "out", "--statistics", *CPU)[0] == 0
    found = [json.loads((folder / f"out/i{n}.tif.receipt.json").read_text())["image"]["statistics"] for n in range(2)]
    assert found[0][0]["mean"] == pytest.approx(read_image(folder / "out/i0.tif").mean())
    assert found[0] != found[1]


def test_workloads_of_other_files_run_one_after_the_other(folder, millrace):
    for number in range(2):
        write_pqr(folder / f"in/m{number}.pqr", molecule(20, number))
    (folder / "in/m2.pqr").write_text("no atoms\n")
    code, out, err = millrace("run", "coulomb", "in/*.pqr", "maps", "--output", "{stem}.npy", "--spacing", "2", *CPU)
    assert code == many_exit(), err
    assert "2 files on cpu" in out
    assert "in/m2.pqr" in err
    assert {"m0.npy", "m0.npy.receipt.json", "m1.npy", many.TABLE} <= {*names_in(folder / "maps")}
