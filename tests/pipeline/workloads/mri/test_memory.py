"""The GPU memory that a plan states: it grows with what it counts, and jobs on a GPU keep it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline.engine.devices.device import CudaDevice
from pipeline.engine.run import run_job
from pipeline.workloads.mri.memory import Problem, device_bytes
from pipeline.workloads.mri.parameters import MriParameters
from tests.pipeline.workloads.mri.mri_jobs import job, scan, write_npz

SMALL = Problem(shape=(256, 256), channels=12, at_once=12, points=65_536)
CASES = {
    "gridding": {"method": "gridding"},
    "cg": {},
    "wavelet": {"regularizer": "l1-wavelet"},
    "tv": {"regularizer": "tv"},
    "several": {"regularizer": "tv-time,llr", "frames": 8},
    "llr": {"regularizer": "llr", "frames": 8},
}


@pytest.mark.parametrize("name", CASES)
def test_more_of_anything_takes_more(name):
    asked = MriParameters(**CASES[name])
    small = device_bytes(SMALL, asked)
    # Maps, coil images on the grid of twice the size, and samples are there at once.
    assert small > 12 * 8 * (256**2 + 512**2 + 65_536)
    for more in (
        {"channels": 24, "at_once": 24},
        {"points": 655_360},
        {"shape": (512, 512)},
        {"shape": (64, 256, 256)},
        {"times": 25},
        {"cached": 15},
    ):
        assert device_bytes(replace(SMALL, **more), asked) > small
    assert device_bytes(replace(SMALL, on_grid=True), asked) <= small


def test_coefficients_cost_kernels_for_each_pair():
    """Five coefficients of 128³: fifteen kernels of 256³ float32, twice as many for a complex basis."""
    volume = Problem(shape=(128,) * 3, channels=12, at_once=12, points=10**6, times=100, coefficients=5)
    asked = MriParameters(basis="/basis.npy", regularizer="llr")
    real, both = (device_bytes(replace(volume, complex_basis=each), asked) for each in (False, True))
    assert both - real == pytest.approx(1.15 * 15 * 4 * 256**3, rel=1e-6)


def test_a_plan_states_it(tmp_path):
    planned, _ = job(write_npz(tmp_path / "in.npz"), tmp_path / "out.npy")
    said = planned.describe()["image"]["gpu_memory"]
    planned.job.close()
    assert said.startswith("at most ")
    assert said.endswith("iB besides the chunks")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_takes_no_more(tmp_path, name):
    import cupy

    n, coils = 192, 8
    kspace, points = scan(64, n, coils, count=2 * n)
    source = write_npz(tmp_path / "in.npz", kspace, points, matrix=[n, n])
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    few = {} if name == "gridding" else {"iterations": 4}
    planned, options = job(source, tmp_path / "out.npy", memory=1 << 30, device=CudaDevice(0), **CASES[name], **few)
    stated = device_bytes(planned.job._largest(), planned.spec.parameters) + planned.ring_bytes
    run_job(planned, options)
    taken = pool.total_bytes() - before
    print(f"{name}: {taken / 2**20:.0f} MiB of {stated / 2**20:.0f} MiB")
    assert 0 < taken <= stated
    assert np.isfinite(np.load(tmp_path / "out.npy")).all()
