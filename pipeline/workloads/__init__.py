"""The kinds of job there are: one module each, found by the `Workload` that it defines."""

from __future__ import annotations

import inspect
import pkgutil
from functools import cache
from importlib import import_module

from pipeline.workloads.base import ArraySpec, Chunk, JobSpec, Parameters, Plan, Workload

__all__ = ["ArraySpec", "Chunk", "JobSpec", "Parameters", "Plan", "Workload", "workloads"]


@cache
def workloads() -> dict[str, type[Workload]]:
    """Every workload by its name, in alphabetical order."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        for _, member in inspect.getmembers(import_module(f"{__name__}.{module.name}"), inspect.isclass):
            if issubclass(member, Workload) and not inspect.isabstract(member):
                found[member.name] = member
    return dict(sorted(found.items()))
