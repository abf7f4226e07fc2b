"""One thread per transform: tests run side by side, and threads of small transforms would wait for one another."""

from __future__ import annotations

import pytest

from kernels.nufft import cpu


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setattr(cpu, "default_workers", lambda workers: workers or 1)
