"""Loops that threads share without the interpreter: every row once, by several threads, in any process."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kernels.runtime.compiled import compiled
from pipeline.codecs.loops.system import close, take
from pipeline.codecs.loops.threads import OF_ENCODED, OF_SAMPLES, entry_of, in_threads, room, share

SPINS = 1 << 25  # some seconds


@compiled
def _meet(memory: Any, next_row: Any, rows: Any, ends: Any, shared: Any) -> None:
    """Mark rows that find memory of the thread as it should be. The first two wait for each other."""
    samples, encoded = room(memory, shared, OF_SAMPLES), room(memory, shared, OF_ENCODED)
    while True:
        number = take(next_row.ctypes.data)
        if number >= len(rows):
            return
        samples[-1], encoded[-1] = number, number
        rows[number] += 1
        spins = 0
        while number < 2 < 1 + len(rows) and spins < SPINS and rows[1 - number] == 0:
            close(-1)
            spins += 1
        ends[number] = spins < SPINS and samples[-1] == number % 256 and encoded[-1] == number % 256


_meeting = entry_of(_meet)


@compiled
def meet(given: tuple[Any, ...]) -> None:
    share(_meeting(given), given[-1], given[0], len(given[1]))


def run(count: int, threads: int, samples: int = 5, encoded: int = 3, *, copies: bool = False) -> bool:
    rows, ends = np.zeros(count, np.int64), np.zeros(count, np.int8)
    in_threads(meet, rows, ends, threads=threads, room=(samples, encoded, 0), copies=copies)
    return rows.tolist() == ends.tolist() == [1] * count


def test_each_row_is_done_once_and_several_threads_take_part() -> None:
    assert run(2, 2)  # the rows wait for each other
    assert run(1000, 32)
    assert run(1000, 32, copies=True)
    assert run(1, 1)
    assert run(0, 2)


def test_threads_get_memory_of_the_size_asked_for() -> None:
    for samples, encoded in ((10, 1), (9 << 20, 70_000), (11, 100_000)):  # larger than what threads keep, too
        assert run(100, 32, samples, encoded)


def test_more_calls_than_the_pool_has_places() -> None:
    with ThreadPoolExecutor(80) as callers:
        assert all(callers.map(lambda _: run(300, 2), range(200)))


def test_a_forked_process_has_threads_of_its_own() -> None:
    assert run(2, 2)
    child = os.fork()
    if not child:
        os._exit(not run(2, 2))
    assert os.waitpid(child, 0)[1] == 0
