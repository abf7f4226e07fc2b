"""Which files jobs may name: those under the configured data roots, symbolic links resolved."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from pipeline.errors import InputError, OutputError, ParameterError


class DataRoots:
    """The folders whose files jobs may read and write."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """ParameterError where there is none, or one that is no folder."""
        if not roots:
            raise ParameterError("data_roots: name at least one folder whose files jobs may read and write")
        for root in roots:
            if not root.is_dir():
                raise ParameterError(f"data_roots: {root} is no folder; create it, or name another")
        self.roots = tuple(Path(os.path.realpath(root)) for root in roots)
        for root in self.roots:
            if not _is_text(root):
                raise ParameterError(
                    f"data_roots: the name {str(root)!a} is no UTF-8, and no answer can tell it; rename it"
                )

    def readable(self, name: str) -> Path:
        """The file or folder of an input. InputError where it lies outside the roots, by any link.

        What does not exist is refused later, by whoever opens it; that it lies outside is said first, so that nobody
        can find out what there is elsewhere.
        """
        resolved = self._resolved(name)
        if resolved is None:
            raise InputError(f"{name}: is outside the service's data roots ({self._listed()}); use a file under them")
        return resolved

    def writable(self, name: str) -> Path:
        """The file or folder of an output. OutputError where it lies outside the roots, or is one of them."""
        resolved = self._resolved(name)
        if resolved is None:
            raise OutputError(f"{name}: is outside the service's data roots ({self._listed()}); write under them")
        if resolved in self.roots:
            raise OutputError(f"{name}: is one of the service's data roots; name a file or folder in it")
        return resolved

    def check_further(self, files: Iterable[Path]) -> None:
        """InputError where one of a job's further inputs lies outside the roots."""
        for path in files:
            self.readable(str(path))

    def _resolved(self, name: str) -> Path | None:
        """Relative names are taken from the first root. None where the path is outside, or is no path."""
        if "\0" in name or not name.strip():
            return None
        try:
            resolved = Path(os.path.realpath(self.roots[0] / name))
        except (OSError, ValueError):  # a loop of links; letters that no file system can hold
            return None
        return resolved if any(resolved.is_relative_to(root) for root in self.roots) else None

    def _listed(self) -> str:
        return ", ".join(map(str, self.roots))


def _is_text(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True
