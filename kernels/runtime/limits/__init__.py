"""Measured limits of a GPU: bytes copied, bytes read, multiply-adds and inverse roots per second."""
