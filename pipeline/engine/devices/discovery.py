"""Finds the devices of this machine, and the reasons why some cannot be used."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.engine.devices.cuda_driver import device_uuid
from pipeline.errors import DeviceUnavailable

GIB = 1 << 30
# The oldest architecture that the kernels are compiled for and tested on.
OLDEST_CAPABILITY = (7, 5)


@dataclass(frozen=True, kw_only=True)
class DeviceReport:
    """One device under the name that users give; `obstacle`: why it cannot be used, or None."""

    name: str
    description: str
    obstacle: str | None = None


def discover() -> list[DeviceReport]:
    """All devices, the preferred first: usable GPUs, the CPU, then unusable devices."""
    gpus = _discover_cuda()
    usable = [gpu for gpu in gpus if gpu.obstacle is None]
    return [*usable, _discover_cpu(), *(gpu for gpu in gpus if gpu.obstacle is not None)]


def cpu_model() -> str:
    """The processor's own name, as the kernel reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cuda_properties(ordinal: int) -> Mapping[str, Any]:
    """Model, memory, compute capability and driver of a GPU that CuPy can reach."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(ordinal)
    return {
        "model": properties["name"].decode(),
        "memory_bytes": int(properties["totalGlobalMem"]),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "uuid": _uuid(device_uuid(ordinal)),
        "pci": "{pciDomainID:04x}:{pciBusID:02x}:{pciDeviceID:02x}.0".format(**properties),
        "driver": _cuda_version(cupy.cuda.runtime.driverGetVersion()),
        "cupy": cupy.__version__,
    }


def usable_gpus() -> list[int]:
    """Ordinals of the GPUs that jobs can run on."""
    reports = [report for report in discover() if report.name.startswith("cuda:") and report.obstacle is None]
    return [int(report.name.removeprefix("cuda:")) for report in reports]


def fault_in_computing(ordinal: int) -> str | None:
    """What goes wrong when a GPU compiles a kernel and runs it."""
    import cupy

    try:
        with cupy.cuda.Device(ordinal):
            total = int(cupy.ElementwiseKernel("int64 x", "int64 y", "y = 2 * x", "doctor")(cupy.arange(1000)).sum())
    except Exception as error:  # drivers and compilers raise anything
        return f"a kernel cannot be run ({' '.join(str(error).split())}); check the driver with nvidia-smi"
    return None if total == 999_000 else f"a kernel computed {total:,} instead of 999,000; this GPU may be damaged"


def all_gpus() -> list[int]:
    """The GPUs of `--device all`: all usable ones. DeviceUnavailable if there are none."""
    gpus = usable_gpus()
    if not gpus:
        raise unavailable("all", discover())
    return gpus


def unavailable(name: str, reports: Sequence[DeviceReport]) -> DeviceUnavailable:
    """The error for a device that cannot be used, with the usable ones among `reports` of `discover`."""
    meant = [report for report in reports if name == "all" or report.name in (name, "cuda")]
    obstacles = [report.obstacle for report in meant if report.obstacle]
    usable = ", ".join(report.name for report in reports if report.obstacle is None)
    reason = obstacles[0] if obstacles else "there is no such device"
    return DeviceUnavailable(f"--device {name}: {reason}; usable here: {usable}")


def _discover_cpu() -> DeviceReport:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    return DeviceReport(name="cpu", description=f"{cpu_model()}, {cores} cores, {memory / GIB:.0f} GiB")


def _discover_cuda() -> list[DeviceReport]:
    driver = _driver_version()
    if driver is None:
        return [_unusable("no NVIDIA driver answers on this machine (libcuda.so.1)")]
    try:
        import cupy
    except ImportError:
        major = 13 if driver >= 13000 else 12
        return [_unusable(f"CuPy is not installed: pip install 'cupy-cuda{major}x[ctk]' nvidia-nccl-cu{major}")]
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return [_unusable(f"the driver ({_cuda_version(driver)}) and CuPy {cupy.__version__} do not fit: {error}")]
    if count == 0:
        return [_unusable("the driver sees no GPU (check CUDA_VISIBLE_DEVICES)")]
    return [_report(cupy, ordinal) for ordinal in range(count)]


def _report(cupy: Any, ordinal: int) -> DeviceReport:
    found = cuda_properties(ordinal)
    memory = found["memory_bytes"] / GIB
    capability = found["compute_capability"]
    description = f"{found['model']}, {memory:.0f} GiB, compute {capability}, CUDA driver {found['driver']}"
    obstacle = None
    if tuple(int(part) for part in capability.split(".")) < OLDEST_CAPABILITY:
        obstacle = "older than compute capability 7.5"
    else:
        try:
            cupy.cuda.nvrtc.getVersion()
        except Exception as error:  # a broken toolkit raises anything; the user needs its message
            obstacle = f"NVRTC does not load ({error}): pip install 'cupy-cuda13x[ctk]' brings it"
    return DeviceReport(name=f"cuda:{ordinal}", description=description, obstacle=obstacle)


def _unusable(obstacle: str) -> DeviceReport:
    return DeviceReport(name="cuda", description="NVIDIA GPU", obstacle=obstacle)


def _driver_version() -> int | None:
    """The CUDA version that the driver supports, as 1000 × major + 10 × minor; None if there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else None


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _uuid(raw: bytes) -> str:
    digits = raw.hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
