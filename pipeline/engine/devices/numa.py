"""The cores and the network interface on a GPU's NUMA node, from /sys."""

from __future__ import annotations

import os
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")
NETWORK = Path("/sys/class/net")
TASKS = Path("/proc/self/task")


def near_cores(pci_address: str) -> set[int]:
    """The cores of the GPU's NUMA node that this process may run on; empty if unknown."""
    text = _line(PCI_DEVICES / pci_address.lower() / "local_cpulist")
    return parse_cores(text) & os.sched_getaffinity(0)


def stay_on(cores: set[int]) -> None:
    """Pin all threads of this process, and those they start, to these cores; an empty set changes nothing."""
    if not cores:
        return
    for task in TASKS.iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:
            continue  # the thread has ended


def near_interface(pci_address: str) -> str | None:
    """The network interface on the GPU's NUMA node; None if there is none, or only one interface."""
    node = _line(PCI_DEVICES / pci_address.lower() / "numa_node")
    cards = [path for path in sorted(NETWORK.glob("*")) if (path / "device").exists()]
    up = [path for path in cards if _line(path / "operstate") == "up"]
    near = [path.name for path in up if node not in ("", "-1") and _line(path / "device" / "numa_node") == node]
    return near[0] if near and len(up) > 1 else None


def parse_cores(text: str) -> set[int]:
    """The numbers in a list such as 0-3,8,10-11."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal():
            cores.update(range(int(first), int(last or first) + 1))
    return cores


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
