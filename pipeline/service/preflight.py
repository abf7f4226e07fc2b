"""Checks that the files and folders in a service's settings can be used, without changing anything."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.errors import ParameterError
from pipeline.service.http.edge.tls import check_certificate
from pipeline.service.http.users.tokens import Tokens
from pipeline.service.reporting.webhooks import read_secret
from pipeline.service.roots import DataRoots
from pipeline.service.settings import ServiceSettings


def unusable_paths(settings: ServiceSettings) -> Iterator[str]:
    """One line for each that cannot be used, with the reason."""
    folders = [*settings.data_roots, *(root for roots in settings.group_roots.values() for root in roots)]
    checks: list[Callable[[], Any]] = [partial(DataRoots, [root]) for root in folders]
    checks.append(partial(DataRoots, settings.data_roots, groups=settings.group_roots))
    if settings.tokens_file is not None:
        checks.append(partial(Tokens, settings.tokens_file))
    checks.append(partial(check_certificate, settings))
    if settings.webhook_secret_file is not None:
        checks.append(partial(read_secret, settings.webhook_secret_file))
    checks.append(partial(_check_state_dir, settings.state_dir))
    found = set()  # a folder that cannot be used is found twice
    for check in checks:
        try:
            check()
        except ParameterError as error:
            if str(error) not in found:
                found.add(str(error))
                yield str(error)


def _check_state_dir(folder: Path) -> None:
    """The service creates it, with missing parents."""
    existing = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    if not os.access(f"{existing}/.", os.W_OK | os.X_OK):
        raise ParameterError(
            f"state_dir {folder}: {existing} is not a folder that this user may write to; choose another"
        )
    for each in (folder, *(existing / part for part in folder.relative_to(existing).parts)):
        try:
            each.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:  # such as a name that is too long
            raise ParameterError(f"state_dir {folder}: {error.strerror}; choose another") from error
