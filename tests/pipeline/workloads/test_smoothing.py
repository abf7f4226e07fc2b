"""Jobs with wide windows: chunked equals whole, receipts name the definition, and the audit finds a wrong result."""

from __future__ import annotations

import math
import pickle
from contextlib import nullcontext

import numpy as np
import pytest

from kernels.smoothing import gaussian_filter, uniform_filter
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.run import RunOptions, plan_job, run_job
from pipeline.errors import AuditError, MemoryTooSmall, ParameterError
from pipeline.workloads import JobSpec, workloads
from pipeline.workloads.common.halo import read_with_borders
from pipeline.workloads.smoothing import SmoothingJob, audit
from tests.images import names_in, read_image, write_image


def smoothed(folder, samples, axes, chunk_bytes, **given):
    write_image(folder / "in.npy", samples, axes)
    parameters = workloads()["smooth"].Parameters(**given)
    spec = JobSpec(workload="smooth", input=folder / "in.npy", output=folder / "out.npy", parameters=parameters)
    device = CpuDevice(1)
    options = RunOptions(memory_bytes=device.ring_depth * chunk_bytes)
    receipt = run_job(plan_job(spec, device, options), options)
    return receipt, read_image(folder / "out.npy")


def image(dtype, shape=(907, 211)):
    rng = np.random.default_rng(7)
    if np.dtype(dtype).kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    return rng.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


