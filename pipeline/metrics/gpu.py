"""The state of the GPUs that this process computes on, from NVML.

A thread asks the driver once a second; scrapes, heartbeats and pages read the last state, so that they never wait for
the driver. Without a driver, and for what a GPU does not report, there is no value.

Source: NVIDIA, NVML API reference (device queries, field value queries).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.core import Metric

INTERVAL_S = 1.0
# An older state is ignored: the driver hangs.
STALE_S = 10.0
# Length of a sample if the driver counts bytes in 32 bits, which a fast link fills in 70 ms.
SAMPLE_S = 0.02
_WRAP = 1 << 32
# Bytes per second of one lane, one way, by the generation of PCI Express: transfers × encoding / 8.
_LANE_BYTES = {1: 250e6, 2: 500e6, 3: 984.6e6, 4: 1969.2e6, 5: 3938.5e6, 6: 7563e6}


@dataclass
class GpuState:
    """The last state of a GPU; None: not reported."""

    uuid: str
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilization_ratio: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    pcie_link_bytes_per_second: float | None = None
    pcie_rx_bytes: float | None = None  # since the first reading
    pcie_tx_bytes: float | None = None


class _Gpu:
    """One GPU and its handle."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self.state = GpuState(uuid)
        self._rx, self._tx = 0.0, 0.0
        self._counted: tuple[float, int, int] | None = None  # when, and 64-bit counters
        self._sampled_at = time.monotonic()
        with self._optional():
            lanes = nvml.nvmlDeviceGetMaxPcieLinkWidth(self._handle)
            generation = nvml.nvmlDeviceGetMaxPcieLinkGeneration(self._handle)
            self.state.pcie_link_bytes_per_second = lanes * _LANE_BYTES[min(generation, max(_LANE_BYTES))]

    def read(self) -> None:
        """Reads the whole state."""
        nvml, handle, found = self._nvml, self._handle, GpuState(self.state.uuid)
        found.pcie_link_bytes_per_second = self.state.pcie_link_bytes_per_second
        with self._optional():
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            found.memory_used_bytes, found.memory_total_bytes = int(memory.used), int(memory.total)
        with self._optional():
            found.utilization_ratio = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        with self._optional():
            found.power_watts = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
        with self._optional():
            found.temperature_celsius = float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        with self._optional():
            self._count_bytes()
            found.pcie_rx_bytes, found.pcie_tx_bytes = self._rx, self._tx
        self.state = found

    def _count_bytes(self) -> None:
        """Adds the bytes over the bus since the last call: exact with 64-bit counters, otherwise estimated."""
        counters = self._counters()
        now = time.monotonic()
        if counters is None:
            rates = tuple(  # over 20 ms, in kB/s
                1e3 * self._nvml.nvmlDeviceGetPcieThroughput(self._handle, which)
                for which in (self._nvml.NVML_PCIE_UTIL_RX_BYTES, self._nvml.NVML_PCIE_UTIL_TX_BYTES)
            )
            self._add_rates(now, *rates)
            return
        (rx, tx), wide = counters
        if wide:
            if self._counted is not None:
                self._rx += max(rx - self._counted[1], 0)
                self._tx += max(tx - self._counted[2], 0)
            self._counted = (now, rx, tx)
            return
        time.sleep(SAMPLE_S)
        again = self._counters()
        took = time.monotonic() - now
        if again is not None and took < _WRAP / (self.state.pcie_link_bytes_per_second or 64e9):
            self._add_rates(now, (again[0][0] - rx) % _WRAP / took, (again[0][1] - tx) % _WRAP / took)

    def _add_rates(self, now: float, rx: float, tx: float) -> None:
        elapsed, self._sampled_at = now - self._sampled_at, now
        self._rx += rx * elapsed
        self._tx += tx * elapsed

    def _counters(self) -> tuple[tuple[int, int], bool] | None:
        """Bytes received and sent, and whether in 64 bits; None if the driver has no such counters."""
        nvml = self._nvml
        fields = (nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES)
        try:
            rx, tx = nvml.nvmlDeviceGetFieldValues(self._handle, fields)
        except nvml.NVMLError:
            return None
        if rx.nvmlReturn != nvml.NVML_SUCCESS or tx.nvmlReturn != nvml.NVML_SUCCESS:
            return None
        if rx.valueType == nvml.NVML_VALUE_TYPE_UNSIGNED_INT:
            return (rx.value.uiVal, tx.value.uiVal), False
        return (rx.value.ullVal, tx.value.ullVal), True

    @contextmanager
    def _optional(self) -> Iterator[None]:
        """Skips what this GPU does not report, such as utilization in MIG mode."""
        with suppress(self._nvml.NVMLError):
            yield


