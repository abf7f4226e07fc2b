"""Host memory that a GPU copies from and to."""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.engine.devices.buffers import allocate_host_slot, pinned

NBYTES = (40 << 20) + 13


def flags_of(memory):
    """What the system notes about it: `hg` huge pages are wanted, `sh` shared, `dc` not copied by a fork."""
    address, is_here = memory.ctypes.data, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            is_here = int(found[1], 16) <= address < int(found[2], 16)
        elif is_here and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError(f"{address:#x} is not mapped")


def test_slots_of_the_cpu_are_private_and_want_huge_pages():
    slot = allocate_host_slot(NBYTES, NBYTES)
    for memory in (slot.host_input, slot.host_output):
        assert "sh" not in flags_of(memory)
        assert "hg" in flags_of(memory) or not Path("/sys/kernel/mm/transparent_hugepage").exists()


def test_large_memory_is_pinned_until_its_last_array_is_dropped(monkeypatch):
    calls = []
    runtime = SimpleNamespace(
        hostRegister=lambda address, nbytes, flags: calls.append((address, nbytes)),
        hostUnregister=calls.append,
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    memory = pinned(NBYTES)
    address = memory.ctypes.data
    assert memory.nbytes == NBYTES
    assert address % (2 << 20) == 0
    assert flags_of(memory) & {"sh", "dc"} == {"dc"}
    part = memory[-13:].view(np.uint8)
    del memory
    gc.collect()
    assert calls == [(address, NBYTES)]
    part[:] = 7  # is still mapped
    del part
    gc.collect()
    assert calls == [(address, NBYTES), address]


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [1, 4096, NBYTES])
def test_copies_to_and_from_it_keep_their_bytes(nbytes):
    import cupy

    memory, stream = pinned(nbytes), cupy.cuda.Stream(non_blocking=True)
    memory[:] = np.arange(nbytes) % 251
    on_device = cupy.empty(nbytes, cupy.uint8)
    on_device.data.copy_from_host_async(memory.ctypes.data, nbytes, stream)
    stream.synchronize()
    memory[:] = 0
    on_device.data.copy_to_host_async(memory.ctypes.data, nbytes, stream)
    stream.synchronize()
    np.testing.assert_array_equal(memory, np.arange(nbytes) % 251)
    attributes = cupy.cuda.runtime.pointerGetAttributes(memory.ctypes.data)
    assert attributes.type == cupy.cuda.runtime.memoryTypeHost
