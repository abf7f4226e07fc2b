"""Work spread over the codecs' threads: everything once, nested calls, errors, a bound of memory."""

from __future__ import annotations

import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline.codecs import parallel
from pipeline.codecs.parallel import for_each


def test_each_item_is_done_once_from_any_number_of_callers() -> None:
    done: Counter[tuple[int, int]] = Counter()
    lock = threading.Lock()

    def nested(caller: int) -> None:
        def count(item: int) -> None:
            with lock:
                done[caller, item] += 1

        for_each(count, range(53))

    with ThreadPoolExecutor(5) as callers:
        list(callers.map(lambda _: for_each(nested, range(7)), range(3)))
    assert done == {(caller, item): 3 for caller in range(7) for item in range(53)}
    for_each(nested, [])


def test_the_first_error_is_raised_and_ends_the_rest() -> None:
    begun = []

    def work(item: int) -> None:
        begun.append(item)
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item"):
        for_each(work, range(1000))
    assert len(begun) < 1000


def test_it_returns_only_when_no_helper_is_at_work_even_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers use the memory that helpers work on again."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2})
    monkeypatch.setattr(parallel, "_queues", {})
    helping, at_work = threading.Semaphore(0), Counter[str]()

    def work(item: int) -> None:
        thread = threading.current_thread().name
        at_work[thread] += 1
        if thread.startswith("codec"):
            helping.release()
            for _ in range(20_000):
                os.getpid()
        else:
            helping.acquire()
            helping.acquire()
            at_work[thread] -= 1
            raise ValueError("of the caller")
        at_work[thread] -= 1

    for _ in range(20):
        with pytest.raises(ValueError, match="of the caller"):
            for_each(work, range(3))
        assert not any(at_work.values())


def test_large_items_are_taken_one_at_a_time() -> None:
    threads = set()
    for_each(lambda _: threads.add(threading.get_ident()), range(100), 1 << 30)
    assert threads == {threading.get_ident()}
