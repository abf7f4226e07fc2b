"""The steps of an operation's ladder and what they are measured on: what operations hand to `millrace kernels`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Ladder", "Limit", "Variant"]

# What a figure is a fraction of, each measured in the same run: bytes copied (read and written) or read a second,
# float32 fused multiply-adds, or inverse roots a second.
Limit = Literal["copy", "read", "fma", "roots"]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to compute an operation on a GPU."""

    summary: str  # what this step does, and what it buys over the one before
    entries: tuple[str, ...]  # the kernels that it is made of, as C++ expressions
    run: Callable[[Any], None]  # launches it for one task, of the kind that the operation's cuda.py defines


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """One input that the variants of an operation are measured on, naive to fast."""

    name: str  # "float32 sum of 2²⁸ values"
    variants: tuple[str, ...]  # the last is the one that the public function runs on such an input
    bytes: int  # that must at least go to and from device memory
    flops: int  # of the definition
    limit: Limit
    # Allocates the input on the current device; what it returns launches the named variant once on the current stream.
    prepare: Callable[[str], Callable[[], Any]]
    # The same for each library on this machine that can do it, by the library's name.
    libraries: Callable[[], Mapping[str, Callable[[], Any]]]
    # The variant that does not compute this but moves as many bytes, or counts as many operations: a bound, no step.
    bound: str | None = None
    roots: int = 0  # inverse roots of the definition, where those are the limit
