"""What enters a job's ledger as it runs: each chunk once, with notes that a workload tells only once."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest

from pipeline.engine.checkpoints import Checkpoints
from pipeline.errors import StorageError


class Notes:
    """An output that returns its notes once; `order` has each flush among the entries."""

    def __init__(self):
        self.untold = []
        self.order = []

    def flush(self):
        self.order.append("flush")

    def take_notes(self, chunks):
        told, self.untold = self.untold, []
        return {str(chunk): 1.0 for chunk in told}


class Entered:
    """A ledger whose disk is full as often as asked."""

    exists = True

    def __init__(self, *, full=0):
        self.full = full
        self.entries = []

    def add(self, entry):
        if self.full:
            self.full -= 1
            raise StorageError("full")
        self.entries.append(entry)


def write(workload, checkpoints, *chunks):
    for chunk in chunks:
        workload.untold.append(chunk)
        checkpoints.note(SimpleNamespace(index=chunk))


def told(entries):
    return [(entry.chunks, sorted(map(int, entry.notes))) for entry in entries]


def test_what_a_full_disk_refused_is_entered_later_with_its_notes():
    workload, ledger = Notes(), Entered(full=1)
    with Checkpoints(ledger, workload, "cpu", joined=True) as checkpoints:
        write(workload, checkpoints, 0, 1)
        with suppress(StorageError):
            checkpoints._save()
        write(workload, checkpoints, 2)
    assert told(ledger.entries) == told(checkpoints.saved) == [((0, 1), [0, 1]), ((2,), [2])]


def test_what_is_entered_is_durable_first():
    workload, ledger = Notes(), Entered()
    ledger.add = workload.order.append
    with Checkpoints(ledger, workload, "cpu", joined=True) as checkpoints:
        write(workload, checkpoints, 0)
        checkpoints._save()
        write(workload, checkpoints, 1)
    kinds = [each if each == "flush" else each.chunks for each in workload.order]
    assert kinds == ["flush", (0,), "flush", (1,)]


class Compared(int):
    """A chunk's number that counts how often it is compared for equality."""

    count = 0
    __hash__ = int.__hash__

    def __eq__(self, other):
        Compared.count += 1
        return int(self) == int(other)


def test_entering_many_chunks_does_not_compare_each_with_each():
    """Every writer waits meanwhile."""
    chunks = [Compared(number) for number in range(1000)]
    with Checkpoints(Entered(), Notes(), "cpu", joined=True) as checkpoints:
        for chunk in chunks:
            checkpoints.note(SimpleNamespace(index=chunk))
        Compared.count = 0
        checkpoints._save()
        assert Compared.count <= len(chunks)
    assert len(checkpoints.saved) == 1


def test_leaving_says_that_the_disk_is_full():
    workload = Notes()
    with (
        pytest.raises(StorageError, match="full"),
        Checkpoints(Entered(full=1), workload, "cpu", joined=True) as checkpoints,
    ):
        write(workload, checkpoints, 0)


def test_an_unexpected_error_of_the_thread_fails_the_job():
    """A job must not run on for hours without a ledger."""
    output, failed = Notes(), threading.Event()

    def broken():
        failed.set()
        raise ArithmeticError("a bug in flush")

    output.flush = broken
    with suppress(ArithmeticError), Checkpoints(Entered(), output, "cpu", 0.01) as checkpoints:
        write(output, checkpoints, 0)
        assert failed.wait(60)
        checkpoints._thread.join(60)
        with pytest.raises(ArithmeticError, match="a bug in flush"):
            write(output, checkpoints, 1)
