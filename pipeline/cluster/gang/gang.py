"""A gang: one function that runs on every rank at once and survives the death of workers.

An epoch is one try over a fixed set of ranks. If a worker dies, the epoch is aborted: the other ranks give up or their
processes are killed, and the survivors try again with the partial results that they kept. Every wait has a deadline.
"""

from __future__ import annotations

import queue
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from pipeline import metrics
from pipeline.cluster.communicators.base import COLLECTIVE_SECONDS, AbortReason, Deadline
from pipeline.cluster.communicators.peers import Membership
from pipeline.cluster.communicators.tcp import CONNECT_SECONDS
from pipeline.cluster.gang.gang_lock import LOOK_SECONDS
from pipeline.cluster.gang.member import (
    GangFunction,
    Introduction,
    RankOutcome,
    RankTask,
    Transport,
    assign,
    end_process,
    give_up_rank,
    introduce,
    leave_gang,
    run_rank,
)
from pipeline.cluster.silence import Silence
from pipeline.errors import Aborted, ClusterError, RankLost

LEAVE_SECONDS = 2.0


class Call(Protocol):
    """A function under way on one worker."""

    def result(self) -> Any: ...


class GangWorkers(Protocol):
    """The workers as a gang uses them: `DaskWorkers`, or a fake in tests."""

    def lock(self, lock_s: float | None, check: Callable[[], None]) -> AbstractContextManager[None]: ...

    def last_heard(self) -> Mapping[str, float]: ...

    def start_on(self, address: str, function: Callable[..., Any], *args: Any, on_done: Callable[[], None]) -> Call: ...

    def tell(self, addresses: Sequence[str], function: Callable[..., Any], *args: Any, wait_s: float = 0.0) -> None: ...


@dataclass(frozen=True, kw_only=True)
class GangLimits:
    """Time limits in seconds.

    total_s      : the whole gang; None: without limit
    collective_s : one collective, including the wait for the slowest rank
    connect_s    : connecting the ranks of an epoch
    stuck_s      : until a rank that was told to give up returns; then its process is killed
    silent_s     : a worker that the scheduler has not heard from for so long counts as lost
    wait_s       : waiting for workers if none is left
    lock_s       : waiting for another gang on the same workers; None: without limit
    epochs       : the number of tries
    """

    total_s: float | None = None
    collective_s: float = COLLECTIVE_SECONDS
    connect_s: float = CONNECT_SECONDS
    stuck_s: float = 5.0
    silent_s: float = 15.0
    wait_s: float = 60.0
    lock_s: float | None = 60.0
    epochs: int = 10


@dataclass(frozen=True, kw_only=True)
class GangResult:
    """The function's results on all ranks, and the epoch that gave them.

    values : by rank of the last epoch
    ranks  : the addresses of the workers, by rank of the last epoch
    epoch  : the number of the last epoch; 1 if nothing went wrong
    lost   : the workers that died or were killed
    """

    values: tuple[Any, ...]
    ranks: tuple[str, ...]
    epoch: int
    lost: tuple[str, ...]
    seconds: float


def run_gang(
    workers: GangWorkers,
    function: GangFunction,
    shards: int,
    *arguments: Any,
    transport: Transport | None = None,
    limits: GangLimits | None = None,
    check: Callable[[], None] = lambda: None,
) -> GangResult:
    """Run `function(member, *arguments)` on every rank at once, each with its share of the shards 0 … shards − 1.

    Ranks are ordered by host and process; there are at most as many as shards. The function may run several times on a
    worker, once an epoch, and finds again what it kept in `member.partials`. It must be importable on the workers; its
    result and arguments should be small, since Dask carries them. One gang at a time runs on a cluster.

    transport : makes the communicator for data from the one over TCP; None: `NcclCommunicator`, which joins the
                workers' GPUs at the first CuPy array, and sends NumPy arrays over TCP
    check     : called several times a second; an exception from it ends the gang

    Raises the function's own error from the lowest rank that has one, with those of the others as notes (if a rank was
    lost by itself, errors are ignored: one that the loss did not cause comes again); ClusterError if another gang does
    not end in time, no workers are left, or too many workers are lost; DeadlineExceeded if the gang takes too long, or
    a collective does so twice with every rank alive.
    """
    if shards < 1:
        raise ValueError(f"a gang needs shards to share: {shards}")
    limits = limits or GangLimits()
    with workers.lock(limits.lock_s, check):
        return _Gang(workers, function, shards, arguments, transport, limits, check).run()


