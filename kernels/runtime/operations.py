"""Finds the operations, and the folder and package of each."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

__all__ = ["FOLDER", "cuda_module", "folder_of", "get", "names", "package_of"]

FOLDER = Path(__file__).parents[1]
_GROUPS = ("", "classic", "runtime")


def names() -> list[str]:
    """The operations, in alphabetical order: every folder with CUDA kernels to launch."""
    patterns = ("*/cuda.py", "*/cuda/__init__.py", "classic/*/cuda.py")
    found = (path.parent if path.stem == "cuda" else path.parents[1] for each in patterns for path in FOLDER.glob(each))
    return sorted(folder.name for folder in found)


def get(name: str) -> ModuleType:
    """The operation's package, with its public functions; KeyError lists the operations."""
    if name not in names():
        raise KeyError(f"no operation named {name!r}; there are {', '.join(names())}")
    return import_module(package_of(name))


def folder_of(operation: str) -> Path:
    """The folder of an operation's sources."""
    folders = (FOLDER / group / operation for group in _GROUPS)
    return next((folder for folder in folders if (folder / "__init__.py").is_file()), FOLDER / operation)


def package_of(operation: str) -> str:
    """The dotted name of an operation's package."""
    return ".".join(("kernels", *folder_of(operation).relative_to(FOLDER).parts))


def cuda_module(operation: str) -> ModuleType:
    """The operation's module with its `VARIANTS` and compiler `OPTIONS`."""
    return import_module(f"{package_of(operation)}.cuda")
