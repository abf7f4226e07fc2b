"""Ranks as threads of one process: each reduces its share of the elements for all."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.cluster.communicators.base import COLLECTIVE_SECONDS, Array, Communicator, Deadline, Op, combine
from pipeline.errors import Aborted, CommunicatorError, DeadlineExceeded


def in_process(size: int, *, epoch: int = 1, timeout_s: float = COLLECTIVE_SECONDS) -> list[InProcessCommunicator]:
    """One communicator per rank, each for a thread of its own. Takes NumPy arrays."""
    shared = _Shared(size)
    return [InProcessCommunicator(rank, size, shared, epoch=epoch, timeout_s=timeout_s) for rank in range(size)]


@dataclass(frozen=True)
class _Call:
    """The arguments that every rank must agree on."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    op: str = ""
    root: int = 0


class _Shared:
    """The ranks' arrays, and a barrier that each collective passes before and after it reads them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.condition = threading.Condition()
        self.posted: list[tuple[_Call, Array, Array]] = [(_Call(""), None, None)] * size
        self.arrived: set[int] = set()
        self.round = 0
        self.broken = False

    def wait(self, rank: int, what: str, deadline: Deadline) -> None:
        with self.condition:
            current = self.round
            self.arrived.add(rank)
            if len(self.arrived) == self.size:
                self.arrived = set()
                self.round += 1
                self.condition.notify_all()
            while self.round == current:
                if self.broken:
                    raise Aborted("another rank gave up")
                if deadline.left_s == 0.0:
                    missing = ", ".join(str(rank) for rank in range(self.size) if rank not in self.arrived)
                    raise DeadlineExceeded(f"{what}: rank {missing} did not come within {deadline.timeout_s:g} s")
                self.condition.wait(deadline.left_s)

    def abort(self) -> None:
        with self.condition:
            self.broken = True
            self.condition.notify_all()


class InProcessCommunicator(Communicator):
    """One thread's rank."""

    def __init__(self, rank: int, size: int, shared: _Shared, *, epoch: int, timeout_s: float) -> None:
        super().__init__(rank, size, epoch=epoch, timeout_s=timeout_s)
        self._shared = shared

    def _allreduce(self, array: Array, op: Op, out: Array, deadline: Deadline) -> None:
        posted = self._exchange(_Call("allreduce", array.shape, str(array.dtype), op), array, out, deadline)
        mine = self._share(array.size)
        total = _pairwise(op, [each.reshape(-1)[mine] for each, _ in posted])
        for _, their_out in posted:
            their_out.reshape(-1)[mine] = total
        self._shared.wait(self.rank, "allreduce", deadline)

    def _reduce(self, array: Array, op: Op, root: int, out: Array | None, deadline: Deadline) -> None:
        posted = self._exchange(_Call("reduce", array.shape, str(array.dtype), op, root), array, out, deadline)
        mine = self._share(array.size)
        posted[root][1].reshape(-1)[mine] = _pairwise(op, [each.reshape(-1)[mine] for each, _ in posted])
        self._shared.wait(self.rank, "reduce", deadline)

    def _broadcast(self, array: Array, root: int, deadline: Deadline) -> None:
        call = _Call("broadcast", array.shape, str(array.dtype), root=root)
        posted = self._exchange(call, array, None, deadline)
        if self.rank != root:
            array[...] = posted[root][0]
        self._shared.wait(self.rank, "broadcast", deadline)

    def _allgather(self, array: Array, out: Array, deadline: Deadline) -> None:
        posted = self._exchange(_Call("allgather", array.shape, str(array.dtype)), array, out, deadline)
        for rank, (theirs, _) in enumerate(posted):
            out[rank] = theirs
        self._shared.wait(self.rank, "allgather", deadline)

    def _barrier(self, deadline: Deadline) -> None:
        self._exchange(_Call("barrier"), None, None, deadline)
        self._shared.wait(self.rank, "barrier", deadline)

    def _check(self) -> None:
        if self._shared.broken:
            raise Aborted("another rank gave up")

    def _abort(self) -> None:
        self._shared.abort()

    def _close(self) -> None:
        pass

    def _exchange(self, call: _Call, array: Array, out: Array, deadline: Deadline) -> list[tuple[Any, Any]]:
        """Every rank's arrays, once all have made the same call."""
        self._shared.posted[self.rank] = (call, array, out)
        self._shared.wait(self.rank, call.name, deadline)
        posted = list(self._shared.posted)
        for rank, (theirs, _, _) in enumerate(posted):
            if theirs != call:
                raise CommunicatorError(f"rank {self.rank} is in {call}, rank {rank} in {theirs}")
        return [(their_array, their_out) for _, their_array, their_out in posted]

    def _share(self, elements: int) -> slice:
        return slice(elements * self.rank // self.size, elements * (self.rank + 1) // self.size)


def _pairwise(op: Op, values: Sequence[Array]) -> Array:
    """Neighbours first, then pairs of neighbours, …: the same tree, and so the same bits, as `tcp`."""
    level = list(values)
    while len(level) > 1:
        pairs = range(0, len(level) - 1, 2)
        above = [np.empty_like(level[0]) for _ in pairs]
        for node, left in zip(above, pairs, strict=True):
            combine(op, level[left], level[left + 1], node)
        level = above + level[2 * len(pairs) :]
    return level[0]
