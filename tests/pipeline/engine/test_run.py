"""A job on a device that is short of memory: chunks are halved until they fit, and the receipt says so."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.smoothing import box
from pipeline.engine.device import CpuDevice
from pipeline.engine.run import RunOptions, plan_job, run_job
from pipeline.errors import OutOfDeviceMemory
from pipeline.workloads import JobSpec, workloads
from tests.images import names_in, read_image, write_image


class SmallDevice(CpuDevice):
    """Has room for slots up to a size, and for computing on inputs up to another."""

    def __init__(self, slot_bytes, compute_bytes):
        super().__init__(2)
        self.slot_bytes = slot_bytes
        self.compute_bytes = compute_bytes

    def allocate(self, input_bytes, output_bytes):
        if input_bytes + output_bytes > self.slot_bytes:
            raise OutOfDeviceMemory("no room for a slot; lower --memory")
        return super().allocate(input_bytes, output_bytes)

    def process(self, workload, chunk, slot, record):
        if chunk.input_bytes > self.compute_bytes:
            raise OutOfDeviceMemory("no room to compute; lower --chunk-bytes")
        super().process(workload, chunk, slot, record)


def run_small(folder, device):
    samples = np.random.default_rng(2).integers(0, 65536, (700, 301)).astype(np.uint16)
    write_image(folder / "in.npy", samples, "YX")
    parameters = workloads()["smooth"].Parameters(size="5")
    spec = JobSpec(workload="smooth", input=folder / "in.npy", output=folder / "out.npy", parameters=parameters)
    options = RunOptions(memory_bytes=64 << 20)
    return samples, run_job(plan_job(spec, device, options), options)


@pytest.mark.parametrize(("slot_bytes", "compute_bytes"), [(200_000, 1 << 30), (1 << 30, 50_000), (200_000, 50_000)])
def test_chunks_are_halved_until_they_fit(tmp_path, slot_bytes, compute_bytes):
    samples, receipt = run_small(tmp_path, SmallDevice(slot_bytes, compute_bytes))
    assert receipt["halvings"] >= 2
    assert receipt["chunks"] >= 4
    np.testing.assert_array_equal(read_image(tmp_path / "out.npy"), box(samples, 5))


def test_a_device_without_any_room_is_an_error(tmp_path):
    with pytest.raises(OutOfDeviceMemory, match="no room for a slot"):
        run_small(tmp_path, SmallDevice(10, 10))
    assert names_in(tmp_path) == ["in.npy"]
