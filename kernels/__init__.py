"""Pure computation on arrays: one folder an operation, each with a CPU and a CUDA body under one contract."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

__all__ = ["get", "names"]


def names() -> list[str]:
    """The operations, in alphabetical order: every folder here that has test cases."""
    return sorted(cases.parent.name for cases in Path(__file__).parent.glob("*/cases.py"))


def get(name: str) -> ModuleType:
    """The operation's package, with its public functions; KeyError names what there is."""
    if name not in names():
        raise KeyError(f"no operation named {name!r}; there are {', '.join(names())}")
    return import_module(f"kernels.{name}")
