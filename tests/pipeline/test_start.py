"""What a command loads before it works, and what not: its first second is Python's."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

# What a run whose one GPU does the work has no use for, and what takes a tenth of a second or more to load.
HEAVY = {
    "MDAnalysis", "dask", "distributed", "fastapi", "finufft", "h5py", "imagecodecs", "llvmlite", "matplotlib", "numba",
    "rich", "scipy", "tifffile", "uvicorn", "zarr",
}  # fmt: skip
# The kernels' module is loaded as on a GPU; what they would compute comes from the oracle, which is NumPy alone.
WITH_STAND_IN = """
import sys
from kernels.coulomb.cases import exact
from pipeline.workloads import coulomb

def on_gpu(atoms, grid, scheme, *, cell, out, workers, stream):
    import kernels.coulomb.cuda
    out[:] = exact(atoms, grid, scheme, cell).values

coulomb.potential = on_gpu
from pipeline.cli import main
try:
    main()
finally:
    print(*sys.modules)
"""


def test_a_map_made_by_a_gpu_needs_no_numba(tmp_path):
    """Neither before its first chunk nor for its audit."""
    np.save(tmp_path / "a.npy", np.array([[0.0, 0, 0, 1], [3, 1, 0, -0.5], [1, 5, 2, 0.25]]))
    arguments = ("run", "coulomb", "a.npy", "out.npy", "--device", "cpu", "--quiet", "--cutoff", "6")
    command = [sys.executable, "-c", WITH_STAND_IN, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert {"kernels.coulomb.cuda", "pipeline.workloads.coulomb.audit"} <= loaded
    assert not HEAVY & loaded
    assert np.load(tmp_path / "out.npy").any()


def loaded_by(folder, *arguments):
    program = "import sys; from pipeline.cli import main\ntry: main()\nfinally: print(*sys.modules)"
    command = [sys.executable, "-c", program, *arguments]
    return set(
        subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=True).stdout.split()
    )


def test_a_run_loads_nothing_of_a_service(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((5, 7), np.uint8))
    loaded = loaded_by(tmp_path, "run", "smooth", "a.npy", "out.npy", "--device", "cpu", "--quiet")
    assert "kernels.smoothing.cpu" in loaded
    commands = {f"pipeline.cli.{name}" for name in ("admin", "client", "doctor", "kernels", "service")}
    assert not {*commands, "pipeline.api_models", "pipeline.client", "pipeline.service", "dask", "rich"} & loaded


def test_the_client_loads_nothing_of_the_server():
    program = "import sys; from pipeline import Client; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    loaded = set(done.stdout.split())
    assert "pipeline.api_models" in loaded
    assert not {*HEAVY, "numpy", "pipeline.service"} & loaded
