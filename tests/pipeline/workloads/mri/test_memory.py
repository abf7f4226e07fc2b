"""The GPU memory that a plan states: it grows with what it counts, and jobs on a GPU keep it."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from pipeline.engine.devices.device import CudaDevice, GpuBound
from pipeline.engine.run import run_job
from pipeline.errors import OutOfDeviceMemory
from pipeline.workloads.mri import MriJob
from pipeline.workloads.mri.parameters import MriParameters
from pipeline.workloads.mri.reconstruction.memory import Problem, bytes_besides_maps, device_bytes
from tests.pipeline.workloads.mri.mri_jobs import job, volume, write_npz

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


def test_coils_a_few_at_a_time_and_maps_elsewhere_take_less():
    large, asked = replace(SMALL, shape=(128,) * 3, channels=32, at_once=32), MriParameters()
    parts = replace(large, at_once=4, copies=8)
    assert device_bytes(parts, asked) < device_bytes(large, asked)
    assert device_bytes(parts, asked) - bytes_besides_maps(parts, asked) == int(1.1 * 32 * 8 * 128**3)


def test_coefficients_cost_kernels_for_each_pair():
    """Five coefficients of 128³: fifteen kernels of 256³ float32, twice as many for a complex basis."""
    cube = Problem(shape=(128,) * 3, channels=12, at_once=12, points=10**6, times=100, coefficients=5)
    asked = MriParameters(basis="/basis.npy", regularizer="llr")
    real, both = (device_bytes(replace(cube, complex_basis=each), asked) for each in (False, True))
    assert both - real == pytest.approx(1.1 * 15 * 4 * 256**3, rel=1e-6)


def test_a_plan_states_it(tmp_path):
    planned, _ = job(write_npz(tmp_path / "in.npz"), tmp_path / "out.npy")
    said = planned.describe()["image"]["gpu_memory"]
    planned.job.close()
    assert said.startswith("at most ")
    assert said.endswith("iB besides the chunks")


def test_a_plan_of_coils_in_parts_states_what_it_needs_at_least(tmp_path):
    planned, _ = job(volume(tmp_path / "in.npz", coils=9), tmp_path / "out.npy", split="coils")
    said = planned.describe()["image"]["gpu_memory"]
    planned.job.close()
    assert re.fullmatch(r"at most \S+ MiB besides the chunks, and at least \S+ MiB: coil maps are streamed .*", said)


def noise(folder, shape, coils, readouts, count):
    """A scan of random samples along random spokes, and a basis of as many frames as there are pairs of readouts."""
    rng = np.random.default_rng(0)
    turns = rng.normal(size=(readouts, 1, len(shape)))
    radius = np.linspace(-0.5, 0.499, count)
    points = turns / np.linalg.norm(turns, axis=2, keepdims=True) * radius[:, None] * min(shape)
    kspace = rng.random((coils, readouts, count, 2), np.float32).view(np.complex64)[..., 0]
    kspace *= np.exp(-((radius / 0.1) ** 2)) + 0.01
    np.save(folder / "basis.npy", np.linalg.qr(rng.normal(size=(readouts // 2, 5)))[0])
    return write_npz(folder / "in.npz", kspace, points, matrix=shape)


SLICE, VOLUME, LARGE = ((256, 256), 32, 160, 512), ((96,) * 3, 12, 300, 192), ((128,) * 3, 16, 3000, 256)
STRONG = {"strength": "0.001", "iterations": 3}
ON_A_GPU = {
    "gridding": (SLICE, {"method": "gridding"}),
    "l2": (SLICE, {"regularizer": "l2", "strength": "0.01", "iterations": 3}),
    "wavelet": (SLICE, {"regularizer": "l1-wavelet", **STRONG}),
    "tv": (SLICE, {"regularizer": "tv", **STRONG}),
    "llr": (SLICE, {"regularizer": "llr", "frames": 20, **STRONG}),
    "tv in time": (SLICE, {"regularizer": "tv-time,llr", "frames": 20, **STRONG}),
    "many frames": (SLICE, {"regularizer": "llr", "frames": 2, **STRONG}),
    "espirit": (SLICE, {"sensitivities": "espirit", "iterations": 3}),
    "exact": (SLICE, {"transform": "exact", "iterations": 3}),
    "compressed": (SLICE, {"compress": 8, "iterations": 3}),
    "subspace": (SLICE, {"basis": "basis.npy", "frames": 2, "regularizer": "llr", **STRONG}),
    "volume": (VOLUME, {"iterations": 3}),
    "volume, tv": (VOLUME, {"regularizer": "tv", **STRONG}),
    "volume, llr": (VOLUME, {"regularizer": "llr", "frames": 75, **STRONG}),
    "volume, subspace": (VOLUME, {"basis": "basis.npy", "frames": 2, "regularizer": "llr", **STRONG}),
    "parts": (LARGE, {"iterations": 3}),
    "parts, wavelet": (LARGE, {"regularizer": "l1-wavelet", **STRONG}),
    "parts, tv": (LARGE, {"regularizer": "tv", **STRONG}),
    "parts, subspace": (VOLUME, {"basis": "basis.npy", "frames": 2, "regularizer": "llr", "split": "coils", **STRONG}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_GPU)
def test_a_gpu_takes_what_is_stated(tmp_path, monkeypatch, name):
    """No more, and not much less."""
    scanned, options = ON_A_GPU[name]
    source, taken = noise(tmp_path, *scanned), []
    if "basis" in options:
        options = options | {"basis": str(tmp_path / "basis.npy")}
    monkeypatch.setattr(GpuBound, "note", lambda bound: taken.append(bound.pool.total_bytes()))
    planned, run_options = job(source, tmp_path / "out.npy", memory=4 << 30, device=CudaDevice(0), **options)
    stated = planned.job.device_bytes
    run_job(planned, run_options)
    print(f"{name}: {max(taken) / 2**20:.0f} MiB of {stated / 2**20:.0f} MiB")
    assert 0 < max(taken) <= stated <= 1.1 * max(taken) + 64 * 2**20
    assert np.isfinite(np.load(tmp_path / "out.npy")).all()


@pytest.mark.gpu
def test_more_than_stated_is_one_line(tmp_path, monkeypatch):
    source = noise(tmp_path, *SLICE)
    monkeypatch.setattr(MriJob, "device_bytes", 64 << 20)
    with pytest.raises(OutOfDeviceMemory, match=r"the job stated 64\.0 MiB, of which .*: use --device cpu"):
        run_job(*job(source, tmp_path / "out.npy", memory=4 << 30, device=CudaDevice(0)))
