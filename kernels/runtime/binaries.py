"""A disk cache of compiled CUDA kernels, by a hash of everything that went into them: in `MILLRACE_CACHE_DIR` or the
user's cache folder. A cache that cannot be read or written only costs time. What is not used for 30 days is removed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kernels.runtime.operations import FOLDER, folder_of

__all__ = ["INCLUDE", "Binary", "cache_folder", "key", "mark_used", "read", "remove_unused", "source_path", "write"]

INCLUDE = FOLDER / "include"

_DAY_S = 86_400
# A binary, a folder of the CPU's code, a temporary file; users may choose a folder that holds other files, too.
_OURS = re.compile(r"[0-9a-f]{64}|[0-9a-f]{16}|\.[0-9a-f]{16}-.+")
_INCLUDED = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Binary:
    """Kernels compiled for one architecture."""

    code: bytes  # a cubin, or PTX for a device newer than this NVRTC
    lowered: dict[str, str]  # their mangled names in the code, by C++ expression
    log: str


def cache_folder(kind: str) -> Path:
    """The user's cache folder for one kind of compiled code; it may be missing or read-only.

    MILLRACE_CACHE_DIR, else XDG_CACHE_HOME/millrace, else ~/.cache/millrace.
    """
    chosen = os.environ.get("MILLRACE_CACHE_DIR")
    if chosen:
        return Path(chosen) / kind
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - never fails
    return Path(home) / "millrace" / kind


def source_path(operation: str) -> Path:
    return folder_of(operation) / f"{operation}.cu"


def key(operation: str, settings: Iterable[str]) -> str:
    """A hash of an operation's source, the headers it includes and all settings (options, compiler, kernel names)."""
    digest = hashlib.sha256()
    for setting in settings:
        digest.update(setting.encode() + b"\0")
    for path in _source_files(source_path(operation)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def _source_files(source: Path) -> tuple[Path, ...]:
    """The source and every header it includes, directly or not, in the order found."""
    found: dict[Path, None] = {source: None}
    waiting = [source]
    while waiting:
        including = waiting.pop()
        for name in _INCLUDED.findall(including.read_text(encoding="utf-8")):
            for folder in (including.parent, source.parent, INCLUDE):
                header = folder / name
                if header.is_file() and header not in found:
                    found[header] = None
                    waiting.append(header)
    return tuple(found)


def read(name: str) -> Binary | None:
    """The cached binary; None if it is missing or damaged."""
    try:
        head, _, code = (cache_folder("cuda") / name).read_bytes().partition(b"\n")
        written = json.loads(head)
        if hashlib.sha256(code).hexdigest() != written["sha256"]:
            return None
        mark_used(cache_folder("cuda") / name)
        return Binary(code=code, lowered=dict(written["lowered"]), log="")
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(name: str, binary: Binary) -> None:
    head = json.dumps({"sha256": hashlib.sha256(binary.code).hexdigest(), "lowered": binary.lowered})
    folder = cache_folder("cuda")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name[:16]}-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(head.encode() + b"\n" + binary.code)
            Path(temporary).replace(folder / name)
        finally:
            Path(temporary).unlink(missing_ok=True)
        remove_unused(folder)
    except OSError:
        return  # with a read-only home, each process compiles again


def mark_used(path: Path) -> None:
    """Dates a file or folder of the cache, once a day, so that it is kept."""
    with suppress(OSError):
        if time.time() - path.stat().st_mtime > _DAY_S:
            os.utime(path)


@cache
def remove_unused(folder: Path) -> None:
    """Remove what no process has used for 30 days, such as the code of older versions; once in each process."""
    for each in folder.iterdir():
        with suppress(OSError):  # another process removes it
            if not _OURS.fullmatch(each.name) or time.time() - each.lstat().st_mtime < 30 * _DAY_S:
                continue
            if each.is_dir() and not each.is_symlink():
                # Renamed first: a process that uses it after all finds all of it, or nothing, and makes it anew.
                shutil.rmtree(each.rename(folder / f".{each.name.strip('.')[:16]}-{os.getpid()}"), ignore_errors=True)
            else:
                each.unlink()
