"""The package of docs/template, installed into a folder of its own: its operator and its full workload run by the
command, over worker processes, in the service and on a GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import httpx2
import numpy as np
import pytest
import scipy.ndimage

from pipeline.client import Client
from tests.images import read_image, write_image
from tests.pipeline.cluster.processes import run
from tests.pipeline.scrapes import free_port
from tests.pipeline.service.soak import server
from tests.pipeline.workloads.packages import BUILT_IN, install

ROOT = Path(__file__).parents[2]
# Where the packages are if they are not installed into the interpreter.
THEIRS = [each for each in [os.environ.get("PYTHONPATH")] if each]
TEMPLATE = ROOT / "docs" / "template"
WAIT_S = 120.0
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder into which pip has installed the template."""
    folder = tmp_path_factory.mktemp("installed")
    # pip builds within the source.
    shutil.copytree(TEMPLATE, folder / "source", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps"]
    offline = ["--no-index", "--no-build-isolation", f"--target={folder / 'site'}", str(folder / "source")]
    done = subprocess.run([*pip, *offline], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture
def folder(installed, tmp_path, monkeypatch):
    """A folder with images, whose commands see the package."""
    for name in [name for name in os.environ if name.startswith("MILLRACE_") and name != "MILLRACE_CACHE_DIR"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(installed), str(ROOT), *THEIRS]))
    write_image(tmp_path / "in.tif", samples_of((301, 203, 3)))
    return tmp_path


def samples_of(shape):
    return np.random.default_rng(2).integers(0, 65536, shape).astype(np.uint16)


def sharpened(samples, radius, amount):
    image = samples.astype(np.float64)
    return image + amount * (image - scipy.ndimage.uniform_filter(image, 2 * radius + 1, axes=(0, 1)))


def binned(samples, factor):
    rows, columns = (n // factor for n in samples.shape[:2])
    kept = samples[: rows * factor, : columns * factor].astype(np.float64)
    return kept.reshape(rows, factor, columns, factor, -1).mean(axis=(1, 3))


def check(folder, *options, device="cpu"):
    """Both workloads by the command."""
    samples = read_image(folder / "in.tif")
    common = ("--device", device, "--chunk-bytes", "200KB", "--json", *options)
    code, out, err = run("run", "sharpen", "in.tif", "a.tif", "--radius", 3, "--amount", 0.8, *common, cwd=folder)
    assert (code, err) == (0, "")
    np.testing.assert_allclose(read_image(folder / "a.tif"), sharpened(samples, 3, 0.8), rtol=0, atol=0.05)
    first = json.loads(out)
    code, out, err = run("run", "bin", "in.tif", "b.npy", "--factor", 4, *common, cwd=folder)
    assert (code, err) == (0, "")
    np.testing.assert_allclose(read_image(folder / "b.npy"), binned(samples, 4), rtol=1e-6)
    receipts = (first, json.loads(out))
    assert all(receipt["chunks"] > 1 and receipt["audit"]["samples"] == 100 for receipt in receipts)
    return receipts


def test_both_are_as_short_as_the_manual_says():
    lengths = {path.name: len(path.read_text().splitlines()) for path in TEMPLATE.rglob("src/*/*.py")}
    assert lengths["sharpen.py"] <= 35
    assert lengths["binning.py"] <= 80
    assert set(lengths) == {"__init__.py", "sharpen.py", "binning.py"}


def test_the_command_runs_both(folder):
    code, out, _ = run("run", "--help", cwd=folder)
    assert code == 0
    assert "Sharpen an image" in out
    assert "Shrink an image" in out
    code, out, _ = run("run", "sharpen", "--help", cwd=folder)
    assert "--radius" in out
    assert "pixels that the mean reaches" in out
    check(folder)
    code, _, err = run("run", "sharpen", "in.tif", "c.tif", "--radius", 0, cwd=folder)
    assert (code, err.count("\n")) == (2, 1)
    assert "--radius" in err


def test_worker_processes_run_both(folder):
    for receipt in check(folder, "--workers", 2):
        assert receipt["device"]["name"] == "2 × cpu"


@pytest.mark.gpu
def test_a_gpu_runs_both(folder):
    for receipt in check(folder, device="cuda:0"):
        assert receipt["device"]["name"] == "cuda:0"


FAILING = """
from pipeline import image_operator
@image_operator
def failing(block):
    raise ValueError("not this image")
"""


def test_a_service_runs_both(folder, installed, tmp_path, monkeypatch):
    install(tmp_path, "failing_package", FAILING, failing="failing_package:failing")
    install(tmp_path, "broken_package", "import absent_module", broken="broken_package:it")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(installed), str(ROOT), *THEIRS]))
    (tmp_path / "data").mkdir()
    samples, port = read_image(folder / "in.tif"), free_port()
    write_image(tmp_path / "data" / "in.npy", samples)
    url = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("MILLRACE_URL", url)
    with server(tmp_path, port, "--workers", "1"), Client(url) as client:
        names = [each["name"] for each in client.workloads()]
        theirs = ["bin", "failing", "sharpen"]
        assert names == sorted([*BUILT_IN, *theirs])
        page = httpx2.get(f"{url}/submit?workload=sharpen").text
        assert 'data-parameter="radius"' in page
        jobs = [
            client.submit("sharpen", "in.npy", "a.npy", radius=3, amount=0.8),
            client.submit("bin", "in.npy", "b.npy", factor="4"),
        ]
        assert [job.wait(timeout_s=WAIT_S).state for job in jobs] == ["succeeded"] * 2
        failed = client.submit("failing", "in.npy", "c.npy")
        assert failed.wait(timeout_s=WAIT_S).state == "failed"
        assert re.fullmatch(r"operator failing: ValueError: not this image \(.*:5, samples .*\)", failed.error)
        lines = [event["message"] for event in failed.log()]
        assert any(line.startswith("Traceback") for line in lines)
        assert sum("claimed" in line.lower() for line in lines) <= 1  # it is not tried again
        for name, said in (("map", "a service does not run map"), ("broken", "cannot be used: ModuleNotFoundError")):
            code, _, err = run("submit", name, "in.npy", "d.npy", cwd=tmp_path)
            assert (code, err.count("\n")) == (2, 1), err
            assert said in err
    np.testing.assert_allclose(read_image(tmp_path / "data" / "a.npy"), sharpened(samples, 3, 0.8), rtol=0, atol=0.05)
    np.testing.assert_allclose(read_image(tmp_path / "data" / "b.npy"), binned(samples, 4), rtol=1e-6)
    assert "workload broken of the package broken_package cannot be used" in (tmp_path / "server.log").read_text()


def test_the_fifteen_lines_of_the_manual_run_as_they_are(folder, tmp_path):
    manual = (ROOT / "docs" / "extending.md").read_text()
    source = re.search(r"```python\n(.*?)```", manual, re.DOTALL)[1]
    assert len(source.splitlines()) <= 15
    (tmp_path / "filters.py").write_text(textwrap.dedent(source))
    command = re.search(r"^millrace (run map .*filters:\S+.*?)(?:  #.*)?$", manual, re.MULTILINE)[1]
    write_image(tmp_path / "photo.tif", samples_of((90, 71)), "YX")
    code, _, err = run(*command.split(), "--device", "cpu", "--quiet", cwd=tmp_path)
    assert (code, err) == (0, "")
