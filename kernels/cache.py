"""Where compiled kernels are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """A folder of the user's for one kind of compiled code; it may not exist, or not be writable.

    MILLRACE_CACHE_DIR, else XDG_CACHE_HOME/millrace, else ~/.cache/millrace.
    """
    chosen = os.environ.get("MILLRACE_CACHE_DIR")
    if chosen:
        return Path(chosen) / kind
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - never fails
    return Path(home) / "millrace" / kind
