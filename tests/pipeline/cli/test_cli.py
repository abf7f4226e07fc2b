"""The command as its user meets it: results, plans, and one clear line for every mistake."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import click
import numpy as np
import pytest
import tifffile

from pipeline.cli.service import serve
from pipeline.cli.workload_commands import submit_group
from pipeline.workloads import workloads
from tests import commands
from tests.commands import COMMAND
from tests.images import names_in, read_image, version, write_image
from tests.pipeline.workloads.coulomb.coulomb_jobs import molecule, write_pqr


@pytest.fixture
def folder(tmp_path, monkeypatch, own_settings):
    monkeypatch.chdir(tmp_path)
    samples = np.random.default_rng(3).integers(0, 65536, (67, 41, 3)).astype(np.uint16)
    write_image(tmp_path / "in.ppm", samples)
    return tmp_path


def test_smooths_and_leaves_a_receipt(folder, millrace):
    code, out, err = millrace("run", "smooth", "in.ppm", "out.ppm", "--size", "5,3", "--device", "cpu")
    assert (code, err) == (0, "")
    assert "out.ppm: 1 chunk on cpu" in out
    from kernels.smoothing import uniform_filter

    np.testing.assert_array_equal(
        read_image(folder / "out.ppm"), uniform_filter(read_image(folder / "in.ppm"), (5, 3), channel_axis=2)
    )
    receipt = json.loads((folder / "out.ppm.receipt.json").read_text())
    assert receipt["parameters"]["size"] == [5, 3]
    assert receipt["input"]["bytes"] == (folder / "in.ppm").stat().st_size
    assert len(receipt["input"]["sha256"]) == 64
    assert receipt["audit"]["worst_error"] <= 0.5
    assert set(receipt["stages"]) == {"read", "upload", "compute", "download", "write"}
    assert names_in(folder) == ["in.ppm", "out.ppm", "out.ppm.receipt.json"]


@pytest.mark.parametrize(
    ("output", "options"),
    [
        ("out.zarr", ("--chunks", "16", "--shards", "32", "--compression", "lz4")),
        ("out.zarr", ("--chunks", "16x16x3", "--compression", "none")),
        ("out.tif", ("--chunks", "32", "--compression", "deflate")),
    ],
)
def test_a_result_is_stored_as_asked(folder, millrace, output, options):
    command = ("run", "smooth", "in.ppm", output, *options, "--chunk-bytes", "30kB", "--device", "cpu", "--quiet")
    assert millrace(*command) == (0, "", "")
    from kernels.smoothing import uniform_filter

    np.testing.assert_array_equal(
        read_image(folder / output), uniform_filter(read_image(folder / "in.ppm"), 3, channel_axis=2)
    )
    receipt = json.loads((folder / f"{output}.receipt.json").read_text())
    assert receipt["chunks"] > 1
    assert receipt["parameters"]["compression"] == options[-1]
    assert millrace("verify", output, "--chunks", "all", "--quiet") == (0, "", "")


@pytest.mark.parametrize("options", [("--size", "31"), ("--filter", "gaussian", "--sigma", "3.5")])
@pytest.mark.parametrize("mode", ["reflect", "mirror", "nearest", "wrap", "constant"])
def test_bits_do_not_depend_on_memory_or_workers(folder, millrace, mode, options):
    samples = np.random.default_rng(5).integers(0, 65536, (1009, 307, 3)).astype(np.uint16)
    write_image(folder / "large.tif", samples)
    common = ("run", "smooth", "large.tif", *options, "--mode", mode, "--device", "cpu", "--quiet")
    results = []
    for name, memory, workers in (("a.npy", "1MiB", 2), ("b.npy", "2MiB", 3), ("c.npy", "512MiB", 1)):
        arguments = [*common[:3], name, *common[3:], "--memory", memory, "--threads", workers]
        assert millrace(*arguments) == (0, "", "")
        results.append((folder / name).read_bytes())
        receipt = json.loads((folder / f"{name}.receipt.json").read_text())
        assert receipt["ring_bytes"] <= (1 << 20) * (512 if memory == "512MiB" else int(memory[0]))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("policy", ["omit", "propagate"])
@pytest.mark.parametrize("beyond", ["nan", "inf", "3.5"])
def test_what_is_beyond_the_edge_counts_the_same_however_a_float_image_is_cut(folder, millrace, policy, beyond):
    samples = np.random.default_rng(5).normal(size=(307, 101)).astype(np.float32)
    samples[samples > 2.5] = np.nan
    write_image(folder / "in.npy", samples, "YX")
    options = ("--size", "5", "--mode", "constant", "--cval", beyond, "--nan-policy", policy, "--device", "cpu")
    found = [
        millrace("run", "smooth", "in.npy", f"{chunk}.npy", *options, "--quiet", "--chunk-bytes", chunk)
        for chunk in ("8KiB", "8MiB")
    ]
    if (policy, beyond) == ("omit", "nan"):  # it would count or be left out, by where the image is cut
        assert [code for code, _, _ in found] == [2, 2]
    else:
        assert found == [(0, "", "")] * 2
        assert (folder / "8KiB.npy").read_bytes() == (folder / "8MiB.npy").read_bytes()


@pytest.mark.parametrize("axes", ["Z,Y,X", "X,Z", "Y"])
def test_a_volume_of_bytes_cut_into_chunks_has_the_bits_of_the_whole(folder, millrace, axes):
    """Which axis is the first decides on an exact Gaussian's weights: chunks must agree with the whole on it."""
    from kernels.smoothing import gaussian_filter

    samples = np.random.default_rng(5).integers(0, 256, (61, 149, 307)).astype(np.uint8)
    write_image(folder / "stack.tif", samples, "ZYX")
    options = ("--filter", "gaussian", "--sigma", "2", "--mode", "constant", "--cval", "200", "--device", "cpu")
    assert millrace("run", "smooth", "stack.tif", "out.npy", *options, "--axes", axes, "--memory", "1MiB")[0] == 0
    chosen = tuple("ZYX".index(letter) for letter in axes.split(","))
    whole = gaussian_filter(samples, 2, mode="constant", cval=200, axes=chosen)
    np.testing.assert_array_equal(read_image(folder / "out.npy"), whole)
    audit = json.loads((folder / "out.npy.receipt.json").read_text())["audit"]
    assert audit["worst_error"] <= audit["tolerance"] == 0.6


