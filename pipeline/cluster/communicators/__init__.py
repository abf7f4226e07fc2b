"""Collectives over ordered ranks: in one process, over TCP, over NCCL."""
