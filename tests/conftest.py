"""Tests marked gpu or multi_gpu are skipped, with the reason, where too few CUDA devices answer; nothing else skips."""

from __future__ import annotations

from functools import cache

import pytest


@cache
def _cuda_devices() -> tuple[int, str]:
    """How many CUDA devices answer, and why there are no more."""
    try:
        from cupy_backends.cuda.api import runtime
    except ImportError as exc:
        return 0, f"CuPy cannot be imported: {exc}"
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as exc:
        return 0, str(exc)
    return count, f"{count} CUDA device(s)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
        if not needed:
            continue
        count, reason = _cuda_devices()
        if count < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s): {reason}"))