def test_volumes_pages_and_axes(folder, millrace):
    samples = np.random.default_rng(5).normal(size=(11, 53, 47)).astype(np.float32)
    write_image(folder / "stack.tif", samples, "ZYX")
    from kernels.smoothing import uniform_filter

    options = ("--quiet", "--memory", "1MiB", "--threads", "1")
    for named, expected in (("Z,Y,X", (0, 1, 2)), ("y,x", (1, 2)), ("0", (0,)), ("-1", (2,))):
        assert millrace("run", "smooth", "stack.tif", "out.npy", f"--axes={named}", *options)[0] == 0
        np.testing.assert_array_equal(read_image(folder / "out.npy"), uniform_filter(samples, 3, axes=expected))


def test_dry_run_prints_the_plan_and_writes_nothing(folder, millrace):
    code, out, _ = millrace("run", "smooth", "in.ppm", "out.ppm", "--dry-run", "--memory", "64MiB", "--device", "cpu")
    assert code == 0
    assert "67 × 41 × 3 (YXS), uint16" in out
    assert "nan_policy propagate, size 3\n" in out
    assert "memory" in out
    code, out, _ = millrace("run", "smooth", "in.ppm", "out.ppm", "--dry-run", "--json")
    assert json.loads(out)["chunks"] == 1
    assert names_in(folder) == ["in.ppm"]


def test_json_prints_the_receipt(folder, millrace):
    code, out, _ = millrace("run", "smooth", "in.ppm", "out.ppm", "--json")
    assert code == 0
    assert json.loads(out) == json.loads((folder / "out.ppm.receipt.json").read_text())


def test_preview_and_metrics(folder, millrace, monkeypatch):
    from pipeline import metrics

    ports = []
    monkeypatch.setattr(metrics, "serve", ports.append)
    code, _, _ = millrace("run", "smooth", "in.ppm", "out.ppm", "--preview", "small.png", "--metrics-port", "9123")
    assert (code, ports) == (0, [9123])
    small = read_image(folder / "small.png")
    assert (small.shape, small.dtype) == ((67, 41, 3), np.uint8)
    assert (small.min(), small.max()) == (0, 255)


