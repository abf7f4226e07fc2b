"""What the ranks of the tests' gangs run: importable on every worker."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import numpy as np

from pipeline.cluster.communicators.solo import SoloCommunicator
from pipeline.cluster.gang.member import Member

ELEMENTS = 20_011


def partial_of(shard):
    """Sums of which every order but one gives other bits."""
    return np.random.default_rng(shard).standard_normal(ELEMENTS).astype(np.float32) * 10.0 ** (shard % 5)


def mark(folder, *words):
    """A file whose name tells the test where a rank is."""
    (Path(folder) / ".".join(map(str, words))).touch()


def marking_transport(folder):
    """The TCP communicator again, with a word about every rank's coming here, and a while in which to be killed."""

    def transport(control):
        mark(folder, "init", control.rank, control.epoch, os.getpid())
        for _ in range(200):
            control.barrier()
        return control

    return transport


def summed(member, folder=None, work=0, rounds=0):
    """Shards computed, `rounds` all-reduces, and the deterministic sum: its bytes, and what was computed here."""
    if folder:
        mark(folder, "compute", member.rank, member.epoch, os.getpid())

    def compute(shard):
        for _ in range(work):
            np.sort(np.random.default_rng(shard).standard_normal(100_000))
        if folder:
            mark(folder, "shard", shard, os.getpid())
        return partial_of(shard)

    member.compute(compute)
    if folder:
        mark(folder, "reduce", member.rank, member.epoch, os.getpid())
    ones = np.ones(500_000)
    for _ in range(rounds):
        assert (member.communicator.allreduce(ones) == member.size).all()
    return member.reduce(deterministic=True).tobytes()


def alone(function, shards):
    """What the function returns with every shard on one rank, in this process: no workers, no connections."""
    return function(Member(SoloCommunicator(), range(shards), shards))


def place(member):
    return member.rank, member.size, member.epoch, member.shards, os.getpid()


def fails(member, ranks, error):
    """An error of its own on some ranks, while the others wait."""
    if member.rank in ranks:
        raise error
    member.control.barrier()


def forgets(member):
    member.compute(partial_of)
    if member.rank == 0:
        del member.partials[member.shards[0]]
    return member.reduce()


def doubles(member):
    member.compute(partial_of)
    if member.rank == 1:
        member.partials[0] = partial_of(0)
    return member.reduce()


def never_comes(member):
    """Rank 1 stays away from a collective."""
    if member.rank != 1:
        member.control.barrier()


def stays(member, folder):
    """Until the test lets it go."""
    mark(folder, "inside", member.rank)
    while not (Path(folder) / "free").exists():
        time.sleep(0.01)


# On GPUs


def marking_nccl(folder):
    """NCCL, with a word about every rank's coming to its start."""

    def transport(control):
        from pipeline.cluster.communicators.nccl import connect_nccl

        mark(folder, "init", control.rank, control.epoch, os.getpid())
        return connect_nccl(control)

    return transport


def summed_on_gpus(member, folder=None, work=0, rounds=0, elements=16 << 20):
    """As `summed`, with the partial results on the rank's GPU, and `rounds` all-reduces there."""
    import cupy

    if folder:
        mark(folder, "compute", member.rank, member.epoch, os.getpid())

    def compute(shard):
        values = cupy.asarray(partial_of(shard))
        for _ in range(work):
            cupy.sort(cupy.random.random(1 << 20)).sum().item()
        if folder:
            mark(folder, "shard", shard, os.getpid())
        return values

    member.compute(compute)
    ones, total = cupy.ones(elements, np.float32), cupy.empty(elements, np.float32)
    if folder:
        member.communicator.allreduce(ones[:1])  # no rank is told to be in the reduction before all have joined
        mark(folder, "reduce", member.rank, member.epoch, os.getpid())
    for number in range(rounds):
        member.communicator.allreduce(ones, out=total)
        if number % 2:
            member.communicator.confirm()
            if folder and not (total == member.size).all():
                mark(folder, "spoilt", member.rank, member.epoch, number)
        assert total[0] == total[-1] == member.size
    return member.reduce(deterministic=True).get().tobytes()


def lost_by_rebuilding(member, times):
    """Bytes of this process on its GPU that did not come back, from the fifth rebuild to the last."""
    import cupy

    from pipeline.cluster.communicators.nccl import connect_nccl

    values, held = cupy.ones(1 << 20, np.float32), []
    for number in range(times):
        with connect_nccl(member.control) as ranks:
            assert (ranks.allreduce(values) == member.size).all()
        if number in (4, times - 1):
            member.control.barrier()  # another rank on this GPU has given its memory back, too
            held.append(device_bytes())
    return held[-1] - held[0]


def device_bytes():
    """What the driver says this process holds of its GPU; where it does not say, what all processes hold."""
    import cupy

    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    for pid, mib in (line.split(",") for line in lines):
        if int(pid) == os.getpid() and mib.strip().isdigit():
            return int(mib) << 20
    free, total = cupy.cuda.runtime.memGetInfo()
    return total - free
