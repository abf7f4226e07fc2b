"""GPUs as NVML tells them: read on a thread of their own, and left out where nobody tells."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace

import pytest

from pipeline.metrics import gpu
from pipeline.metrics.gpu import GpuMonitor

UUID = "GPU-4f3c2a10-0000-1111-2222-333344445555"
DEADLINE_S = 60


class NVMLError(Exception):
    """As pynvml's."""


class FakeNvml:
    """One GPU. `silent`: names of functions that this GPU does not support. Each reading of counters moves them on."""

    NVMLError = NVMLError
    NVML_SUCCESS = 0
    NVML_TEMPERATURE_GPU = 0
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1
    NVML_FI_DEV_PCIE_COUNT_TX_BYTES, NVML_FI_DEV_PCIE_COUNT_RX_BYTES = 197, 198
    NVML_VALUE_TYPE_UNSIGNED_INT, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG = 1, 3

    def __init__(self, *silent, value_type=NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, counters=(1000, 2000), step=(30, 7)):
        self.silent = silent
        self.value_type = value_type
        self.counters = list(counters)
        self.step = step
        self.threads = set()
        self.readings = 0
        self.hanging = threading.Event()
        self.hanging.set()

    def __getattr__(self, name):
        def function(*arguments):
            self.threads.add(threading.current_thread().name)
            if name in self.silent:
                raise NVMLError(name)
            return getattr(self, f"_{name.removeprefix('nvmlDevice')}")(*arguments)

        if name.startswith("nvmlDevice"):
            return function
        raise AttributeError(name)

    def _GetHandleByUUID(self, uuid):
        if uuid != UUID:
            raise NVMLError("not found")
        return "handle"

    def _GetMaxPcieLinkWidth(self, handle):
        return 16

    def _GetMaxPcieLinkGeneration(self, handle):
        return 5

    def _GetMemoryInfo(self, handle):
        self.hanging.wait(DEADLINE_S)
        self.readings += 1
        return SimpleNamespace(used=3 << 30, total=80 << 30)

    def _GetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=87)

    def _GetPowerUsage(self, handle):
        return 312_500

    def _GetTemperature(self, handle, sensor):
        return 54

    def _GetFieldValues(self, handle, fields):
        assert fields == (198, 197)
        self.counters = [value + step for value, step in zip(self.counters, self.step, strict=True)]
        wrapped = [value % 2**32 for value in self.counters]
        return [
            SimpleNamespace(
                nvmlReturn=0, valueType=self.value_type,
                value=SimpleNamespace(uiVal=wrapped[i], ullVal=self.counters[i]),
            )
            for i in range(2)
        ]  # fmt: skip

    def _GetPcieThroughput(self, handle, which):
        return {self.NVML_PCIE_UTIL_RX_BYTES: 5_000_000, self.NVML_PCIE_UTIL_TX_BYTES: 1_000_000}[which]


def until(condition):
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.fixture
def monitors():
    made = []

    def monitor(nvml, *uuids):
        found = GpuMonitor(lambda: nvml, 0.002)
        made.append((nvml, found))
        for uuid in uuids or (UUID,):
            found.watch(uuid)
        return found

    yield monitor
    for nvml, each in made:
        if nvml is not None:
            nvml.hanging.set()
        each.end()


def told(monitor):
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in monitor.collect()
        for sample in family.samples
    }


def test_everything_is_told_in_base_units(monitors):
    nvml = FakeNvml()
    monitor = monitors(nvml)
    until(lambda: nvml.readings > 3)
    found = told(monitor)
    received, sent = (found.pop(("millrace_gpu_pcie_bytes_total", UUID, way)) for way in ("rx", "tx"))
    assert found == {
        ("millrace_gpu_memory_used_bytes", UUID): 3 << 30,
        ("millrace_gpu_memory_total_bytes", UUID): 80 << 30,
        ("millrace_gpu_utilization_ratio", UUID): 0.87,
        ("millrace_gpu_power_watts", UUID): 312.5,
        ("millrace_gpu_temperature_celsius", UUID): 54.0,
        ("millrace_gpu_pcie_link_bytes_per_second", UUID): pytest.approx(63e9, rel=1e-3),
    }
    assert received > 0
    assert received % 30 == 0  # wide counters: every byte since the first reading, none from before
    assert received / sent == pytest.approx(30 / 7)
    assert nvml.threads == {"nvml"}
    [state] = monitor.states()
    assert (state["uuid"], state["utilization_ratio"]) == (UUID, 0.87)


