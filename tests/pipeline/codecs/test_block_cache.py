"""The cache of decoded blocks: what it keeps, whose memory it uses again, and threads that want one block."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.codecs import block_cache
from pipeline.codecs.block_cache import BlockCache, Key

NBYTES = 1000


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_cache, "_SMALLEST_BYTES", NBYTES)


class Blocks:
    """Blocks whose bytes are their number; counts how often each is decoded."""

    def __init__(self, kept: int) -> None:
        self.cache = BlockCache(row_bytes=0, block_bytes=NBYTES)
        self.cache._capacity_bytes = kept * NBYTES
        self.decoded: Counter[Key] = Counter()
        self._lock = threading.Lock()

    def get(self, number: int, *, at: tuple[int, ...] = (), wait: bool = True) -> bool | None:
        """Whether every byte is right; None if another thread decodes the block."""

        def decode(memory: NDArray[np.uint8]) -> NDArray[Any]:
            with self._lock:
                self.decoded[number,] += 1
            memory[:] = number
            return memory

        return self.cache.use((number,), NBYTES, decode, lambda block: bool((block == number).all()), at=at, wait=wait)


def test_the_block_used_last_is_dropped_first_and_no_more_is_kept_than_allowed() -> None:
    blocks = Blocks(kept=3)
    for number in (0, 1, 2, 0, 3, 0, 2, 1):  # 3 takes the place of 1
        assert blocks.get(number)
    assert blocks.decoded == {(0,): 1, (1,): 2, (2,): 1, (3,): 1}
    assert blocks.cache._held_bytes == 3 * NBYTES


@pytest.mark.parametrize("kept", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_as_few_blocks_are_decoded_as_if_the_one_used_last_were_dropped(kept: int, seed: int) -> None:
    order = np.random.default_rng(seed).integers(0, 7, 200).tolist()
    uses = {number: [place for place, each in enumerate(order) if each == number] for number in range(7)}
    blocks = Blocks(kept)

    def next_use(key: Key, after: tuple[int, ...]) -> tuple[int, ...] | None:
        return next(((place,) for place in uses[key[0]] if (place,) > after), None)

    blocks.cache.expect(lambda key: len(uses[key[0]]), next_use)
    held: set[int] = set()
    decodes = 0
    for place, number in enumerate(order):
        assert blocks.get(number, at=(place,))
        decodes += number not in held
        held.add(number)
        further = {each: [later for later in uses[each] if later > place] for each in held}
        held = {each for each in held if further[each]}
        if len(held) > kept:
            held.remove(max(held, key=lambda each: further[each][0]))
    assert sum(blocks.decoded.values()) == decodes


def test_blocks_whose_uses_are_past_are_dropped_first() -> None:
    """Another process has read the regions in between."""
    blocks = Blocks(kept=3)
    blocks.cache.expect(lambda key: 5, lambda key, after: (key[0],) if (key[0],) > after else None)
    for number in (10, 200, 201):
        assert blocks.get(number, at=(1,))
    for place in range(100, 120):
        blocks.cache.begin((place,))
    assert blocks.get(202, at=(119,))
    assert blocks.get(200, at=(119,))
    assert blocks.get(201, at=(119,))
    assert set(blocks.decoded.values()) == {1}


def test_blocks_are_kept_until_their_last_use_and_no_longer() -> None:
    blocks = Blocks(kept=100)
    blocks.cache.expect(lambda key: key[0], lambda key, after: None)
    for number in (1, 2, 3):
        assert blocks.get(number)
    assert blocks.cache._held_bytes == 2 * NBYTES
    for number in (3, 2, 3):
        assert blocks.get(number)
    assert set(blocks.decoded.values()) == {1}
    assert blocks.cache._held_bytes == 0
    assert blocks.get(2)
    assert blocks.decoded[2,] == 2


def test_memory_is_used_again_but_not_while_a_thread_looks_at_it() -> None:
    blocks, looks = Blocks(kept=1), threading.Barrier(2)

    def look(block: NDArray[Any]) -> bool:
        looks.wait()  # others come and go meanwhile
        looks.wait()
        return bool((block == 7).all())

    def decode(memory: NDArray[np.uint8]) -> NDArray[Any]:
        memory[:] = 7
        return memory

    with ThreadPoolExecutor(1) as other:
        held = other.submit(blocks.cache.use, (7,), NBYTES, decode, look, wait=True)
        looks.wait()
        assert all(blocks.get(number) for number in range(5))
        looks.wait()
        assert held.result()
    taken = blocks.cache._spare
    assert len({each.ctypes.data for each in taken}) == len(taken)


def test_memory_that_a_decoder_did_not_take_is_not_counted_twice() -> None:
    blocks = Blocks(kept=1)
    own = np.zeros(10, np.uint16)
    assert blocks.cache.use((0,), NBYTES, lambda _: own, lambda block: block is own, wait=True)
    assert blocks.cache._held_bytes == own.nbytes


def test_one_thread_decodes_and_the_others_wait_or_leave() -> None:
    blocks, entered, leave = Blocks(kept=3), threading.Event(), threading.Event()

    def slow(memory: NDArray[np.uint8]) -> NDArray[Any]:
        entered.set()
        leave.wait()
        memory[:] = 1
        return memory

    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(blocks.cache.use, (1,), NBYTES, slow, lambda block: True, wait=True)
        entered.wait()
        assert blocks.get(1, wait=False) is None
        waiting = [threads.submit(blocks.get, 1) for _ in range(2)]
        leave.set()
        assert first.result() is True
        assert all(each.result() for each in waiting)
    assert not blocks.decoded


def test_a_block_that_does_not_decode_is_tried_by_the_next_thread() -> None:
    blocks = Blocks(kept=3)

    def fail(memory: NDArray[np.uint8]) -> NDArray[Any]:
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        blocks.cache.use((1,), NBYTES, fail, lambda block: True, wait=True)
    assert blocks.get(1)


def test_many_threads_see_the_right_bytes_in_memory_that_moves_between_blocks() -> None:
    blocks = Blocks(kept=4)
    blocks.cache.expect(lambda key: 3, lambda key, after: (after[0] + key[0],) if after else None)
    numbers = np.random.default_rng(0).integers(0, 12, 4000).tolist()

    def read(place: int) -> bool | None:
        blocks.cache.begin((place,))
        return blocks.get(numbers[place], at=(place,))

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(read, range(len(numbers))))


def together(blocks: Blocks, numbers: list[int], look: Any, **how: Any) -> list[int]:
    """Those that are left, by their place."""

    def looked(ours: list[int], memories: list[tuple[int, bool]]) -> Any:
        held = [(memory_at(address), is_held) for address, is_held in memories]
        return look([numbers[place] for place in ours], held)

    return blocks.cache.use_together(
        [(number,) for number in numbers], NBYTES, looked, lambda _, memory: memory, at=(), **how
    )


def memory_at(address: int) -> NDArray[np.uint8] | None:
    if not address:
        return None
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8)), (NBYTES,))


def test_blocks_used_together_are_made_once_and_kept() -> None:
    blocks = Blocks(kept=2)
    assert blocks.get(0)

    def look(numbers: list[int], memories: Any) -> list[int]:
        assert numbers == [0, 1, 2]
        assert [is_held for _, is_held in memories] == [True, False, False]
        assert (memories[0][0] == 0).all()
        memories[1][0][:] = 1
        assert blocks.get(1, wait=False) is None, "it is being made"
        assert together(blocks, [1], lambda numbers, _: numbers) == [0]
        return [2]  # damaged

    assert together(blocks, [0, 1, 2], look) == [2]
    assert blocks.get(1)
    assert blocks.get(2)  # tried again
    assert blocks.decoded == {(0,): 1, (2,): 1}
    assert blocks.cache._held_bytes == 2 * NBYTES


def test_memory_of_blocks_used_together_is_not_used_again_meanwhile() -> None:
    blocks = Blocks(kept=1)
    assert blocks.get(0)
    kept = []

    def look(_: list[int], memories: Any) -> list[int]:
        kept.append(memories[0][0])
        assert blocks.get(1)  # evicts 0
        assert blocks.get(2)
        assert (kept[0] == 0).all()
        return []

    assert together(blocks, [0], look) == []
    assert blocks.get(3)
    assert (kept[0] == 3).all()


def test_blocks_that_are_used_once_get_no_memory_to_keep() -> None:
    blocks, given = Blocks(kept=3), []

    def look(_: list[int], memories: Any) -> list[int]:
        given.append([memory is not None for memory, _ in memories])
        return []

    assert together(blocks, [0, 1], look, keeps=False) == []
    blocks.cache.expect(lambda key: key[0], lambda key, after: None)
    assert together(blocks, [1, 2], look) == []
    assert given == [[False, False], [False, True]]
    assert [blocks.cache.lacks((number,)) for number in range(3)] == [True, True, False]


def test_an_error_while_blocks_are_used_together_frees_them_for_others() -> None:
    blocks = Blocks(kept=3)

    def fail(_: list[int], memories: Any) -> list[int]:
        raise ValueError("a server that does not answer")

    with pytest.raises(ValueError, match="server"):
        together(blocks, [0, 1], fail)
    assert blocks.get(0)
    assert blocks.get(1)
