"""One rank of a gang: the calls that a worker process serves, and the `Member` that the gang's function gets.

A worker keeps the partial results of its shards from epoch to epoch. If a rank is lost, the others run the function
again under new rank numbers, reuse their results, and compute only the lost rank's shards, which are now theirs.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kernels.runtime.threads import interruptible
from pipeline.cluster.communicators.base import AbortReason, Array, Communicator, Op, combine
from pipeline.cluster.communicators.deterministic import fixed_tree_sum
from pipeline.cluster.communicators.nccl import NcclCommunicator
from pipeline.cluster.communicators.peers import Endpoint, Membership, listen
from pipeline.cluster.communicators.tcp import connect_tcp
from pipeline.errors import Aborted, ClusterError, DeadlineExceeded, RankLost

STUCK_EXIT_CODE = 75


class Member:
    """The first argument of a gang's function: its rank, shards, partial results and communicators.

    communicator : for the data: CuPy arrays go over NCCL, NumPy arrays over `control`
    control      : over TCP, for NumPy arrays
    shards       : those of 0 … shard_count − 1 that this rank computes in this epoch; at least one
    partials     : the results of shards, by number, kept while this process is in the gang; results that depend on the
                   communicator's sums may be stored only after its `confirm`
    """

    def __init__(
        self,
        control: Communicator,
        shards: Sequence[int],
        shard_count: int,
        *,
        communicator: Communicator | None = None,
        partials: dict[int, Any] | None = None,
    ) -> None:
        self.control = control
        self.communicator = communicator or control
        self.rank = control.rank
        self.size = control.size
        self.epoch = control.epoch
        self.shards = tuple(shards)
        self.shard_count = shard_count
        self.partials: dict[int, Any] = {} if partials is None else partials

    def compute(self, function: Callable[[int], Any]) -> None:
        """Keep `function(shard)` for each of this rank's shards that is not there yet.

        CommunicatorError, between two shards, if another rank is gone.
        """
        for shard in self.shards:
            if shard not in self.partials:
                self.check()
                self.partials[shard] = function(shard)

    def check(self) -> None:
        """CommunicatorError if a rank is gone or the gang was given up; for loops between collectives."""
        self.control.check()
        if self.communicator is not self.control:
            self.communicator.check()

    def reduce(self, op: Op = "sum", of: Callable[[Any], Array] | None = None, *, deterministic: bool = False) -> Array:
        """The partials of all shards combined, a new array on every rank. Collective.

        of            : the array of a partial; None: the partial itself. All have the same shape and dtype.
        deterministic : the same bits for any number of ranks and any distribution of shards; floats and complex sums
                        are added along a fixed tree over the shards, at the cost stated by `fixed_tree_sum`

        ClusterError if a shard's partial is missing or held by two ranks; else as `Communicator.allreduce`.
        """
        holders = self.holders()
        arrays = {shard: self.partials[shard] if of is None else of(self.partials[shard]) for shard in self.shards}
        if deterministic and op == "sum":
            return fixed_tree_sum(self.communicator, arrays, holders)
        if deterministic and op == "prod" and arrays[self.shards[0]].dtype.kind == "f":
            raise ValueError("a product of floats has no deterministic order here: use sum, min or max")
        total = arrays[self.shards[0]].copy()
        for shard in self.shards[1:]:
            combine(op, total, arrays[shard], total)
        return self.communicator.allreduce(total, op)

    def holders(self) -> list[int]:
        """The rank that holds each shard's partial. Collective; ClusterError on every rank unless each has one."""
        ledger = np.zeros((2, self.shard_count), np.int64)
        for shard in self.partials:
            ledger[:, shard] = 1, self.rank
        counts, ranks = self.control.allreduce(ledger)
        for wrong, words in ((counts < 1, "was computed by no rank"), (counts > 1, "is held by several ranks")):
            if wrong.any():
                raise ClusterError(f"shard {int(np.argmax(wrong))} of {self.shard_count} {words}: nothing was combined")
        return [int(rank) for rank in ranks]


GangFunction = Callable[..., Any]
# Makes the communicator for data from the one over TCP, on every rank at once, such as `NcclCommunicator`.
Transport = Callable[[Communicator], Communicator]


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """A rank's host and process, and the endpoint where it listens."""

    host: str
    process: int
    endpoint: Endpoint


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """One rank's task in one epoch."""

    session: str
    address: str
    membership: Membership
    shards: tuple[int, ...]
    shard_count: int
    collective_s: float
    connect_s: float
    function: GangFunction
    arguments: tuple[Any, ...]
    transport: Transport | None


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """The function's outcome on a rank: a value, its own error, or `broken` by other ranks."""

    value: Any = None
    error: Exception | None = None
    broken: Exception | None = None


# What runs on a worker


