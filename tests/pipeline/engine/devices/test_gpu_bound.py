"""A bound on a job's GPU memory: the ring and the temporary arrays count, those of other jobs do not."""

from __future__ import annotations

import pytest

from pipeline.engine.devices.device import CpuDevice, GpuBound
from pipeline.errors import OutOfDeviceMemory

MIB = 1 << 20


class Pool:
    """What a bound asks of CuPy's pool."""

    def __init__(self):
        self.limit, self.total = None, 0

    def set_limit(self, size):
        self.limit = size

    def get_limit(self):
        return self.limit

    def total_bytes(self):
        return self.total


def test_the_ring_leaves_the_rest_to_temporary_arrays():
    pool, taken = Pool(), []
    bound = GpuBound(10 * MIB, pool, Pool(), taken.append)
    for left in (7, 4, 1):
        bound.take(3 * MIB)
        assert pool.limit == left * MIB
    pool.total = MIB
    bound.note()
    assert taken == [3 * MIB, 6 * MIB, 9 * MIB, 10 * MIB]
    with pytest.raises(OutOfDeviceMemory, match=r"ring takes more than the 10\.0 MiB of GPU memory that it may take"):
        bound.take(MIB)


def test_what_a_job_states_holds_besides_the_ring_and_within_the_bound():
    pool = Pool()
    GpuBound(None, pool, Pool(), print, 6 * MIB).take(100 * MIB)
    assert pool.limit == 6 * MIB
    bound = GpuBound(10 * MIB, pool, Pool(), lambda nbytes: None, 6 * MIB)
    assert "the job stated 6.0 MiB" in bound.advice()
    for left in (6, 4, 1):
        bound.take(3 * MIB)
        assert pool.limit == left * MIB
    assert bound.advice() == "lower --chunk-bytes"


def test_codecs_have_memory_besides_what_a_job_states():
    pool, codecs, taken = Pool(), Pool(), []
    bound = GpuBound(None, pool, codecs, taken.append, 6 * MIB)
    bound.take(MIB, 20 * MIB)
    bound.admit_codecs()
    assert (pool.limit, codecs.limit) == (6 * MIB, 20 * MIB)
    bound = GpuBound(17 * MIB, pool, codecs, taken.append)
    bound.take(MIB, 20 * MIB)
    assert (pool.limit, codecs.limit) == (16 * MIB, 1), "not all jobs have codecs, and 0 would be no limit"
    bound.admit_codecs()
    assert (pool.limit, codecs.limit) == (12 * MIB, 4 * MIB), "no more than a quarter of what the ring leaves"
    pool.total, codecs.total = 14 * MIB, 2 * MIB
    bound.note()
    assert taken[-1] == 17 * MIB
    bound.take(0, 20 * MIB)
    assert (pool.limit, codecs.limit) == (12 * MIB, 2 * MIB), "kernels have taken more before"


def test_a_cpu_has_no_memory_of_its_own():
    device = CpuDevice(1)
    assert device.bounded(1, print) is device
    with device.allocating():
        pass


@pytest.mark.gpu
def test_temporary_arrays_of_one_job_are_bounded_and_measured():
    import cupy

    from pipeline.engine.devices.device import CudaDevice

    device, taken = CudaDevice(0), []
    device.enter()
    before = cupy.get_default_memory_pool().total_bytes()
    bounded = device.bounded(64 * MIB, taken.append)
    slots = [bounded.allocate(4 * MIB, 4 * MIB) for _ in range(2)]
    with bounded.allocating():
        kept = cupy.empty(32 * MIB, cupy.uint8)
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
            cupy.empty(32 * MIB, cupy.uint8)
        other = cupy.empty(8 * MIB, cupy.uint8)
    assert taken[-1] == (16 + 32 + 8) * MIB
    assert cupy.get_default_memory_pool().total_bytes() == before, "the arrays are not in the pool of other jobs"
    free = cupy.empty(128 * MIB, cupy.uint8)  # outside the bound
    assert free.nbytes == 128 * MIB
    with pytest.raises(OutOfDeviceMemory):
        bounded.allocate(64 * MIB, 0)
    del kept, other, slots, free, bounded
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.gpu
def test_a_job_on_a_bounded_gpu_makes_the_same_bits(tmp_path):
    """A bound that the first cut does not fit: the chunks are halved until they do."""
    import numpy as np

    from kernels.smoothing import uniform_filter
    from pipeline.engine.devices.device import CudaDevice
    from pipeline.engine.planned import PlannedJob
    from pipeline.engine.run import RunOptions, plan_job, run_job, stream_on_device
    from pipeline.workloads import JobSpec, workloads
    from tests.images import read_image, write_image

    samples = np.random.default_rng(5).integers(0, 65536, (2003, 1999)).astype(np.uint16)
    write_image(tmp_path / "in.npy", samples, "YX")
    parameters = workloads()["smooth"].Parameters(size="5")
    spec = JobSpec(workload="smooth", input=tmp_path / "in.npy", output=tmp_path / "out.npy", parameters=parameters)
    device, taken = CudaDevice(0), []
    options = RunOptions(memory_bytes=256 * MIB, chunk_bytes=8 * MIB)
    planned = plan_job(spec, device, options)
    bound = planned.ring_bytes // 2

    def stream(job: PlannedJob, plan, ledger, events):
        from dataclasses import replace

        return stream_on_device(replace(job, device=device.bounded(bound, taken.append)), plan, ledger, events)

    receipt = run_job(planned, options, stream=stream)
    assert receipt["halvings"] >= 1
    assert 0 < max(taken) <= bound
    np.testing.assert_array_equal(read_image(tmp_path / "out.npy"), uniform_filter(samples, 5))


@pytest.mark.gpu
def test_codecs_stay_within_what_the_plan_states(tmp_path):
    """Every chunk is decoded and encoded there."""
    from dataclasses import replace

    import numpy as np

    from pipeline.engine.devices.device import CudaDevice
    from pipeline.engine.run import RunOptions, plan_job, run_job, stream_on_device
    from pipeline.formats.image import Storage
    from pipeline.workloads import JobSpec, workloads
    from tests.images import write_image

    rng, stated = np.random.default_rng(6), 64 * MIB
    samples = (np.add.outer(np.arange(3001), np.arange(2999)) * 3 + rng.normal(0, 20, (3001, 2999))).astype(np.uint16)
    write_image(tmp_path / "in.zarr", samples, "YX", storage=Storage(chunks=(512,), compression="zstd"))
    parameters = workloads()["smooth"].Parameters(size="5", compression="zstd", chunks="512", levels="1")
    spec = JobSpec(workload="smooth", input=tmp_path / "in.zarr", output=tmp_path / "out.zarr", parameters=parameters)
    device, taken = CudaDevice(0), []
    options = RunOptions(memory_bytes=1 << 30, chunk_bytes=16 * MIB)
    planned = plan_job(spec, device, options)

    def stream(job, plan, ledger, events):
        bounded = device.bounded(None, taken.append, stated)
        return stream_on_device(replace(job, device=bounded), plan, ledger, events)

    receipt = run_job(planned, options, stream=stream)
    assert receipt["stages"]["decode"]["bytes"] == receipt["read_bytes"]
    assert receipt["stages"]["encode"]["bytes"] == receipt["written_bytes"] == samples.nbytes
    assert receipt["ring_bytes"] < max(taken) <= receipt["ring_bytes"] + receipt["codec_bytes"] + stated
