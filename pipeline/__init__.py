"""Millrace: a multi-GPU pipelined processing service."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Loads `Client` on first use."""
    if name == "Client":
        from pipeline.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
