"""Commands of a service's users in this process, and answers that no service gave."""

from __future__ import annotations

import httpx2
from click.testing import CliRunner

from pipeline.cli import cli


def run(*args):
    return CliRunner().invoke(cli, [str(arg) for arg in args], standalone_mode=False)


HTTP = httpx2.Client


def job_view(**changes):
    """A job that is running, as a service answers."""
    return {
        "id": "0123456789ab", "number": 1, "owner": "ada", "group": "", "workload": "smooth", "input": "i",
        "output": "o", "parameters": {}, "priority": 0, "array": None, "index": None, "state": "running",
        "cancelling": False, "attempts": 1, "chunks": None, "chunks_done": 0, "error": None, "submitted_at": 1.0,
        "started_at": 2.0, "finished_at": None, "device_seconds": 0.0, "held": False,
        "preemptions": 0, "throttle": None, "no_clobber": False, "limits": {}, "estimate": None,
        "used": {"seconds": 0.0, "memory_bytes": None, "gpu_memory_bytes": None},
    } | changes  # fmt: skip


def answering(monkeypatch, answer):
    """Clients from now on are answered so, whatever they ask."""
    transport = httpx2.MockTransport(answer if callable(answer) else lambda request: answer)
    monkeypatch.setattr("pipeline.client.connection.httpx2.Client", lambda **how: HTTP(**how, transport=transport))
    monkeypatch.setattr("pipeline.client.connection.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("pipeline.client.job.RECONNECT_S", 0.001)
