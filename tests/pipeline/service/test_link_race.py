"""Users who replace files by links while a service runs their jobs; for longer: tests.pipeline.service.link_race."""

from __future__ import annotations

from tests.pipeline.service.link_race import race


def test_nothing_outside_the_roots_is_read_or_written(tmp_path):
    found = race(tmp_path, seconds=4.0)
    assert found.wrong == []
    assert found.swaps > 0
    assert not [error for error in found.errors if "internal error" in error or "/proc/" in error]
