"""Prometheus metrics as the program updates them; `table` lists them all."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from pipeline.metrics.gpu import monitor as gpus
from pipeline.metrics.pipelines import AtWork, audit_error_ratio, stages, work_of
from pipeline.metrics.table import STAGES

__all__ = ["STAGES", "AtWork", "audit_error_ratio", "gpus", "stages", "work_of"]  # besides those of `registered`


def __getattr__(name: str) -> Any:
    """A counter, or what else only `registered` has."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("pipeline.metrics.registered"), name)
