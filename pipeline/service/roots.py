"""The files and objects that jobs may read and write: those under the configured data roots, symlinks resolved.

Roots are folders, or URLs of an object store. A URL has no links, so comparing its parts is enough.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pipeline.errors import InputError, OutputError, ParameterError
from pipeline.formats.cfl import files_of
from pipeline.formats.image.zarr import is_zarr
from pipeline.storage.confinement import Confinement, confine, real_path
from pipeline.storage.objects import ObjectPath, is_url
from pipeline.storage.positional import reading


class DataRoots:
    """The folders whose files jobs may read and write: those of groups without roots of their own, and by `of` of any
    group."""

    def __init__(
        self,
        roots: Sequence[Path],
        *,
        but: Path | None = None,
        groups: Mapping[str, Sequence[Path]] | None = None,
        working_folder: Path | None = None,
    ) -> None:
        """roots          : folders, and ObjectPaths
        but            : the service's state folder: jobs may not use its files even if it lies under a root
        groups         : roots that take the place of these, for the jobs of some groups
        working_folder : where the workloads find relative paths; default: the first folder

        Raises ParameterError without a root, if one cannot be used as a folder, or if others could use a group's.
        """
        if not roots:
            raise ParameterError("data_roots: name at least one folder whose files jobs may read and write")
        urls = [root for root in roots if isinstance(root, ObjectPath)]
        folders = [root for root in roots if not isinstance(root, ObjectPath)]
        for root in folders:
            try:
                os.stat(f"{root}/.")  # noqa: PTH116 - Path drops the dot, which needs search permission only
            except OSError as error:
                raise ParameterError(
                    f"data_roots: {root} cannot be used as a folder ({error.strerror}); correct that, or choose another"
                ) from error
        self._folders = [Path(os.path.realpath(root)) for root in folders]
        self._urls = urls
        self.roots: tuple[Path, ...] = (*self._folders, *urls)
        for root in self._folders:
            if not is_text(root):
                raise ParameterError(
                    f"data_roots: the name {str(root)!a} is not UTF-8 and cannot be sent in an answer; rename it"
                )
        names = (*(root.absolute() for root in folders), *self._folders)
        self._confinement = Confinement(tuple(dict.fromkeys(names)), but and but.absolute())
        self.folder = self._folders[0] if self._folders else None
        self._working_folder = working_folder or self.folder
        self._groups = {
            group: DataRoots(own, but=but, working_folder=self._working_folder) for group, own in (groups or {}).items()
        }
        for group, own in self._groups.items():
            for root in own.roots:
                shared = next((each for each in self.roots if each in root.parents), None)
                if shared is not None:
                    raise ParameterError(
                        f"group_roots: {root} of {group} lies under the data root {shared}, which groups without roots "
                        "of their own use; name data roots beside it"
                    )

    def of(self, group: str) -> DataRoots:
        """The roots of a group's jobs."""
        return self._groups.get(group, self)

    def seen_by(self, groups: Iterable[str] | None) -> list[DataRoots]:
        """The roots of these groups, each once; None: of all groups."""
        if groups is None:
            return [self, *self._groups.values()]
        return list({id(each): each for each in map(self.of, groups)}.values())

    def holds(self, path: Path) -> bool:
        """Whether a job of any group may use that file."""
        place = os.path.realpath(path)
        return any(each._confinement.holds(place) for each in (self, *self._groups.values()))

    def confine(self) -> Confinement:
        """For jobs to carry: from now on, this process opens no path under the roots that leads out of them.

        The checks here find what is wrong when a job is submitted or claimed; links that are put there later are found
        when a file is opened.
        """
        confine(self._confinement)
        for own in self._groups.values():
            own.confine()
        return self._confinement

    def within(self, name: str) -> Path:
        """The file or folder of that name. InputError if it lies outside the roots, by any symlink.

        A missing file is refused later, when it is opened: the check of the roots comes first, so that it does not
        reveal which files exist elsewhere.
        """
        resolved = self._resolved(name)
        if resolved is None:
            raise InputError(f"{name}: is outside the service's data roots ({self._listed()}); use a file under them")
        return resolved

    def readable(self, name: str) -> Path:
        """The file or folder of an input that a job is about to read, checked with all its parts.

        InputError if a part lies outside the roots: the other file of a pair, or the target of a symlink in a Zarr
        folder. Symlinks may lead elsewhere under the roots, as with git-annex.
        """
        resolved = self.within(name)
        self._check_parts(resolved)
        return resolved

    def writable(self, name: str) -> Path:
        """The file or folder of an output. OutputError if it lies outside the roots, or is one of them."""
        resolved = self._resolved(name)
        if resolved is None:
            raise OutputError(f"{name}: is outside the service's data roots ({self._listed()}); write under them")
        if resolved in self.roots:
            raise OutputError(f"{name}: is one of the service's data roots; name a file or folder in it")
        return resolved

    def check_further(self, files: Iterable[Path]) -> None:
        """InputError if one of a job's further inputs, or a part of one, lies outside the roots; also if its name does:
        only names under the roots are checked again when they are opened."""
        for path in files:
            resolved = self.within(str(path))
            assert self.folder is not None, "it holds a file"
            if self._working_folder != self.folder and not path.is_absolute():
                raise InputError(f"{path}: among parameters, name a file by its whole path, {resolved}")
            if self._confinement.place_of(str(self.folder / path)) is None:
                raise InputError(f"{path}: leads into the service's data roots from outside; name it {resolved}")
            self._check_parts(self.folder / path)  # unresolved: the other file of a pair lies beside this name

    def _check_parts(self, path: Path) -> None:
        """InputError if reading this path would read a file outside the roots."""
        if isinstance(path, ObjectPath):
            return
        with reading(path):
            if is_zarr(path):
                self._check_links(path)
        for part in files_of(path) if path.name else ():
            if os.path.lexists(part):
                self.within(str(part))

    def _check_links(self, folder: Path) -> None:
        """Checks the symlinks of a folder, and of the folders under the roots that they lead to."""
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
                            f"{entry.path}: is a symlink that leaves the service's data roots ({self._listed()}); "
                            "put its target under them"
                        )
                    if found not in seen and found.is_dir():
                        seen.add(found)
                        pending.append(found)

    def _resolved(self, name: str) -> Path | None:
        """The path, relative names from the first folder. None if it is outside the roots, or not a valid path.

        InputError for a URL with credentials.
        """
        if is_url(name):
            path = ObjectPath.of(name)
            return path if any(path.is_relative_to(root) for root in self._urls) else None
        if "\0" in name or not name.strip() or self.folder is None:
            return None
        try:
            resolved = Path(real_path(os.path.join(self.folder, name)))  # noqa: PTH118
        except (OSError, ValueError):  # a loop of symlinks; characters that a file system refuses
            return None
        return resolved if self._confinement.holds(str(resolved)) else None

    def _listed(self) -> str:
        return ", ".join(map(str, self.roots))


def is_text(path: Path | str) -> bool:
    """Whether a name is UTF-8, as answers are."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True
