"""The units as systemd reads them, and what the service tells it."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from pipeline.service.reporting import systemd

FOLDER = Path(__file__).parents[2] / "deploy" / "systemd"
UNITS = ("millrace-serve.service", "millrace-scheduler.service", "millrace-worker@.service")
# systemd's own scale: below 2 is its "OK", 10 is an unconfined service.
WORST_EXPOSURE = 2.0


@pytest.fixture
def units(tmp_path):
    """The units, with commands that exist here; runs systemd-analyze on them."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (Debian: apt-get install systemd)")
    shutil.copytree(FOLDER, tmp_path / "units")
    for path in (tmp_path / "units").glob("*.service"):
        text = path.read_text()
        assert "ExecStart=/opt/millrace/bin/" in text
        path.write_text(re.sub(r"/opt/millrace/bin/\w+", sys.executable, text))

    def analyze(*arguments):
        environment = os.environ | {"SYSTEMD_UNIT_PATH": f"{tmp_path}/units:/lib/systemd/system"}
        return subprocess.run(
            ["systemd-analyze", "--no-pager", *arguments], env=environment, capture_output=True, text=True, check=False
        )

    return tmp_path / "units", analyze


@pytest.mark.parametrize("unit", UNITS)
def test_units_have_no_fault(units, unit):
    folder, analyze = units
    done = analyze("--man=no", "verify", folder / unit)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_service_is_started_once_it_says_so_and_anew_where_it_falls_silent():
    said = (FOLDER / "millrace-serve.service").read_text().splitlines()
    assert {"Type=notify", "NotifyAccess=main"} <= set(said)
    (watched,) = [line for line in said if line.startswith("WatchdogSec=")]
    assert int(watched.removeprefix("WatchdogSec=")) > 0
    confined = (FOLDER / "millrace-.service.d/confined.conf").read_text().splitlines()
    assert {"Restart=on-failure", "KillMode=mixed"} <= set(confined)


def test_units_can_do_little_harm(units):
    _, analyze = units
    for unit in (*UNITS[:2], "millrace-worker@head:8786.service"):
        done = analyze("security", "--offline=yes", unit)
        exposure = float(re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)[1])
        assert exposure <= WORST_EXPOSURE, f"{unit}\n{done.stdout}"


@pytest.fixture(params=["/notify", "@"])
def listener(request, tmp_path, monkeypatch):
    """systemd's side, on a path or in the abstract namespace."""
    address = f"{tmp_path}/notify" if request.param == "/notify" else f"@millrace-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(address.replace("@", "\0"))
        listening.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        yield listening


def test_states_are_lines(listener):
    systemd.notify(READY="1", STATUS="takes\njobs")
    assert listener.recv(4096) == b"READY=1\nSTATUS=takes jobs"


def test_the_watchdog_hears_twice_in_a_period(listener, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(systemd.time, "monotonic", lambda: now)
    monkeypatch.setenv("WATCHDOG_USEC", "20000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    heartbeat = systemd.Watchdog()
    heard = []
    for _ in range(300):
        now += 0.1
        heartbeat.beat("well")
        listener.setblocking(False)
        try:
            heard.append((now, listener.recv(4096)))
        except BlockingIOError:
            continue
    assert {message for _, message in heard} == {b"WATCHDOG=1\nSTATUS=well"}
    gaps = [b - a for (a, _), (b, _) in pairwise(heard)]
    assert len(heard) == 3
    assert max(gaps) < 10.2


@pytest.mark.parametrize("environment", [{}, {"WATCHDOG_USEC": "20000000", "WATCHDOG_PID": "1"}])
def test_nobody_is_told_who_did_not_ask(listener, monkeypatch, environment):
    for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    systemd.Watchdog().beat("well")
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.recv(4096)


def test_a_service_goes_on_where_nobody_listens(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "none"))
    systemd.notify(READY="1")
    assert "NOTIFY_SOCKET: No such file or directory" in caplog.text
    monkeypatch.delenv("NOTIFY_SOCKET")
    systemd.notify(READY="1")
