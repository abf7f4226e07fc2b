"""Molecules that are no part of the repository: under $MILLRACE_TEST_DATA, or in shared/data beside the checkout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_BESIDE = Path(__file__).parents[5] / "shared" / "data"


def real_molecule(name: str) -> Path:
    """The path of `coulomb/<name>`; skips the test where it is absent."""
    path = Path(os.environ.get("MILLRACE_TEST_DATA", _BESIDE)) / "coulomb" / name
    if not path.is_file():
        pytest.skip(f"{name} is not under $MILLRACE_TEST_DATA or ../shared/data")
    return path