MISTAKES = [
    (("none.ppm", "out.ppm"), "none.ppm: no such file"),
    ((".", "out.ppm"), "is a folder"),
    (("empty.ppm", "out.ppm"), "empty.ppm: the file is empty"),
    (("text.ppm", "out.ppm"), "text.ppm"),
    (("short.ppm", "out.ppm"), "short.ppm"),
    (("complex.npy", "out.npy"), "complex.npy"),
    (("in.ppm", "in.ppm"), "in.ppm is the input itself"),
    (("in.ppm", "link.ppm"), "link.ppm is the input itself"),
    (("new.ppm.partial", "new.ppm"), "new.ppm.partial, the input itself"),
    (("in.ppm", "loop.ppm"), "loop.ppm"),
    (("in.ppm", "old.ppm"), "old.ppm.receipt.json is a folder where the receipt belongs"),
    (("z.zarr/0", "z.zarr"), "lie one within the other"),
    (("z.zarr", "z.zarr/new.zarr"), "lie one within the other"),
    (("in.ppm", "out.ppm", "--memory", "9" * 400), "is not an amount of memory"),
    (("in.ppm", "out.ppm", "--preview", "folder.png"), "folder.png: is a folder"),
    (("in.ppm", "out.ppm", "--preview", "nowhere/small.png"), "nowhere does not exist"),
    (("in.ppm", "out.ppm", "--preview", "s3://b/p.png"), "s3://b/p.png: name a file on this machine"),
    (("in.ppm", "out"), "out: the name has no suffix"),
    (("in.ppm", "."), "in.ppm is an input itself: give --output, or another folder"),
    (("in.ppm", "out.jpg"), "out.jpg: unsupported image format .jpg"),
    (("in.ppm", "nowhere/out.ppm"), "nowhere does not exist"),
    (("in.ppm", "/proc/out.ppm"), "/proc takes no new files; choose another"),
    (("in.ppm", "o" * 300 + ".ppm"), "does not take a name this long"),
    (("in.ppm", "o" * 250 + ".ppm"), "does not take a name this long"),  # that of the partial file is longer
    (("in.ppm", "out.ppm", "--preview", "p" * 300 + ".png"), "does not take a name this long"),
    (("i" * 300 + ".ppm", "out.ppm"), "has a name too long for its file system"),
    (("", "out.ppm"), "Invalid value for 'INPUT': the name is empty."),
    (("in.ppm", ""), "Invalid value for 'OUTPUT': the name is empty."),
    (
        ("ftp://host/in.ppm", "out.ppm"),
        "ftp://host/in.ppm: URLs begin with s3://, gs://, az:// or https://; name a file",
    ),
    (("in.ppm", "out.ppm", "--config", ""), "Invalid value for '--config': the name is empty."),
    (("float.npy", "out.png"), "out.png"),
    (("in.ppm", "out.ppm", "--size", "1048577"), "--size: size must lie in 1 … 1048576; got 1048577"),
    (("in.ppm", "out.ppm", "--size", "0"), "--size: size must lie in 1 … 1048576; got 0"),
    (("in.ppm", "out.ppm", "--size", "three"), "--size"),
    (("in.ppm", "out.ppm", "--size", "max"), "got 'max'"),
    (("in.ppm", "out.ppm", "--size", "3,3,3"), "--size has 3 values; in.ppm is smoothed along YX: give 1 or 2"),
    (("in.ppm", "out.ppm", "--size", ""), "--size"),
    (("in.ppm", "out.ppm", "--sigma", "2"), "--sigma belongs to --filter gaussian"),
    (("in.ppm", "out.ppm", "--filter", "gaussian"), "--filter gaussian needs --sigma"),
    (("in.ppm", "out.ppm", "--filter", "gaussian", "--sigma", "-1"), "--sigma: sigma must be a number of samples, 0"),
    (("in.ppm", "out.ppm", "--filter", "gaussian", "--sigma", "nan"), "--sigma: sigma must be a number of samples, 0"),
    (("in.ppm", "out.ppm", "--filter", "gaussian", "--sigma", "inf"), "--sigma: sigma must be a number of samples, 0"),
    (("in.ppm", "out.ppm", "--filter", "gaussian", "--sigma", "1e6"), "at most 524287 are supported"),
    (("in.ppm", "out.ppm", "--filter", "gaussian", "--sigma", "2", "--truncate", "nan"), "--truncate"),
    (("in.ppm", "out.ppm", "--filter", "gaussian", "--sigma", "2", "--truncate", "inf"), "millrace: --truncate: "),
    (("in.ppm", "out.ppm", "--filter", "gaussian", "--sigma", "2", "--order", "4"), "--order: order must be a whole"),
    (("in.ppm", "out.ppm", "--order", "1"), "--order belongs to --filter gaussian"),
    (("in.ppm", "out.ppm", "--truncate", "3"), "--truncate belongs to --filter gaussian"),
    (
        ("in.ppm", "out.ppm", "--filter", "gaussian", "--sigma", "2", "--truncate", "3", "--radius", "5"),
        "--truncate and --radius both cut the kernel",
    ),
    (("in.ppm", "out.ppm", "--cval", "7"), "--cval belongs to --mode constant, and the mode is reflect"),
    (
        ("in.ppm", "out.ppm", "--filter", "gaussian", "--sigma", "2", "--radius", "-1"),
        "--radius: radius must be a whole number",
    ),
    (("in.ppm", "out.ppm", "--filter", "median"), "'median' is not one of"),
    (("in.ppm", "out.ppm", "--mode", "constant", "--cval", "70000"), "--cval must be a whole number in 0 … 65535"),
    (("in.ppm", "out.ppm", "--mode", "constant", "--cval", "nan"), "--cval must be a whole number"),
    *(
        (
            ("float.npy", "out.npy", "--mode", "constant", "--cval", "nan", "--nan-policy", policy),
            f"--cval nan does not fit --nan-policy {policy}: pass a number, or --nan-policy propagate",
        )
        for policy in ("omit", "raise")
    ),
    (
        ("float.npy", "out.npy", "--mode", "constant", "--cval", "-1e39"),
        "--cval -1e+39 is beyond the float32 of float.npy",
    ),
    (("in.ppm", "out.ppm", "--axes", "Z"), "--axes Z: name each axis once, of those in.ppm has: Y (0), X (1)"),
    (("in.ppm", "out.ppm", "--axes", "C"), "--axes C"),
    (("in.ppm", "out.ppm", "--axes", "Y,0"), "--axes Y,0: name each axis once"),
    (("in.ppm", "out.ppm", "--device", "cuda:99"), "--device cuda:99"),
    (("in.ppm", "out.ppm", "--device", "gpu"), "--device: must be auto, all, cpu, cuda or cuda:N"),
    (("in.ppm", "out.ppm", "--memory", "lots"), "--memory: 'lots' is not an amount of memory"),
    (("in.ppm", "out.ppm", "--preview", "out.jpg"), "--preview out.jpg: a preview is a PNG"),
    (("in.ppm", "out.png", "--preview", "out.png"), "is also the input or the output"),
    (("p.png.partial", "out.ppm", "--preview", "p.png"), "is also the input or the output"),
    (("p.png.samples.partial", "out.ppm", "--preview", "p.png"), "is also the input or the output"),
    (("in.ppm", "z.zarr", "--preview", "z.zarr/p.png"), "z.zarr/p.png lies within the input or the output"),
    (("z.zarr", "out.ppm", "--preview", "z.zarr/0/p.png"), "z.zarr/0/p.png lies within the input or the output"),
    (("in.ppm", "out.ppm", "--metrics-port", "0"), "--metrics-port"),
    (("in.ppm", "out.ppm", "--bogus"), "No such option '--bogus'. (see millrace run smooth --help)"),
    (("-x.ppm", "out.ppm"), "No such option '-x'. (the file is ./-x.ppm; see millrace run smooth --help)"),
    (("in.ppm",), "Missing argument 'OUTPUT'"),
    (("in.ppm", "out.ppm", "--filter", "gaussian", "--sigma", "2", "--radius", "1000000"), "--radius: a Gaussian of"),
    (("white.tif", "out.png"), "out.png: PNG would show a negative of this image, in which 0 is white; choose .tif"),
    (("white.tif", "out.pgm"), "out.pgm: PNM and PAM would show a negative of this image"),
    (("inks.tif", "out.png"), "than those of this image, whose 4 channels are inks; choose .tif"),
    (("inks.tif", "out.pam"), "out.pam: PNM and PAM would show other colours than those of this image"),
    (("premultiplied.tif", "out.png"), "as alpha, which it says is multiplied into the colours; choose .tif"),
    (("spectrum.tif", "out.pam"), "out.pam: PNM and PAM would show the last channel of this image as alpha"),
    (("nan.npy", "out.npy", "--nan-policy", "raise"), "nan.npy, among samples (0, 0) to (5, 7): image contains NaN"),
    (("in.ppm", "out.ppm", "--chunk-bytes", "some"), "--chunk-bytes: 'some' is not an amount of memory"),
    (("in.ppm", "out.ppm", "--chunk-bytes", "1GiB"), "--chunk-bytes 1.0 GiB: "),
    (("large.png", "out.tif", "--memory", "1MiB"), "large.png must be held whole, which takes 2.0 MiB"),
    (("wide.npy", "out.npy", "--memory", "1MiB", "--size", "255"), "--memory is too small for one chunk of wide.npy"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(case[0])[:60] for case in MISTAKES])
