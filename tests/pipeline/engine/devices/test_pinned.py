"""Host memory that a GPU copies from and to."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.engine.devices.buffers import pinned

NBYTES = (40 << 20) + 13


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
