"""The kinds of job there are, by name: those built in, and those of installed packages.

A package offers workloads by entry points of the group `millrace.workloads`: a `Workload`, a class of such, or an
operator. A workload that cannot be used is named in one line; the others still work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pipeline.errors import ParameterError
from pipeline.workloads.protocol import Parameters, Workload

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "millrace.workloads"


def _ours(module: str, name: str) -> Workload:
    """The workload, or one of the class, with this name in a module of this package."""
    found = getattr(import_module(f"pipeline.workloads.{module}"), name.replace("-", "_"))
    workload: Workload = found() if isinstance(found, type) else found
    return workload


# By their module of `pipeline.workloads.filters`.
_FILTERS = {
    "bilateral": ("bilateral",),
    "chain": ("chain",),
    "composites": ("deviation", "divide-background", "dog", "log", "subtract-background", "unsharp"),
    "morphology": ("bottomhat", "close", "dilate", "erode", "open", "tophat"),
    "rolling_ball": ("rolling-ball",),
    "rank": ("maximum", "median", "minimum", "percentile"),
}
# Each is imported when it is first asked for.
_BUILT_IN: dict[str, Callable[[], Workload]] = {
    "coulomb": partial(_ours, "coulomb", "Coulomb"),
    "mri": partial(_ours, "mri", "Mri"),
    "smooth": partial(_ours, "smoothing", "Smoothing"),
    **{name: partial(_ours, f"filters.{module}", name) for module, names in _FILTERS.items() for name in names},
}
# Runs the code of the user who starts the command; a service refuses it.
LOCAL_ONLY: dict[str, Callable[[], Workload]] = {"map": partial(_ours, "operator.map_function", "MapFunction")}


def workload_named(name: str) -> Workload:
    """One workload, without importing the others. KeyError if there is none of that name, ParameterError if it is an
    installed package's that cannot be used."""
    found = _built_in(name) if name in _BUILT_IN or name in LOCAL_ONLY else _installed(name)
    if isinstance(found, str):
        raise ParameterError(found)
    return found


def workloads() -> dict[str, Workload]:
    """Every workload that a service can run, by its name, in alphabetical order."""
    installed = {name: _installed(name) for name in _offered() if name not in _BUILT_IN and name not in LOCAL_ONLY}
    usable = {name: found for name, found in installed.items() if not isinstance(found, str)}
    return dict(sorted({**{name: _built_in(name) for name in _BUILT_IN}, **usable}.items()))


def unusable() -> list[str]:
    """One line for each workload of an installed package that cannot be used."""
    return [found for name in sorted(_offered()) if isinstance(found := _installed(name), str)]


def runs_own_code(name: str) -> bool:
    """Whether a workload comes from outside Millrace, whose author must then fix what kills workers."""
    return name not in _BUILT_IN


@cache
def _built_in(name: str) -> Workload:
    return {**_BUILT_IN, **LOCAL_ONLY}[name]()


@cache
def _offered() -> dict[str, list[EntryPoint]]:
    """What installed packages offer, by name."""
    from importlib.metadata import entry_points

    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, []).append(point)
    return found


@cache
def _installed(name: str) -> Workload | str:
    """A package's workload, or why it cannot be used. KeyError if none offers one of that name."""
    offered = _offered()[name]
    packages = sorted(point.dist.name if point.dist else point.value for point in offered)
    if name in _BUILT_IN or name in LOCAL_ONLY:
        packages.append("Millrace itself")
    if len(packages) > 1:
        return f"workload {name} is offered by {' and by '.join(packages)}: uninstall or rename one of them"
    try:
        found = offered[0].load()
        workload = found() if isinstance(found, type) else found
        fault = _fault(name, workload)
    except (Exception, SystemExit) as error:
        fault = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return workload if fault is None else f"workload {name} of the package {packages[0]} cannot be used: {fault}"


def _fault(name: str, workload: Any) -> str | None:
    """Why an object cannot be the workload of that name; None if it can."""
    from pipeline.workloads.operator.parameters import RESERVED

    lacking = [each for each in ("name", "summary", "unit", "Parameters", "check_output", "open")
               if not hasattr(workload, each)]  # fmt: skip
    if lacking:
        return f"{type(workload).__name__} is no workload, it has no {lacking[0]}; decorate it with @image_operator?"
    if workload.name != name:
        return f"its entry point is called {name} and the workload {workload.name}: give both the same name"
    model = workload.Parameters
    if not (isinstance(model, type) and issubclass(model, Parameters)):
        return "its Parameters must be a subclass of pipeline.workloads.Parameters"
    taken = sorted(RESERVED & model.model_fields.keys())
    return f"its parameter {taken[0]} is called like an option that every workload has" if taken else None
