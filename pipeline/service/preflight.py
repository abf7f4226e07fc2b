"""Whether the files and folders that a service's settings name can be used, looked at without changing anything."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.errors import ParameterError
from pipeline.service.http.tokens import Tokens
from pipeline.service.roots import DataRoots
from pipeline.service.settings import ServiceSettings


def faults_of_places(settings: ServiceSettings) -> Iterator[str]:
    """What is wrong with each, in one line."""
    looks: list[Callable[[], Any]] = [partial(DataRoots, [root]) for root in settings.data_roots]
    if not looks:
        looks.append(partial(DataRoots, []))
    if settings.tokens_file is not None:
        looks.append(partial(Tokens, settings.tokens_file))
    looks.append(partial(_check_state_dir, settings.state_dir))
    for look in looks:
        try:
            look()
        except ParameterError as error:
            yield str(error)


def _check_state_dir(folder: Path) -> None:
    """The service makes it, and what of its parents is missing."""
    there = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    if not os.access(f"{there}/.", os.W_OK | os.X_OK):
        raise ParameterError(f"state_dir {folder}: {there} is no folder that this user may write to; choose another")
    for each in (folder, *(there / part for part in folder.relative_to(there).parts)):
        try:
            each.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:  # a name that is too long
            raise ParameterError(f"state_dir {folder}: {error.strerror}; choose another") from error
