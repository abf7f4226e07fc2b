"""The command, run in the test's own process."""

from __future__ import annotations

import os
import signal
import sys

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
