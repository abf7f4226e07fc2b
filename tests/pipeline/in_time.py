"""For tests that a defect could leave waiting for ever: they fail instead, and nothing they leave keeps the process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

LIMIT_S = 90.0


def in_background(work: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """The outcome of a call on a thread that ends with the process: an executor's would be waited for."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(work(*arguments))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def in_time(test: Callable[..., None]) -> Callable[..., None]:
    """A test that fails after a while, wherever it waits."""

    @functools.wraps(test)
    def limited(**arguments: Any) -> None:
        outcome = in_background(functools.partial(test, **arguments))
        try:
            error = outcome.exception(LIMIT_S)
        except TimeoutError:
            pytest.fail(f"still waiting after {LIMIT_S:g} s")
        if error is not None:
            raise error

    return limited