class _Gang:
    """The epochs of one gang."""

    def __init__(
        self,
        workers: GangWorkers,
        function: GangFunction,
        shards: int,
        arguments: tuple[Any, ...],
        transport: Transport | None,
        limits: GangLimits,
        check: Callable[[], None],
    ) -> None:
        self._check = check
        self._workers = workers
        self._function = function
        self._shards = shards
        self._arguments = arguments
        self._transport = transport
        self._limits = limits
        self._session = secrets.token_hex(8)
        self._total = Deadline(limits.total_s if limits.total_s is not None else float("inf"))
        self._held: dict[str, tuple[int, ...]] = {}
        self._met: set[str] = set()
        self._lost: list[str] = []
        self._overdue = 0
        self._silence = Silence()

    def run(self) -> GangResult:
        started = time.perf_counter()
        try:
            for epoch in range(1, self._limits.epochs + 1):
                metrics.communicator_epoch.set(epoch)
                found = self._epoch(epoch, self._crew())
                if found is not None:
                    return GangResult(
                        values=tuple(found.values()),
                        ranks=tuple(found),
                        epoch=epoch,
                        lost=tuple(self._lost),
                        seconds=time.perf_counter() - started,
                    )
        finally:
            self._leave()
        raise ClusterError(
            f"the gang was tried {self._limits.epochs} times and lost the workers {', '.join(self._lost) or 'none'}: "
            "see their logs"
        )

    def _leave(self) -> None:
        """Wait for it: if this process ends next, no ranks may be left waiting for each other."""
        with suppress(ClusterError):
            there = self._met & self._workers.last_heard().keys()
            self._workers.tell(sorted(there), leave_gang, self._session, wait_s=LEAVE_SECONDS)

    def _crew(self) -> list[str]:
        """The survivors; at first, and if none is left, all workers, as soon as there are any."""
        patience = Deadline(self._limits.wait_s)
        while True:
            there = [address for address in self._workers.last_heard() if address not in self._lost]
            survivors = [address for address in there if address in self._held]
            if survivors or there:
                return survivors or sorted(there)[: self._shards]
            self._check()
            self._total.check("the gang")
            if patience.left_s == 0.0:
                raise ClusterError(f"no worker is left for the gang after {self._limits.wait_s:g} s")
            time.sleep(LOOK_SECONDS)

    def _epoch(self, epoch: int, crew: Sequence[str]) -> dict[str, Any] | None:
        """The function's results by worker, in rank order; None if another epoch is needed."""
        self._met |= set(crew)
        calls = {
            address: (introduce, self._session, epoch, address, urlsplit(address).hostname or "127.0.0.1")
            for address in crew
        }
        introduced = self._together(epoch, calls)
        if introduced is None:
            return None
        order = _in_order(introduced)
        self._held = assign(self._shards, {address: self._held.get(address, ()) for address in order})
        endpoints = tuple(introduced[address].endpoint for address in order)
        secret = secrets.token_bytes(32)
        tasks = {
            address: RankTask(
                session=self._session,
                address=address,
                membership=Membership(rank=rank, epoch=epoch, endpoints=endpoints, secret=secret),
                shards=self._held[address],
                shard_count=self._shards,
                collective_s=self._limits.collective_s,
                connect_s=self._limits.connect_s,
                function=self._function,
                arguments=self._arguments,
                transport=self._transport,
            )
            for rank, address in enumerate(order)
        }
        outcomes = self._together(epoch, {address: (run_rank, task) for address, task in tasks.items()})
        return None if outcomes is None else {address: outcomes[address].value for address in order}

    def _together(self, epoch: int, calls: Mapping[str, tuple[Any, ...]]) -> dict[str, Any] | None:
        """Make one call on each worker and collect the results; None if a rank was lost, or failed because of that.

        Raises an error of the calls' own once every rank has returned or was killed because it did not, unless a rank
        was lost by itself: the loss may have caused the error, since NCCL may return garbage until it is detected.
        """
        round_ = _Round(self._workers, calls)
        patience: Deadline | None = None
        ended: set[str] = set()
        while round_.running:
            round_.collect(LOOK_SECONDS)
            self._check()
            for address in self._missing(round_.running):
                round_.lose(address)
            if patience is None and (round_.trouble or self._total.left_s == 0.0):
                patience = Deadline(self._limits.stuck_s)
                self._give_up(epoch, calls, "rank_lost" if round_.lost else round_.reason)
            if patience is not None and patience.left_s == 0.0:
                self._workers.tell(sorted(round_.running), end_process, self._session)
                ended = set(round_.running)
                for address in ended:
                    round_.lose(address)
        self._lost += [address for address in calls if address in round_.lost]
        if round_.lost <= ended:
            round_.raise_errors(calls)
        self._total.check("the gang")
        if round_.broken and not round_.lost:
            self._overdue += 1
            if self._overdue > 1:
                raise next(iter(round_.broken.values()))
        return None if round_.lost or round_.broken else round_.results

    def _give_up(self, epoch: int, calls: Mapping[str, Any], reason: AbortReason) -> None:
        metrics.communicator_aborts.labels(reason).inc()
        self._workers.tell(sorted(calls), give_up_rank, self._session, epoch, reason)

    def _missing(self, addresses: set[str]) -> set[str]:
        """The addresses that the scheduler has lost, or has not heard from for too long."""
        silence = self._silence.seconds(self._workers.last_heard())
        return {address for address in addresses if silence.get(address, float("inf")) > self._limits.silent_s}


