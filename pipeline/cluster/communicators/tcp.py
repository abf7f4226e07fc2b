"""Ranks as processes connected over TCP: reductions go up a fixed pairwise tree, and results come down again.

These are plain sockets used by the gang's own thread. Dask's connections live on the worker's event loop, which must
answer the scheduler, and offer neither our deadlines nor our abort. Arrays are sent and received in place, in blocks,
so that the levels of the tree overlap and no rank holds a second whole array.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import numpy as np

from pipeline.cluster.communicators.base import COLLECTIVE_SECONDS, Array, Communicator, Deadline, Op, combine
from pipeline.cluster.communicators.peers import Membership, Peers, connect
from pipeline.errors import CommunicatorError

CONNECT_SECONDS = 10.0
# On one host, larger blocks do not fit the cache and smaller ones cost more system calls.
BLOCK_BYTES = 1 << 18

# Call number, name, op, dtype, root and bytes: these must agree on every rank.
_CALL = struct.Struct("<Q12s4s4siQ")


class TcpCommunicator(Communicator):
    """One process's rank. Takes NumPy arrays.

    Rank r combines its array with those of r + 1, r + 2, r + 4, … up to the lowest set bit of r, in this order, and
    sends the result to r with that bit cleared. `reduce` gives the bits of `allreduce` for any root.
    """

    def __init__(
        self, peers: Peers, rank: int, size: int, *, epoch: int, timeout_s: float = COLLECTIVE_SECONDS
    ) -> None:
        super().__init__(rank, size, epoch=epoch, timeout_s=timeout_s)
        self._peers = peers
        self._calls = 0

    def _allreduce(self, array: Array, op: Op, out: Array, deadline: Deadline) -> None:
        self._check_same_call("allreduce", op, array, 0, deadline)
        self._reduce_up(array, op, out, deadline)
        self._broadcast_down(out, 0, deadline)

    def _reduce(self, array: Array, op: Op, root: int, out: Array | None, deadline: Deadline) -> None:
        self._check_same_call("reduce", op, array, root, deadline)
        total = np.empty_like(array) if out is None else out
        self._reduce_up(array, op, total, deadline)
        if root != 0 and self.rank == 0:
            self._peers.send(root, _flat(total), deadline, "reduce")
        elif root != 0 and self.rank == root:
            self._peers.receive(0, _flat(total), deadline, "reduce")

    def _broadcast(self, array: Array, root: int, deadline: Deadline) -> None:
        self._check_same_call("broadcast", "", array, root, deadline)
        self._broadcast_down(array, root, deadline)

    def _allgather(self, array: Array, out: Array, deadline: Deadline) -> None:
        self._check_same_call("allgather", "", array, 0, deadline)
        out[self.rank] = array
        for root in range(self.size):
            self._broadcast_down(out[root : root + 1], root, deadline)

    def _barrier(self, deadline: Deadline) -> None:
        token = np.zeros(1, np.uint8)
        self._check_same_call("barrier", "", token, 0, deadline)
        self._broadcast_down(token, 0, deadline)

    def _check(self) -> None:
        self._peers.check()

    def _abort(self) -> None:
        self._peers.abort()

    def _close(self) -> None:
        self._peers.close()

    # The tree

    def _check_same_call(self, name: str, op: str, array: Array, root: int, deadline: Deadline) -> None:
        """Raise CommunicatorError if ranks make different calls: each parent compares its children's with its own."""
        self._calls += 1
        header = _CALL.pack(self._calls, name.encode(), op.encode(), array.dtype.str.encode(), root, array.nbytes)
        parent, children = _neighbours(self.rank, self.size)
        theirs = bytearray(_CALL.size)
        for child in children:
            self._peers.receive(child, theirs, deadline, name)
            if theirs != header:
                raise CommunicatorError(
                    f"rank {self.rank} is in {_describe(header)}, rank {child} in {_describe(bytes(theirs))}: "
                    "every rank must make the same calls"
                )
        if parent is not None:
            self._peers.send(parent, header, deadline, name)

    def _reduce_up(self, array: Array, op: Op, out: Array, deadline: Deadline) -> None:
        """Rank 0's `out` receives the result; the other ranks use theirs as working memory."""
        parent, children = _neighbours(self.rank, self.size)
        given, total = array.reshape(-1), out.reshape(-1)
        received = np.empty(min(total.size, _block(total)), total.dtype)
        what = f"{op} over the ranks"
        for block in _blocks(total):
            own = given[block]
            for child in children:
                theirs = received[: own.size]
                self._peers.receive(child, theirs.view(np.uint8), deadline, what)
                combine(op, own, theirs, total[block])
                own = total[block]
            if parent is not None:
                self._peers.send(parent, own.view(np.uint8), deadline, what)
            elif not children:
                total[block] = own

    def _broadcast_down(self, array: Array, root: int, deadline: Deadline) -> None:
        """Copy the root's array to every rank, down the tree."""
        parent, children = _neighbours((self.rank - root) % self.size, self.size)
        below = [(child + root) % self.size for child in reversed(children)]  # the largest subtree first
        above = None if parent is None else (parent + root) % self.size
        given = array.reshape(-1)
        for block in _blocks(given):
            part = given[block].view(np.uint8)
            if above is not None:
                self._peers.receive(above, part, deadline, "broadcast")
            for child in below:
                self._peers.send(child, part, deadline, "broadcast")


def connect_tcp(
    listener: socket.socket,
    member: Membership,
    *,
    timeout_s: float = COLLECTIVE_SECONDS,
    connect_s: float = CONNECT_SECONDS,
    given_up: threading.Event | None = None,
) -> TcpCommunicator:
    """This rank's communicator, connected to every other rank. The caller keeps the listener.

    timeout_s : for each collective
    connect_s : for all connections together
    given_up  : another thread sets it to end the wait

    Raises RankLost, DeadlineExceeded or Aborted.
    """
    peers = connect(listener, member, Deadline(connect_s), given_up or threading.Event())
    return TcpCommunicator(peers, member.rank, len(member.endpoints), epoch=member.epoch, timeout_s=timeout_s)


def _neighbours(position: int, size: int) -> tuple[int | None, list[int]]:
    """Parent (None for position 0) and children, in the order of combining, of a position in the pairwise tree."""
    children = []
    bit = 1
    while not position & bit and position + bit < size:
        children.append(position + bit)
        bit <<= 1
    return (position & (position - 1) if position else None), children


def _block(array: Array) -> int:
    elements: int = max(1, BLOCK_BYTES // array.itemsize)
    return elements


def _blocks(array: Array) -> Iterator[slice]:
    step = _block(array)
    for start in range(0, array.size, step):
        yield slice(start, start + step)


def _flat(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _describe(header: bytes) -> str:
    number, name, op, dtype, root, nbytes = _CALL.unpack(header)
    return (
        f"call {number}, {name.rstrip(bytes(1)).decode()} {op.rstrip(bytes(1)).decode()} of {nbytes} bytes "
        f"{dtype.rstrip(bytes(1)).decode()}, root {root}"
    )
