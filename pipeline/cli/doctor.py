"""`millrace doctor`: what this machine has, what hinders jobs here, and how to fix it."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import click

from pipeline import __version__
from pipeline.cli.stdout import say
from pipeline.config import Settings, format_bytes, load_settings
from pipeline.errors import MillraceError, UserError, printable

_LITTLE_SPACE_BYTES = 10 << 30
_LITTLE_MEMORY_BYTES = 2 << 30
# NCCL's ranks and Dask's workers exchange data through shared memory.
_LITTLE_SHARED_BYTES = 256 << 20
# A run opens hundreds of Zarr chunks at once.
_FEW_FILES = 1024
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Finding:
    """One finding. `remedy`: what to do about it; `stops_jobs`: no job can run until that is done."""

    thing: str
    found: str
    remedy: str | None = None
    stops_jobs: bool = False

    def line(self) -> str:
        mark = "ok" if self.remedy is None else "FIX" if self.stops_jobs else "note"
        return f"{mark:4}  {self.thing:14}  {self.found}{f': {self.remedy}' if self.remedy else ''}"


def findings() -> Iterator[Finding]:
    """All findings, in the order of the report."""
    yield _program()
    yield from _devices()
    yield _memory()
    yield _shared_memory()
    yield _space("working folder", Path.cwd())
    yield from _caches()
    yield _open_files()
    yield from _settings()
    yield from _misspelt_variables()
    yield from _workloads()


def _program() -> Finding:
    from importlib.metadata import version

    names = ("numpy", "numba", "dask", "zarr", "tifffile")
    found = ", ".join(f"{name} {version(name)}" for name in names)
    return Finding("Millrace", f"{__version__} on Python {platform.python_version()}, {found}")


def _devices() -> Iterator[Finding]:
    from pipeline.engine.devices.discovery import discover, fault_in_computing

    for report in discover():
        obstacle = report.obstacle
        if obstacle is None and report.name.startswith("cuda"):
            obstacle = fault_in_computing(int(report.name.partition(":")[2]))
        yield Finding(report.name, report.description, obstacle)


def _memory() -> Finding:
    words = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free, total = (int(words[name].split()[0]) << 10 for name in ("MemAvailable", "MemTotal"))
    limit = _number(_CGROUP / "memory.max")
    if limit is not None and limit < total:
        total, free = limit, min(free, limit - (_number(_CGROUP / "memory.current") or 0))
    remedy = "jobs may not fit: pass a small --memory, or end other programs" if free < _LITTLE_MEMORY_BYTES else None
    return Finding("memory", f"{format_bytes(free)} of {format_bytes(total)} free", remedy)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such limit, or "max"
        return None


def _shared_memory() -> Finding:
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError as error:
        return Finding(
            "shared memory", f"/dev/shm: {error.strerror}", "jobs on several GPUs need it: mount a tmpfs there"
        )
    remedy = "jobs on several GPUs need more: start the container with --shm-size=1g"
    return Finding(
        "shared memory", f"/dev/shm of {format_bytes(size)}", remedy if size < _LITTLE_SHARED_BYTES else None
    )


def _space(thing: str, folder: Path) -> Finding:
    disk = shutil.disk_usage(folder)
    found = f"{folder}: {format_bytes(disk.free)} free"
    if not os.access(folder, os.W_OK | os.X_OK):
        return Finding(thing, found, "this user may not write here; give outputs another folder")
    return Finding(thing, found, "large results do not fit here" if disk.free < _LITTLE_SPACE_BYTES else None)


def _caches() -> Iterator[Finding]:
    from kernels.runtime.binaries import cache_folder

    folder = cache_folder("numba").parent
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    writable = os.access(existing, os.W_OK | os.X_OK)
    remedy = (
        "this user may not write there, so every run compiles its kernels: set MILLRACE_CACHE_DIR to another folder"
    )
    yield Finding("kernel cache", str(folder), None if writable else remedy)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < _FEW_FILES
    found = "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft:,} at once"
    return Finding("open files", found, f"raise it: ulimit -n {min(max(hard, soft), 65_536)}" if few else None)


def _settings() -> Iterator[Finding]:
    source = os.environ.get("MILLRACE_CONFIG")
    try:
        load_settings({})
    except MillraceError as error:
        yield Finding("settings", source or "MILLRACE_… variables", str(error), stops_jobs=True)
    else:
        if source:
            yield Finding("settings", source)


def _misspelt_variables() -> Iterator[Finding]:
    from pipeline.service.settings import ServiceSettings

    others = ("URL", "TOKEN", "CA_FILE", "CACHE_DIR", "CONFIG", "DEBUG")
    fields = (*Settings.model_fields, *ServiceSettings.model_fields)
    known = {f"MILLRACE_{name.upper()}" for name in (*fields, *others)}
    for name in sorted(set(os.environ) - known):
        if name.startswith("MILLRACE_") and (close := get_close_matches(name, known, 1, 0.85)):
            yield Finding("settings", name, f"has no effect; did you mean {close[0]}?")


def _workloads() -> Iterator[Finding]:
    from pipeline.workloads import LOCAL_ONLY, unusable, workloads

    yield Finding("workloads", ", ".join(sorted([*workloads(), *LOCAL_ONLY])))
    for line in unusable():
        yield Finding("workloads", "one cannot be used", line)


@click.command("doctor")
def check_machine() -> None:
    """Check this machine (GPUs, driver, memory, disks, settings, packages) and name what to fix.

    Exit code 2 if jobs cannot run.
    """
    found = list(findings())
    for each in found:
        say(printable(each.line()))
    if any(each.stops_jobs for each in found):
        raise SystemExit(UserError.exit_code)
