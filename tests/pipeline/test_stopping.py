"""A signal stops the program at once, but not between a file's making and its being known."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from pipeline import stopping
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.run import RunOptions, plan_job, run_job
from pipeline.formats import image as images
from pipeline.workloads import JobSpec, workloads
from tests.images import names_in, write_image


@pytest.fixture(autouse=True)
def signals(monkeypatch, foreground):
    monkeypatch.setattr(stopping._State, "waiting", None)
    stopping.raise_on_signals()


def test_at_once():
    with pytest.raises(stopping.Stopped) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.value.signal == signal.SIGTERM
    os.kill(os.getpid(), signal.SIGINT)  # nor does a second one interrupt what cleans up


def test_two_at_the_same_moment(monkeypatch):
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)

    def both():
        signal.pthread_sigmask(signal.SIG_BLOCK, stopping.SIGNALS)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.pthread_kill(threading.get_ident(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stopping.SIGNALS)

    with pytest.raises(stopping.Stopped):
        both()
    os.kill(os.getpid(), signal.SIGHUP)  # by now every one that is waiting has been looked at
    assert unraisable == []


@pytest.mark.parametrize("second", stopping.SIGNALS)
def test_a_second_one_does_not_kill_the_interpreter_at_its_end(second):
    program = """
import os, signal, sys
from pipeline import stopping
class Ended:
    def __del__(self, kill=os.kill, process=os.getpid(), number=int(sys.argv[1]), write=os.write):
        kill(process, number)
        write(1, b"ended")
kept = Ended()  # goes as the interpreter takes modules apart, which is after its handlers
stopping.raise_on_signals()
try:
    os.kill(os.getpid(), signal.SIGINT)
except stopping.Stopped:
    sys.exit(130)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(int(second))], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "ended", "")


def test_what_is_held_is_done_first():
    done = []

    def work():
        with stopping.held(), stopping.held():
            os.kill(os.getpid(), signal.SIGHUP)
            done.append("inside")
        done.append("after")

    with pytest.raises(stopping.Stopped):
        work()
    assert done == ["inside"]


def test_an_error_of_what_is_held_is_told_with_the_signal():
    error = OSError("the disk is full")

    def work():
        with stopping.held():
            os.kill(os.getpid(), signal.SIGTERM)
            raise error

    with pytest.raises(stopping.Stopped) as stop:
        work()
    assert stop.value.__cause__ is error
    assert str(stop.value) == "stopped by SIGTERM; the disk is full"


def test_what_is_ignored_from_the_start_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stopping.raise_on_signals()
    os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_module_is_loaded_first(tmp_path, monkeypatch):
    """What is raised while one is loaded may be swallowed, as here, or leave it half-loaded."""
    (tmp_path / "slow_module.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGTERM)\n"
        "except BaseException:\n    done = False\n"
        "else:\n    done = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def work():
        import slow_module

        assert slow_module.done
        threading.Event().wait(10)

    with pytest.raises(stopping.Stopped) as stop:
        work()
    assert stop.value.signal == signal.SIGTERM


def test_a_file_that_has_just_been_made_is_removed(tmp_path, monkeypatch):
    source = write_image(tmp_path / "in.npy", np.zeros((50, 40), np.uint8), "YX")
    create = images.create_image

    def created(*arguments):
        writer = create(*arguments)
        os.kill(os.getpid(), signal.SIGINT)
        return writer

    monkeypatch.setattr(images, "create_image", created)
    parameters = workloads()["smooth"].Parameters(size=3)
    spec = JobSpec(workload="smooth", input=tmp_path / "in.npy", output=tmp_path / "out.npy", parameters=parameters)
    options = RunOptions(memory_bytes=64 << 20)
    with pytest.raises(stopping.Stopped):
        run_job(plan_job(spec, CpuDevice(1), options), options)
    assert names_in(tmp_path) == ["in.npy"], source


@pytest.mark.parametrize(
    ("module", "arguments", "code", "said"),
    [
        ("pipeline.cli", ("wait", "0123456789ab"), 130, "millrace: stopped by SIGINT\n"),
        ("pipeline.cli", ("--version",), 130, "millrace: stopped by SIGINT\n"),
        ("pipeline.stopping", ("--version",), -signal.SIGINT, ""),
        ("typing", ("--version",), -signal.SIGINT, ""),
    ],
)
def test_ctrl_c_before_the_command_is_loaded(module, arguments, code, said):
    """It comes as the loading begins, and waits for its end, or ends the process before it can be handled."""
    program = f"""
import os, signal, sys
sys.path[:] = {sys.path!r}
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from pipeline.__main__ import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", program, *arguments],  # site may load typing
        env=os.environ | {"MILLRACE_URL": "http://127.0.0.1:9"},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)


def test_one_that_waits_for_a_module_does_not_kill_the_interpreter_at_its_end(tmp_path):
    """The program is done before it is looked at again."""
    (tmp_path / "loads.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    program = """
import time
from pipeline import stopping
stopping.raise_on_signals()
import loads
stopping.no_more()
time.sleep(0.1)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