class _Round:
    """One call on each of several workers."""

    # An idle worker may steal a waiting task and refuses it; then it is started again.
    MOST_STARTS = 4

    def __init__(self, workers: GangWorkers, calls: Mapping[str, tuple[Any, ...]]) -> None:
        self._workers = workers
        self._calls = calls
        self._done: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._under_way: dict[str, Call] = {}
        self._starts: dict[str, int] = defaultdict(int)
        self.running: set[str] = set(calls)
        self.results: dict[str, Any] = {}
        self.errors: dict[str, Exception] = {}
        self.broken: dict[str, Exception] = {}
        self.lost: set[str] = set()
        for address in calls:
            self._start(address)

    @property
    def trouble(self) -> bool:
        return bool(self.errors or self.broken or self.lost)

    @property
    def reason(self) -> AbortReason:
        if self.errors:
            return "error"
        if any(isinstance(error, RankLost) for error in self.broken.values()):
            return "rank_lost"
        return "deadline" if not all(isinstance(error, Aborted) for error in self.broken.values()) else "requested"

    def collect(self, timeout_s: float) -> None:
        """Take over finished calls; wait for the first."""
        with suppress(queue.Empty):
            address, start = self._done.get(timeout=timeout_s)
            while True:
                if address in self.running and start == self._starts[address]:
                    self._take(address)
                address, start = self._done.get_nowait()

    def lose(self, address: str) -> None:
        self.running.discard(address)
        self.lost.add(address)

    def raise_errors(self, order: Mapping[str, Any]) -> None:
        errors = [self.errors[address] for address in order if address in self.errors]
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"and on another rank: {type(other).__name__}: {other}")
            raise errors[0]

    def _start(self, address: str) -> None:
        self._starts[address] += 1
        start = self._starts[address]
        function, *arguments = self._calls[address]
        self._under_way[address] = self._workers.start_on(
            address, function, *arguments, on_done=lambda: self._done.put((address, start))
        )

    def _take(self, address: str) -> None:
        try:
            result = self._under_way[address].result()
        except RankLost:
            if address in self._workers.last_heard() and self._starts[address] < self.MOST_STARTS:
                self._start(address)
            else:
                self.lose(address)
            return
        except Exception as error:
            self.errors[address] = error
        else:
            kept = result if isinstance(result, RankOutcome) else RankOutcome(value=result)
            if kept.error is not None:
                self.errors[address] = kept.error
            elif kept.broken is not None:
                self.broken[address] = kept.broken
            else:
                self.results[address] = result
        self.running.discard(address)


def _in_order(introduced: Mapping[str, Introduction]) -> list[str]:
    """The workers in rank order, so that neighbours in the tree share a host."""

    def sort_key(address: str) -> tuple[str, int, str]:
        return introduced[address].host, introduced[address].process, address

    return sorted(introduced, key=sort_key)
