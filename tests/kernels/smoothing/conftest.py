"""Compiles kernels in parallel before tests that launch most of them."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from kernels.runtime import launch
from kernels.smoothing.cuda import VARIANTS


@pytest.fixture(scope="session")
def compiled_kernels() -> None:
    """Fills the cache of binaries: one after another they take two minutes. Not needed with pytest-xdist, whose workers
    share the tests."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    entries = sorted({entry for variant in VARIANTS.values() for entry in variant.entries})
    major, minor = (launch._attribute(which, 0) for which in (75, 76))  # compute capability
    architecture = launch._newest_supported(10 * major + minor)
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, entries, [architecture] * len(entries), chunksize=4))


def _compile(entry: str, architecture: str) -> None:
    launch.cached_binary("smoothing", entry, architecture)
