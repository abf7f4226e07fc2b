"""A Zarr hierarchy's files as zarr reads them, but for what is none: opening a named pipe would wait for its other end.

Imported only where zarr is needed.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

from zarr.storage import LocalStore

from pipeline.errors import InputError


class RegularFiles(LocalStore):  # type: ignore[misc] # zarr is not typed for mypy here
    """Reading raises InputError where something else than a regular file has a file's name, or a link that leads
    nowhere: a folder or such a link would be taken for a chunk that is not stored."""

    async def get(self, key: str, *arguments: Any, **options: Any) -> Any:
        _require_regular(self.root / key)
        return await super().get(key, *arguments, **options)

    def get_sync(self, key: str, *arguments: Any, **options: Any) -> Any:
        _require_regular(self.root / key)
        return super().get_sync(key, *arguments, **options)


def _require_regular(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as exc:
        if path.is_symlink():  # as git-annex leaves them where contents have not been fetched
            raise InputError(f"{path}: is a link that leads to no file; fetch what it stands for") from exc
        return  # which zarr takes for a chunk that is not stored
    except OSError:
        return  # a fault that opening it will name
    if not stat.S_ISREG(mode):
        raise InputError(f"{path}: is not a regular file where a chunk or metadata belongs; copy or export it again")
