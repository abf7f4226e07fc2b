"""MRI reconstruction on a GPU, as whole jobs: the CPU's images within a stated error, and coils split over GPUs."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pipeline.engine.run import RunOptions, open_device, plan_job, run_job
from pipeline.workloads import JobSpec, workloads
from pipeline.workloads.mri.reconstruction import volume as mri_volume
from tests.gpu_ranks import COMMAND, rank_gpus, rank_workers
from tests.kernels.sense.phantom import coil_maps, definition, image, normalised_error
from tests.pipeline.cluster.processes import kill_9, running, wait_until, worker_processes
from tests.pipeline.formats.kspace.raw_mri import real_scan, write_cfl
from tests.pipeline.workloads.mri.mri_jobs import COILS, N, images, volume, write_h5, write_npz

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
        {"method": "gridding", "iterations": 10, "tolerance": 1e-4},
        {"density": "ramp"},
        {"density": "none", "transform": "gridding"},
        {"transform": "exact"},
        {"compress": 3},
        {"field_map": "field.npy", "dwell": 20.0},
        {"frames": 20, "frame_step": 10},
        {"tolerance": 1e-2},
        {"regularizer": "l1-wavelet", "strength": "0.01"},
        {"regularizer": "tv", "strength": "0.01"},
        {"regularizer": "llr,l1-wavelet", "strength": "0.005", "frames": 10},
        {"gradient_delay": "0.4,-0.3"},
        {"frames": 10, "basis": "basis.npy"},
        {"frames": 10, "basis": "complex.npy", "regularizer": "llr", "strength": "0.01"},
        {"frames": 10, "basis": "basis.npy", "regularizer": "l1-wavelet", "strength": "0.01"},
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
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(4, 2)))[0]
    np.save(tmp_path / "basis.npy", basis)
    np.save(tmp_path / "complex.npy", basis * np.exp(1j * np.arange(4)[:, None]))
    if "basis" in options:
        options = options | {"basis": tmp_path / options["basis"]}
    source = write_npz(tmp_path / "a.npz")
    found, expected = both(source, tmp_path, sensitivities=str(tmp_path / "maps.npy"), **options)
    assert normalised_error(found, expected) < TOLERANCE


@pytest.mark.parametrize("options", [{}, {"regularizer": "tv", "strength": "0.01"}], ids=str)
def test_cartesian_samples(tmp_path, options):
    places = np.arange(N) - N // 2
    maps, points = coil_maps(COILS, N), np.stack(np.meshgrid(places, places, indexing="ij"), axis=-1)
    kspace = definition(maps * image(N), points.reshape(-1, 2)).reshape(COILS, N, N)
    kspace[:, :, 1::2] = 0
    source = write_cfl(tmp_path / "k", kspace.transpose(1, 2, 0)[:, :, None])
    np.save(tmp_path / "maps.npy", maps.transpose(0, 2, 1))
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


def options_with_maps(folder):
    np.save(folder / "maps.npy", np.random.default_rng(0).normal(size=(18, 20, 20, 20)) + 2)
    return OPTIONS | {"sensitivities": str(folder / "maps.npy"), "split": "coils"}


def test_coils_a_few_at_a_time(tmp_path):
    source = volume(tmp_path / "a.npz", 20, 18)
    found, expected = both(source, tmp_path, **options_with_maps(tmp_path))
    assert normalised_error(found, expected) < TOLERANCE
    assert json.loads((tmp_path / "gpu.npy.receipt.json").read_text())["image"]["coil_maps"] == "on the device"


@pytest.mark.parametrize("maps", ["of a file", "walsh"])
def test_coils_from_the_host_make_the_same_bits(tmp_path, monkeypatch, maps):
    source = volume(tmp_path / "a.npz", 20, 18)
    options = options_with_maps(tmp_path) | ({} if maps == "of a file" else {"sensitivities": maps})
    found = []
    original = mri_volume.plan_residency
    for left in (18, 17, 8):
        monkeypatch.setattr(
            mri_volume, "plan_residency", lambda coils, shape, _, left=left: original(coils, shape, left * 8000 * 8)
        )
        image_, receipt = images(source, tmp_path / "gpu.npy", device=open_device("cuda:0"), **options)
        found.append(image_.view(np.uint32))
        assert ("streamed from the host" in receipt["image"]["coil_maps"]) == (left < 18)
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])


@pytest.mark.parametrize("kind", ["tv-time,llr", "basis"])
def test_images_that_are_one_problem_take_coils_from_the_host(tmp_path, monkeypatch, kind):
    source, options = (
        volume(tmp_path / "a.npz", 20, 18),
        options_with_maps(tmp_path) | {"frames": 10, "strength": "0.01"},
    )
    options["regularizer"] = "llr" if kind == "basis" else kind
    if kind == "basis":
        np.save(tmp_path / "basis.npy", np.linalg.qr(np.random.default_rng(1).normal(size=(4, 3)))[0])
        options["basis"] = str(tmp_path / "basis.npy")
    original = mri_volume.plan_residency
    with monkeypatch.context() as patch:
        patch.setattr(mri_volume, "plan_residency", lambda coils, shape, _: original(coils, shape, 8 * 8000 * 8))
        found, receipt = images(source, tmp_path / "gpu.npy", device=open_device("cuda:0"), **options)
    expected, _ = images(source, tmp_path / "cpu.npy", **options)
    assert "streamed from the host" in receipt["image"]["coil_maps"]
    assert normalised_error(found, expected) < TOLERANCE


def test_off_resonance_of_a_volume(tmp_path):
    r = (np.arange(20) - 10) / 20
    np.save(tmp_path / "field.npy", 100 * np.exp(-(r[:, None, None] ** 2 + r[:, None] ** 2 + r**2) / 0.05))
    options = options_with_maps(tmp_path) | {"field_map": tmp_path / "field.npy", "dwell": 20.0}
    found, expected = both(volume(tmp_path / "a.npz", 20, 18), tmp_path, **options)
    assert normalised_error(found, expected) < TOLERANCE


# Each solver; frames that are one problem; coefficients.
SHARED = {
    "conjugate gradients": {},
    "fista": {"regularizer": "l1-wavelet"},
    "admm": {"regularizer": "tv,tv-time", "frames": 10},
    "frames": {"regularizer": "llr", "frames": 10},
    "coefficients": {"basis": "basis.npy", "frames": 10},
    "low rank of coefficients": {"basis": "basis.npy", "regularizer": "llr", "frames": 10},
}


@pytest.mark.multi_gpu
def test_coils_split_over_gpus(tmp_path):
    from pipeline.cluster.dask.worker_processes import local_workers

    np.save(tmp_path / "basis.npy", np.linalg.qr(np.random.default_rng(1).normal(size=(4, 3)))[0])
    source, run_options = volume(tmp_path / "a.npz", 20, 18), RunOptions(memory_bytes=1 << 30)
    with local_workers(rank_workers(rank_gpus()[:4])) as workers:  # starting them takes longer than the jobs
        for name, more in SHARED.items():
            options = options_with_maps(tmp_path) | more | ({"strength": "0.01"} if "regularizer" in more else {})
            if "basis" in more:
                options["basis"] = str(tmp_path / "basis.npy")
            expected, _ = images(source, tmp_path / "cpu.npy", **options)
            asked = workloads()["mri"].Parameters(**options)
            spec = JobSpec(workload="mri", input=source, output=tmp_path / f"{name}.npy", parameters=asked)
            receipt = run_job(plan_job(spec, workers, run_options), run_options, stream=workers.stream)
            assert receipt["image"]["split"].startswith("18 channels over "), name
            found = np.load(spec.output).reshape(expected.shape)
            assert normalised_error(found, expected) < TOLERANCE, name


@pytest.mark.multi_gpu
@pytest.mark.parametrize("more", [{}, {"regularizer": "llr", "frames": 10, "strength": "0.01"}], ids=str)
def test_a_gpu_worker_killed_on_the_way_is_made_up_for(tmp_path, more):
    source, options = volume(tmp_path / "a.npz", 20, 18), options_with_maps(tmp_path) | {"iterations": 200} | more
    expected, _ = images(source, tmp_path / "cpu.npy", **options)
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    arguments = ("run", "mri", source, "out.npy", *flags, "--device", "all", "--json")
    with running(*arguments, cwd=tmp_path, command=COMMAND) as process:
        wait_until((tmp_path / "out.npy.partial").exists, "the output")
        kill_9(worker_processes(process)[1])
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert "coil_maps" in json.loads(out)["image"]  # by all ranks together, or by the one that is left of two
    assert normalised_error(np.load(tmp_path / "out.npy").reshape(expected.shape), expected) < TOLERANCE