class GpuMonitor:
    """Reads the watched GPUs from the first `watch` until the process ends."""

    def __init__(self, load: Callable[[], Any], interval_s: float = INTERVAL_S) -> None:
        """`load` returns NVML's initialised binding, or None; it is called on the monitor's thread."""
        self._load = load
        self._interval_s = interval_s
        self._wanted: list[str] = []
        self._states: list[GpuState] = []
        self._read_at = 0.0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def watch(self, uuid: str) -> None:
        """Adds a GPU, "GPU-…" or "MIG-…". Returns at once."""
        with self._lock:
            if uuid in self._wanted:
                return
            self._wanted.append(uuid)
            if self._thread is None:
                self._thread = threading.Thread(target=self._read_on, name="nvml", daemon=True)
                self._thread.start()

    def states(self) -> list[dict[str, Any]]:
        """The last states as dicts with the names of `GpuState`; none if they are stale."""
        return [asdict(state) for state in self._fresh()]

    def end(self) -> None:
        """Stops reading; for tests."""
        self._ended.set()
        thread = self._thread
        if thread is not None:
            thread.join()

    def collect(self) -> Iterable[Metric]:
        """As a collector of prometheus_client."""
        from pipeline.metrics.families import counter_family, gauge_family

        families = [gauge_family(f"millrace_gpu_{name}") for name in _GAUGES]
        pcie = counter_family("millrace_gpu_pcie_bytes_total")
        for state in self._fresh():
            for name, family in zip(_GAUGES, families, strict=True):
                value = getattr(state, name)
                if value is not None:
                    family.add_metric([state.uuid], value)
            for direction, counted in (("rx", state.pcie_rx_bytes), ("tx", state.pcie_tx_bytes)):
                if counted is not None:
                    pcie.add_metric([state.uuid, direction], counted)
        return [*families, pcie]

    def _fresh(self) -> list[GpuState]:
        return self._states if time.monotonic() - self._read_at < STALE_S else []

    def _read_on(self) -> None:
        nvml = self._load()
        gpus: dict[str, _Gpu] = {}
        while self._has_more(nvml, gpus):
            for gpu in gpus.values():
                gpu.read()
            self._states, self._read_at = [gpu.state for gpu in gpus.values()], time.monotonic()
            self._ended.wait(self._interval_s)

    def _has_more(self, nvml: Any, gpus: dict[str, _Gpu]) -> bool:
        """Opens newly watched GPUs; False, which ends the thread, if there is nothing to read.

        GPUs that NVML does not know, of another machine or hidden from us, are dropped.
        """
        tried = list(self._wanted)
        for uuid in tried if nvml is not None else ():
            if uuid not in gpus:
                with suppress(nvml.NVMLError):
                    gpus[uuid] = _Gpu(nvml, uuid)
        with self._lock:  # not held during calls of the driver: `watch` takes it too
            self._wanted = [uuid for uuid in self._wanted if uuid in gpus or (nvml is not None and uuid not in tried)]
            if not self._wanted or self._ended.is_set():
                self._thread = None
                return False
            return True


_GAUGES = (
    "memory_used_bytes",
    "memory_total_bytes",
    "utilization_ratio",
    "power_watts",
    "temperature_celsius",
    "pcie_link_bytes_per_second",
)


def _nvml() -> Any:
    """NVML, or None on a machine without NVIDIA's driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


monitor = GpuMonitor(_nvml)
