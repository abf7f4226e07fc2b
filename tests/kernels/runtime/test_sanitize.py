"""Each operation has tests that scripts/sanitize runs."""

from __future__ import annotations

import re
from pathlib import Path

import kernels

TESTS = Path(__file__).parents[2]


def test_a_test_is_marked_for_every_operation() -> None:
    marks = re.compile(r"^@pytest\.mark\.sanitize\((.*)\)$", re.MULTILINE)
    named = {
        operation
        for path in TESTS.rglob("test_*.py")
        for mark in marks.findall(path.read_text())
        for operation in re.findall(r'"(\w+)"', mark)
    }
    assert named == set(kernels.names())
