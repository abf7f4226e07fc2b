"""Whether this process is compiling kernels, so that a progress line can name what a first run waits for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# One entry for each compilation under way; several threads may compile at once, and append and pop are atomic.
_running: list[None] = []


def under_way() -> bool:
    return bool(_running)


def begin() -> None:
    _running.append(None)


def end() -> None:
    _running.pop()


@contextmanager
def compiling() -> Iterator[None]:
    begin()
    try:
        yield
    finally:
        end()
