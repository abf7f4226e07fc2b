"""Filters made of Gaussians and boxes, against scipy.ndimage in float64: within 1e-5 of the range, for any cut."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from scipy import ndimage

from kernels.composites import subtract_background
from pipeline.errors import ParameterError
from pipeline.workloads import Budget, JobSpec, workload_named
from pipeline.workloads.common.halo import read_with_borders
from pipeline.workloads.operator import job as operator_job
from tests.kernels.rank.cases import samples_of
from tests.pipeline.workloads.filters.jobs import filtered


def _gaussian(image: Any, sigma: Any, **options: Any) -> Any:
    """Wide ones are not cut at 4 sigma."""
    wide = max(np.atleast_1d(sigma)) > 5.8
    return ndimage.gaussian_filter(image, sigma, truncate=9 if wide else 4, **options)


def _deviation(image: Any, size: Any, **options: Any) -> Any:
    return ndimage.generic_filter(image, np.std, size, **options)


DEFINED = {
    "dog": lambda x, sigma, ratio, **o: _gaussian(x, sigma, **o) - _gaussian(x, np.multiply(sigma, ratio), **o),
    "log": ndimage.gaussian_laplace,
    "unsharp": lambda x, sigma, amount, **o: x + amount * (x - _gaussian(x, sigma, **o)),
    "subtract-background": lambda x, sigma, **o: x - _gaussian(x, sigma, **o),
    "divide-background": lambda x, sigma, **o: x / _gaussian(x, sigma, **o),
    "deviation": _deviation,
}
CASES = [
    ("dog", {"sigma": (1.5, 2.0), "ratio": 2.0}),
    ("dog", {"sigma": (6.0,), "ratio": 1.6}),
    ("log", {"sigma": (1.2,)}),
    ("unsharp", {"sigma": (2.0,), "amount": 1.5}),
    ("subtract-background", {"sigma": (11.0,)}),
    ("divide-background", {"sigma": (3.0, 0.0)}),
    ("deviation", {"size": (3, 4)}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda each: each if isinstance(each, str) else "")
def test_scipy_in_float64_gives_nearly_the_same(tmp_path: Any, name: str, options: dict[str, Any]) -> None:
    for dtype, mode in (("uint8", "reflect"), ("float32", "nearest"), ("uint8", "constant")):
        image = samples_of((67, 59), dtype) if dtype == "uint8" else 9 + samples_of((67, 59), "uint8").astype(dtype)
        given = {"mode": mode, **({"cval": 3} if mode == "constant" else {})}
        values = {key: each[0] if isinstance(each, tuple) and len(each) == 1 else each for key, each in options.items()}
        # Derivatives of scipy.ndimage take cval for the value beyond the edge in each pass: extend the image first.
        around = 100 if mode == "constant" else 0
        wide = np.pad(image.astype(np.float64), around, **({"constant_values": 3} if around else {}))
        expected = DEFINED[name](wide, **values, mode=mode)[around : around + 67, around : around + 59]
        receipt, found = filtered(tmp_path, name, image, "YX", chunk_bytes=6_000, **options, **given)
        if name == "unsharp" and dtype == "uint8":
            assert found.dtype == np.uint8
            assert np.abs(found - expected.clip(0, 255)).max() < 0.501
        else:
            assert found.dtype == np.float32
            scale = np.abs(expected).max() if name == "divide-background" else 255
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * scale)
        assert receipt["audit"]["samples"] > 0
        _, whole = filtered(tmp_path, name, image, "YX", **options, **given)
        np.testing.assert_array_equal(found, whole, strict=True)


def test_float64_is_cut_at_4_sigma_where_float32_is_not(tmp_path: Any) -> None:
    image = samples_of((67, 59), "uint8").astype(np.float64)
    expected = ndimage.gaussian_filter(image, 6.0) - ndimage.gaussian_filter(image, 7.2)
    _, found = filtered(tmp_path, "dog", image, "YX", chunk_bytes=12_000, sigma=(6.0,), ratio=1.2)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


def test_axes_that_are_no_neighbours_are_not_decimated_below_7_6(tmp_path: Any) -> None:
    image = samples_of((41, 5, 59), "uint8").astype(np.float32)
    expected = ndimage.gaussian_filter(image.astype(np.float64), (6.5, 0, 6.5))
    receipt, found = filtered(tmp_path, "subtract-background", image, "ZYX", sigma=6.5, axes="ZX")
    np.testing.assert_allclose(found, image - expected, rtol=0, atol=1e-5 * 255)
    assert receipt["image"]["gaussian"].startswith("float32 sums, within ")


def test_receipts_name_the_definition_of_each_gaussian(tmp_path: Any) -> None:
    image = samples_of((67, 59), "uint16")
    receipt, _ = filtered(tmp_path, "dog", image, "YX", sigma=5)
    narrow, wide = receipt["image"]["gaussian"].split("; ")
    assert narrow == "sigma 5: float32 sums, within 82 roundings of the largest magnitude to float32"
    assert wide == "sigma 8: decimated, within 1e-5 of the largest magnitude"
    steps = ["gaussian sigma=1", "gaussian sigma=9 order=1"]
    receipt, found = filtered(tmp_path, "chain", image, "YX", step=steps)
    assert found.dtype == np.float32
    assert receipt["image"]["step 1, gaussian"] == "float32 sums, within 1 step"
    assert receipt["image"]["step 2, gaussian"].startswith("decimated, within 1e-5")


def test_an_even_image_has_no_deviation_and_no_background(tmp_path: Any) -> None:
    image = np.full((31, 43), 65_533, np.uint16)
    for name, value in (("deviation", 0), ("subtract-background", 0), ("divide-background", 1), ("dog", 0)):
        _, found = filtered(tmp_path, name, image, "YX")
        np.testing.assert_allclose(found, np.full(image.shape, value, np.float32), rtol=0, atol=0.05, strict=True)
    assert not filtered(tmp_path, "deviation", image, "YX", size=(5,))[1].any()


def test_infinities_and_nan_go_through(tmp_path: Any) -> None:
    image = np.ones((31, 43), np.float32)
    image[10, 10], image[10, 11], image[20, 30] = np.inf, -np.inf, np.nan
    for name in ("dog", "unsharp", "divide-background", "deviation"):
        _, found = filtered(tmp_path, name, image, "YX", **({} if name == "deviation" else {"sigma": (1.0,)}))
        assert np.isnan(found[10, 10])
        assert np.isnan(found[20, 30])
        assert np.isfinite(found[30, :5]).all()


def test_volumes_and_channels(tmp_path: Any) -> None:
    image = samples_of((9, 13, 11, 2), "float32").clip(-9, 9)
    _, found = filtered(tmp_path, "log", image, "ZYXS", chunk_bytes=9_000, sigma=(0.8,))
    exact = image.astype(np.float64)
    expected = np.stack([ndimage.gaussian_laplace(exact[..., channel], 0.8) for channel in (0, 1)], axis=-1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("dog", {"sigma": (1, 2, 3)}, "--sigma has 3 values: give 1 or 2 .*in.npy is filtered along Y,X"),
        ("log", {"sigma": (0.01,)}, "--sigma 0.01 reaches no neighbour"),
        ("deviation", {"size": (3, 3, 3)}, "--size has 3 values: give 1 or 2"),
    ],
)
def test_what_does_not_fit(tmp_path: Any, name: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        filtered(tmp_path, name, samples_of((9, 7), "uint8"), "YX", **given)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("dog", {"nan_policy": policy}) for policy in ("propagate", "omit")),
        ("log", {}),
        *(("unsharp", {"nan_policy": policy}) for policy in ("propagate", "omit")),
        ("subtract-background", {"sigma": 9.0}),
        ("divide-background", {"sigma": 9.0}),
        *(("deviation", {"nan_policy": policy}) for policy in ("propagate", "omit")),
        ("rolling-ball", {"radius": 3}),
        ("tophat", {"size": 5}),
        ("chain", {"step": ["deviation", "gaussian sigma=1", "dog"]}),
        ("smooth", {"nodata": 7}),
    ],
    ids=str,
)
def test_a_job_states_the_arrays_that_computing_makes(tmp_path, name, options):
    """So that --memory holds them beside the ring."""
    dtype = "float32" if options.get("nan_policy") == "omit" else "uint16"
    np.save(tmp_path / "in.npy", samples_of((600, 500), dtype))
    spec = JobSpec(
        workload=name, input=tmp_path / "in.npy", output=tmp_path / "out.npy",
        parameters=workload_named(name).Parameters(**options),
    )  # fmt: skip
    job = workload_named(name).open(spec)
    (chunk,) = job.plan(Budget(budget_bytes=1 << 30, target_bytes=1 << 30)).chunks
    arrays = chunk.inputs, chunk.outputs
    inputs, outputs = ([np.empty(each.shape, each.dtype) for each in several] for several in arrays)
    job.read(chunk, inputs)
    job.compute(chunk, inputs, outputs, None)  # compiles
    tracemalloc.start()
    try:
        job.compute(chunk, inputs, outputs, None)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        job.close()
    stated = job.work_ratio * (chunk.input_bytes + chunk.output_bytes)
    assert 0.5 * stated < peak_bytes < 1.25 * stated  # halos are not counted


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("subtract-background", {}),
        ("deviation", {"size": 201}),
        ("tophat", {"size": 51}),
        ("chain", {"step": ["median size=101", "bilateral sigma_range=900 size=31", "gaussian sigma=20"]}),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_small_volume_has_no_halo(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, name: str, options: Any) -> None:
    """Nor does its audit read one. A background of 50 pixels took 5.8 GiB for 48 × 46 × 72 voxels."""
    samples, shapes = samples_of((5, 4, 7), "uint16"), set()

    def read(reader: Any, region: Any, *rest: Any) -> None:
        shapes.add(region.shape)
        read_with_borders(reader, region, *rest)

    monkeypatch.setattr(operator_job, "read_with_borders", read)
    _, found = filtered(tmp_path, name, samples, "ZYX", **options)
    assert shapes == {samples.shape}
    if name == "subtract-background":
        np.testing.assert_array_equal(found, subtract_background(samples, 50.0), strict=True)
