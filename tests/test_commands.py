"""What starts warm is as if it had been started by itself, and is the test's own child."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tests import commands
from tests.commands import COMMAND, Popen, run
from tests.pipeline.workloads.packages import install

TOLD = """
import json, os, signal, sys
told = {
    "argv": sys.argv, "folder": os.getcwd(), "a": os.environ.get("A"), "parent": os.getppid(), "read": sys.stdin.read(),
    "warm": "zarr" in sys.modules, "main": __name__,
    "ignored": [n.name for n in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(n) == signal.SIG_IGN],
    "descriptors": len(os.listdir("/proc/self/fd")),
}
print(json.dumps(told))
print("besides", file=sys.stderr)
raise SystemExit(int(sys.argv[1]))
"""


def told(folder, **environment):
    done = run(
        [sys.executable, "-c", TOLD, "7", "ä"], cwd=folder, env=os.environ | environment, input="read", timeout=60,
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (7, "besides\n")
    return json.loads(done.stdout)


@contextmanager
def action(number, taken):
    before = signal.signal(number, taken)
    yield
    signal.signal(number, before)


def test_a_warm_program_is_as_a_cold_one(tmp_path):
    warm, cold = told(tmp_path, A="b"), told(tmp_path, A="b", PYTHON_OF_ITS_OWN="1")
    assert (warm.pop("warm"), cold.pop("warm")) == (True, False)
    assert warm == cold
    assert warm["parent"] == os.getpid()
    with action(signal.SIGINT, signal.SIG_IGN):
        assert "SIGINT" in told(tmp_path)["ignored"]


def test_what_the_first_program_was_given_does_not_concern_later_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "_parents", [])
    with monkeypatch.context() as patch, action(signal.SIGHUP, signal.SIG_IGN):
        patch.setenv("MILLRACE_CACHE_DIR", str(tmp_path))
        first = told(tmp_path)
    with action(signal.SIGHUP, signal.SIG_DFL):
        later = told(tmp_path)
    assert (first["warm"], "SIGHUP" in first["ignored"]) == (False, True)
    assert (later["warm"], "SIGHUP" in later["ignored"]) == (True, False)
    commands._parents[0].close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_can_be_killed(number):
    program = "print('ready', flush=True); input()"
    with Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(60) == -number


def test_errors_and_modules_end_as_usual(tmp_path):
    (tmp_path / "mine.py").write_text("import sys; print(sys.argv[1:], __name__); sys.exit('wrong')")
    done = run([sys.executable, "-m", "mine", "x"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "['x'] __main__\n", "wrong\n")
    done = run(
        [sys.executable, "-c", "import atexit; atexit.register(print, 'end'); 1 / 0"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "end\n")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    with pytest.raises(FileNotFoundError):
        run([*COMMAND, "--version"], cwd=tmp_path / "absent")
    with pytest.raises(subprocess.CalledProcessError):
        run([*COMMAND, "absent"], check=True, capture_output=True)


def test_packages_of_the_python_path_are_found_warm(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    source = "from pipeline import image_operator\n@image_operator()\ndef same(block):\n    return block\n"
    install(first, "found", source, same="found:same")
    (second / "found.py").write_text("wrong")
    program = (
        "import sys; from pipeline.workloads import workloads as all; print('same' in all(), 'zarr' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (first, second)))}
    done = run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True True\n"
    done = run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False True\n"


def test_a_warm_programs_fork_server_is_warm_too():
    program = """
from pathlib import Path
from pipeline.cluster.dask import worker_start
worker_start.start_fork_server()
children = Path("/proc/self/task", str(__import__("os").getpid()), "children").read_text().split()
print(*(Path("/proc", child, "cmdline").read_text().count("tests.commands") for child in children))
"""
    done = run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (sorted(done.stdout.split()), done.stderr) == (["0", "1"], "")  # the other is the resource tracker
