"""Ordered ranks that combine arrays: in one process, over TCP, by NCCL."""
