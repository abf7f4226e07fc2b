"""A receipt's audit in words: what was compared, and the error with its unit."""

from __future__ import annotations

import pytest

from pipeline.engine.receipt import verified


@pytest.mark.parametrize(
    ("samples", "worst", "tolerance", "unit", "said"),
    [
        (100, 0.0, 1, "sample values", "100 pixels verified, all exact"),
        (1, 0.497, 1, "sample values", "1 pixel verified, all within rounding (0.497 of a step)"),
        (9, 0.573, 1, "sample values", "9 pixels verified, worst error 0.573 of a step (tolerated: 1)"),
        (
            9, 1e-7, 2e-6, "relative to the largest value",
            "9 pixels verified, worst error 1e-07 of the largest value (tolerated: 2e-06)",
        ),
        (9, 1e-7, 2e-6, "parts of a litre", "9 values verified, worst error 1e-07 parts of a litre (tolerated: 2e-06)"),
        (9, 1e-7, 2e-6, "", "9 values verified, worst error 1e-07 (tolerated: 2e-06)"),
    ],
)  # fmt: skip
def test_an_audit_in_words(samples, worst, tolerance, unit, said):
    assert verified({"samples": samples, "worst_error": worst, "tolerance": tolerance, "unit": unit}) == said
