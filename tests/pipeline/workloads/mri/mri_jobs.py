"""What the tests of MRI reconstruction share: a small analytic scan as a file, and a job."""

from __future__ import annotations

from uuid import uuid4

import numpy as np

from pipeline.cluster.gang.gang_stream import GangStream
from pipeline.cluster.segments import ClusterJob, WorkerDevice
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.run import RunOptions, plan_job, run_job
from pipeline.engine.stages import StageRecord
from pipeline.workloads import JobSpec, workloads
from tests.kernels.sense.phantom import definition, radial, samples
from tests.pipeline.formats.kspace.raw_mri import readouts, write_ismrmrd, xml

N, COILS, SPOKES = 32, 4, 40


def scan(spokes=SPOKES, n=N, coils=COILS, seed=5, count=None):
    """kspace (coils, spokes, samples), and the trajectory (spokes, samples, 2) in cycles per field of view."""
    points = radial(spokes, count or 2 * n, n)
    found = samples(points.reshape(-1, 2), coils, n, seed)
    return found.reshape(coils, *points.shape[:2]).astype(np.complex64), points


def write_npz(path, kspace=None, points=None, **arrays):
    """In cycles per field of view, with matrix and units, unless `arrays` say otherwise."""
    if kspace is None:
        kspace, points = scan()
    given = {"kspace": kspace, "traj": points, "matrix": [N, N], "units": "cycles/fov"} | arrays
    np.savez(path, **{name: value for name, value in given.items() if value is not None})
    return path


def write_h5(path, *, slices=1, repetitions=1, spokes=SPOKES, noise=None, gap_mm=6.0):
    """An ISMRMRD scan in cycles/pixel; each slice and repetition is scaled by a factor of its own."""
    kspace, points = scan(spokes)
    directions = {"read_dir": (0, 1, 0), "phase_dir": (0, 0, 1), "slice_dir": (1, 0, 0)}
    records = list(noise or [])
    for repetition in range(repetitions):
        for slice_ in range(slices):
            factor = 1 + slice_ + 10 * repetition
            records += readouts(
                kspace * factor,
                points / N,
                idx_slice=slice_,
                idx_repetition=repetition,
                position=(10 + gap_mm * slice_, -20, 30),
                sample_time_us=8.0,
                **directions,
            )
    return write_ismrmrd(path, xml((N, N, 1), (160.0, 160.0, 5.0)), records)


def job(source, output, *, memory=64 << 20, resume=False, device=None, **parameters):
    asked = workloads()["mri"].Parameters(**parameters)
    spec = JobSpec(workload="mri", input=source, output=output, parameters=asked)
    options = RunOptions(memory_bytes=memory, resume=resume)
    return plan_job(spec, device or CpuDevice(2), options), options


def images(source, output, **options):
    """The series [time, z, y, x] of an .npy, and the receipt."""
    planned, run_options = job(source, output, **options)
    shape = planned.job.header.shape
    receipt = run_job(planned, run_options)
    return np.load(output).reshape(shape), receipt


def volume(path, n=10, coils=5):
    """A blob of three dimensions; `maps` beside it."""
    rng = np.random.default_rng(1)
    points = rng.uniform(-n / 2, n / 2, (40, 60, 3))
    r = (np.arange(n) - n // 2) / n
    blob = np.exp(-((r[:, None, None] / 0.2) ** 2) - (r[:, None] / 0.3) ** 2 - ((r - 0.1) / 0.25) ** 2)
    maps = np.stack([np.exp(1j * c * r)[:, None, None] * (1 + r * c / 4)[:, None] + 0 * blob for c in range(coils)])
    kspace = definition(maps * blob, points.reshape(-1, 3)).reshape(coils, 40, 60)
    return write_npz(path, kspace.astype(np.complex64), points, matrix=[n, n, n])


class Streamed:
    """A stream over the workers of a cluster, or a stand-in for them."""

    def __init__(self, workers, ranks):
        self.workers, self.ranks = workers, ranks
        self.shares = None

    def __call__(self, planned, plan, ledger, events):
        if not ledger.exists:
            ledger.create()
        cluster_job = ClusterJob(
            name=f"mri-{uuid4().hex}", spec=planned.spec, budget=planned.budget,
            held_bytes=planned.job.hold_at_most(planned.budget.budget_bytes),
            ledger_identity=ledger.identity, worker_device=WorkerDevice(device="cpu", threads=1),
        )  # fmt: skip
        self.shares = GangStream(self.workers, cluster_job, planned, ranks=self.ranks, memory_bytes=64 << 20)
        assert self.shares.is_better
        record = StageRecord()
        self.shares.stream(plan, ledger, events, record)
        return record


def shared_images(source, output, workers, ranks, **parameters):
    """As `images`, the coils split over the workers."""
    planned, options = job(source, output, **{"split": "coils"} | parameters)
    shape = planned.job.header.shape
    receipt = run_job(planned, options, stream=Streamed(workers, ranks))
    return np.load(output).reshape(shape), receipt
