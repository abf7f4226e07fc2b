"""The command, run in the test's own process; and the steps in which files become durable."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline import cli, stopping
from pipeline.cli import local as local_commands


@pytest.fixture
def own_settings(monkeypatch):
    """No setting of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith("MILLRACE_") and name not in ("MILLRACE_CACHE_DIR", "MILLRACE_TEST_DATA"):
            monkeypatch.delenv(name)


@pytest.fixture
def foreground():
    """Signals act on this process, and on those that it starts, as in the foreground of a terminal: a shell's
    background jobs ignore SIGINT, and nohup's SIGHUP."""
    defaults = dict.fromkeys(stopping.SIGNALS, signal.SIG_DFL) | {signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, default) for number, default in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def millrace(monkeypatch, capsys):
    """Run the command in this process; returns exit code, stdout and stderr."""

    def run(*arguments):
        before = {number: signal.getsignal(number) for number in stopping.SIGNALS}
        for noted in (local_commands._published, local_commands._begun, local_commands.kept):
            noted.clear()
        monkeypatch.setattr(sys, "argv", ["millrace", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        for number, handler in before.items():
            signal.signal(number, handler)
        printed = capsys.readouterr()
        return stop.value.code or 0, printed.out, printed.err

    return run


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
