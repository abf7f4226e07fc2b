"""Work shared among threads: every part once, errors reach the caller, and no thread survives a fork."""

from __future__ import annotations

import multiprocessing
import threading

import pytest

from kernels.runtime.threads import Interrupted, check_wanted, for_each, interruptible


@pytest.mark.parametrize("workers", [1, 2, 7, 1000])
@pytest.mark.parametrize("count", [0, 1, 5, 300])
def test_every_part_is_computed_once(count: int, workers: int) -> None:
    done: list[int] = []
    for_each(done.append, range(count), workers)
    assert sorted(done) == [*range(count)]


def test_the_caller_works_too_and_alone_if_told_so() -> None:
    names: set[str] = set()
    for_each(lambda _part: names.add(threading.current_thread().name), range(8), 1)
    assert names == {threading.current_thread().name}


def test_an_error_in_one_thread_reaches_the_caller() -> None:
    def compute(part: int) -> None:
        if part == 5:
            raise MemoryError("part 5")

    with pytest.raises(MemoryError, match="part 5"):
        for_each(compute, range(8), 3)


@pytest.mark.parametrize("workers", [1, 3])
def test_what_is_not_wanted_any_more_ends_between_parts(workers: int) -> None:
    given_up, done = threading.Event(), list[int]()

    def compute(part: int) -> None:
        done.append(part)
        if part == 5:
            given_up.set()

    with interruptible(given_up), pytest.raises(Interrupted):
        for_each(compute, range(1000), workers)
    assert 6 <= len(done) <= 6 + workers


def test_only_what_a_thread_computes_itself_is_interrupted() -> None:
    given_up, others = threading.Event(), list[int]()
    given_up.set()
    with interruptible(threading.Event()):
        with interruptible(given_up), pytest.raises(Interrupted):
            check_wanted()
        check_wanted()
        with interruptible(given_up):
            other = threading.Thread(target=for_each, args=(others.append, range(8), 2))
            other.start()
            other.join()
    check_wanted()
    assert sorted(others) == [*range(8)]


def _in_a_child(results: multiprocessing.Queue[int]) -> None:
    done: list[int] = []
    for_each(done.append, range(50), 3)
    results.put(len(done))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_child_process_has_threads_of_its_own() -> None:
    for_each(lambda _part: None, range(8), 3)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_in_a_child, args=(results,))
    child.start()
    try:
        assert results.get(timeout=60) == 50
    finally:
        child.join(10)
        child.kill()
