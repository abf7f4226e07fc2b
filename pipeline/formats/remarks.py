"""Libraries that remark on files in the log. Where nobody has asked for one, Python prints it on stderr: lines about
tags and chunks that do not matter, beside the one line that does, which is an error of ours."""

from __future__ import annotations

import functools
import logging

_LIBRARIES = ("imagecodecs", "tifffile")


@functools.cache
def hush() -> None:
    """From now on they keep their remarks to themselves."""
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(logging.CRITICAL)