@dataclass
class _Part:
    """The state of a gang in this process."""

    session: str
    epoch: int = 0
    partials: dict[int, Any] = field(default_factory=dict)
    listener: socket.socket | None = None
    communicators: list[Communicator] = field(default_factory=list)
    given_up: threading.Event = field(default_factory=threading.Event)
    unwanted: threading.Event = field(default_factory=threading.Event)  # no later epoch needs this rank
    running: bool = False

    def give_up(self, reason: AbortReason) -> None:
        self.given_up.set()
        for communicator in list(self.communicators):
            communicator.abort(reason)

    def leave_devices(self, *, broken: bool) -> None:
        """Close what may wait for a GPU, on the rank's own thread. If a lost rank broke CUDA, end this process."""
        for communicator in self.communicators[1:]:
            communicator.close(wait=False)
            if broken and communicator.device_lost:
                os._exit(STUCK_EXIT_CODE)

    def end_epoch(self) -> None:
        """Close everything of the epoch; called after the function has ended."""
        for communicator in reversed(self.communicators):
            communicator.close(wait=False)
        self.communicators = []
        if self.listener is not None:
            self.listener.close()
            self.listener = None


# By the worker's address: in tests, several workers are threads of one process.
_parts: dict[str, _Part] = {}
_entering = threading.Lock()


def introduce(session: str, epoch: int, address: str, host: str) -> Introduction:
    """Join a gang's next epoch: listen for its other ranks. ClusterError if another gang runs here."""
    with _entering:
        part = _parts.get(address)
        if part is not None and part.running and (part.session == session or not part.given_up.is_set()):
            raise ClusterError(f"the worker {address} already takes part in a gang: wait until that one has ended")
        if part is not None and not part.running:
            part.end_epoch()
        if part is None or part.session != session:
            part = _parts[address] = _Part(session)
        part.epoch = epoch
        part.given_up = threading.Event()
        part.listener = listen(host)
        return Introduction(host=socket.gethostname(), process=os.getpid(), endpoint=part.listener.getsockname()[:2])


def run_rank(task: RankTask) -> RankOutcome:
    """Connect the epoch's ranks and run the function. RankLost if this process has not been introduced."""
    with _entering:
        part = _parts.get(task.address)
        if part is None or (part.session, part.epoch) != (task.session, task.membership.epoch) or part.running:
            raise RankLost(f"{task.address} knows nothing of epoch {task.membership.epoch} of this gang")
        part.running = True
    try:
        with interruptible(part.unwanted):
            value = task.function(_member(task, part), *task.arguments)
        for communicator in part.communicators[1:]:
            communicator.close()
        return RankOutcome(value=value)
    except Exception as error:
        part.give_up("error")
        part.leave_devices(broken=_of_another(error))
        return RankOutcome(broken=error) if _of_another(error) else RankOutcome(error=error)
    finally:
        with _entering:
            part.running = False
            if _parts.get(task.address) is not part:
                part.end_epoch()


def give_up_rank(session: str, epoch: int, reason: AbortReason, address: str) -> None:
    """Abort this epoch. Called on a worker's event loop: does not block."""
    part = _parts.get(address)
    if part is not None and (part.session, part.epoch) == (session, epoch):
        part.give_up(reason)


def leave_gang(session: str, address: str) -> None:
    """Release what this process holds for the gang, now or as soon as the function has ended."""
    with _entering:
        part = _parts.get(address)
        if part is None or part.session != session:
            return
        del _parts[address]
        part.unwanted.set()
        if part.running:
            part.give_up("requested")
        else:
            part.end_epoch()


def end_process(session: str, address: str) -> None:
    """The last resort if a rank does not return: its nanny starts another process."""
    part = _parts.get(address)
    if part is not None and part.session == session and part.running:
        os._exit(STUCK_EXIT_CODE)


def _of_another(error: BaseException | None) -> bool:
    """Whether the loss of another rank caused an error, however the function wrapped it."""
    while error is not None and not isinstance(error, (RankLost, DeadlineExceeded, Aborted)):
        error = error.__cause__ or error.__context__
    return error is not None


def _member(task: RankTask, part: _Part) -> Member:
    control = connect_tcp(
        _listener(part), task.membership,
        timeout_s=task.collective_s, connect_s=task.connect_s, given_up=part.given_up,
    )  # fmt: skip
    part.communicators.append(control)
    data = NcclCommunicator(control) if task.transport is None else task.transport(control)
    part.communicators.append(data)
    if part.given_up.is_set():  # between two of the lines above
        part.give_up("requested")
    for shard in part.partials.keys() - set(task.shards):
        del part.partials[shard]
    return Member(control, task.shards, task.shard_count, communicator=data, partials=part.partials)


def _listener(part: _Part) -> socket.socket:
    listener = part.listener
    if listener is None:
        raise Aborted("the gang ended before its ranks were connected")
    return listener


def assign(shard_count: int, held: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Assign every shard to a worker: each keeps the shards it holds.

    The free shards go, in runs, to the workers with the fewest.
    """
    kept = {address: list(shards) for address, shards in held.items()}
    taken = {shard for shards in kept.values() for shard in shards}
    free = [shard for shard in range(shard_count) if shard not in taken]
    counts = dict.fromkeys(kept, 0)
    for _ in free:
        counts[min(counts, key=lambda address: counts[address] + len(kept[address]))] += 1
    first = 0
    for address, count in counts.items():
        kept[address] += free[first : first + count]
        first += count
    return {address: tuple(sorted(shards)) for address, shards in kept.items()}
