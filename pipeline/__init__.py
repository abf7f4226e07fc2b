"""Millrace: a multi-GPU pipelined processing service."""

__version__ = "0.1.0"
