"""What a command loads before it works, and what not: its first second is Python's."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from pipeline.formats.image import Storage
from tests.images import write_image

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
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=folder, capture_output=True,
        text=True, timeout=120, check=True,
    )  # fmt: skip
    return set(done.stdout.split())


def test_a_run_loads_nothing_of_a_service(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((5, 7), np.uint8))
    loaded = loaded_by(tmp_path, "run", "smooth", "a.npy", "out.npy", "--device", "cpu", "--quiet")
    assert "kernels.smoothing.cpu" in loaded
    commands = {f"pipeline.cli.{name}" for name in ("admin", "client", "doctor", "kernels", "service")}
    assert not {*commands, "pipeline.api_models", "pipeline.client", "pipeline.service", "dask", "rich"} & loaded
    assert not {"imagecodecs", "prometheus_client"} & loaded


def test_an_uncompressed_zarr_loads_no_codecs(tmp_path):
    write_image(tmp_path / "a.zarr", np.zeros((5, 7), np.uint8), "YX", Storage(compression="none", levels=1))
    loaded = loaded_by(tmp_path, "run", "smooth", "a.zarr", "out.zarr", "--compression", "none", "--quiet")
    assert "pipeline.codecs.loops.chunk_files" in loaded
    assert not {"imagecodecs", "zarr"} & loaded


def test_what_was_compiled_before_needs_no_numba(tmp_path):
    write_image(tmp_path / "a.zarr", np.zeros((5, 7), np.uint8), "YX", Storage(compression="lz4", levels=1))
    command = ("run", "smooth", "a.zarr", "out.zarr", "--filter", "gaussian", "--sigma", "1", "--quiet")
    loaded_by(tmp_path, *command)
    loaded = loaded_by(tmp_path, *command)
    assert {"kernels.smoothing.cpu.floats", "pipeline.codecs.loops.chunk_files", "llvmlite"} <= loaded
    assert not {"kernels.runtime.compiled.compiler", "numba"} & loaded


AT_EXIT = """
import atexit, os, sys, threading
class Late:
    def __del__(self):
        print("taken apart", flush=True)
sys.late = Late()
def end():
    loaded = {"numpy.random", "prometheus_client"} & sys.modules.keys()
    print("at exit", len(os.listdir("/proc/self/task")), *loaded, flush=True)
def at_the_end():
    threading.main_thread().join()
    print("a thread")
atexit.register(end)
threading.Thread(target=at_the_end).start()
from pipeline.__main__ import main
main()
"""


def test_a_run_ends_without_taking_its_modules_apart(tmp_path):
    """It starts no thread of BLAS, but waits for its threads, and for what is to be done at exit."""
    np.save(tmp_path / "a.npy", np.zeros((5, 7), np.uint8))
    arguments = ("run", "smooth", "a.npy", "out.npy", "--device", "cpu", "--quiet", "--dry-run", "--json")
    command = [sys.executable, "-c", AT_EXIT, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("}\na thread\nat exit 1\n")


def test_the_client_loads_nothing_of_the_server():
    program = "import sys; from pipeline import Client; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    loaded = set(done.stdout.split())
    assert "pipeline.api_models" in loaded
    assert not {*HEAVY, "numpy", "pipeline.service"} & loaded
