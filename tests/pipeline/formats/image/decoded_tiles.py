"""Counts how often each strip or tile of a TIFF is decoded."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pipeline.formats.image.tiff import together


def decoded_tiles(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int, int, int]]:
    """By page, plane, and place down and across; those that are left to tifffile do not count."""
    found: Counter[tuple[int, int, int, int]] = Counter()
    read = together.read_tiles_of

    def counted(file: Any, pages: Any, plane: int, parts: Any, memories: Any, *given: Any) -> list[int]:
        left = read(file, pages, plane, parts, memories, *given)
        for number, (page, (down, *_), (across, *_)) in enumerate(parts):
            if number not in left and not memories[number][1]:
                found[pages[page].index, plane, down, across] += 1
        return left

    monkeypatch.setattr(together, "read_tiles_of", counted)
    return found
