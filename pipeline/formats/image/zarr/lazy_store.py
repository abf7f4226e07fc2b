"""A zarr store that refuses anything but regular files: opening a named pipe would wait for its other end.

Imported on first use, since its base class needs zarr, which is slow to import.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from zarr.storage import LocalStore

from pipeline.errors import InputError
from pipeline.storage.confinement import by_descriptor


class RegularFiles(LocalStore):  # type: ignore[misc] # zarr is not typed for mypy here
    """Reading raises InputError for a folder, a special file or a broken link; zarr would take the first and the last
    for chunks that are not stored."""

    async def get(self, key: str, *arguments: Any, **options: Any) -> Any:
        with suppress(FileNotFoundError, NotADirectoryError), self._named(key) as name:
            return await super().get(name, *arguments, **options)
        return None

    def get_sync(self, key: str, *arguments: Any, **options: Any) -> Any:
        with suppress(FileNotFoundError, NotADirectoryError), self._named(key) as name:
            return super().get_sync(name, *arguments, **options)
        return None

    async def get_partial_values(self, prototype: Any, key_ranges: Any) -> list[Any]:
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    @contextmanager
    def _named(self, key: str) -> Iterator[str]:
        """What zarr reads a file by: the key, or an absolute path, which replaces the root."""
        path = self.root / key
        _require_regular(path)
        with by_descriptor(path) as found:
            if found != path:  # it may have been replaced since
                _require_regular(found)
            yield str(found.absolute())


def _require_regular(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as exc:
        if path.is_symlink():  # as git-annex leaves them for contents that have not been fetched
            raise InputError(f"{path}: is a broken symbolic link; fetch the file it refers to") from exc
        return  # a chunk that is not stored
    except OSError:
        return  # an error that opening it reports
    if not stat.S_ISREG(mode):
        raise InputError(f"{path}: is not a regular file where a chunk or metadata belongs; copy or export it again")
