"""An operation's variants from naive to fast (its ladder), and the inputs that `millrace kernels` measures them on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Ladder", "Limit", "Variant"]

# The device's limit that a figure is a fraction of, measured in the same run: bytes copied (read and written) or read,
# float32 fused multiply-adds, or inverse roots, each per second.
Limit = Literal["copy", "read", "fma", "roots"]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to compute an operation on a GPU."""

    summary: str  # what this step does, and what it gains over the previous one
    entries: tuple[str, ...]  # its kernels, as C++ expressions
    run: Callable[[Any], None]  # launches it for one Task of the operation's cuda.py


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """One input that an operation's variants are measured on, naive to fast."""

    name: str  # "float32 sum of 2²⁸ values"
    variants: tuple[str, ...]  # the last one is what the public function runs on this input
    bytes: int  # least traffic to and from device memory
    flops: int  # of the definition
    limit: Limit
    # Allocates the input on the current device; returns a function that launches the named variant once on the current
    # stream.
    prepare: Callable[[str], Callable[[], Any]]
    # The same for each installed library that offers the operation, by its name.
    libraries: Callable[[], Mapping[str, Callable[[], Any]]]
    # A variant that computes something else but moves as many bytes or counts as many operations: an upper bound.
    bound: str | None = None
    roots: int = 0  # inverse roots of the definition, if those are the limit