def test_a_mistake_gets_one_line_and_exit_code_2(folder, millrace, arguments, message):
    Path("empty.ppm").touch()
    Path("-x.ppm").write_bytes(Path("in.ppm").read_bytes())
    Path("text.ppm").write_text("P6 hello world")
    Path("short.ppm").write_bytes(Path("in.ppm").read_bytes()[:-1])
    Path("link.ppm").symlink_to("in.ppm")
    Path("new.ppm.partial").write_bytes(Path("in.ppm").read_bytes())
    Path("loop.ppm").symlink_to("loop.ppm")
    for name in ("p.png.partial", "p.png.samples.partial"):
        Path(name).write_bytes(Path("in.ppm").read_bytes())
    Path("old.ppm.receipt.json").mkdir()
    Path("folder.png").mkdir()
    write_image(Path("z.zarr"), np.zeros((5, 7), np.uint8), "YX")
    np.save("complex.npy", np.zeros((3, 3), complex))
    np.save("float.npy", np.zeros((3, 3), np.float32))
    np.save("nan.npy", np.full((5, 7), np.nan, np.float32))
    tifffile.imwrite("white.tif", np.zeros((5, 7), np.uint8), photometric="miniswhite")
    four = np.zeros((5, 7, 4), np.uint8)
    tifffile.imwrite("inks.tif", four, photometric="separated")
    tifffile.imwrite("premultiplied.tif", four, photometric="rgb", extrasamples=["assocalpha"])
    tifffile.imwrite("spectrum.tif", four, photometric="minisblack", planarconfig="contig", extrasamples=[0, 0, 0])
    np.save("wide.npy", np.zeros((300, 300, 4), np.float64))
    write_image(Path("large.png"), np.zeros((1024, 2048), np.uint8), "YX")
    before = {path: path.read_bytes() for path in Path().iterdir() if path.is_file()}
    Path("out.ppm").write_text("an older result")
    before[Path("out.ppm")] = b"an older result"
    code, out, err = millrace("run", "smooth", *arguments)
    assert err.startswith("millrace: ")
    assert err.count("\n") == 1
    assert message in err
    assert (code, out) == (2, "")
    assert {path: path.read_bytes() for path in Path().iterdir() if path.is_file()} == before


def test_one_pixel_and_thin_images(folder, millrace):
    for shape in ((1, 1), (1, 500), (500, 1)):
        samples = np.random.default_rng(1).integers(0, 256, shape).astype(np.uint8)
        write_image(folder / "thin.pgm", samples, "YX")
        for mode in ("reflect", "mirror", "nearest", "wrap", "constant"):
            code, _, err = millrace("run", "smooth", "thin.pgm", "out.pgm", "--size", "9", "--mode", mode, "--quiet")
            assert (code, err) == (0, "")


def test_a_defect_of_ours_is_one_line_and_exit_code_1(folder, millrace, monkeypatch):
    from pipeline.workloads.smoothing import SmoothingJob

    monkeypatch.setattr(SmoothingJob, "compute", lambda *arguments: 1 / 0)
    code, _, err = millrace("run", "smooth", "in.ppm", "out.ppm")
    assert code == 1
    assert err.startswith("millrace: internal error: ZeroDivisionError")
    assert err.count("\n") == 1
    assert names_in(folder) == ["in.ppm"]


