"""The kinds of job there are, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from pipeline.workloads.protocol import Workload


def _coulomb() -> Workload:
    from pipeline.workloads.coulomb import Coulomb

    return Coulomb()


def _mri() -> Workload:
    from pipeline.workloads.mri import Mri

    return Mri()


def _smooth() -> Workload:
    from pipeline.workloads.smoothing import Smoothing

    return Smoothing()


# Each is imported when it is first asked for.
_BUILT_IN: dict[str, Callable[[], Workload]] = {"coulomb": _coulomb, "mri": _mri, "smooth": _smooth}


@cache
def workload_named(name: str) -> Workload:
    """One workload, without importing the others. KeyError if there is none of that name."""
    return _BUILT_IN[name]()


def workloads() -> dict[str, Workload]:
    """Every workload by its name, in alphabetical order."""
    return {name: workload_named(name) for name in _BUILT_IN}
