"""What NVML tells of a real GPU, through the monitor that a worker has."""

from __future__ import annotations

import time

import pytest

from pipeline.engine.devices.discovery import cuda_properties
from pipeline.metrics import gpu

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

GIB = 1 << 30


def read_after(monitor, moment, deadline_s=20):
    """The first state that was read after that moment."""
    deadline = time.monotonic() + deadline_s
    while monitor._read_at <= moment:
        assert time.monotonic() < deadline, "nothing was read"
        time.sleep(0.02)
    (state,) = monitor.states()
    return state


def test_memory_power_temperature_and_the_bus():
    import cupy

    monitor = gpu.GpuMonitor(gpu._nvml, interval_s=0.1)
    monitor.watch(cuda_properties(0)["uuid"])
    try:
        before = read_after(monitor, time.monotonic())
        held = cupy.cuda.alloc_pinned_memory(GIB)
        there = cupy.cuda.alloc(GIB)
        sent = 8
        for _ in range(sent):
            there.copy_from_host(held.ptr, GIB)
        cupy.cuda.runtime.deviceSynchronize()
        after = read_after(monitor, time.monotonic() + 0.2)
    finally:
        monitor.end()
    assert after["memory_total_bytes"] == pytest.approx(cuda_properties(0)["memory_bytes"], rel=0.05)
    assert GIB // 2 <= after["memory_used_bytes"] - before["memory_used_bytes"] < 4 * GIB
    assert 0 <= after["utilization_ratio"] <= 1
    assert 20 < after["power_watts"] < 1500
    assert 5 < after["temperature_celsius"] < 110
    assert after["pcie_link_bytes_per_second"] > 1e9
    if after["pcie_rx_bytes"] is None:
        pytest.skip("this driver counts no bytes on the bus")
    received = after["pcie_rx_bytes"] - before["pcie_rx_bytes"]
    assert 0.2 * sent * GIB < received < 5 * sent * GIB  # estimated from samples where the counters are narrow
