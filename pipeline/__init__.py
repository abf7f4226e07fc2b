"""Millrace: a multi-GPU pipelined processing service."""

from __future__ import annotations

TYPE_CHECKING = False  # typing loads for as long as the rest before Ctrl-C is handled
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Loads `Client` and `image_operator` on first use."""
    if name == "Client":
        from pipeline.client import Client

        return Client
    if name == "image_operator":
        from pipeline.workloads.operator import image_operator

        return image_operator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
