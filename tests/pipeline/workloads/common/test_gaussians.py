"""The definitions that receipts name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.smoothing.window import gaussian_windows
from pipeline.workloads.common.gaussians import definition_of

EXACT = "exact sums of fixed-point weights, within "
ROUNDINGS = " roundings of the largest magnitude to "
FLOATS = "1e-5 of the largest magnitude"
CASES: list[tuple[str, tuple[float, ...], dict[str, Any], str]] = [
    ("uint8", (2,), {}, EXACT + "0.6 of a step"),
    ("uint8", (2, 3, 0), {}, EXACT + "0.6 of a step"),
    ("uint8", (2, 2, 2), {}, "float32 sums, within 0.6 of a step"),
    ("uint8", (20, 20), {"truncate": 4}, "float32 sums, within 0.6 of a step"),
    ("uint8", (600, 600), {"truncate": 4}, "float32 sums, within 1 step"),
    ("uint8", (12, 12, 12), {}, "decimated, within 0.6 of a step"),
    ("uint8", (3, 12), {}, "float32 sums along Y and decimated along X, within 0.6 of a step"),
    ("uint16", (4, 4), {}, EXACT + "0.6 of a step"),
    ("uint16", (1, 1), {}, "float32 sums, within 1 step"),
    ("uint16", (20, 20), {}, "decimated, within 0.6 of a step"),
    ("uint16", (12, 12, 12), {}, "decimated, within 0.6 of a step"),
    ("uint16", (12, 12, 12, 12), {}, "decimated, within 1 step"),
    ("uint16", (20, 20), {"truncate": 4}, "float32 sums, within 1 step"),
    ("float32", (2, 3), {}, f"float32 sums, within 42{ROUNDINGS}float32"),
    ("float64", (2, 3), {}, f"float64 sums, within 42{ROUNDINGS}float64"),
    ("float32", (6, 6), {}, "decimated, within " + FLOATS),
    ("float64", (2,), {"result": "int32"}, f"float64 sums, within 0.5 of a step and 17{ROUNDINGS}float64"),
    ("float32", (9,), {"result": "float16"}, "decimated, within one rounding to float16 and " + FLOATS),
    ("uint8", (2, 2), {"orders": (0, 1)}, "float32 sums, within 1e-5 of the largest value that the weights could give"),
    ("uint8", (0, 0), {}, "none, since sigma is 0"),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "sigmas", "options", "said"), CASES)
def test_a_definition_and_its_bound(dtype: str, sigmas: tuple[float, ...], options: dict[str, Any], said: str) -> None:
    given = dict(options)
    result, axes = np.dtype(given.pop("result", dtype)), range(len(sigmas))
    windows = gaussian_windows(axes, sigmas, ["reflect"] * len(sigmas), np.dtype(dtype), **given)
    assert definition_of(windows, "TZYX"[-len(sigmas) :], np.dtype(dtype), result) == said
