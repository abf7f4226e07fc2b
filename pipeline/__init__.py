"""Millrace: a multi-GPU pipelined processing service."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`from pipeline import Client, image_operator`, and nothing of them loaded before."""
    if name == "Client":
        from pipeline.client import Client

        return Client
    if name == "image_operator":
        from pipeline.workloads.operator import image_operator

        return image_operator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
