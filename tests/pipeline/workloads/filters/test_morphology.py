"""`millrace run open` and its kin: chunked equals whole at every border, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernels.morphology as kernels
from kernels.rank import disk
from pipeline.errors import AuditError, ParameterError
from pipeline.workloads.filters import morphology
from tests.kernels.rank.cases import samples_of
from tests.pipeline.workloads.filters.jobs import filtered

FUNCTIONS = {
    "erode": kernels.grey_erosion, "dilate": kernels.grey_dilation, "open": kernels.grey_opening,
    "close": kernels.grey_closing, "tophat": kernels.white_tophat, "bottomhat": kernels.black_tophat,
}  # fmt: skip


@pytest.mark.parametrize("mode", ["reflect", "mirror", "nearest", "wrap", "constant"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_cut_gives_the_same(tmp_path: Any, name: str, mode: str) -> None:
    options = {"mode": mode, **({"cval": 7} if mode == "constant" else {})}
    for dtype, size in (("int16", (4, 7)), ("uint8", (3, 4))):
        samples = samples_of((97, 83), dtype)
        receipt, found = filtered(tmp_path, name, samples, "YX", chunk_bytes=3_000, size=size, **options)
        np.testing.assert_array_equal(found, FUNCTIONS[name](samples, size, **options), strict=True)
        assert (receipt["audit"]["worst_error"], receipt["audit"]["samples"] > 50) == (0, True)
        assert receipt["chunks"] > 1


def test_footprints_and_missing_samples(tmp_path: Any) -> None:
    samples = samples_of((31, 29), "uint8")
    samples[3:9, 20:] = 255
    for name in ("close", "tophat"):
        options = {"mode": "nearest", "nodata": 255}
        _, found = filtered(tmp_path, name, samples, "YX", chunk_bytes=2_000, footprint="disk", radius=3, **options)
        np.testing.assert_array_equal(found, FUNCTIONS[name](samples, footprint=disk(3), **options), strict=True)


def test_windows_that_do_not_fit(tmp_path: Any) -> None:
    with pytest.raises(ParameterError, match=r"--size has 3 values: give 1 or 2 .*in.npy is filtered along Y,X"):
        filtered(tmp_path, "open", samples_of((9, 7), "uint8"), "YX", size=(3, 5, 7))


def test_the_audit_finds_results_that_depend_on_the_cut(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(morphology, "grey_erosion", lambda block, **_: np.full_like(block, len(block)))
    monkeypatch.setitem(morphology._FILTERS, "open", (morphology.grey_erosion,))
    with pytest.raises(AuditError, match="operator open gives other values if the image is cut otherwise"):
        filtered(tmp_path, "open", samples_of((23, 31), "uint16"), "YX")