def test_a_run_killed_between_publishing_and_tidying_is_resumed_as_complete(folder, millrace, monkeypatch):
    from pipeline.engine import run
    from pipeline.engine.ledger import Ledger

    def kill(*_):
        raise SystemExit(9)

    arguments = ("run", "smooth", "in.ppm", "out.ppm", "--size", "3", "--device", "cpu")
    begin = run.stream_on_device

    def begin_with_ledger(job, plan, ledger, events):
        ledger.create()
        return begin(job, plan, ledger, events)

    with monkeypatch.context() as patched:
        patched.setattr("pipeline.cluster.executor.stream_on_device", begin_with_ledger)
        patched.setattr(run, "write_receipt", kill)
        assert millrace(*arguments)[0] == 9
    made = version(folder / "out.ppm")
    assert Ledger(folder / "out.ppm", {}).begun
    code, out, err = millrace(*arguments, "--resume", "--preview", "small.png")
    assert (code, err) == (0, "")
    assert out.endswith("out.ppm: complete: an earlier run of this job had published it before it was killed\n")
    assert version(folder / "out.ppm") == made
    assert json.loads((folder / "out.ppm.receipt.json").read_text())["parameters"]["size"] == [3]
    assert names_in(folder) == ["in.ppm", "out.ppm", "out.ppm.receipt.json", "small.png"]


