"""Installed from the wheel into an environment of its own, served as systemd's unit confines it: no home, nothing that
can be written but state, cache and data, no capabilities, no sight of the repository."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from kernels.smoothing import uniform_filter
from pipeline.client import Client
from tests.deploy.waiting import WAIT_S, wait_until
from tests.images import read_image, write_image

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
OLDEST_SETUPTOOLS = 77  # as pyproject.toml has it; an older one is left out, and pip fetches its own


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder of a clean environment that holds the wheel; what the wheel depends on is lent from this one."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    source.mkdir()
    for line in (ROOT / "deploy/docker/Dockerfile.dockerignore").read_text().splitlines():
        if line.startswith("!"):  # what the images are made of
            path = ROOT / line[1:]
            copy = shutil.copy if path.is_file() else shutil.copytree
            copy(
                path,
                source / path.name,
                **({} if path.is_file() else {"ignore": shutil.ignore_patterns("__pycache__")}),
            )
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    builder = ["--no-build-isolation"] if int(version("setuptools").partition(".")[0]) >= OLDEST_SETUPTOOLS else []
    done = subprocess.run(
        [*pip, "wheel", *builder, "--no-deps", f"--wheel-dir={folder}", source],
        capture_output=True,
        text=True,
        check=False,
    )
    if "setuptools" in done.stderr and "No matching distribution" in done.stderr:
        pytest.skip("no package index answers: the wheel cannot be built")
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("millrace_pipeline-*.whl")
    environment = folder / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    subprocess.run([*pip, f"--python={environment}/bin/python", "install", "--no-deps", wheel], check=True)
    site = environment / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    # A folder named in a .pth is searched, its own .pth files are not read: the repository stays out.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    shutil.rmtree(source)
    return environment


def confined(installed, folder, socket_path):
    """The command line that runs what follows as the unit would: all is read-only, homes and repository are empty."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed (Debian: apt-get install bubblewrap)")
    dependencies = sysconfig.get_paths()["purelib"]
    hidden = [part for path in ("/root", "/home", "/tmp", ROOT) for part in ("--tmpfs", str(path))]
    seen = [part for path in (sys.base_prefix, dependencies, installed) for part in ("--ro-bind", str(path), str(path))]
    written = [
        part
        for name, place in (("state", "/var/lib/millrace"), ("cache", "/var/cache/millrace"), ("data", "/srv"))
        for part in ("--bind", str(folder / name), place)
    ]
    settings = {
        "PATH": f"{installed}/bin:/usr/bin:/bin", "MILLRACE_STATE_DIR": "/var/lib/millrace",
        "MILLRACE_CACHE_DIR": "/var/cache/millrace", "MILLRACE_DATA_ROOTS": "/srv", "MILLRACE_DRAIN_S": "60",
        "NOTIFY_SOCKET": "/run/notify/socket", "WATCHDOG_USEC": "3600000000",
    }  # fmt: skip
    return [
        "bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/run",
        *hidden, *seen, "--bind", str(socket_path.parent), "/run/notify",
        "--tmpfs", "/var/lib", "--tmpfs", "/var/cache",
        *written, "--remount-ro", "/var/lib", "--remount-ro", "/var/cache", "--remount-ro", "/root",
        "--unshare-user", "--unshare-pid", "--unshare-ipc", "--uid", "10001", "--gid", "10001", "--cap-drop", "ALL",
        "--die-with-parent", "--new-session", "--chdir", "/", "--clearenv",
        *(part for name, value in settings.items() for part in ("--setenv", name, value)),
    ]  # fmt: skip


def received(told, messages):
    with contextlib.suppress(TimeoutError):
        messages.append(told.recv(4096))
    return messages


def test_the_wheel_serves_in_confinement(installed, tmp_path):
    for name in ("state", "cache", "data", "notify"):
        (tmp_path / name).mkdir()
    samples = np.random.default_rng(2).integers(0, 65536, (401, 307)).astype(np.uint16)
    write_image(tmp_path / "data" / "in.npy", samples, "YX")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(tmp_path / "notify" / "socket"))
        told.settimeout(0.2)
        sandbox = confined(installed, tmp_path, tmp_path / "notify" / "socket")
        process = subprocess.Popen(
            [*sandbox, "--", "millrace", "serve", "--port", "0", "--device", "cpu", "--workers", "1", "--threads", "1"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            ready = []
            wait_until(lambda: process.poll() is not None or received(told, ready), "its start")
            assert ready, process.communicate()[1]
            assert ready[0].startswith(b"READY=1\n")
            address = re.fullmatch(r"Millrace serves at (\S+)\n", process.stdout.readline())[1]
            with Client(address) as client:
                job = client.submit("smooth", "in.npy", "out.npy", size=7)
                assert job.wait(timeout_s=WAIT_S).state == "succeeded"
            # The command is the sandbox's second process: its first only waits for it.
            (inside,) = (
                int(word) for word in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            )
            (server,) = (int(word) for word in Path(f"/proc/{inside}/task/{inside}/children").read_text().split())
            os.kill(server, signal.SIGTERM)
            _, err = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
            process.communicate()
        told.setblocking(False)
        messages = []
        while b"STOPPING=1" not in (messages or [b""])[-1]:
            messages.append(told.recv(4096))
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert any(message.startswith(b"WATCHDOG=1\n") for message in messages)
    np.testing.assert_array_equal(read_image(tmp_path / "data" / "out.npy"), uniform_filter(samples, 7))
    receipt = json.loads((tmp_path / "data" / "out.npy.receipt.json").read_text())
    assert receipt["output"] == "/srv/out.npy"
    assert (tmp_path / "state" / "jobs.sqlite").stat().st_size > 0
    assert list((tmp_path / "cache" / "numba").rglob("*.nbc")), "compiled kernels were not kept"


def test_the_wheel_holds_what_is_no_python(installed):
    """Without these the service starts and then fails; the repository, from which tests import, would hide it."""
    (package,) = installed.rglob("site-packages/pipeline")
    names = {path.suffix for path in package.rglob("*") if path.is_file()}
    assert {".sql", ".html", ".css"} <= names
    (package,) = installed.rglob("site-packages/kernels")
    assert {".cu", ".cuh"} <= {path.suffix for path in package.rglob("*") if path.is_file()}
