"""Which files jobs may read and write: those under the configured data roots, symbolic links resolved."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from pipeline.errors import InputError, OutputError, ParameterError
from pipeline.formats.cfl import files_of
from pipeline.formats.image.zarr import is_zarr
from pipeline.storage.positional import reading


class DataRoots:
    """The folders whose files jobs may read and write."""

    def __init__(self, roots: Sequence[Path], *, but: Path | None = None) -> None:
        """`but`: the service's state folder, whose files jobs leave alone though it may lie under a root, as in a home.

        ParameterError where there is no root, or one that is no folder which can be used.
        """
        self._but = Path(os.path.realpath(but)) if but is not None else None
        if not roots:
            raise ParameterError("data_roots: name at least one folder whose files jobs may read and write")
        for root in roots:
            try:
                os.stat(f"{root}/.")  # noqa: PTH116 - a Path has no such dot: may names be looked up? They need not be listed
            except OSError as error:
                raise ParameterError(
                    f"data_roots: {root} is no folder that can be used ({error.strerror}); mend that, or name another"
                ) from error
        self.roots = tuple(Path(os.path.realpath(root)) for root in roots)
        for root in self.roots:
            if not _is_text(root):
                raise ParameterError(
                    f"data_roots: the name {str(root)!a} is no UTF-8, and no answer can tell it; rename it"
                )

    def within(self, name: str) -> Path:
        """The file or folder of that name. InputError where it lies outside the roots, by any link.

        What does not exist is refused later, by whoever opens it; that it lies outside is said first, so that nobody
        can find out what there is elsewhere.
        """
        resolved = self._resolved(name)
        if resolved is None:
            raise InputError(f"{name}: is outside the service's data roots ({self._listed()}); use a file under them")
        return resolved

    def readable(self, name: str) -> Path:
        """The file or folder of an input, for a job that is about to read it: all that belongs to it is looked at.

        InputError where any of it lies outside the roots: the other file of a pair, or what a link within a Zarr folder
        leads to. Links may lead to other places under the roots, as git-annex has them.
        """
        resolved = self.within(name)
        self._check_parts(resolved)
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
        """InputError where one of a job's further inputs, or what belongs to it, lies outside the roots."""
        for path in files:
            self.within(str(path))
            self._check_parts(self.roots[0] / path)  # by its own name: a pair's other file is sought beside that

    def _check_parts(self, path: Path) -> None:
        """InputError where a file outside the roots would be read by way of this one."""
        with reading(path):
            if is_zarr(path):
                self._check_links(path)
        for part in files_of(path) if path.name else ():
            if os.path.lexists(part):
                self.within(str(part))

    def _check_links(self, folder: Path) -> None:
        """Of a folder, and of those under the roots that its links lead to."""
        pending, seen = [folder], {folder}
        while pending:
            folder = pending.pop()
            with reading(folder), os.scandir(folder) as entries:
                for entry in entries:
                    if not entry.is_symlink() and not entry.is_dir():
                        continue
                    found = self._resolved(entry.path)
                    if found is None:
                        raise InputError(
                            f"{entry.path}: is a link that leads out of the service's data roots ({self._listed()}); "
                            "put what it stands for under them"
                        )
                    if found not in seen and found.is_dir():
                        seen.add(found)
                        pending.append(found)

    def _resolved(self, name: str) -> Path | None:
        """Relative names are taken from the first root. None where the path is outside, or is no path."""
        if "\0" in name or not name.strip():
            return None
        try:
            resolved = Path(os.path.realpath(self.roots[0] / name))
        except (OSError, ValueError):  # a loop of links; letters that no file system can hold
            return None
        if self._is_state(resolved):
            return None
        return resolved if any(resolved.is_relative_to(root) for root in self.roots) else None

    def _is_state(self, path: Path) -> bool:
        """Whether the service keeps its state there. Beside that, its folder may hold what is the users'."""
        if self._but is None or not path.is_relative_to(self._but):
            return False
        first = next(iter(path.relative_to(self._but).parts), "")
        return first in ("lock", "previews") or first.startswith("jobs.sqlite")

    def _listed(self) -> str:
        return ", ".join(map(str, self.roots))


def _is_text(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True
