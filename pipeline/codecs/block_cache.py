"""A cache of a file's decoded blocks (strips, tiles, chunks), which neighbouring regions share."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from numpy.typing import NDArray

# Reader threads at neighbouring strips of the image, each with a halo, touch two rows more than there are threads (six
# on a GPU with many cores), and the slowest may be some strips behind. With less, rows are decoded again for each halo.
_ROWS_KEPT = 16
_SMALLEST_BYTES = 32 << 20

Key = tuple[int, ...]


class BlockCache:
    """A thread-safe least-recently-used cache, bounded in bytes.

    Two threads never decode the same block: the second waits for the first, or takes other blocks meanwhile.
    """

    def __init__(self, *, row_bytes: int, block_bytes: int) -> None:
        """Decoded sizes of one row of blocks across the whole image, and of the largest block."""
        self._lock = threading.Lock()
        self._found: OrderedDict[Key, Future[NDArray[Any]]] = OrderedDict()
        self._held_bytes = 0
        self._capacity_bytes = max(_ROWS_KEPT * row_bytes, _SMALLEST_BYTES)
        # A block is in memory while it is read, regardless of the bound. A large one counts towards the memory budget
        # and is kept: an image stored as one strip must not be decoded again for every chunk of the job.
        self._least_bytes = block_bytes if block_bytes > _SMALLEST_BYTES else 0

    def hold_at_most(self, budget_bytes: int) -> int:
        """Lower the bound; returns the bound in force, which leaves room for one large block."""
        self._capacity_bytes = max(min(self._capacity_bytes, budget_bytes), self._least_bytes)
        return self._capacity_bytes

    def take(self, key: Key, decode: Callable[[], NDArray[Any]], *, wait: bool) -> NDArray[Any] | None:
        """The block, read-only. None if another thread is decoding it and `wait` is False.

        Raises what `decode` raises, in every thread that waits for the block.
        """
        with self._lock:
            future = self._found.get(key)
            mine = future is None
            if future is None:
                future = self._found[key] = Future()
            self._found.move_to_end(key)
        if not mine:
            return future.result() if wait or future.done() else None
        try:
            block = decode()
        except BaseException as exc:
            with self._lock:
                del self._found[key]
            future.set_exception(exc)
            raise
        future.set_result(block)
        with self._lock:
            self._held_bytes += block.nbytes
            self._trim()
        return block

    def _trim(self) -> None:
        for key in list(self._found):
            if self._held_bytes <= self._capacity_bytes:
                return
            if self._found[key].done():
                self._held_bytes -= self._found.pop(key).result().nbytes
