"""`--regularizer` as its user meets it: better images, receipts, frames that are joined, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline import metrics
from pipeline.engine.devices.device import CpuDevice
from pipeline.errors import ParameterError
from pipeline.workloads.mri.parameters import MriParameters
from tests.kernels.sense.phantom import coil_maps, image, normalised_error
from tests.pipeline.workloads.mri.mri_jobs import COILS, N, images, job, scan, volume, write_h5, write_npz


def truth():
    """[y, x], as files have it."""
    return (image(N) * np.linalg.norm(coil_maps(COILS, N), axis=0)).T


@pytest.fixture
def few(tmp_path):
    """Twelve noisy spokes, and true maps."""
    kspace, points = scan(12)
    rng = np.random.default_rng(0)
    noise = rng.normal(size=kspace.shape) + 1j * rng.normal(size=kspace.shape)
    np.save(tmp_path / "maps.npy", coil_maps(COILS, N).transpose(0, 2, 1).astype(np.complex64))
    return write_npz(tmp_path / "few.npz", kspace + noise.astype(np.complex64), points)


@pytest.mark.parametrize("penalties", ["l1-wavelet", "tv", "l1-wavelet,tv", "tv,l2"])
def test_penalties_make_better_images(tmp_path, few, penalties):
    maps = {"sensitivities": str(tmp_path / "maps.npy")}
    plain = min(
        normalised_error(images(few, tmp_path / "a.npy", iterations=count, **maps)[0][0, 0], truth())
        for count in (5, 10, 20)
    )
    strength = "0.01,0.001" if "l2" in penalties else "auto"
    found, receipt = images(few, tmp_path / "b.npy", regularizer=penalties, strength=strength, iterations=25, **maps)
    assert normalised_error(found[0, 0], truth()) < 0.9 * plain
    told = receipt["image"]
    assert told["solver"] == ("fista" if penalties == "l1-wavelet" else "admm")
    for name in penalties.split(","):
        assert (name in told["strengths"]) == (name != "l2")
    assert ("found by SURE" in told["strengths"]) == (strength == "auto")
    assert len(told["convergence"]) == told["iterations"] <= 25
    assert told["convergence"][-1] == pytest.approx(told["objective"], rel=1e-3)
    assert told["convergence"][-1] < told["convergence"][0]
    assert 0 < told["residual"] < 0.5
    assert 0 < told["change"] < 0.1
    assert receipt["parameters"]["regularizer"] == penalties
    assert "lambda" not in receipt["parameters"]
    assert 0 < receipt["audit"]["worst_error"] < receipt["audit"]["tolerance"]
    assert metrics.solver_objective.labels("mri")._value.get() == pytest.approx(told["objective"], rel=1e-3)
    assert metrics.solver_residual.labels("mri")._value.get() == pytest.approx(told["residual"], rel=1e-3)
    json.dumps(receipt)


def test_l2_is_the_damping_of_conjugate_gradients(tmp_path, few):
    plain, _ = images(few, tmp_path / "a.npy", iterations=9, tolerance=0.0, lamda=0.3)
    found, receipt = images(few, tmp_path / "b.npy", iterations=9, tolerance=0.0, regularizer="l2", strength="0.3")
    np.testing.assert_array_equal(found, plain)
    assert receipt["image"]["residual"] < 1


@pytest.mark.parametrize("penalties", ["llr", "tv-time", "tv-time,l1-wavelet"])
def test_frames_are_joined(tmp_path, penalties):
    """Few spokes a frame of a still phantom: together they are one image of many."""
    kspace, points = scan(40)
    source = write_npz(tmp_path / "a.npz", kspace, points)
    options = {"frames": 8, "tolerance": 0.0}
    alone, _ = images(source, tmp_path / "b.npy", iterations=10, **options)
    found, receipt = images(source, tmp_path / "c.npy", iterations=25, regularizer=penalties, **options)
    assert found.shape == alone.shape == (5, 1, N, N)
    assert receipt["chunks"] == 1
    assert receipt["audit"]["samples"] == 5 * 6
    best, _ = images(source, tmp_path / "d.npy", iterations=20)
    errors = [np.mean([normalised_error(frame, best[0]) for frame in series]) for series in (found, alone)]
    assert errors[0] < 0.6 * errors[1]


def test_slices_and_times_of_joined_frames_are_in_place(tmp_path):
    kspace, points = scan(24)
    several = np.stack([np.stack([kspace * (1 + s + 10 * t) for s in range(2)]) for t in range(2)])
    source = write_npz(tmp_path / "a.npz", several, points)
    found, receipt = images(source, tmp_path / "b.npy", regularizer="llr", strength="1e-4", iterations=15)
    assert receipt["chunks"] == 2
    for slice_ in range(2):
        ratio = np.linalg.norm(found[1, slice_]) / np.linalg.norm(found[0, slice_])
        assert ratio == pytest.approx((11 + slice_) / (1 + slice_), rel=0.02)


def test_bits_do_not_depend_on_threads_or_runs(tmp_path, few):
    found = [
        images(few, tmp_path / "out.npy", device=CpuDevice(threads), regularizer="l1-wavelet", iterations=8)[0]
        for threads in (1, 2)
    ]
    np.testing.assert_array_equal(found[0], found[1])


def test_large_volumes_are_regularised_a_few_coils_at_a_time(tmp_path):
    source = volume(tmp_path / "v.npz")
    options = {"regularizer": "tv", "strength": "0.01", "iterations": 12, "tolerance": 0.0}
    whole, _ = images(source, tmp_path / "a.npy", **options)
    parts, receipt = images(source, tmp_path / "b.npy", split="coils", **options)
    assert receipt["image"]["coil_maps"] == "on the device"
    assert receipt["image"]["solver"] == "admm"
    assert normalised_error(parts, whole) < 1e-2


def test_progress_tells_objective_residual_and_iteration(tmp_path, few):
    planned, options = job(few, tmp_path / "out.npy", regularizer="l1-wavelet", iterations=5)
    follow = planned.job._penalty_follower(0)
    follow(3, np.array([12.5, 0.25, 0.1]))
    assert planned.job.progress_note() == "iteration 3, residual 0.25, objective 12.5, image 1"
    del options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regularizer": "l3"}, "l1-wavelet, tv, tv-time, llr, l2, or several"),
        ({"regularizer": "tv,tv"}, "each penalty once"),
        ({"regularizer": "tv", "strength": "-1"}, "auto, or numbers above 0"),
        ({"regularizer": "tv", "strength": "nan"}, "auto, or numbers above 0"),
        ({"regularizer": "tv", "strength": "weak"}, "auto, or numbers above 0"),
        ({"regularizer": "tv,l1-wavelet,llr", "strength": "1,2"}, "2 numbers for 3 penalties; give one, or"),
        ({"regularizer": "l2"}, "l2 needs a number"),
        ({"regularizer": "tv,l2"}, "a number for each penalty instead of auto"),
        ({"regularizer": "tv", "method": "gridding"}, "--regularizer belongs to --method cg-sense"),
        ({"regularizer": "tv", "lamda": 0.5}, "--lambda is that of --method cg-sense alone"),
        ({"regularizer": "tv", "wavelet": "haar"}, "--wavelet belongs to --regularizer l1-wavelet"),
        ({"regularizer": "tv", "block": 4}, "--block belongs to --regularizer llr"),
        ({"strength": "0.1"}, "--strength belongs to --regularizer"),
    ],
)
def test_parameters_that_contradict_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MriParameters(**options)


def test_what_does_not_fit_the_data_is_refused(tmp_path, few):
    with pytest.raises(ParameterError, match=r"--regularizer llr: .*few\.npz holds one time, and llr joins several"):
        job(few, tmp_path / "out.npy", regularizer="llr")
    with pytest.raises(ParameterError, match=r"--strength 90: a strength of 90 leaves nothing of the image"):
        images(few, tmp_path / "out.npy", regularizer="l1-wavelet", strength="90")
    with pytest.raises(ParameterError, match=r"--strength 1000: the objective grows with the iterations"):
        images(few, tmp_path / "out.npy", regularizer="tv", strength="1000")


def test_a_refused_job_closes_its_file(tmp_path):  # an HDF5 file that is open at the end of Python crashes it
    scan = write_h5(tmp_path / "scan.h5")
    with pytest.raises(ParameterError, match="holds one time") as refused:
        job(scan, tmp_path / "out.npy", regularizer="tv-time")
    still_open = [file for file in Path("/proc/self/fd").iterdir() if file.exists() and file.samefile(scan)]
    assert refused  # it keeps the job's frames, and so the file, alive
    assert not still_open
