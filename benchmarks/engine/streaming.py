"""The engine's throughput against that of the bus: chunks from pinned memory to pinned memory, and from file to file.

pinned  box 3×3 over u16 RGB, at least 32 GiB each way, against both-ways copies of the same chunks in the same run
chunk   the host's own time per chunk, with chunks of 1 MiB
memory  peak host and device memory of jobs of 1, 8 and 64 GiB
files   a file in /dev/shm to a file there, against a copy by as many host threads without a GPU
gpus    all GPUs at once, one process each: both-ways copies, the engine, and a job bound by computing
one     one process of `gpus`
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.options import Options, run_parts
from kernels.smoothing import gaussian_filter, uniform_filter
from pipeline.engine.device_pipeline import DevicePipeline, slot_bytes
from pipeline.engine.devices.buffers import allocate_cuda_slot
from pipeline.engine.devices.device import CudaDevice
from pipeline.formats import image as images
from pipeline.formats.image.base import ImageHeader, Region
from pipeline.workloads.protocol import ArraySpec, Chunk

GIB = 1 << 30
MIB = 1 << 20
COLUMNS = 8192
U16, F32 = np.dtype(np.uint16), np.dtype(np.float32)
COPY_SECONDS = 2.0
SIGMA_OF_31_TAPS = 3.75


class InPinnedMemory:
    """An image that is already in the slots: reading and writing do nothing."""

    name = "pinned"
    unit = "pixels"

    def __init__(self, passes: int = 0) -> None:
        """`passes`: Gaussians of 31 taps over f32, one after another; 0: box 3×3 over u16 RGB."""
        self.workload = self.job = self  # as an output has them
        self._passes = passes

    def chunks(self, count: int, nbytes: int) -> list[Chunk]:
        """Chunks with `nbytes` of input and as much output."""
        shape = (nbytes // (COLUMNS * 4), COLUMNS) if self._passes else (nbytes // (COLUMNS * 6), COLUMNS, 3)
        spec = ArraySpec(shape, F32 if self._passes else U16)
        zero = (0,) * len(shape)
        halo = ((0, 0),) * len(shape)
        return [
            Chunk(index=i, region=Region(zero, shape), halo=halo, inputs=(spec,), outputs=(spec,), work=spec.nbytes)
            for i in range(count)
        ]

    def read(self, chunk: Chunk, inputs: Sequence[NDArray[Any]]) -> None: ...

    def write(self, chunk: Chunk, outputs: Sequence[NDArray[Any]]) -> None: ...

    def compute(self, chunk: Chunk, inputs: Sequence[Any], outputs: Sequence[Any], stream: Any) -> None:
        if not self._passes:
            uniform_filter(inputs[0], 3, axes=(0, 1), out=outputs[0], stream=stream)
        for number in range(self._passes):
            source, target = (inputs[0], outputs[0]) if number % 2 == 0 else (outputs[0], inputs[0])
            gaussian_filter(source, SIGMA_OF_31_TAPS, radius=15, axes=(0, 1), out=target, stream=stream)


def streamed(device: CudaDevice, workload: InPinnedMemory, chunks: Sequence[Chunk]) -> Any:
    """Streams the chunks after a warm-up; for box 3×3, checks results of two slots against the CPU."""
    with DevicePipeline(device, workload, slot_bytes(chunks)) as pipeline:
        rng = np.random.default_rng(0)
        slots = list(pipeline._free.slots)
        for slot in slots:
            slot.host_input[...] = rng.integers(0, 100, len(slot.host_input), np.uint8)
        pipeline.stream(chunks[: 2 * len(slots)])
        record = pipeline.stream(chunks)
        if not workload._passes:
            for slot in slots[:2]:
                np.testing.assert_array_equal(
                    slot.outputs(chunks[0])[0], uniform_filter(slot.inputs(chunks[0])[0], 3, axes=(0, 1))
                )
    return record


def both_ways(nbytes: int, seconds: float = COPY_SECONDS) -> float:
    """Bytes a second each way of copies in and out at once, in pieces of `nbytes`, each direction on its own stream."""
    import cupy

    slots = [allocate_cuda_slot(nbytes, nbytes) for _ in range(4)]
    runtime = cupy.cuda.runtime
    inward, outward = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))

    def push(count: int) -> None:
        for number in range(count):
            slot = slots[number % 4]
            assert slot.cuda is not None
            runtime.memcpyAsync(slot.cuda.input.ptr, slot.host_input.ctypes.data, nbytes, 1, inward.ptr)
            runtime.memcpyAsync(slot.host_output.ctypes.data, slot.cuda.output.ptr, nbytes, 2, outward.ptr)
        inward.synchronize()
        outward.synchronize()

    push(8)
    count = max(8, int(seconds * 40e9 / nbytes))
    began = time.perf_counter()
    push(count)
    return count * nbytes / (time.perf_counter() - began)


def measure_pinned(options: argparse.Namespace) -> Mapping[str, Any]:
    device, workload = CudaDevice(0), InPinnedMemory()
    found = {}
    for nbytes in (16 * MIB, 32 * MIB):
        chunks = workload.chunks(32 * GIB // nbytes + 1, nbytes)
        before = both_ways(chunks[0].input_bytes)
        record = streamed(device, workload, chunks)
        after = both_ways(chunks[0].input_bytes)
        rate = sum(chunk.input_bytes for chunk in chunks) / record.wall_seconds
        copies = (before + after) / 2
        found[f"{nbytes // MIB} MiB"] = {
            "GB/s each way": rate / 1e9,
            "copies alone": copies / 1e9,
            "ratio": rate / copies,
        }
    return found


def measure_chunk(options: argparse.Namespace) -> Mapping[str, Any]:
    device, workload = CudaDevice(0), InPinnedMemory()
    chunks = workload.chunks(20_000, MIB)
    record, began = None, time.process_time()
    record = streamed(device, workload, chunks)
    spent = time.process_time() - began
    everything = len(chunks) + 4 * device.ring_depth
    return {
        "chunks": len(chunks),
        "wall µs a chunk": 1e6 * record.wall_seconds / len(chunks),
        "CPU µs a chunk, all threads": 1e6 * spent / everything,
        "GB/s each way": len(chunks) * chunks[0].input_bytes / record.wall_seconds / 1e9,
    }


def measure_memory(options: argparse.Namespace) -> Mapping[str, Any]:
    return {f"{gib} GiB": _peaks(gib * GIB, options.memory) for gib in (1, 8, 64)}


def _peaks(job_bytes: int, memory_bytes: int) -> Mapping[str, float]:
    """Peak host memory of the process so far, and the peak device memory of a job of this size."""
    import cupy

    device, workload = CudaDevice(0), InPinnedMemory()
    nbytes = min(device.target_bytes(2 * job_bytes), memory_bytes // device.ring_depth) // 2
    chunks = workload.chunks(job_bytes // nbytes, nbytes)
    free, _ = cupy.cuda.runtime.memGetInfo()
    least, stop = [free], threading.Event()

    def watch() -> None:
        device.enter()
        while not stop.wait(0.005):
            least[0] = min(least[0], cupy.cuda.runtime.memGetInfo()[0])

    watcher = threading.Thread(target=watch)
    watcher.start()
    streamed(device, workload, chunks)
    stop.set()
    watcher.join()
    return {
        "peak host MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "peak device MB": (free - least[0]) / 1e6,
        "chunk MiB in": nbytes / MIB,
    }


def measure_files(options: argparse.Namespace) -> Mapping[str, Any]:
    from pipeline.engine.run import RunOptions, plan_job, run_job
    from pipeline.workloads import JobSpec, workloads

    device = CudaDevice(0)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        source = Path(folder) / "in.npy"
        nbytes = _make_file(source, options.gib * GIB)
        spec = JobSpec(
            workload="smooth", input=source, output=Path(folder) / "out.npy",
            parameters=workloads()["smooth"].Parameters(size=(3,)),
        )  # fmt: skip
        run = RunOptions(memory_bytes=options.memory)
        rates, hosts = [], []
        for _ in range(3):
            receipt = run_job(plan_job(spec, device, run), run)
            rates.append(nbytes / receipt["wall_seconds"])
            spec.output.unlink()
            hosts.append(_host_copies(source, device.readers, 32 * MIB))
        copies = both_ways(32 * MIB)
        busy = {name: stage["seconds"] / stage["lanes"] for name, stage in receipt["stages"].items()}
    rate, host = float(np.median(rates)), float(np.median(hosts))
    return {
        "GB/s each way": rate / 1e9,
        "the host's threads alone": host / 1e9,
        "copies over the bus alone": copies / 1e9,
        "of the bus": rate / copies,
        "of the host": rate / host,
        "wall s": receipt["wall_seconds"],
        "busy s by stage": busy,
        "readers": device.readers,
        "writers": device.writers,
    }


def _make_file(path: Path, nbytes: int) -> int:
    rows = nbytes // (COLUMNS * 6)
    header = ImageHeader(shape=(rows, COLUMNS, 3), axes="YXS", dtype=U16)
    band = np.random.default_rng(0).integers(0, 65536, (1024, COLUMNS, 3), np.uint16)
    writer = images.create_image(path, header)
    for top in range(0, rows, 1024):
        bottom = min(top + 1024, rows)
        writer.write(Region((top, 0, 0), (bottom, COLUMNS, 3)), band[: bottom - top])
    writer.publish()
    return header.nbytes


def _host_copies(source: Path, threads: int, nbytes: int) -> float:
    """Bytes a second each way: `threads` read a file into pinned memory, while as many write pinned memory to one."""
    from pipeline.storage.partial import PartialFile
    from pipeline.storage.positional import PositionalFile

    size = source.stat().st_size // nbytes * nbytes
    target = PartialFile(source.with_name("copy.bin"), size)
    reader = PositionalFile(source)
    slots = [allocate_cuda_slot(nbytes, nbytes) for _ in range(threads)]

    def carry(number: int, inward: bool) -> None:
        for at in range(number * nbytes, size, threads * nbytes):
            if inward:
                reader.read_at(at, slots[number].host_input.data[:nbytes])
            else:
                target.write_at(at, slots[number].host_output.data[:nbytes])

    workers = [threading.Thread(target=carry, args=(n, inward)) for n in range(threads) for inward in (True, False)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - began
    reader.close()
    target.discard()
    return size / seconds


def measure_gpus(options: argparse.Namespace) -> Mapping[str, Any]:
    import cupy

    gpus = cupy.cuda.runtime.getDeviceCount()
    found: dict[str, Any] = {}
    for count in (1, 2, 4, 8):
        if count > gpus:
            break
        start = time.time() + 10.0
        processes = []
        for gpu in range(count):
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
            command = [sys.executable, "-m", "benchmarks.engine.streaming", "one", "--start", str(start)]
            processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        each = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
        found[f"{count} GPUs"] = {key: sum(one[key] for one in each) for key in each[0]}
    return {name: _with_ratios(rates, found["1 GPUs"]) for name, rates in found.items()}


def _with_ratios(rates: Mapping[str, float], one: Mapping[str, float]) -> Mapping[str, float]:
    return {
        **rates,
        "engine / copies": rates["engine GB/s"] / rates["copies GB/s"],
        "compute-bound, times one GPU": rates["compute chunks/s"] / one["compute chunks/s"],
    }


def measure_one(options: argparse.Namespace) -> Mapping[str, Any]:
    """One process of `gpus`: each part starts at the same time in all processes, and lasts equally long."""
    device, workload, heavy = CudaDevice(0), InPinnedMemory(), InPinnedMemory(passes=64)
    nbytes = 32 * MIB
    chunks, heavy_chunks = workload.chunks(2000, nbytes), heavy.chunks(1000, nbytes)
    both_ways(nbytes, 0.2)
    streamed(device, workload, chunks[:20])
    streamed(device, heavy, heavy_chunks[:8])
    found = {}
    _wait_until(options.start)
    found["copies GB/s"] = both_ways(nbytes, 3.0) / 1e9
    _wait_until(options.start + 6)
    record = streamed(device, workload, chunks)
    found["engine GB/s"] = len(chunks) * chunks[0].input_bytes / record.wall_seconds / 1e9
    _wait_until(options.start + 12)
    record = streamed(device, heavy, heavy_chunks)
    found["compute chunks/s"] = len(heavy_chunks) / record.wall_seconds
    return found


def _wait_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.time()))


PARTS = {
    "pinned": measure_pinned,
    "chunk": measure_chunk,
    "memory": measure_memory,
    "files": measure_files,
    "gpus": measure_gpus,
}


def main() -> None:
    parser = Options("engine/streaming", __doc__)
    parser.add_parts([*PARTS, "one"], default=["pinned", "chunk", "memory", "files"])
    parser.add_argument("--gib", type=int, default=8, help="size of the file")
    parser.add_argument("--memory", type=int, default=2 * GIB, help="bytes of the ring")
    parser.add_json()
    parser.add_argument("--start", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.parts == ["one"]:
        print(json.dumps(measure_one(options)))
        return
    run_parts(PARTS, options)


if __name__ == "__main__":
    main()
