"""The kinds of job there are: one module each, found by the `Workload` that it defines."""

from __future__ import annotations

import inspect
import pkgutil
from functools import cache
from importlib import import_module

from pipeline.workloads.base import ArraySpec, Chunk, JobSpec, Parameters, Plan, Workload

__all__ = ["ArraySpec", "Chunk", "JobSpec", "Parameters", "Plan", "Workload", "workload_named", "workloads"]


@cache
def workloads() -> dict[str, type[Workload]]:
    """Every workload by its name, in alphabetical order."""
    return dict(sorted((kind.name, kind) for module in _modules() for kind in _kinds(module)))


@cache
def workload_named(name: str) -> type[Workload]:
    """One workload, without importing the others where its module's name begins alike. KeyError where there is none."""
    likely = (module for module in _modules() if module.startswith(name[:3]) and "_" not in module)
    found = next((kind for module in likely for kind in _kinds(module) if kind.name == name), None)
    return found or workloads()[name]


def _modules() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(__path__)]


def _kinds(module: str) -> list[type[Workload]]:
    classes = inspect.getmembers(import_module(f"{__name__}.{module}"), inspect.isclass)
    return [kind for _, kind in classes if issubclass(kind, Workload) and not inspect.isabstract(kind)]