@pytest.mark.parametrize("mode", ["reflect", "mirror", "nearest", "wrap", "constant"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_chunks_of_a_decimated_gaussian_equal_the_whole(tmp_path, dtype, mode):
    samples = image(dtype)
    cval = {"cval": 9} if mode == "constant" else {}
    given = {"filter": "gaussian", "sigma": (9, 1.5), "mode": mode, **cval}
    receipt, found = smoothed(tmp_path, samples, "YX", 120_000 * samples.itemsize, **given)
    assert receipt["chunks"] > 1
    bound = {"uint8": "0.6 of a step", "uint16": "1 step"}.get(dtype, "1e-5 of the largest magnitude")
    assert receipt["image"]["gaussian"] == f"decimated along Y and float32 sums along X, within {bound}"
    assert receipt["audit"]["worst_error"] <= (1e-5 if dtype == "float32" else 1.0)
    np.testing.assert_array_equal(found, gaussian_filter(samples, (9, 1.5), mode=mode, cval=9))


@pytest.mark.parametrize(
    ("dtype", "sigma"), [("uint16", 4), ("uint16", 6), ("uint16", 14), ("uint8", 2), ("uint8", (0.2, 2))]
)
def test_bytes_exact_sums_and_two_decimated_axes_are_audited_to_0_6_of_a_step(tmp_path, dtype, sigma):
    samples = image(dtype)
    receipt, found = smoothed(tmp_path, samples, "YX", 250_000 * samples.itemsize, filter="gaussian", sigma=sigma)
    assert receipt["chunks"] > 1
    assert receipt["audit"]["tolerance"] == 0.6
    np.testing.assert_array_equal(found, gaussian_filter(samples, sigma))


@pytest.mark.parametrize("size", [6, (2, 7)])
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_means_that_end_in_a_half_pass_the_audit(tmp_path, dtype, size):
    """Every mean does, along an axis of even size."""
    axis = int(np.atleast_1d(size)[0] % 2)
    samples = (np.indices((67, 73))[axis] % 2 + np.iinfo(dtype).max // 3).astype(dtype)
    receipt, found = smoothed(tmp_path, samples, "YX", 1 << 20, size=size)
    assert receipt["audit"]["worst_error"] == pytest.approx(0.5)
    np.testing.assert_array_equal(found, uniform_filter(samples, size))
    assert (found == np.iinfo(dtype).max // 3 + 1).mean() > 0.5


def test_a_volume_and_an_axis_left_alone(tmp_path):
    samples = image("int16", (9, 101, 97))
    receipt, found = smoothed(tmp_path, samples, "ZYX", 300_000, filter="gaussian", sigma=(0, 8.5, 8.5))
    assert receipt["chunks"] > 1
    np.testing.assert_array_equal(found, gaussian_filter(samples, (0, 8.5, 8.5)))


@pytest.mark.parametrize("given", [{"truncate": 3}, {"radius": 40}, {"nan_policy": "omit"}])
def test_a_kernel_with_a_given_end_and_missing_samples_are_smoothed_directly(tmp_path, given):
    samples = image("float32", (61, 83))
    samples[5, 7] = np.nan if given.get("nan_policy") else 1
    receipt, found = smoothed(tmp_path, samples, "YX", 1 << 20, filter="gaussian", sigma=12, **given)
    assert receipt["image"]["gaussian"].startswith("float32 sums, within ")
    np.testing.assert_array_equal(found, gaussian_filter(samples, 12, **given))


@pytest.mark.parametrize("dtype", ["uint16", "float32", "float64"])
@pytest.mark.parametrize(("sigma", "order"), [(2, (1, 0)), (9, (0, 2)), ((3, 10), 3)])
def test_derivatives_are_audited_and_float32_for_integers(tmp_path, dtype, sigma, order):
    samples = image(dtype)
    receipt, found = smoothed(
        tmp_path,
        samples,
        "YX",
        200_000 * samples.itemsize,
        filter="gaussian",
        sigma=sigma,
        order=order,
        statistics=True,
    )
    assert receipt["chunks"] > 1
    assert receipt["parameters"]["order"] == list(np.atleast_1d(order))
    assert receipt["image"]["dtype"] == ("float32" if dtype == "uint16" else dtype)
    assert receipt["audit"]["unit"] == "relative to the window's largest value"
    np.testing.assert_array_equal(found, gaussian_filter(samples, sigma, order=order))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_chunks_of_a_wide_box_equal_the_whole(tmp_path, dtype):
    samples = image(dtype, (701, 53))
    receipt, found = smoothed(tmp_path, samples, "YX", 300_000, size=(301, 999), mode="wrap")
    assert "gaussian" not in receipt["image"]
    np.testing.assert_array_equal(found, uniform_filter(samples, (301, 999), mode="wrap"))


@pytest.mark.parametrize("statistics", [False, True])
def test_a_halo_that_no_chunk_can_hold_names_the_memory_it_needs(tmp_path, statistics, monkeypatch):
    monkeypatch.setattr("pipeline.workloads.common.statistics.MAX_SAMPLES", 1 << 20)
    write_image(tmp_path / "in.npy", image("uint8", (1500, 2000)), "YX")
    parameters = workloads()["smooth"].Parameters(filter="gaussian", sigma=200, statistics=statistics)
    spec = JobSpec(workload="smooth", input=tmp_path / "in.npy", output=tmp_path / "out.npy", parameters=parameters)
    said = (
        r"--statistics takes: leave it out"
        if statistics
        else r"--memory is too small for one chunk .* with its halo.*raise it to"
    )
    with pytest.raises(ParameterError, match=said) as refused:
        plan_job(spec, CpuDevice(1), RunOptions(memory_bytes=1 << 20))
    if isinstance(refused.value, MemoryTooSmall):
        assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)
        for share, fits in ((1.0, True), (0.95, False)):
            options = RunOptions(memory_bytes=math.ceil(share * refused.value.times * (1 << 20)))
            with nullcontext() if fits else pytest.raises(MemoryTooSmall):
                plan_job(spec, CpuDevice(1), options)


@pytest.mark.parametrize("mode", ["reflect", "mirror", "nearest", "wrap", "constant"])
def test_the_audit_of_a_window_wider_than_the_image_reads_that_once(tmp_path, monkeypatch, mode):
    """Each sample has the sum of the weights that fall on it: 201 ** 3 samples are 8 million for each place."""
    samples, shapes = image("uint16", (7, 6, 9)), []

    def read(reader, region, mode, cval, out):
        shapes.append(region.shape)
        read_with_borders(reader, region, mode, cval, out)

    monkeypatch.setattr(audit, "read_with_borders", read)
    cval = {"cval": 900} if mode == "constant" else {}
    receipt, found = smoothed(tmp_path, samples, "ZYX", 1 << 20, filter="gaussian", sigma=16.0, mode=mode, **cval)
    assert len(shapes) == receipt["audit"]["samples"] > 50
    assert set(shapes) == {(8, 7, 10) if cval else samples.shape}  # and one beyond the edges
    np.testing.assert_array_equal(found, gaussian_filter(samples, 16.0, mode=mode, cval=900))
    part, found = smoothed(
        tmp_path, samples, "ZYX", 1 << 24, filter="gaussian", sigma=(1.0, 3.0, 2.0), mode=mode, crop="X=2:5", **cval
    )
    assert part["audit"]["worst_error"] <= 0.6
    np.testing.assert_array_equal(found, gaussian_filter(samples, (1.0, 3.0, 2.0), mode=mode, cval=900)[..., 2:5])


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_a_wrong_result_is_not_published(tmp_path, monkeypatch, dtype):
    compute = SmoothingJob.compute

    def wrong(job, chunk, inputs, outputs, stream):
        compute(job, chunk, inputs, outputs, stream)
        outputs[0] += np.asarray(2 if dtype == "uint16" else 2e-3, dtype)

    monkeypatch.setattr(SmoothingJob, "compute", wrong)
    with pytest.raises(AuditError, match="audit failed at sample"):
        smoothed(tmp_path, image(dtype, (53, 61)), "YX", 1 << 20, filter="gaussian", sigma=20)
    assert names_in(tmp_path) == ["in.npy"]
