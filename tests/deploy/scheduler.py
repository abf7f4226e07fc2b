"""A Dask scheduler for workers that come and go."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager

from tests.deploy.waiting import wait_until


@contextmanager
def scheduler(folder):
    """On a port of its own; yields its address."""
    address_file = folder / "scheduler.json"
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"]
    command += ["--no-dashboard", "--scheduler-file", str(address_file)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(
                lambda: address_file.exists() and address_file.read_text().endswith("}"), "the scheduler's start"
            )
            yield json.loads(address_file.read_text())["address"]
        finally:
            process.kill()
