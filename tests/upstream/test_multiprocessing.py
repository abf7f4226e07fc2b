"""Python's multiprocessing: the fork server and the resource tracker, started before they are needed."""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import subprocess
import sys
from pathlib import Path

CODE = """
import multiprocessing, signal, os
from pathlib import Path
from pipeline.cluster.dask import worker_start

def masked(pid):
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigBlk"))
    mask = int(line.split()[1], 16)
    return [bool(mask >> (number - 1) & 1) for number in (signal.SIGINT, signal.SIGHUP)]

def show(pipe):
    pipe.send((os.getppid(), "kernels.runtime.compiled.compiler" in __import__("sys").modules))

if __name__ == "__main__":
    worker_start.start_fork_server()
    context = multiprocessing.get_context(worker_start.METHOD)
    ours, theirs = context.Pipe()
    process = context.Process(target=show, args=(theirs,))
    process.start()
    parent, has_modules = ours.recv()
    process.join()
    print(masked(parent), has_modules, masked(os.getpid()))
"""


def test_both_can_be_started_ahead_and_start_only_once() -> None:
    for module in (multiprocessing.forkserver, multiprocessing.resource_tracker):
        assert callable(module.ensure_running)


def test_the_fork_server_inherits_blocked_signals_and_imports_what_it_is_told(tmp_path: Path) -> None:
    """Ctrl-C and a closed terminal must not reach it; workers must not import for seconds."""
    script = tmp_path / "main.py"
    script.write_text(CODE)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[True, True] True [False, False]"
