"""Users who replace files by links while a service runs their jobs; for longer: tests.pipeline.service.link_race."""

from __future__ import annotations

from contextlib import contextmanager

from tests.pipeline.service.link_race import race
from tests.pipeline.service.live import live_service


@contextmanager
def service(folder):
    """In this process."""
    with live_service(folder, target_bytes=100_000) as (url, _, _):
        yield url


def test_nothing_outside_the_roots_is_read_or_written(tmp_path):
    found = race(tmp_path, service, seconds=4.0)
    assert found.wrong == []
    assert found.swaps > 0
    assert found.states
    assert not [error for error in found.errors if "internal error" in error or "/proc/" in error]
