"""A cache of a file's decoded blocks (strips, tiles, chunks), which neighbouring regions share."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

# Reader threads at neighbouring strips of the image, each with a halo, touch two rows more than there are threads (six
# on a GPU with many cores), and the slowest may be some strips behind. With less, rows are decoded again for each halo.
_ROWS_KEPT = 16
_SMALLEST_BYTES = 32 << 20
_MOST_SPARE = 64
# The share of the blocks that is ranked for eviction at once, since ranking looks at all of them.
_SHARE_RANKED = 16

Key = tuple[int, ...]
Place = tuple[int, ...]  # of a read in the order of the plan
Box = tuple[slice, ...]  # of a block's samples
Memory = NDArray[np.uint8]


class _Block:
    """A decoded block or the part that is kept, the memory it lies in if that can be used again, how many threads are
    looking at it, how many looks are expected (negative: unknown), and the place of the latest read that looked."""

    __slots__ = ("is_evicted", "left", "memory", "part", "samples", "seen", "users")

    def __init__(self, samples: NDArray[Any], memory: Memory | None, left: int) -> None:
        self.samples = samples
        self.memory = memory
        self.part: Box | None = None
        self.left = left
        self.seen: Place = ()
        self.users = 1
        self.is_evicted = False

    @property
    def nbytes(self) -> int:
        return self.samples.nbytes if self.memory is None else self.memory.nbytes

    def has(self, box: Box) -> bool:
        """Whether the samples are kept; (): all."""
        if self.part is None or not box:
            return self.part is None
        pairs = zip(self.part, box, strict=True)
        return all(kept.start <= wanted.start and wanted.stop <= kept.stop for kept, wanted in pairs)

    def cut_out(self, box: Box) -> NDArray[Any]:
        """A view of those samples, which it has; (): of all."""
        if self.part is not None:
            box = tuple(
                slice(wanted.start - kept.start, wanted.stop - kept.start)
                for kept, wanted in zip(self.part, box, strict=True)
            )
        return self.samples[box] if box else self.samples


def _whole(key: Key, after: Place) -> Box:
    return ()


class Claim(NamedTuple):
    """A block to look at, and its samples; block None: a new one, and its memory."""

    key: Key
    samples: NDArray[Any]
    block: _Block | None


class BlockCache:
    """A thread-safe cache, bounded in bytes.

    If it is full, blocks are cut to the part that further reads use, and then the block that will be used last is
    dropped; if the order of uses is unknown, the one used least recently.

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
        self._uses: Callable[[Key], int] = lambda _: -1  # unknown
        self._next_use: Callable[[Key, Place], Place | None] | None = None
        self._part: Callable[[Key, Place], Box] = _whole
        self._reading: list[Place] = []
        # Of the blocks to give up, the last one first: when it was seen, and whether only to be cut.
        self._ranked: list[tuple[Key, Place, bool]] = []
        self._held_bytes = 0
        self._capacity_bytes = self._useful_bytes = max(_ROWS_KEPT * row_bytes, _SMALLEST_BYTES)
        # A block is in memory while it is read, regardless of the bound. A large one counts towards the memory budget
        # and is kept: an image stored as one strip must not be decoded again for every chunk of the job.
        self._least_bytes = block_bytes if block_bytes > _SMALLEST_BYTES else 0

    def hold_at_most(self, budget_bytes: int) -> int:
        """Set the bound; returns the bound in force, which leaves room for one large block."""
        self._capacity_bytes = max(min(self._useful_bytes, budget_bytes), self._least_bytes)
        return self._capacity_bytes

    def expect(
        self,
        uses: Callable[[Key], int],
        next_use: Callable[[Key, Place], Place | None],
        part: Callable[[Key, Place], Box] = _whole,
    ) -> None:
        """Announce the uses from now on. A block is dropped after the last one.

        uses     : how often a block will be used
        next_use : the place of the first read after that one which uses a block; None: it is used no more
        part     : the samples of a block that the reads after that one use; (): all
        """
        self._uses, self._next_use, self._part = uses, next_use, part

    @contextmanager
    def reading(self, at: Place) -> Iterator[None]:
        """A read of this place in the schedule: the uses of earlier ones, unless these are under way too, are past."""
        with self._lock:
            self._reading.append(at)
        try:
            yield
        finally:
            with self._lock:
                self._reading.remove(at)

    def lacks(self, key: Key) -> bool:
        """Whether the block has to be decoded, by this thread or another."""
        return key not in self._blocks

    def is_shared(self, key: Key) -> bool:
        """Whether the block is expected to be used more than once, so that it pays to keep it."""
        return self._uses(key) > 1

    def use(
        self,
        key: Key,
        nbytes: int,
        decode: Callable[[Memory], NDArray[Any]],
        look: Callable[[NDArray[Any]], T],
        box: Box = (),
        *,
        at: Place = (),
        wait: bool,
    ) -> T | None:
        """What `look` returns for the samples of the block in the box, which are valid only during that call and must
        not be changed.

        decode : makes the block in the given memory, of `nbytes`, or in its own
        box    : (): the whole block
        at     : the place of the read in the schedule

        None if another thread is decoding it and `wait` is False. Raises what `decode` raises.
        """
        with self._lock:
            while (block := self._blocks.get(key)) is None and key in self._making:
                if not wait:
                    return None
                self._made.wait()
            if block is not None and not block.has(box):
                self._evict(key)
                block = None
            if block is not None:
                self._begin(key, block, at)
            else:
                self._making.add(key)
                memory = self._memory(nbytes)
        if block is None:
            block = self._decoded(key, decode, memory, at)
        try:
            return look(block.cut_out(box))
        finally:
            with self._lock:
                self._end(key, block)

    def use_together(
        self,
        keys: Sequence[Key],
        nbytes: int,
        look: Callable[[list[int], list[tuple[int, bool]]], Sequence[int]],
        samples: Callable[[int, Memory], NDArray[Any]],
        *,
        keeps: bool = True,
        at: Place,
    ) -> list[int]:
        """Decode blocks and look at them together, except for those that another thread has in hand, or decoded alone.

        look    : gets numbers among `keys`, and for each the address of memory of `nbytes`, 0 if the block need not be
                  kept, and whether it holds the block already; returns the places of those that do not decode
        samples : a decoded block in that memory
        keeps   : whether blocks that are used again are kept

        Returns the numbers of those that have not been looked at.
        """
        kept = [number for number, key in enumerate(keys) if keeps and self._uses(key) != 1]
        claims = dict(zip(kept, self._claim([keys[number] for number in kept], nbytes, at), strict=True))
        taken = {number: claim for number, claim in claims.items() if claim is not None}
        ours = [number for number in range(len(keys)) if number in taken or number not in claims]
        left = set(ours)
        try:
            memories = [
                (taken[number].samples.ctypes.data, taken[number].block is not None) if number in taken else (0, False)
                for number in ours
            ]
            left = {ours[place] for place in look(ours, memories)} if ours else set()
        finally:
            made = [None if number in left else samples(number, claim.samples) for number, claim in taken.items()]
            self._release(list(taken.values()), made, at)
        return sorted(left.union(set(range(len(keys))).difference(ours)))

    def _claim(self, keys: Sequence[Key], nbytes: int, at: Place) -> list[Claim | None]:
        """New blocks are decoded into their memory; None for those that another thread is decoding, or that `use`
        decoded into memory of its own, perhaps without the padding of a block at the image's edge."""
        found: list[Claim | None] = []
        with self._lock:
            for key in keys:
                block = self._blocks.get(key)
                if key in self._making or (block is not None and block.memory is None):
                    found.append(None)
                elif block is not None:
                    self._begin(key, block, at)
                    found.append(Claim(key, block.samples, block))
                else:
                    self._making.add(key)
                    found.append(Claim(key, self._memory(nbytes), None))
        return found

    def _release(self, claims: Sequence[Claim], samples: Sequence[NDArray[Any] | None], at: Place) -> None:
        """Claimed blocks have been looked at. `samples`: of each, in its memory; None: it was not decoded."""
        with self._lock:
            # Those on their last use leave room for others.
            for (key, memory, block), found in zip(claims, samples, strict=True):
                if block is None:
                    self._making.remove(key)
                    if found is not None:
                        block = self._keep(key, _Block(found, memory, self._uses(key)), at)
                if block is not None:
                    self._end(key, block)
            self._trim()
            self._made.notify_all()

    def _decoded(self, key: Key, decode: Callable[[Memory], NDArray[Any]], memory: Memory, at: Place) -> _Block:
        block = None
        try:
            samples = decode(memory)
            lent = memory if np.may_share_memory(samples, memory) else None
            block = _Block(samples, lent, self._uses(key))
        finally:
            with self._lock:
                self._making.remove(key)
                if block is not None:
                    self._keep(key, block, at)
                    self._trim()
                self._made.notify_all()
        return block

    # Called with the lock held

    def _begin(self, key: Key, block: _Block, at: Place) -> None:
        block.users += 1
        block.seen = max(block.seen, at)
        self._blocks.move_to_end(key)

    def _keep(self, key: Key, block: _Block, at: Place) -> _Block:
        block.seen = at
        self._blocks[key] = block
        self._held_bytes += block.nbytes
        return block

    def _end(self, key: Key, block: _Block) -> None:
        block.users -= 1
        block.left -= 1
        if block.left == 0 and not block.is_evicted:
            self._evict(key)
        elif block.is_evicted:
            self._reuse(block)

    def _trim(self) -> None:
        while self._held_bytes > self._capacity_bytes:
            key, part = self._dispensable()
            if part is None:
                self._evict(key)
            else:
                self._keep_part(self._blocks[key], part)

    def _dispensable(self) -> tuple[Key, Box | None]:
        """A block of which a part is enough, and the part; if there is none, the block that is needed last, or never
        again."""
        if self._next_use is None:
            return next(iter(self._blocks)), None
        while True:
            while self._ranked:
                key, seen, to_cut = self._ranked.pop()
                if key in self._blocks and self._blocks[key].seen == seen:
                    part = self._small_part(key)
                    if part is not None or not to_cut:
                        return key, part
            count = max(len(self._blocks) // _SHARE_RANKED, 1)
            found = list(islice((key for key in self._blocks if self._small_part(key) is not None), count))[::-1]
            further = found or sorted(self._blocks, key=self._when)[-count:]
            self._ranked = [(key, self._blocks[key].seen, bool(found)) for key in further]

    def _when(self, key: Key) -> tuple[bool, bool, Place]:
        """When the block is used next: whether never, whether it is whole (parts free little memory), and the place."""
        assert self._next_use is not None, "the order is known"
        found = self._next_use(key, max(self._blocks[key].seen, self._past()))
        return found is None, self._blocks[key].part is None, found or ()

    def _past(self) -> Place:
        """The place just before the first read under way."""
        first = min(self._reading, default=())
        return (*first[:-1], first[-1] - 1) if first else ()

    def _small_part(self, key: Key) -> Box | None:
        """The part of a whole block that further reads need, if it is less than half of it."""
        block = self._blocks[key]
        if block.users or block.part is not None:
            return None
        part = self._part(key, self._past())
        samples = block.samples[part].nbytes if part else block.nbytes
        return part if 0 < 2 * samples < block.nbytes else None

    def _keep_part(self, block: _Block, part: Box) -> None:
        self._held_bytes -= block.nbytes
        memory = block.memory
        block.samples, block.memory, block.part = block.samples[part].copy(), None, part
        self._held_bytes += block.nbytes
        self._recycle(memory)

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
        if not block.users:
            self._recycle(block.memory)

    def _recycle(self, memory: Memory | None) -> None:
        if memory is not None and len(self._spare) < _MOST_SPARE:
            self._spare.append(memory)
