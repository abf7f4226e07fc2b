"""The same job on a GPU and on the CPU writes the same bytes."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from pipeline import cli
from tests.images import write_image

pytestmark = pytest.mark.gpu

FILTERS = [("--size", "3"), ("--size", "8,31"), ("--size", "255"), ("--filter", "gaussian", "--sigma", "2.5")]


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["millrace", "run", "smooth", *arguments, "--quiet"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code


@pytest.mark.parametrize("options", FILTERS, ids=" ".join)
@pytest.mark.parametrize("mode", ["reflect", "mirror", "nearest", "wrap", "constant"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.float32, np.float64])
def test_the_same_bytes_as_the_cpu(tmp_path, monkeypatch, options, mode, dtype):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(7)
    if np.dtype(dtype).kind == "f":
        samples = rng.normal(size=(1021, 509, 3)).astype(dtype)
    else:
        info = np.iinfo(dtype)
        samples = rng.integers(info.min, info.max, (1021, 509, 3), dtype=dtype, endpoint=True)
    write_image(tmp_path / "in.tif", samples, "YXS")
    run(monkeypatch, "in.tif", "cpu.npy", *options, "--mode", mode, "--device", "cpu")
    # So little memory that there are several chunks: halo, ring and all three streams take part.
    memory = f"{8 * max(np.dtype(dtype).itemsize, 3)}MiB"
    run(monkeypatch, "in.tif", "gpu.npy", *options, "--mode", mode, "--device", "cuda:0", "--memory", memory)
    assert (tmp_path / "gpu.npy").read_bytes() == (tmp_path / "cpu.npy").read_bytes()
    receipt = json.loads((tmp_path / "gpu.npy.receipt.json").read_text())
    assert receipt["device"]["name"] == "cuda:0"
    assert receipt["stages"]["upload"]["seconds"] > 0


def test_volume_in_one_and_in_many_chunks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_image(tmp_path / "in.npy", np.random.default_rng(1).normal(size=(61, 127, 113)).astype(np.float32), "ZYX")
    for name, device, memory in (
        ("a.npy", "cpu", "512MiB"),
        ("b.npy", "cuda:0", "512MiB"),
        ("c.npy", "cuda:0", "4MiB"),
    ):
        run(monkeypatch, "in.npy", name, "--size", "5", "--device", device, "--memory", memory)
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes() == (tmp_path / "c.npy").read_bytes()