def test_narrow_counters_are_sampled_over_their_wrap(monitors, monkeypatch):
    """Counters of 32 bits about to overflow: between two readings 1 GiB and 1 MiB, over at least the sample's time."""
    monkeypatch.setattr(gpu, "SAMPLE_S", 0.001)
    started = time.monotonic()
    nvml = FakeNvml(
        value_type=FakeNvml.NVML_VALUE_TYPE_UNSIGNED_INT, counters=(2**32 - 100, 5), step=(1 << 30, 1 << 20)
    )
    monitor = monitors(nvml)
    until(lambda: told(monitor).get(("millrace_gpu_pcie_bytes_total", UUID, "rx"), 0.0) > 0)
    found = told(monitor)
    received, sent = (found["millrace_gpu_pcie_bytes_total", UUID, way] for way in ("rx", "tx"))
    assert received == pytest.approx(1024 * sent)
    assert received <= (1 << 30) / 0.001 * (time.monotonic() - started)


def test_without_counters_the_throughput_is_added_up(monitors):
    started = time.monotonic()
    monitor = monitors(FakeNvml("nvmlDeviceGetFieldValues"))
    until(lambda: told(monitor).get(("millrace_gpu_pcie_bytes_total", UUID, "rx"), 0.0) > 0)
    found = told(monitor)
    received = found["millrace_gpu_pcie_bytes_total", UUID, "rx"]
    assert received == pytest.approx(5 * found["millrace_gpu_pcie_bytes_total", UUID, "tx"])
    assert received <= 5e9 * (time.monotonic() - started)


@pytest.mark.parametrize(
    ("silent", "missing"),
    [
        ("nvmlDeviceGetUtilizationRates", "utilization_ratio"),
        ("nvmlDeviceGetPowerUsage", "power_watts"),
        ("nvmlDeviceGetMemoryInfo", "memory_used_bytes"),
        ("nvmlDeviceGetTemperature", "temperature_celsius"),
        ("nvmlDeviceGetMaxPcieLinkWidth", "pcie_link_bytes_per_second"),
    ],
)
def test_what_a_gpu_does_not_tell_is_left_out(monitors, silent, missing):
    monitor = monitors(FakeNvml(silent))
    until(monitor.states)
    names = {name for name, *_ in told(monitor)}
    assert f"millrace_gpu_{missing}" not in names
    assert "millrace_gpu_pcie_bytes_total" in names
    assert len(names) == (5 if missing == "memory_used_bytes" else 6)


def test_a_driver_that_hangs_delays_nobody_and_old_values_are_not_told(monitors, monkeypatch):
    monkeypatch.setattr(gpu, "STALE_S", 0.05)
    nvml = FakeNvml()
    monitor = monitors(nvml)
    until(monitor.states)
    nvml.hanging.clear()  # the next reading does not return
    until(lambda: not monitor.states())
    assert told(monitor) == {}
    nvml.hanging.set()
    until(monitor.states)


def test_without_a_driver_nothing_is_told(monitors):
    monitor = monitors(None)
    until(lambda: monitor._thread is None)
    assert monitor.states() == []
    assert told(monitor) == {}


def test_another_machines_gpu_is_not_told_and_does_not_hide_ours(monitors):
    monitor = monitors(FakeNvml(), "GPU-somebody-elses")
    until(lambda: monitor._thread is None)  # with nothing to read it ends
    monitor.watch(UUID)
    until(monitor.states)
    assert [state["uuid"] for state in monitor.states()] == [UUID]


def test_the_driver_of_this_machine_is_asked_without_harm(monkeypatch):
    """Whether there is one or not, and whether its binding is installed."""
    nvml = gpu._nvml()
    assert nvml is None or nvml.nvmlDeviceGetCount() >= 0
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu._nvml() is None
