"""`millrace run bilateral` and `rolling-ball`: chunked equals whole at every border, and what is refused."""

from __future__ import annotations

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
