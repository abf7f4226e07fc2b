"""What the tests of every format share."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is made durable, renamed and removed, in order: 'sync NAME', 'sync all', 'rename TO', 'swap', 'remove NAME'.

    The calls themselves go on as ever.
    """
    noted: list[str] = []

    def note(module: Any, name: str, say: Any) -> None:
        function = getattr(module, name)

        def noting(*arguments: Any, **options: Any) -> Any:
            noted.append(say(*arguments))
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, noting)

    def name_of(descriptor: int) -> str:
        return Path(f"/proc/self/fd/{descriptor}").readlink().name

    for name in ("fsync", "fdatasync"):
        note(os, name, lambda descriptor: f"sync {name_of(descriptor)}")
    for name in ("rename", "replace"):
        note(os, name, lambda _, target: f"rename {Path(target).name}")
    note(shutil, "rmtree", lambda folder: f"remove {Path(folder).name}")
    load = ctypes.CDLL

    class Noting:
        """The C library."""

        def __getattr__(self, name: str) -> Any:
            if name in ("syncfs", "renameat2"):
                noted.append({"syncfs": "sync all", "renameat2": "swap"}[name])
            return getattr(load(None, use_errno=True), name)

    monkeypatch.setattr(ctypes, "CDLL", lambda name, **options: load(name, **options) if name else Noting())
    return noted
