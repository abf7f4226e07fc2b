"""Everything but CUDA itself imports and runs where CuPy is not installed."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tests.images import read_image, write_image

WITHOUT_CUPY = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cupy", "cupy_backends", "cupyx"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""
IMPORT_ALL = """
import pkgutil, importlib, kernels, pipeline
for package in (kernels, pipeline):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
print("imported")
"""


def run(code, *arguments, folder):
    command = [sys.executable, "-c", WITHOUT_CUPY + code, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_every_module_imports(tmp_path):
    done = run(IMPORT_ALL, folder=tmp_path)
    assert (done.stdout, done.returncode) == ("imported\n", 0), done.stderr


@pytest.mark.slow
def test_a_job_runs_and_devices_say_what_is_missing(tmp_path):
    write_image(tmp_path / "in.pgm", np.arange(35, dtype=np.uint8).reshape(5, 7), "YX")
    command = "from pipeline.cli import main; main()"
    done = run(command, "run", "smooth", "in.pgm", "out.pgm", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_image(tmp_path / "out.pgm").shape == (5, 7)
    done = run(command, "devices", folder=tmp_path)
    assert "not usable: " in done.stdout
    for asked, named in (("cuda", "cuda:0"), ("all", "all")):
        done = run(command, "run", "smooth", "in.pgm", "no.pgm", "--device", asked, folder=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith(f"millrace: --device {named}: ")
        assert "; usable here: cpu" in done.stderr
        assert done.stderr.count("\n") == 1
    done = run(command, "worker", "tcp://127.0.0.1:1", "--device", "all", folder=tmp_path)
    assert (done.returncode, done.stderr.startswith("millrace: --device all: ")) == (2, True)
    assert not (tmp_path / "no.pgm").exists()
