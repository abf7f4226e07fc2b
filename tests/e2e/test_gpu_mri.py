"""MRI reconstruction on a GPU, as whole jobs: the CPU's images within a stated error, and coils split over GPUs."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.cluster.gang import run_alone, run_gang
from pipeline.engine.run import open_device
from pipeline.workloads.mri_gang import reconstruct_shared, shards_of
from tests.kernels.sense.phantom import coil_maps, image, normalised_error
from tests.pipeline.formats.raw_mri import real_scan
from tests.pipeline.workloads.mri_jobs import COILS, N, images, write_h5, write_npz
from tests.pipeline.workloads.test_mri_gang import spec_of, volume

pytestmark = pytest.mark.gpu

# Both devices keep the transform to 1e-5 here; the iterations pass on what is left of it. Where maps are estimated, the
# eigenvectors of pixels without signal depend on rounding: those pixels are left out.
TOLERANCE = 5e-4
OPTIONS = {"eps": 1e-5, "iterations": 6, "tolerance": 0.0, "output_values": "complex"}


def both(source, folder, **options):
    options = OPTIONS | options
    expected, _ = images(source, folder / "cpu.npy", **options)
    found, receipt = images(source, folder / "gpu.npy", device=open_device("cuda:0"), **options)
    assert receipt["device"]["name"] == "cuda:0"
    assert receipt["audit"]["worst_error"] < receipt["audit"]["tolerance"]
    return found, expected


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "gridding"},
        {"density": "ramp"},
        {"density": "none", "transform": "gridding"},
        {"transform": "exact"},
        {"compress": 3},
        {"field_map": "field.npy", "dwell": 20.0},
        {"frames": 20, "frame_step": 10},
        {"tolerance": 1e-2},
    ],
    ids=str,
)
def test_the_cpus_images(tmp_path, options):
    maps = coil_maps(COILS, N)
    np.save(tmp_path / "maps.npy", maps.transpose(0, 2, 1))
    r = (np.arange(N) - N // 2) / N
    np.save(tmp_path / "field.npy", 100 * np.exp(-(r[:, None] ** 2 + r**2) / 0.05))
    if "field_map" in options:
        options = options | {"field_map": tmp_path / "field.npy"}
    source = write_npz(tmp_path / "a.npz")
    found, expected = both(source, tmp_path, sensitivities=str(tmp_path / "maps.npy"), **options)
    assert normalised_error(found, expected) < TOLERANCE


@pytest.mark.parametrize("sensitivities", ["walsh", "espirit"])
def test_maps_are_estimated_alike(tmp_path, sensitivities):
    found, expected = both(write_npz(tmp_path / "a.npz"), tmp_path, sensitivities=sensitivities)
    inside = image(N).T > 0.3
    assert normalised_error(found[0, 0][inside], expected[0, 0][inside]) < 5e-3


def test_slices_and_repetitions(tmp_path):
    found, expected = both(write_h5(tmp_path / "a.h5", slices=3, repetitions=2), tmp_path, traj_units="cycles/pixel")
    inside = image(N).T > 0.3
    assert normalised_error(found[..., inside], expected[..., inside]) < 5e-3


def test_a_volume(tmp_path):
    maps = np.random.default_rng(0).normal(size=(5, 10, 10, 10)) + 2
    np.save(tmp_path / "maps.npy", maps)
    found, expected = both(volume(tmp_path / "a.npz"), tmp_path, sensitivities=str(tmp_path / "maps.npy"))
    assert normalised_error(found, expected) < TOLERANCE


@pytest.mark.parametrize("name", ["cardiac_radial.h5", "phantom_spiral.h5"])
def test_real_scans(tmp_path, name):
    found, expected = both(real_scan(name), tmp_path, traj_units="cycles/pixel")
    bright = np.abs(expected) > 0.2 * np.percentile(np.abs(expected), 99.5)
    assert normalised_error(np.abs(found[bright]), np.abs(expected[bright])) < 1e-2


def test_a_gang_of_one_gpu(tmp_path):
    import cupy

    source = write_npz(tmp_path / "a.npz")
    np.save(tmp_path / "maps.npy", coil_maps(COILS, N).transpose(0, 2, 1))
    options = OPTIONS | {"sensitivities": str(tmp_path / "maps.npy")}
    expected, _ = images(source, tmp_path / "cpu.npy", **options)
    spec = spec_of(source, tmp_path / "out.npy", **options)
    run_alone(reconstruct_shared, shards_of(spec), spec, cupy.asarray)
    assert normalised_error(np.load(tmp_path / "out.npy"), expected[0, 0]) < TOLERANCE


@pytest.mark.multi_gpu
def test_coils_split_over_gpus(tmp_path):
    import cupy

    from pipeline.cluster.worker_specs import gpu_workers
    from pipeline.cluster.workers import local_workers
    from pipeline.engine.discovery import usable_gpus

    source = volume(tmp_path / "a.npz")
    maps = np.random.default_rng(0).normal(size=(5, 10, 10, 10)) + 2
    np.save(tmp_path / "maps.npy", maps)
    options = OPTIONS | {"sensitivities": str(tmp_path / "maps.npy")}
    expected, _ = images(source, tmp_path / "cpu.npy", **options)
    spec = spec_of(source, tmp_path / "out.npy", **options)
    with local_workers(gpu_workers(usable_gpus()[:4])) as workers:
        result = run_gang(workers, reconstruct_shared, shards_of(spec), spec, cupy.asarray)
    assert len(result.ranks) >= 2
    assert normalised_error(np.load(tmp_path / "out.npy"), expected[0]) < TOLERANCE
