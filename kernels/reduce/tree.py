"""The order in which production reductions take their values, the same on the CPU and in reduce.cu.

A tile is ROWS rows of THREADS × columns_of(itemsize) values. Each column is taken row by row; then the columns of a
thread are joined by halves, the threads of a warp by halves, and the warps by halves. Tiles' results are values again.
"""

from __future__ import annotations

THREADS, WARP, ROWS = 256, 32, 16


def columns_of(itemsize: int) -> int:
    """Values of a row that one thread takes: those of 16 bytes."""
    return max(1, 16 // itemsize)
