"""The contract of a communicator: collectives over ordered ranks.

Every rank calls the same collectives in the same order. On each rank a collective either returns its result or raises
CommunicatorError, at its deadline at the latest. After an error the communicator cannot be used again: the caller
creates another over the remaining ranks. `solo`, `in_process`, `tcp` and `nccl` implement this contract and pass one
test suite.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Literal, Self, get_args

import numpy as np

from pipeline import metrics
from pipeline.errors import Aborted, CommunicatorError, DeadlineExceeded, RankLost

Array = Any  # NumPy, or CuPy if the ranks have GPUs
Op = Literal["sum", "prod", "min", "max"]
AbortReason = Literal["requested", "rank_lost", "deadline", "error"]

# The dtypes that NCCL reduces; a complex number is reduced as two reals, so by a sum only.
REDUCED = tuple(map(np.dtype, ("i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")))
_REDUCED = frozenset(REDUCED)
OPS: tuple[Op, ...] = get_args(Op)
COLLECTIVE_SECONDS = 120.0
# `allreduce_many` sends larger arrays separately: copying them into a bucket would cost more than it saves.
BUCKETED_BYTES = 1 << 20


class Deadline:
    """A point in time at which waiting ends."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """The remaining seconds; never below 0."""
        return max(0.0, self._end - time.monotonic())

    def check(self, what: str) -> None:
        """Raise DeadlineExceeded, naming `what` was awaited, if no time is left."""
        if self.left_s == 0.0:
            raise DeadlineExceeded(f"{what} did not come within {self.timeout_s:g} s")


class Communicator(ABC):
    """One rank's part in `size` ordered ranks.

    Arrays are C-contiguous, of any shape (including empty), and have the same shape and dtype on every rank. Results
    are complete when a call returns; an array on a GPU is read in the order of the caller's current stream. One thread
    makes the calls; any thread may call `abort`. No call changes its input, except `broadcast`, which fills it.

    Reductions take int8, uint8, int32, uint32, int64, uint64, float16, float32, float64, complex64 and complex128.
    Integers wrap modulo 2ⁿ. A sum or product rounds once for each rank but the first, in the same order in each call
    with the same size; every rank gets the same bits. Complex numbers have a sum only. `min` and `max` may propagate a
    NaN or drop it: count NaNs by a sum if they matter.

    Raises
    ------
    TypeError, ValueError : wrong dtype, op, shape, layout or root. Nothing was sent.
    RankLost              : a rank's process, or the connection to it, is gone.
    DeadlineExceeded      : a rank did not make the call or finish it within the deadline.
    Aborted               : `abort` was called, here or on another rank, or an earlier call failed.
    CommunicatorError     : the base of these three; also raised if ranks are seen to make different calls.
    """

    def __init__(self, rank: int, size: int, *, epoch: int = 1, timeout_s: float = COLLECTIVE_SECONDS) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not one of {size}")
        self.rank = rank
        self.size = size
        self.epoch = epoch
        self.timeout_s = timeout_s
        self._given_up: Aborted | None = None
        self._giving_up = threading.Lock()
        metrics.communicator_epoch.set(epoch)

    def allreduce(self, array: Array, op: Op = "sum", *, out: Array = None, timeout_s: float | None = None) -> Array:
        """The arrays of all ranks combined element by element, on every rank.

        out : receives the result; same shape and dtype as `array`, without overlap; None: a new array
        """
        _check_reduced(array, op)
        out = _output(array, array.shape, out)
        with self._collective("allreduce", array.nbytes, timeout_s) as deadline:
            self._allreduce(array, op, out, deadline)
        return out

    def allreduce_many(self, arrays: Sequence[Array], op: Op = "sum", *, timeout_s: float | None = None) -> list[Array]:
        """Each array combined as by `allreduce`; small arrays of one dtype share a collective.

        They are copied into one bucket; their results are views of another, which lives as long as any of them. Each
        larger array gets a new result. The call waits once.
        """
        arrays = list(arrays)
        for array in arrays:
            _check_reduced(array, op)
        nbytes = sum(array.nbytes for array in arrays)
        results: list[Array] = [None] * len(arrays)
        with self._collective("allreduce", nbytes, timeout_s) as deadline:
            self._allreduce_each(list(_in_buckets(arrays, results)), op, deadline)
        return results

    def reduce(
        self, array: Array, op: Op = "sum", *, root: int = 0, out: Array = None, timeout_s: float | None = None
    ) -> Array | None:
        """As `allreduce`, but only `root` gets the result; the others get None and ignore `out`."""
        _check_reduced(array, op)
        self._check_root(root)
        out = _output(array, array.shape, out) if self.rank == root else None
        with self._collective("reduce", array.nbytes, timeout_s) as deadline:
            self._reduce(array, op, root, out, deadline)
        return out

    def broadcast(self, array: Array, *, root: int = 0, timeout_s: float | None = None) -> Array:
        """Copy the root's `array` into that of every rank, bit for bit, and return it. Any numeric dtype."""
        _check_moved(array)
        self._check_root(root)
        if self.rank != root and not getattr(array.flags, "writeable", True):
            raise ValueError("broadcast needs an array that can be written on every rank but the root")
        with self._collective("broadcast", array.nbytes, timeout_s) as deadline:
            self._broadcast(array, root, deadline)
        return array

    def allgather(self, array: Array, *, out: Array = None, timeout_s: float | None = None) -> Array:
        """The arrays of all ranks, bit for bit, stacked to shape (size, \\*array.shape). Any numeric dtype."""
        _check_moved(array)
        out = _output(array, (self.size, *array.shape), out)
        with self._collective("allgather", array.nbytes, timeout_s) as deadline:
            self._allgather(array, out, deadline)
        return out

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Wait until every rank has called this."""
        with self._collective("barrier", 0, timeout_s) as deadline:
            self._barrier(deadline)

    def confirm(self) -> None:
        """Confirm the results of earlier collectives. Collective; CommunicatorError if they may be wrong.

        A rank that dies during a collective may leave meaningless numbers on the others, which notice its death a
        little later. Confirm results before keeping them beyond this epoch.
        """
        self.check()

    def check(self) -> None:
        """Raise CommunicatorError if a rank is lost or gave up. For use between pieces of work; never waits."""
        if self._given_up is not None:
            raise Aborted(str(self._given_up))
        with self._failing():
            self._check()

    def abort(self, reason: AbortReason = "requested") -> None:
        """Give up: this rank's pending call fails at once, those of the others at their deadlines at the latest.

        Callable from any thread; the first reason counts. Never waits.
        """
        with self._giving_up:
            if self._given_up is not None:
                return
            self._given_up = Aborted(f"rank {self.rank} of {self.size} gave up: {reason}")
        metrics.communicator_aborts.labels(reason).inc()
        self._abort()

    @property
    def aborted(self) -> bool:
        return self._given_up is not None

    @property
    def device_lost(self) -> bool:
        """Whether CUDA has failed for good in this process, so that only a new process can take part again."""
        return False

    def close(self, *, wait: bool = True) -> None:
        """Release all resources. Every rank's last call: an early rank waits for the others.

        wait : False if every rank is known to have finished
        """
        if wait and self._given_up is None:
            with suppress(CommunicatorError):  # the others have already closed, or are gone
                self._barrier(Deadline(self.timeout_s))
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort("error")
        self.close()

    # Implemented by each transport. Arguments are already validated; waits end at the deadline or on `_abort`.

    @abstractmethod
    def _allreduce(self, array: Array, op: Op, out: Array, deadline: Deadline) -> None: ...

    def _allreduce_each(self, pairs: Sequence[tuple[Array, Array]], op: Op, deadline: Deadline) -> None:
        """Several arrays, each with its output; overridden by transports that can start them all at once."""
        for array, out in pairs:
            self._allreduce(array, op, out, deadline)

    @abstractmethod
    def _reduce(self, array: Array, op: Op, root: int, out: Array | None, deadline: Deadline) -> None: ...

    @abstractmethod
    def _broadcast(self, array: Array, root: int, deadline: Deadline) -> None: ...

    @abstractmethod
    def _allgather(self, array: Array, out: Array, deadline: Deadline) -> None: ...

    @abstractmethod
    def _barrier(self, deadline: Deadline) -> None: ...

    @abstractmethod
    def _check(self) -> None:
        """Raise if another rank is known to be lost or to have given up, without waiting."""

    @abstractmethod
    def _abort(self) -> None:
        """Wake this rank's waits and notify the others if that needs no waiting. Called once, on any thread."""

    @abstractmethod
    def _close(self) -> None:
        """Release resources; idempotent."""

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise ValueError(f"root {root} is not one of {self.size} ranks")

    @contextmanager
    def _collective(self, name: str, nbytes: int, timeout_s: float | None) -> Iterator[Deadline]:
        if self._given_up is not None:
            raise Aborted(str(self._given_up))
        started = time.perf_counter()
        with self._failing():
            yield Deadline(self.timeout_s if timeout_s is None else timeout_s)
        moved, spent = _counters(name)
        moved.inc(nbytes)
        spent.inc(time.perf_counter() - started)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Any exception inside aborts the communicator."""
        try:
            yield
        except BaseException as error:
            if self._given_up is not None and isinstance(error, CommunicatorError):
                raise Aborted(str(self._given_up)) from error
            self.abort(_reason(error))
            raise


@cache
def _counters(name: str) -> tuple[Any, Any]:
    return metrics.collective_bytes.labels(name), metrics.collective_seconds.labels(name)


# All start at 0: Prometheus does not see a counter that first appears as 1 as an increase.
for _label in ("allreduce", "reduce", "broadcast", "allgather", "barrier"):
    _counters(_label)
for _label in get_args(AbortReason):
    metrics.communicator_aborts.labels(_label)


_UFUNCS: dict[Op, np.ufunc] = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


def combine(op: Op, left: Array, right: Array, out: Array) -> None:
    """One node of a reduction tree. Overflow and NaN raise no warnings."""
    with np.errstate(all="ignore"):
        _UFUNCS[op](left, right, out=out)


def _reason(error: BaseException) -> AbortReason:
    if isinstance(error, RankLost):
        return "rank_lost"
    return "deadline" if isinstance(error, DeadlineExceeded) else "error"


def _check_reduced(array: Array, op: str) -> None:
    if op not in OPS:
        raise ValueError(f"op {op!r} is not one of {', '.join(OPS)}")
    if array.dtype not in _REDUCED:
        raise TypeError(f"{array.dtype} cannot be reduced: convert to one of {', '.join(map(str, REDUCED))}")
    if array.dtype.kind == "c" and op != "sum":
        raise TypeError(f"{op} of {array.dtype} is not defined here: complex numbers have a sum only")
    _check_moved(array)


def _check_moved(array: Array) -> None:
    if array.dtype.kind not in "biufc" or not array.dtype.isnative:
        raise TypeError(f"an array of {array.dtype.str} cannot be sent: booleans and native numbers can")
    if not array.flags.c_contiguous:
        raise ValueError("the array must be C-contiguous")


def _output(array: Array, shape: tuple[int, ...], out: Array) -> Array:
    if out is None:
        return np.empty_like(array, shape=shape)  # CuPy's arrays answer this with one of their own
    if type(out) is not type(array) or out.shape != shape or out.dtype != array.dtype:
        raise ValueError(
            f"out must be of shape {shape} and {array.dtype}, where the input is, not of {out.shape} and {out.dtype}"
        )
    if not out.flags.c_contiguous or not getattr(out.flags, "writeable", True):
        raise ValueError("out must be C-contiguous and writable")
    start, other = _address(array), _address(out)
    if start < other + out.nbytes and other < start + array.nbytes:
        raise ValueError("out must lie apart from the input, which a later try may need")
    return out


def _in_buckets(arrays: Sequence[Array], results: list[Array]) -> Iterator[tuple[Array, Array]]:
    """Pairs of input and output, with small arrays of one dtype in a shared bucket. Fills `results`."""
    small: dict[tuple[type, np.dtype[Any]], list[int]] = {}
    for number, array in enumerate(arrays):
        if array.nbytes < BUCKETED_BYTES:
            small.setdefault((type(array), array.dtype), []).append(number)
        else:
            results[number] = np.empty_like(array)
            yield array, results[number]
    for numbers in small.values():
        bucket = np.concatenate([arrays[number].reshape(-1) for number in numbers])
        combined = np.empty_like(bucket)
        start = 0
        for number in numbers:
            given = arrays[number]
            results[number] = combined[start : start + given.size].reshape(given.shape)
            start += given.size
        yield bucket, combined


def on_gpu(array: Array) -> bool:
    return hasattr(type(array), "__cuda_array_interface__")


def _address(array: Array) -> int:
    address: int = array.data.ptr if on_gpu(array) else array.__array_interface__["data"][0]
    return address
