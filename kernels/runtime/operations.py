"""The operations there are, and the folder and package in which each lives."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

__all__ = ["FOLDER", "cuda_module", "folder_of", "get", "names", "package_of"]

FOLDER = Path(__file__).parents[1]
_GROUPS = ("", "classic", "runtime")


def names() -> list[str]:
    """The operations, in alphabetical order: every folder that has test cases."""
    return sorted(cases.parent.name for cases in (*FOLDER.glob("*/cases.py"), *FOLDER.glob("classic/*/cases.py")))


def get(name: str) -> ModuleType:
    """The operation's package, with its public functions; KeyError names the operations there are."""
    if name not in names():
        raise KeyError(f"no operation named {name!r}; there are {', '.join(names())}")
    return import_module(package_of(name))


def folder_of(operation: str) -> Path:
    """Where an operation's sources are."""
    folders = (FOLDER / group / operation for group in _GROUPS)
    return next((folder for folder in folders if (folder / "__init__.py").is_file()), FOLDER / operation)


def package_of(operation: str) -> str:
    """The dotted name of an operation's package."""
    return ".".join(("kernels", *folder_of(operation).relative_to(FOLDER).parts))


def cuda_module(operation: str) -> ModuleType:
    """The module of an operation that holds its `VARIANTS` and the `OPTIONS` of its compilation."""
    return import_module(f"{package_of(operation)}.cuda")
