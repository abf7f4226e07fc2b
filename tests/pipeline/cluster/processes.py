"""The command as a process of its own, with the worker processes that it starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil

from tests import commands
from tests.commands import COMMAND

DEADLINE_S = 60


@contextmanager
def running(*arguments, cwd, command=COMMAND):
    """The command, started; killed with all its children if it is still there at the end."""
    process = commands.Popen(
        [*command, *map(str, arguments)], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        # The command first: it would start its workers again.
        for child in [process, *children(process)]:
            with_suppressed(os.kill, child.pid, signal.SIGKILL)
        process.communicate()


def run(*arguments, cwd, command=COMMAND):
    """Run the command to its end: exit code, stdout, stderr."""
    with running(*arguments, cwd=cwd, command=command) as process:
        out, err = process.communicate(timeout=DEADLINE_S)
        return process.returncode, out, err


@contextmanager
def running_scheduler(folder, port=0, *options):
    """A Dask scheduler's process and its address; `port`: any free one."""
    address_file = folder / "scheduler.json"
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--no-dashboard", "--dashboard-address", "127.0.0.1:0", "--scheduler-file", str(address_file)]
    command += map(str, options)
    with commands.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            # Written bit by bit: it is whole with its last brace.
            wait_until(
                lambda: address_file.exists() and address_file.read_text().endswith("}"), "the scheduler's start"
            )
            address = json.loads(address_file.read_text())["address"]
            address_file.unlink()
            yield process, address
        finally:
            process.kill()


def children(process):
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def worker_processes(process):
    """The worker processes that the command's nannies have started: its fork server's children."""
    found = []
    for child in children(process):
        try:
            parent = child.parent()
            if parent is not None and parent.ppid() == process.pid:
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def kill_9(child):
    with_suppressed(child.kill)


def with_suppressed(function, *arguments):
    try:
        function(*arguments)
    except (ProcessLookupError, psutil.NoSuchProcess):
        return


def wait_until(condition, what):
    """Poll until it holds; AssertionError where it does not in time."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError(f"{what} did not happen within {DEADLINE_S} s")
