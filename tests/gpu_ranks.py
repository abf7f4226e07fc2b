"""Worker processes for tests that want several GPUs: one on each GPU, or several on the only one.

NCCL refuses two ranks on one GPU of a host. With an NCCL_HOSTID of their own they count as ranks on several hosts: they
talk over sockets, as between machines.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.cluster import executor
from pipeline.cluster.dask.worker_start import WorkerSpec, gpu_workers
from pipeline.engine.devices.discovery import all_gpus

# If one is killed, two are left to be joined again.
RANKS_ON_ONE_GPU = 3
ROOT = str(Path(__file__).resolve().parent.parent)
# The command as another process runs it, with `--device all` on these workers.
COMMAND = [sys.executable, "-c", f"import sys; sys.path.append({ROOT!r}); from tests.gpu_ranks import main; main()"]


def rank_gpus() -> list[int]:
    """The ordinal of each rank's GPU, at least two."""
    found = all_gpus()
    return found if len(found) > 1 else found * RANKS_ON_ONE_GPU


def share_a_gpu() -> bool:
    return len(all_gpus()) == 1


def rank_workers(ordinals: Sequence[int]) -> list[WorkerSpec]:
    """As `gpu_workers`; an ordinal may come more than once."""
    specs = gpu_workers(ordinals)
    if len(set(ordinals)) == len(ordinals):
        return specs
    return [
        replace(spec, environment=spec.environment | {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo"})
        for rank, spec in enumerate(specs)
    ]


def main() -> None:
    from pipeline import cli

    executor.all_gpus = rank_gpus
    executor.gpu_workers = rank_workers
    cli.main()
