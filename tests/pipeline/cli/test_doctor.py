"""`millrace doctor`: one line for each thing, with what to do about those that hinder jobs."""

from __future__ import annotations

import os
import resource
import shutil
from collections import namedtuple

import pytest

from pipeline.cli import doctor
from pipeline.engine.devices import discovery
from pipeline.engine.devices.discovery import DeviceReport

CPU = DeviceReport(name="cpu", description="a processor")


@pytest.fixture
def found(millrace, monkeypatch):
    """The lines for a thing, on a machine with these devices."""

    def found(thing, *devices):
        monkeypatch.setattr(discovery, "discover", lambda: [CPU, *devices])
        code, out, err = millrace("doctor")
        assert err == ""
        return code, [line for line in out.splitlines() if line[6:].startswith(thing)]

    return found


def test_every_thing_is_listed_and_a_healthy_machine_has_nothing_to_mend(found, tmp_path, monkeypatch):
    monkeypatch.setenv("MILLRACE_CACHE_DIR", str(tmp_path))
    code, lines = found("")
    assert code == 0
    things = ["Millrace", "cpu", "memory", "shared memory", "working folder", "kernel cache", "open files", "workloads"]
    assert [line[6:20].strip() for line in lines] == things
    assert not any(line.startswith("FIX") for line in lines)
    assert found("kernel cache")[1] == [f"ok    kernel cache    {tmp_path}"]


def test_a_gpu_that_cannot_be_used_is_named_with_the_reason(found):
    broken = DeviceReport(name="cuda", description="NVIDIA GPU", obstacle="no NVIDIA driver answers")
    assert found("cuda", broken) == (0, ["note  cuda            NVIDIA GPU: no NVIDIA driver answers"])


def test_a_gpu_that_computes_nothing_is_not_called_ok(found, monkeypatch):
    usable = DeviceReport(name="cuda:1", description="a GPU")
    asked = []
    monkeypatch.setattr(discovery, "fault_in_computing", lambda ordinal: asked.append(ordinal) or "check the driver")
    assert found("cuda", usable) == (0, ["note  cuda:1          a GPU: check the driver"])
    assert asked == [1]


def test_little_room_is_told_with_the_way_out(found, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(64 << 20, 0, 1 << 20))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 4096))
    assert found("shared")[1] == [
        "note  shared memory   /dev/shm of 64.0 MiB: jobs on several GPUs need more: start the container with "
        "--shm-size=1g"
    ]
    assert found("working")[1][0].endswith(": 1.0 MiB free: large results do not fit here")
    assert found("open files")[1] == ["note  open files      at most 256 at once: raise it: ulimit -n 4096"]


def test_a_cache_that_cannot_be_written_is_told(found, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    monkeypatch.setenv("MILLRACE_CACHE_DIR", str(tmp_path / "cache"))
    assert "set MILLRACE_CACHE_DIR to another folder" in found("kernel cache")[1][0]


def test_a_container_s_limit_counts_as_its_memory(found, tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text(f"{1 << 30}\n")
    (tmp_path / "memory.current").write_text(f"{3 << 28}\n")
    monkeypatch.setattr(doctor, "_CGROUP", tmp_path)
    said = (
        "note  memory          256 MiB of 1.0 GiB free: jobs may not fit: pass a small --memory, or end other programs"
    )
    assert found("memory")[1] == [said]


def test_wrong_settings_stop_jobs(found, monkeypatch):
    monkeypatch.setenv("MILLRACE_MEMORY", "much")
    code, lines = found("settings")
    assert code == 2
    assert lines == [
        "FIX   settings        MILLRACE_… variables: MILLRACE_MEMORY: 'much' is not an amount of memory; write it like "
        "512MiB or 2GB"
    ]


def test_a_misspelt_variable_is_named_with_the_closest(found, monkeypatch):
    monkeypatch.setenv("MILLRACE_MEMROY", "1GiB")
    monkeypatch.setenv("MILLRACE_DATA", "/data")  # compose's
    said = "note  settings        MILLRACE_MEMROY: has no effect; did you mean MILLRACE_MEMORY?"
    assert found("settings") == (0, [said])


@pytest.mark.gpu
def test_a_gpu_computes():
    assert discovery.fault_in_computing(0) is None
