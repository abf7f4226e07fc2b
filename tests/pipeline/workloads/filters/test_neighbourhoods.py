"""`millrace run bilateral` and `rolling-ball`: chunked equals whole at every border, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernels.bilateral import bilateral
from kernels.rolling_ball import rolling_ball
from pipeline.errors import AuditError, ParameterError
from pipeline.workloads.filters import bilateral as operator
from tests.kernels.rank.cases import samples_of
from tests.pipeline.workloads.filters.jobs import filtered


@pytest.mark.parametrize("mode", ["wrap", "constant"])
def test_bilateral(tmp_path: Any, mode: str) -> None:
    options = {"mode": mode, **({"cval": 7} if mode == "constant" else {})}
    for dtype, given in (("uint8", {"sigma_range": 30.0}), ("float32", {"sigma_range": 0.5, "size": (3, 7)})):
        image = samples_of((67, 59), dtype)
        image = image.clip(-3, 3) if dtype == "float32" else image
        receipt, found = filtered(tmp_path, "bilateral", image, "YX", chunk_bytes=5_000, **given, **options)
        np.testing.assert_array_equal(found, bilateral(image, **given, **options), strict=True)
        assert receipt["chunks"] > 1
        assert receipt["audit"]["samples"] > 50
    receipt, _ = filtered(tmp_path, "bilateral", image, "YX", sigma_range=0.5, sigma_spatial=(1, 9))
    assert receipt["image"]["window"] == "7,31"  # where three deviations are cut


def test_missing_values_have_no_weight_for_any_sigma(tmp_path: Any) -> None:
    image = np.where(samples_of((23, 31), "uint8") < 128, 1, 100).astype(np.float32)
    image[5, 7] = np.nan
    for sigma in (1e-5, 1.0, 1e4):
        _, found = filtered(tmp_path, "bilateral", image, "YX", sigma_range=sigma, size=(3,), nan_policy="omit")
        assert np.isnan(found).sum() == 1
        if sigma < 10:
            np.testing.assert_array_equal(found, image)
        assert np.nanmin(found) >= 1
        assert np.nanmax(found) <= 100


@pytest.mark.parametrize("policy", ["omit", "propagate"])
def test_an_infinity_spreads_over_its_windows(tmp_path: Any, policy: str) -> None:
    image = samples_of((9, 11), "uint8").astype(np.float32)  # small enough for the audit to see every sample
    image[4, 5] = np.inf
    _, found = filtered(tmp_path, "bilateral", image, "YX", sigma_range=50, size=(3,), nan_policy=policy)
    assert np.isnan(found).sum() == 9
    assert np.isnan(found[3:6, 4:7]).all()


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_the_audit_tolerates_the_error_of_weights(dtype: str) -> None:
    """Errors of weights add up around single pixels."""
    image = np.zeros((29, 500), dtype)
    image[14, 14::18] = np.linspace(3500, 5300, 28).astype(dtype)[: image[14, 14::18].size]
    asked = SimpleNamespace(sigma_range=1000.0, sigma_spatial=(5.0,), size=(15,))
    found = bilateral(image, 1000, 5, size=15, mode="valid").astype(np.float64)
    expected = np.empty_like(found)
    operator._define(image.astype(np.float64), **vars(asked), axes=(0, 1), nan_policy="propagate", out=expected)
    scale = float(image.max()) if dtype == "float32" else 1
    tolerated = operator._tolerance(np.dtype(dtype), asked, 2)
    assert tolerated / 8 < abs(found - expected).max() / scale < tolerated


def test_rolling_ball(tmp_path: Any) -> None:
    image = samples_of((267, 259), "uint8")
    background = rolling_ball(image, 4)
    for chunk_bytes in (None, 24_000):
        receipt, found = filtered(tmp_path, "rolling-ball", image, "YX", chunk_bytes=chunk_bytes, radius=4)
        np.testing.assert_array_equal(found, np.rint(image - background).astype(np.uint8), strict=True)
        _, found = filtered(tmp_path, "rolling-ball", image, "YX", chunk_bytes=chunk_bytes, radius=4, background=True)
        np.testing.assert_array_equal(found, np.rint(background).astype(np.uint8), strict=True)
    assert receipt["chunks"] > 1
    small = image[:9, :7]
    _, found = filtered(tmp_path, "rolling-ball", small, "YX", radius=30, mode="wrap")
    np.testing.assert_array_equal(found, np.rint(small - rolling_ball(small, 30)).astype(np.uint8), strict=True)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("bilateral", {"sigma_range": 3, "size": 4}, "--size must be odd; got 4"),
        ("bilateral", {"sigma_range": 3, "sigma_spatial": (1, 2, 3)}, "--sigma-spatial has 3 values: give 1 or 2"),
        ("rolling-ball", {"axes": "Y"}, "--axes: a ball rolls along two or three; got 1"),
    ],
)
def test_what_does_not_fit(tmp_path: Any, name: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        filtered(tmp_path, name, samples_of((9, 7), "uint8"), "YX", **given)


def test_the_audit_finds_another_mean(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "filtered", lambda *_, out, **__: out.fill(3))
    with pytest.raises(AuditError, match="operator bilateral wrote 3, its reference says"):
        filtered(tmp_path, "bilateral", samples_of((23, 31), "uint8"), "YX", sigma_range=30)
