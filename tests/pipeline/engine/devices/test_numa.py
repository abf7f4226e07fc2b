"""Near cores and cards, read from a made-up /sys."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pipeline.engine.devices import numa

GPU = "0000:18:00.0"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Write files of a made-up machine; returns the function that does."""
    monkeypatch.setattr(numa, "PCI_DEVICES", tmp_path / "pci")
    monkeypatch.setattr(numa, "NETWORK", tmp_path / "net")

    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")

    return write


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0-3,8,10-11", {0, 1, 2, 3, 8, 10, 11}), ("5", {5}), ("", set()), ("nonsense", set()), (" 1 , 2-2 ", {1, 2})],
)
def test_lists_of_cores(text, cores):
    assert numa.parse_cores(text) == cores


def test_near_cores_are_those_this_process_may_use(machine):
    allowed = sorted(os.sched_getaffinity(0))
    machine(f"pci/{GPU}/local_cpulist", f"{allowed[0]},4000-4095")
    assert numa.near_cores(GPU) == {allowed[0]}
    assert numa.near_cores(GPU.upper()) == {allowed[0]}
    assert numa.near_cores("0000:99:00.0") == set()


def test_the_card_on_the_gpus_side_is_chosen(machine):
    machine(f"pci/{GPU}/numa_node", "1")
    for name, node, state in (("eth0", "0", "up"), ("eth1", "1", "down"), ("eth2", "1", "up"), ("eth3", "0", "up")):
        machine(f"net/{name}/device/numa_node", node)
        machine(f"net/{name}/operstate", state)
    machine("net/lo/operstate", "unknown")
    assert numa.near_interface(GPU) == "eth2"


@pytest.mark.parametrize("node", ["-1", "0", ""])
def test_without_a_choice_the_system_decides(machine, node):
    machine(f"pci/{GPU}/numa_node", node)
    machine("net/eth0/device/numa_node", "0")
    machine("net/eth0/operstate", "up")
    assert numa.near_interface(GPU) is None
    assert numa.near_interface("0000:99:00.0") is None


def test_every_thread_stays_where_it_is_told():
    program = (
        "import os, threading\n"
        "from pipeline.engine.devices.numa import stay_on\n"
        "begun, go = threading.Event(), threading.Event()\n"
        "seen = []\n"
        "def work():\n"
        "    begun.set(); go.wait(); seen.append(os.sched_getaffinity(0))\n"
        "thread = threading.Thread(target=work); thread.start(); begun.wait()\n"
        "one = {min(os.sched_getaffinity(0))}\n"
        "stay_on(set()); assert os.sched_getaffinity(0) >= one\n"
        "stay_on(one); go.set(); thread.join()\n"
        "assert seen == [one] and os.sched_getaffinity(0) == one\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
