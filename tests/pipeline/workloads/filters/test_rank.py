"""`millrace run median` and its kin: chunked equals whole, every option, and what is refused."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from kernels.rank import ball, cross, disk, maximum_filter, median_filter, minimum_filter, percentile_filter
from pipeline.errors import AuditError, InputError, ParameterError
from pipeline.workloads.filters import rank
from tests.kernels.rank.cases import samples_of
from tests.pipeline.workloads.filters.jobs import filtered

FILTERS = {"median": median_filter, "minimum": minimum_filter, "maximum": maximum_filter}


@pytest.fixture
def made(tmp_path):
    return partial(filtered, tmp_path)


@pytest.mark.parametrize(
    ("dtype", "size", "mode"),
    [("uint8", 3, "mirror"), ("int16", (4, 7), "constant"), ("float32", (6, 1), "nearest"), ("uint16", 71, "wrap")],
)
def test_any_cut_gives_the_same(made, dtype, size, mode):
    samples, options = samples_of((61, 47), dtype), {"cval": 7} if mode == "constant" else {}
    expected = median_filter(samples, size, mode=mode, **options)
    for chunk_bytes in (None, 4_000):
        receipt, found = made("median", samples, "YX", chunk_bytes=chunk_bytes, size=size, mode=mode, **options)
        np.testing.assert_array_equal(found, expected, strict=True)
        assert (receipt["audit"]["worst_error"], receipt["audit"]["tolerance"]) == (0, 0)
        assert receipt["audit"]["samples"] > 50


@pytest.mark.parametrize(("name", "function"), FILTERS.items())
def test_volumes_and_channels(made, name, function):
    samples = samples_of((7, 19, 12, 2), "uint16")
    _, found = made(name, samples, "ZYXS", chunk_bytes=3_000)
    np.testing.assert_array_equal(found, function(samples, 3, channel_axis=3), strict=True)
    _, found = made(name, samples, "ZYXS", chunk_bytes=3_000, axes="x,0", size="3x5")
    np.testing.assert_array_equal(found, function(samples, (3, 5), axes=(2, 0)), strict=True)


@pytest.mark.parametrize(
    ("footprint", "radius", "mask"),
    [("disk", 3, disk(3)), ("cross", 2, cross(2, 2)), ("cross", 1, cross(1, 3)), ("ball", 2, ball(2))],
)
def test_footprints(made, footprint, radius, mask):
    samples, letters = samples_of((9, 14, 11)[3 - mask.ndim :], "uint8"), "ZYX"[3 - mask.ndim :]
    given = {"footprint": footprint, "radius": radius}
    _, found = made("percentile", samples, letters, chunk_bytes=2_000, percentile=30, **given)
    np.testing.assert_array_equal(found, percentile_filter(samples, 30, footprint=mask), strict=True)


@pytest.mark.parametrize("policy", ["propagate", "omit"])
def test_missing_samples(made, policy):
    samples = samples_of((23, 31), "float32")
    samples[3:9, 4:11] = np.nan
    samples[13, 4:30] = -5
    options = {"nan_policy": policy, "nodata": -5}
    _, found = made("median", samples, "YX", chunk_bytes=1_000, size=5, **options)
    np.testing.assert_array_equal(found, median_filter(samples, 5, **options), strict=True)


def test_nan_may_be_refused(made):
    samples = samples_of((23, 31), "float32")
    samples[3, 4] = np.nan
    with pytest.raises(InputError, match=r"in.npy, among samples .*: image contains NaN .*; replace them, or choose"):
        made("median", samples, "YX", nan_policy="raise")
    with pytest.raises(ParameterError, match=r"--cval nan does not fit --nan-policy raise"):
        made("median", samples, "YX", nan_policy="raise", mode="constant", cval=np.nan)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"size": (3, 5, 7)}, "--size has 3 values: give 1 or 2 .*in.npy is filtered along Y,X"),
        ({"radius": 3}, "--radius belongs to --footprint disk, ball or cross"),
        ({"footprint": "disk"}, "--footprint disk needs --radius"),
        ({"footprint": "cross", "radius": 2, "size": 3}, "--size belongs to --footprint box; a cross has --radius"),
        ({"footprint": "ball", "radius": 2}, "--footprint ball needs 3 axes, and 2 are filtered"),
        ({"footprint": "disk", "radius": 2, "axes": "Y"}, "--footprint disk needs 2 axes, and 1 is filtered: .* cross"),
        ({"size": 2049}, "--size makes a window of 4,198,401 pixels; at most 4,194,304"),
        ({"axes": "Z"}, r"--axes Z: name each axis once, of those .*in.npy has: Y \(0\), X \(1\)"),
        ({"axes": "C"}, r"--axes C: name each axis once"),
    ],
)
def test_windows_that_do_not_fit(made, given, said):
    with pytest.raises(ParameterError) as refused:
        made("median", samples_of((9, 7, 3), "uint8"), "YXS", **given)
    refused.match(said)
    assert "\n" not in str(refused.value)


def test_the_audit_finds_another_sample(made, monkeypatch):
    monkeypatch.setattr(rank, "percentile_filter", lambda *_, out, **__: out.fill(3))
    with pytest.raises(AuditError, match="operator maximum wrote 3, its reference says"):
        made("maximum", samples_of((23, 31), "uint16"), "YX")
