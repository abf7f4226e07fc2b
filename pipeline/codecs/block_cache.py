"""A cache of a file's decoded blocks (strips, tiles, chunks), which neighbouring regions share."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

# Reader threads at neighbouring strips of the image, each with a halo, touch two rows more than there are threads (six
# on a GPU with many cores), and the slowest may be some strips behind. With less, rows are decoded again for each halo.
_ROWS_KEPT = 16
_SMALLEST_BYTES = 32 << 20
_MOST_SPARE = 64

Key = tuple[int, ...]
Memory = NDArray[np.uint8]


class _Block:
    """A decoded block, the memory it lies in if that can be used again, how many threads are looking at it, and how
    many looks are expected (negative: unknown)."""

    __slots__ = ("is_evicted", "left", "memory", "samples", "users")

    def __init__(self, samples: NDArray[Any], memory: Memory | None, left: int) -> None:
        self.samples = samples
        self.memory = memory
        self.left = left
        self.users = 1
        self.is_evicted = False

    @property
    def nbytes(self) -> int:
        return self.samples.nbytes if self.memory is None else self.memory.nbytes


class BlockCache:
    """A thread-safe least-recently-used cache, bounded in bytes.

    Two threads never decode the same block: the second waits for the first, or takes other blocks meanwhile. New blocks
    are decoded into the memory of old ones.
    """

    def __init__(self, *, row_bytes: int, block_bytes: int) -> None:
        """Decoded sizes of one row of blocks across the whole image, and of the largest block."""
        self._lock = threading.Lock()
        self._made = threading.Condition(self._lock)
        self._blocks: OrderedDict[Key, _Block] = OrderedDict()
        self._making: set[Key] = set()
        self._spare: list[Memory] = []
        self._uses: Callable[[Key], int] = _unknown
        self._held_bytes = 0
        self._capacity_bytes = max(_ROWS_KEPT * row_bytes, _SMALLEST_BYTES)
        # A block is in memory while it is read, regardless of the bound. A large one counts towards the memory budget
        # and is kept: an image stored as one strip must not be decoded again for every chunk of the job.
        self._least_bytes = block_bytes if block_bytes > _SMALLEST_BYTES else 0

    def hold_at_most(self, budget_bytes: int) -> int:
        """Lower the bound; returns the bound in force, which leaves room for one large block."""
        self._capacity_bytes = max(min(self._capacity_bytes, budget_bytes), self._least_bytes)
        return self._capacity_bytes

    def expect(self, uses: Callable[[Key], int]) -> None:
        """`uses`: how often each block will be used from now on. It is dropped after the last time."""
        self._uses = uses

    def use(
        self,
        key: Key,
        nbytes: int,
        decode: Callable[[Memory], NDArray[Any]],
        look: Callable[[NDArray[Any]], T],
        *,
        wait: bool,
    ) -> T | None:
        """What `look` returns for the block, which is valid only during that call and must not be changed.

        decode : makes the block in the given memory, of `nbytes`, or in its own

        None if another thread is decoding it and `wait` is False. Raises what `decode` raises.
        """
        with self._lock:
            while (block := self._blocks.get(key)) is None and key in self._making:
                if not wait:
                    return None
                self._made.wait()
            if block is not None:
                block.users += 1
                self._blocks.move_to_end(key)
            else:
                self._making.add(key)
                memory = self._memory(nbytes)
        if block is None:
            block = self._decoded(key, decode, memory)
        try:
            return look(block.samples)
        finally:
            with self._lock:
                block.users -= 1
                block.left -= 1
                if block.left == 0 and not block.is_evicted:
                    self._evict(key)
                elif block.is_evicted:
                    self._reuse(block)

    def _decoded(self, key: Key, decode: Callable[[Memory], NDArray[Any]], memory: Memory) -> _Block:
        block = None
        try:
            samples = decode(memory)
            lent = memory if np.may_share_memory(samples, memory) else None
            block = _Block(samples, lent, self._uses(key))
        finally:
            with self._lock:
                self._making.remove(key)
                if block is not None:
                    self._blocks[key] = block
                    self._held_bytes += block.nbytes
                    self._trim()
                self._made.notify_all()
        return block

    def _trim(self) -> None:
        while self._held_bytes > self._capacity_bytes:
            self._evict(next(iter(self._blocks)))

    def _evict(self, key: Key) -> None:
        block = self._blocks.pop(key)
        self._held_bytes -= block.nbytes
        block.is_evicted = True
        self._reuse(block)

    def _memory(self, nbytes: int) -> Memory:
        if self._spare and len(self._spare[-1]) == nbytes:
            return self._spare.pop()
        self._spare.clear()
        return np.empty(nbytes, np.uint8)

    def _reuse(self, block: _Block) -> None:
        """Take an evicted block's memory for another block, unless a thread is looking at it."""
        if not block.users and block.memory is not None and len(self._spare) < _MOST_SPARE:
            self._spare.append(block.memory)


def _unknown(key: Key) -> int:
    return -1