def test_too_many_open_files_name_their_limit(folder, millrace, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("pipeline.cluster.executor.open_device", fail)
    code, out, err = millrace("run", "smooth", "in.ppm", "out.ppm", "--size", "3", "--device", "cpu")
    assert (code, out) == (1, "")
    assert re.fullmatch(r"millrace: .*Too many open files.*: raise the limit \(ulimit -n\), then run again\n", err)


def test_too_little_memory_is_not_called_an_internal_error(folder, millrace, monkeypatch):
    def fail(*_, **__):
        raise MemoryError("Unable to allocate 64.0 GiB")

    monkeypatch.setattr("pipeline.cluster.executor.open_device", fail)
    code, out, err = millrace("run", "smooth", "in.ppm", "out.ppm", "--size", "3", "--device", "cpu")
    assert (code, out) == (1, "")
    assert err.startswith("millrace: too little memory (Unable to allocate 64.0 GiB): lower --memory, ")
    assert err.endswith(", then run again\n")
    assert names_in(folder) == ["in.ppm"]


def test_the_progress_bar_begins_anew_where_chunks_are_halved(folder, millrace, monkeypatch):
    from pipeline.engine.devices.device import CpuDevice
    from pipeline.errors import OutOfDeviceMemory

    write_image(folder / "large.npy", np.zeros((512, 1024), np.uint8), "YX")
    process, seen = CpuDevice.process, []

    def shrinking(device, workload, chunk, slot, record):
        seen.append(chunk.input_bytes)
        if len(seen) > 4 and chunk.input_bytes > max(seen) * 3 // 4:
            raise OutOfDeviceMemory("no room to compute")
        process(device, workload, chunk, slot, record)

    monkeypatch.setattr(CpuDevice, "process", shrinking)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    arguments = ("--size", "3", "--chunk-bytes", "128KiB", "--device", "cpu", "--threads", "1")
    code, out, err = millrace("run", "smooth", "large.npy", "out.npy", *arguments)
    assert code == 0, err
    assert "(halved 1 time to fit the device)" in out
    assert re.findall(r"([\d.]+)/([\d.]+) (\w+)", err)[-1] == ("512.0", "512.0", "KiB")


def test_a_terminal_shows_what_a_run_waits_for(folder, millrace, monkeypatch):
    write_image(folder / "grey.npy", np.zeros((9, 7), np.uint8), "YX")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, out, err = millrace("run", "smooth", "grey.npy", "out.npy", "--device", "cpu")
    assert code == 0, err
    assert err.startswith("opening grey.npy and planning …\r\x1b[K")
    monkeypatch.setenv("COLUMNS", "20")
    assert millrace("run", "smooth", "grey.npy", "out.npy", "--device", "cpu")[2].startswith("opening grey.npy  …\r")
    assert re.search(r"filtered along Y, X; \d+ pixels verified, all exact$", out.strip())


@pytest.mark.parametrize("compiled", [True, False])
def test_the_progress_bar_names_a_compilation(capsys, monkeypatch, compiled):
    from kernels.runtime.compiling import compiling
    from pipeline.cli.terminal import progress_bar

    monkeypatch.setenv("COLUMNS", "120")
    with compiling() if compiled else nullcontext():
        with progress_bar(SimpleNamespace(output_bytes=2048), "out", shown=True, note=lambda: "iteration 3") as bar:
            bar.written(SimpleNamespace(output_bytes=1024))
        err = capsys.readouterr().err
    assert ("compiling kernels (once)" in err, "iteration 3" in err) == (compiled, not compiled)
    with progress_bar(SimpleNamespace(output_bytes=2048), "out", shown=True) as bar:
        bar.written(SimpleNamespace(output_bytes=2048))
    assert "checking the result" in capsys.readouterr().err


def test_a_long_name_leaves_room_for_the_progress(capsys, monkeypatch):
    from pipeline.cli.terminal import progress_bar
    from pipeline.client import display

    monkeypatch.setenv("COLUMNS", "80")
    with progress_bar(SimpleNamespace(output_bytes=2048), "x" * 100, shown=True) as bar:
        bar.written(SimpleNamespace(output_bytes=2048))
    assert re.search("x{20,}.* 2.0/2.0 KiB", capsys.readouterr().err)
    with display.bar("x" * 100) as show:
        show({"chunks_done": 2, "chunks": 3, "state": "running"})
    assert re.search("x{20,}.* 2/3 chunks, running", capsys.readouterr().err)


def test_a_wrong_result_is_never_published(folder, millrace, monkeypatch):
    from pipeline.workloads.smoothing import SmoothingJob

    right = SmoothingJob.compute

    def wrong(self, chunk, inputs, outputs, stream):
        right(self, chunk, inputs, outputs, stream)
        outputs[0][...] ^= 1

    monkeypatch.setattr(SmoothingJob, "compute", wrong)
    code, _, err = millrace("run", "smooth", "in.ppm", "out.ppm")
    assert code == 1
    assert "audit failed at sample" in err
    assert names_in(folder) == ["in.ppm"]


def test_a_full_disk_is_told_before_any_work(folder):
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    arguments = [*COMMAND, "run", "smooth", "in.ppm", "out.ppm"]
    done = subprocess.run(
        arguments, check=False, cwd=folder, preexec_fn=limit, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "out.ppm" in done.stderr
    assert done.stderr.count("\n") == 1
    assert names_in(folder) == ["in.ppm"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_leaves_nothing_half_written(foreground, folder, number, code):
    write_image(folder / "large.tif", np.zeros((6000, 4000, 3), np.uint16))
    (folder / "out.tif").write_text("an older result")
    arguments = ["run", "smooth", "large.tif", "out.tif", "--filter", "gaussian", "--sigma", "25", "--threads", "1"]
    process = commands.Popen([*COMMAND, *arguments], cwd=folder, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (folder / "out.tif.partial").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert f"stopped by {number.name}; nothing was published" in err
    assert err.count("\n") == 1
    assert (folder / "out.tif").read_text() == "an older result"
    assert names_in(folder) == ["in.ppm", "large.tif", "out.tif"]


def test_devices_say_what_can_be_used(millrace):
    code, out, _ = millrace("devices")
    assert code == 0
    assert "cpu" in out
    code, out, _ = millrace("devices", "--json")
    assert any(device["name"] == "cpu" and device["obstacle"] is None for device in json.loads(out))


def test_demo_inputs_are_the_same_for_the_same_seed(folder, millrace):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert millrace("demo", name, "--size", "150", "--seed", seed)[0] == 0
    first, again, other = (read_image(folder / name / "cells.tif") for name in "abc")
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert first.shape == (150, 150, 3)


@pytest.mark.parametrize("address", ["foo", "tcp://localhost", "tcp://localhost:0", "tcp://localhost:65536"])
def test_a_schedulers_address_that_is_none_is_told_at_once(millrace, address):
    says = f"must be an address like tcp://HOST:PORT or tls://HOST:PORT, with a port from 1 to 65535; got '{address}'"
    assert millrace("worker", address) == (2, "", f"millrace: SCHEDULER: {says}\n")
    code, _, err = millrace("run", "smooth", "in.tif", "out.tif", "--scheduler", address)
    assert (code, err) == (2, f"millrace: --scheduler: {says}\n")


def test_version_and_help(millrace):
    assert millrace("--version")[:2] == (0, "millrace, version 0.1.0\n")
    code, out, _ = millrace("run", "smooth", "--help")
    assert code == 0
    assert "--sigma" in out


@pytest.mark.parametrize(
    ("workload", "unit"), [("smooth", "--size N,…"), ("coulomb", "--cutoff Å"), ("mri", "--dwell µs")]
)
def test_help_has_headings_units_and_two_examples(millrace, workload, unit):
    code, out, _ = millrace("run", workload, "--help")
    assert code == 0
    headings = [line[:-1] for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Parameters", "Running", "Output", "Advanced", "Examples"]
    assert unit in out
    assert out.partition("Examples:\n")[2].count(f"  millrace run {workload} ") == 2
    listed = re.findall(r"^  (--[\w-]+)", out, re.MULTILINE)
    assert len(listed) == len(set(listed))


def examples(millrace, *command):
    _, out, _ = millrace(*command, "--help")
    return [shlex.split(line)[1:] for line in out.partition("Examples:\n")[2].splitlines()]


def test_the_examples_of_the_help_are_valid(millrace):
    """They fail because their files are missing, and for no other reason."""
    for workload in set(workloads()) - {"chain"}:  # its steps are checked once the image is open
        found = examples(millrace, "run", workload)
        assert found
        for given in found:
            code, _, err = millrace(*(each for each in given if each not in ("--device", "cuda")))
            assert code == 2
            assert "no such file" in err, (given, err)


def test_the_examples_of_submit_and_serve_are_valid(millrace):
    context = click.Context(submit_group, info_name="submit")
    for workload in workloads():
        command = submit_group.get_command(context, workload)
        found = [shlex.split(line) for line in command.epilog.splitlines()]
        assert found
        for given in found:
            command.make_context(workload, given[2:])  # raises if an option does not exist
    found = examples(millrace, "serve")
    assert [given[0] for given in found] == ["serve", "serve"]
    for given in found:
        serve.make_context("serve", given[1:])  # raises if an option does not exist


def test_every_setting_of_the_service_is_in_one_section_of_its_help(millrace):
    from pipeline.cli.service import SECTIONS
    from pipeline.service.settings import ServiceSettings

    listed = [name for section in SECTIONS.values() for name in section]
    assert sorted(listed) == sorted(ServiceSettings.model_fields)
    _, out, _ = millrace("serve", "--help")
    assert [title for title in SECTIONS if f"\n{title}:\n" in out] == [*SECTIONS]
    assert " TEXT" not in out


def test_the_help_of_run_shows_the_order_of_its_arguments(millrace):
    _, out, _ = millrace("run", "--help")
    assert out.startswith("Usage: millrace run WORKLOAD INPUT… OUTPUT [OPTIONS]\n")
    assert "\nWorkloads:\n  bilateral " in out


def test_the_help_of_groups_shows_whole_summaries_under_headings(millrace):
    code, out, _ = millrace("--help")
    assert code == 0
    headings = [line[:-1] for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Options", "On this machine", "Use a service", "Run a service"]
    assert re.search(r"run +Run a job on this machine", out.partition("On this machine:\n")[2])
    for group in ((), ("run",), ("submit",), ("admin",), ("token",)):
        assert "..." not in re.sub(r"Usage.*", "", millrace(*group, "--help")[1])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["smoth"], "there is no command 'smoth'; did you mean run smooth? (see millrace --help)"),
        (["verif", "out.tif"], "there is no command 'verif'; did you mean verify? (see millrace --help)"),
        (["fly"], "there is no command 'fly' (see millrace --help)"),
        (["run", "smoth", "a", "b"], "there is no workload 'smoth'; did you mean smooth? there are bilateral, "),
    ],
)
def test_a_command_of_a_wrong_name_is_answered_with_the_closest(millrace, given, said):
    code, out, err = millrace(*given)
    assert (code, out) == (2, "")
    assert err.startswith(f"millrace: {said}")


def test_a_workload_in_place_of_a_command_is_shown_where_it_belongs(millrace):
    assert millrace("smooth", "in.tif", "out.tif", "--size", "3") == (
        2, "", "millrace: smooth is a workload: millrace run smooth in.tif out.tif --size 3 (see millrace --help)\n"
    )  # fmt: skip


@pytest.mark.parametrize("command", ["run", "submit"])
def test_an_unknown_workload_lists_those_there_are(millrace, command):
    code, out, err = millrace(command, "smoothe", "in.tif", "out.tif")
    assert (code, out) == (2, "")
    assert err.startswith("millrace: there is no workload 'smoothe'; did you mean smooth? there are bilateral, ")
    assert ", smooth, " in err


WINDOWS = [("--size", "3"), ("--filter", "gaussian", "--sigma", "1", "--radius", "20")]


@pytest.mark.parametrize("value", [1e36, 1e-44, np.inf, 0.0])
@pytest.mark.parametrize("options", WINDOWS)
def test_extreme_floats_pass_the_audit(folder, millrace, value, options):
    samples = np.ones((40, 50), np.float32)
    samples[10:20] = value
    np.save("extreme.npy", samples)
    assert millrace("run", "smooth", "extreme.npy", "out.npy", "--quiet", *options) == (0, "", "")


@pytest.mark.parametrize("value", [np.float32(3e38), np.finfo(np.float32).min, 1.7e308])
@pytest.mark.parametrize("options", WINDOWS)
def test_finite_floats_whose_sums_are_not_are_refused(folder, millrace, value, options):
    np.save("large.npy", np.full((40, 50), value))
    code, out, err = millrace("run", "smooth", "large.npy", "out.npy", "--quiet", *options)
    assert (code, out) == (2, "")
    assert "large.npy: holds values as large as " in err
    assert f"whose sums pass the range of {np.asarray(value).dtype.name}; nothing was published; divide" in err
    assert "out.npy" not in names_in(folder)


@pytest.mark.slow
def test_a_damaged_kernel_cache_is_made_anew(folder, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)  # it would win over MILLRACE_CACHE_DIR
    monkeypatch.setenv("MILLRACE_CACHE_DIR", str(folder / "cache"))
    write_pqr(folder / "a.pqr", molecule())
    command = [*COMMAND, "run", "coulomb", "a.pqr", "out.npy", "--scheme", "direct", "--device", "cpu", "--quiet"]
    commands.run(command, cwd=folder, check=True, timeout=120)
    kept = [path for path in (folder / "cache").rglob("*") if path.is_file()]
    assert {path.suffix for path in kept} == {".nbc", ".nbi", ".code"}
    for path in kept:
        os.truncate(path, 0 if path.suffix == ".nbi" else path.stat().st_size // 2)
    done = commands.run(command, cwd=folder, check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(path.stat().st_size for path in kept if path.exists())


def test_an_input_that_changes_is_not_published(folder, millrace, monkeypatch):
    from pipeline.engine.output import Output

    right = Output.write

    def write(self, chunk, outputs):
        right(self, chunk, outputs)
        os.utime("in.ppm", ns=(0, 0))

    monkeypatch.setattr(Output, "write", write)
    code, _, err = millrace("run", "smooth", "in.ppm", "out.ppm")
    assert (code, err) == (2, "millrace: in.ppm: changed while it was read; nothing was published; run again\n")
    assert names_in(folder) == ["in.ppm"]


ALONE = " ".join([sys.executable, "-c", "'from pipeline.cli import main; main()'"])
SMOOTH = f"{ALONE} run smooth in.ppm out.ppm"


def test_closed_streams(folder):
    for command in (f"{SMOOTH} 2>&-", f"{SMOOTH} --json >&- 2>&- <&-"):
        assert subprocess.run(command, shell=True, cwd=folder, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_streams_that_cannot_be_written_and_a_reader_that_goes_away(folder, monkeypatch, unbuffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    piped = f"set -o pipefail; {SMOOTH} --json | true"
    assert subprocess.run(["bash", "-c", piped], cwd=folder, check=False).returncode in (0, 141)
    full = subprocess.run(f"{SMOOTH} > /dev/full", shell=True, cwd=folder, check=False, capture_output=True, text=True)
    assert full.returncode == 1
    assert "out.ppm is complete" in full.stderr
    for command in (f"{SMOOTH} --bogus", ALONE):
        assert subprocess.run(f"{command} 2>/dev/full", shell=True, cwd=folder, check=False).returncode == 2


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [
        *((["devices"], unbuffered) for unbuffered in ("", "1")),
        (["--help"], ""), (["--version"], "1"), (["run", "smooth", "--help"], ""),
    ],
)  # fmt: skip
def test_a_stdout_that_cannot_be_written_is_told_by_every_command(arguments, unbuffered):
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}

    def ends(stdout):
        with subprocess.Popen(
            [*COMMAND, *arguments], stdout=stdout, stderr=subprocess.PIPE, env=environment, text=True
        ) as process:
            _, err = process.communicate(timeout=60)
        return process.returncode, err

    with Path("/dev/full").open("w") as full:
        assert ends(full) == (1, "millrace: stdout: No space left on device\n")
    reading, writing = os.pipe()
    os.close(reading)
    assert ends(writing) == (141, "")
    os.close(writing)


def test_closed_stdout_is_no_file_of_ours(folder):
    """Nor does what is printed end up in the first file that is opened."""
    done = subprocess.run(f"{SMOOTH} <&- >&-", shell=True, cwd=folder, check=False, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert read_image(folder / "out.ppm").shape == (67, 41, 3)


def test_a_folder_that_is_gone_is_said(folder, monkeypatch, millrace):
    gone = folder / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    code, _, err = millrace("run", "smooth", folder / "in.ppm", "out.ppm")
    monkeypatch.chdir(folder)
    assert (code, err.count("\n")) == (2, 1)
    assert "the folder that this was started in is gone" in err


def test_messages_do_not_act_on_the_terminal(folder, millrace):
    _, _, err = millrace("run", "smooth", "red\x1b[31m.ppm", "out.ppm")
    assert err == "millrace: red\\x1b[31m.ppm: no such file; check the path\n"
    for name in ("red\x1b[31m.ppm", "two\nlines.ppm", "no\udcfftext.ppm"):
        shown = ascii(name)[1:-1]
        code, out, err = millrace("run", "smooth", "in.ppm", name, "--dry-run")
        assert (code, err) == (0, "")
        assert out.splitlines()[0] == f"smooth in.ppm → {shown}"
        code, out, err = millrace("run", "smooth", "in.ppm", name)
        assert (code, err, out.count("\n")) == (0, "", 1)
        assert f"{shown}: 1 chunk on " in out


def test_no_arguments_show_the_help(millrace):
    code, _, err = millrace("run")
    assert code == 2
    assert "Usage:" in err
    assert err.count("\n") > 3


def test_a_private_result_stays_private(folder, millrace):
    (folder / "out.ppm").touch(mode=0o600)
    assert millrace("run", "smooth", "in.ppm", "out.ppm", "--quiet")[0] == 0
    assert (folder / "out.ppm").stat().st_mode & 0o777 == 0o600


def test_chunks_are_made_larger_rather_than_too_many(folder, millrace, monkeypatch):
    """A plan of millions of chunks would itself take gigabytes."""
    from pipeline.workloads.common import image_plan

    np.save(folder / "long.npy", np.zeros((1000, 2000), np.uint8))
    monkeypatch.setattr(image_plan, "MOST_CHUNKS", 10)
    arguments = ("run", "smooth", "long.npy", "out.npy", "--dry-run")
    code, out, _ = millrace(*arguments, "--json", "--chunk-bytes", "1")
    assert (code, 1 < json.loads(out)["chunks"] <= 10) == (0, True)
    code, _, err = millrace(*arguments, "--memory", "1MiB")
    assert code == 2
    enough = re.search(
        r"--memory is too small for long.npy, .* chunks, more than 10: pass --memory (\S+);", err.strip()
    )
    assert enough, err
    assert millrace(*arguments, "--memory", enough[1])[0] == 0


@pytest.mark.parametrize("suffix", ["npy", "tif"])
def test_too_little_memory_says_how_much_is_enough(folder, millrace, suffix):
    """Of files without compression and with, whose decoded blocks are held."""
    rng = np.random.default_rng(len(suffix))
    for sigma, dtype in ((rng.integers(40, 70), np.uint8), (rng.integers(120, 400), np.float32)):
        samples = np.zeros(rng.integers(100, 200, 2), dtype)
        if suffix == "npy":
            np.save(folder / "in.npy", samples)
        else:
            tifffile.imwrite(folder / f"in.{suffix}", samples, compression="zlib", tile=(64, 64))
        files = (f"in.{suffix}", f"out.{suffix}")
        arguments = ("run", "dog", *files, "--sigma", str(sigma), "--dry-run", "--device", "cpu", "--memory")
        code, _, err = millrace(*arguments, "1MiB")
        assert code == 2
        enough = re.search(
            r"--memory is too small for one chunk of \S+ with its halo: pass --memory (\d+)MiB;", err.strip()
        )
        assert enough, err
        assert millrace(*arguments, f"{enough[1]}MiB")[0] == 0
        code, _, err = millrace(*arguments, f"{int(0.8 * int(enough[1]))}MiB")
        assert (code, "is too small" in err) == (2, True)
