"""What is opened besides the place itself."""

from __future__ import annotations

import pytest

from pipeline import metrics
from pipeline.cluster import executor
from pipeline.config import Settings
from pipeline.engine.devices.device import CpuDevice


class Gpu(CpuDevice):
    def describe(self):
        return {"name": "cuda:0", "uuid": "GPU-of-this-test"}


@pytest.mark.parametrize(
    ("device", "port", "watched"),
    [(Gpu, 9100, ["GPU-of-this-test"]), (Gpu, None, []), (CpuDevice, 9100, [])],
)
def test_a_gpu_is_watched_where_metrics_are_served(monkeypatch, device, port, watched):
    """NVML takes a third of a second to load and to ask: not for jobs that tell nobody."""
    told = []
    monkeypatch.setattr(metrics.gpus, "watch", told.append)
    monkeypatch.setattr(executor, "open_device", lambda _name, threads, overlap: device(threads, overlap))
    with executor.open_executor(Settings(device="auto", metrics_port=port)) as opened:
        assert isinstance(opened.device, device)
    assert told == watched
