"""Waiting for what other processes do."""

from __future__ import annotations

import time

# Long enough for a machine with much else to do: what is waited for is the start of several Python processes.
WAIT_S = 150


def wait_until(condition, what, say=lambda: "", every_s=0.02):
    """Poll until it holds; AssertionError, with what `say` tells, where it does not in time."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {WAIT_S} s\n{say()}"
        time.sleep(every_s)
