"""The table of README.md: its files and tests exist, and every test file here has a row."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def test_the_table_names_what_is_there() -> None:
    text = (HERE / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:kernels|pipeline)/[\w/]+\.py)`", text))
    assert named
    assert {name for name in named if not (ROOT / name).is_file()} == set()
    tests = {path.name for path in HERE.glob("test_*.py")} - {Path(__file__).name}
    assert set(re.findall(r"`(test_\w+\.py)`", text)) == tests
