"""What the command says of results: axes, facts that are not kept, and older results."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import tifffile

from tests.images import names_in, version, write_image


@pytest.fixture
def folder(tmp_path, monkeypatch, own_settings):
    monkeypatch.chdir(tmp_path)
    write_image(tmp_path / "in.npy", np.random.default_rng(3).integers(0, 255, (31, 41), np.uint8), "YX")
    return tmp_path


def run(millrace, *arguments):
    return millrace("run", "smooth", *arguments, "--device", "cpu")


def test_an_older_result_is_kept_or_its_replacement_said(folder, millrace):
    code, out, err = run(millrace, "in.npy", "out.npy", "--no-clobber")
    assert (code, err) == (0, "")
    assert ", filtered along Y, X; " in out
    assert "replaced" not in out
    older = version(folder / "out.npy")
    code, out, err = run(millrace, "in.npy", "out.npy", "--size", "5", "--no-clobber")
    assert (code, out) == (2, "")
    assert err.startswith("millrace: out.npy: exists, and --no-clobber keeps it; choose another name, or remove it")
    assert version(folder / "out.npy") == older
    assert names_in(folder) == ["in.npy", "out.npy", "out.npy.receipt.json"]
    code, out, err = run(millrace, "in.npy", "out.npy", "--size", "5")
    assert (code, err) == (0, "")
    assert ", filtered along Y, X; " in out
    assert out.endswith("; replaced an older result\n")
    assert version(folder / "out.npy") != older


def test_a_result_that_appears_during_the_run_is_kept(folder, millrace, monkeypatch):
    from pipeline.workloads.smoothing import SmoothingJob

    compute = SmoothingJob.compute

    def meanwhile(self, *arguments):
        (folder / "out.npy").write_bytes(b"another's")
        compute(self, *arguments)

    monkeypatch.setattr(SmoothingJob, "compute", meanwhile)
    code, _, err = run(millrace, "in.npy", "out.npy", "--no-clobber")
    assert code == 2
    assert "out.npy: exists, and --no-clobber keeps it" in err
    assert (folder / "out.npy").read_bytes() == b"another's"


def test_the_kept_result_of_a_step(folder, millrace):
    """It is kept as the output is, and each of many files has one."""
    chain = ("--step", "median size=3", "--step", "box size=3", "--keep", "1", "--device", "cpu", "--quiet")
    (folder / "out.step1.npy").write_bytes(b"older")
    code, _, err = millrace("run", "chain", "in.npy", "out.npy", *chain, "--no-clobber")
    assert code == 2
    assert err.startswith("millrace: out.step1.npy: exists, and --no-clobber keeps it")
    assert (folder / "out.step1.npy").read_bytes() == b"older"
    assert millrace("run", "chain", "in.npy", "out.npy", *chain) == (0, "", "")
    shutil.copy(folder / "in.npy", folder / "other.npy")
    assert millrace("run", "chain", "in.npy", "other.npy", "results", *chain) == (0, "", "")
    for name in ("in", "other"):
        for kind in ("", ".step1"):
            expected = (folder / f"out{kind}.npy").read_bytes()
            assert (folder / "results" / f"{name}{kind}.npy").read_bytes() == expected


def test_much_reading_is_said_before_work(folder, millrace, monkeypatch):
    monkeypatch.setattr("pipeline.cli.local.MUCH_READ", 3)
    write_image(folder / "wide.npy", np.zeros((700, 600), np.uint16), "YX")
    arguments = ("wide.npy", "out.npy", "--filter", "gaussian", "--sigma", "40")
    code, _, err = run(millrace, *arguments, "--memory", "3MiB")
    assert code == 0
    assert err.startswith("millrace: warning: chunks are much smaller than their halo: ")
    assert err.endswith(" are read for a result of 820 KiB; raise --memory to read less\n")
    assert run(millrace, *arguments, "--memory", "64MiB")[2] == ""


def test_what_is_not_kept_is_said_before_work_and_in_plan_and_receipt(folder, millrace):
    sizes = {"PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5, "Channel": {"Name": ["GFP"]}}
    samples = np.arange(31 * 41, dtype=np.uint16).reshape(31, 41)
    tifffile.imwrite(folder / "in.ome.tif", samples, metadata={"axes": "YX", **sizes})
    code, _, err = run(millrace, "in.ome.tif", "out.png")
    assert (code, err) == (0, "out.png does not keep these properties of in.ome.tif: channel names\n")
    receipt = json.loads((folder / "out.png.receipt.json").read_text())
    assert receipt["image"]["not kept"] == "channel names"
    _, plan, _ = run(millrace, "in.ome.tif", "out.png", "--dry-run")
    assert "not kept channel names" in plan
    assert run(millrace, "in.ome.tif", "out.ome.tif")[::2] == (0, "")
    assert run(millrace, "in.ome.tif", "quiet.png", "--quiet") == (0, "", "")
