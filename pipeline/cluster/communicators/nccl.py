"""Ranks as GPUs connected by NCCL; no call hangs, even if other ranks die.

NCCL waits without limit for a dead rank: on the host while connecting, on the device in a kernel that polls for data.
So nothing here waits inside NCCL. Its communicators are non-blocking: the calling thread starts each call, then polls
until it is done, the TCP connections beside it report a lost rank, a rank gives up, or the deadline passes. In the last
three cases NCCL is aborted, which ends its kernels and threads, before anything else happens.

A killed process loses its memory before its connections: a kernel that reads from it may finish without an error and
return meaningless numbers. `confirm` guards results against this.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from pipeline.cluster.communicators.base import AbortReason, Array, Communicator, Deadline, Op, on_gpu
from pipeline.cluster.communicators.solo import SoloCommunicator
from pipeline.engine.devices.cuda_driver import device_uuid
from pipeline.errors import Aborted, ClusterError, CommunicatorError, DeviceUnavailable

# NCCL's "in progress". CuPy's binding has names for the codes up to 6 and raises KeyError for others.
_IN_PROGRESS = 7
_OPS: dict[Op, int] = {"sum": 0, "prod": 1, "max": 2, "min": 3}
_BYTES = 1
# Numbers per element and their NCCL type: a complex number is two reals.
_NUMBERS = {
    np.dtype(name): (2 if name[0] == "c" else 1, code)
    for name, code in {
        "i1": 0, "u1": _BYTES, "i4": 2, "u4": 3, "i8": 4, "u8": 5, "f2": 6, "f4": 7, "f8": 8, "c8": 7, "c16": 8,
    }.items()
}  # fmt: skip
_NOT_READY = 600  # cudaErrorNotReady
# Most collectives end while the thread spins; during longer ones it sleeps between polls.
_SPIN_SECONDS = 0.01
_PAUSES = 0.02  # length of a pause as a fraction of the time waited so far
_LONGEST_PAUSE_SECONDS = 2e-3
_LOOK_SECONDS = 2e-3
# After an NCCL error: a dead rank's connection may end a little later.
_GRACE_SECONDS = 1.0
_UNIQUE_ID_BYTES = 128


def connect_nccl(control: Communicator) -> NcclCommunicator:
    """Connect the ranks of `control` by NCCL, each with the current CUDA device of the calling thread.

    Collective. NumPy arrays still go over `control`.

    Raises
    ------
    DeviceUnavailable : CuPy or NCCL is not installed.
    ClusterError      : two ranks have the same GPU.
    CommunicatorError : as for any collective; `control` cannot be used afterwards.
    """
    communicator = NcclCommunicator(control)
    communicator.start()
    return communicator


class NcclCommunicator(Communicator):
    """One GPU's rank. CuPy arrays go over NCCL, which starts with the first of them; NumPy arrays go over `control`.

    Different calls on different ranks are not detected: they end at their deadlines or return meaningless numbers.
    """

    def __init__(self, control: Communicator) -> None:
        super().__init__(control.rank, control.size, epoch=control.epoch, timeout_s=control.timeout_s)
        self._control = control
        self._solo = SoloCommunicator(epoch=self.epoch)
        # CuPy's NCCL and CUDA runtime, set by `_join`, and this rank's NCCL communicator while in use.
        self._library: Any = None
        self._runtime: Any = None
        self._nccl: Any = None

    def start(self) -> None:
        """Connect the ranks' GPUs now rather than at the first array. Collective; idempotent."""
        if self._nccl is None:
            with self._failing():
                self._join(Deadline(self.timeout_s))

    @property
    def device_lost(self) -> bool:
        """Whether CUDA has failed in this process; only a new process recovers from that."""
        if self._runtime is None:
            return False
        try:
            self._runtime.memGetInfo()
        except self._runtime.CUDARuntimeError:
            return True
        return False

    def abort(self, reason: AbortReason = "requested") -> None:
        """As in the base class; `control` notifies the other ranks and counts the abort."""
        with self._giving_up:
            if self._given_up is None:
                self._given_up = Aborted(f"rank {self.rank} of {self.size} gave up: {reason}")
        self._control.abort(reason)

    def confirm(self) -> None:
        if self._nccl is None:  # only TCP was used, which reports lost ranks itself; or this rank has given up
            super().confirm()
            return
        self.barrier()  # every rank has its results,
        self.barrier()  # and every rank was still alive when all had theirs

    def close(self, *, wait: bool = True) -> None:
        if wait and self._nccl is not None and self._given_up is None:
            try:
                self._barrier(Deadline(self.timeout_s))
            except CommunicatorError:  # the others have already closed, or are gone
                self._drop(broken=True)
        self._close()

    # Collectives: started on this rank's stream, after the work that the caller has queued on the current one

    def _allreduce(self, array: Array, op: Op, out: Array, deadline: Deadline) -> None:
        self._allreduce_each([(array, out)], op, deadline)

    def _allreduce_each(self, pairs: Sequence[tuple[Array, Array]], op: Op, deadline: Deadline) -> None:
        """One launch for all arrays that go over NCCL."""
        there = []
        for array, out in pairs:
            other = self._without_nccl(array)
            if other is not None:
                other._allreduce(array, op, out, deadline)
            elif array.size:
                there.append((array, out))
        if not there:
            return
        with self._call("allreduce", [array for array, _ in there], deadline) as (nccl, stream):
            if len(there) > 1:
                self._library.groupStart()
            try:
                for array, out in there:
                    _launch(nccl.allReduce, array.data.ptr, out.data.ptr, *_reals(array), _OPS[op], stream)
            finally:
                if len(there) > 1:
                    _launch(self._library.groupEnd)

    def _reduce(self, array: Array, op: Op, root: int, out: Array | None, deadline: Deadline) -> None:
        other = self._without_nccl(array)
        if other is not None:
            other._reduce(array, op, root, out, deadline)
        elif array.size:
            with self._call("reduce", [array], deadline) as (nccl, stream):
                target = 0 if out is None else out.data.ptr
                _launch(nccl.reduce, array.data.ptr, target, *_reals(array), _OPS[op], root, stream)

    def _broadcast(self, array: Array, root: int, deadline: Deadline) -> None:
        other = self._without_nccl(array)
        if other is not None:
            other._broadcast(array, root, deadline)
        elif array.size:
            with self._call("broadcast", [array], deadline) as (nccl, stream):
                _launch(nccl.broadcast, array.data.ptr, array.data.ptr, array.nbytes, _BYTES, root, stream)

    def _allgather(self, array: Array, out: Array, deadline: Deadline) -> None:
        other = self._without_nccl(array)
        if other is not None:
            other._allgather(array, out, deadline)
        elif array.size:
            with self._call("allgather", [array], deadline) as (nccl, stream):
                _launch(nccl.allGather, array.data.ptr, out.data.ptr, array.nbytes, _BYTES, stream)

    def _without_nccl(self, array: Array) -> Communicator | None:
        """The communicator for arrays that need no NCCL: those on the host, and those of a single rank."""
        if not on_gpu(array):
            return self._control
        return self._solo if self.size == 1 and self._nccl is None else None

    def _barrier(self, deadline: Deadline) -> None:
        self._control._barrier(deadline)

    def _check(self) -> None:
        self._control.check()
        if self._nccl is not None:
            try:
                self._is_started()
            except BaseException as error:
                self._end(error)
                raise

    def _abort(self) -> None:
        """Nothing more to do: the waiting thread sees `_given_up`."""

    def _close(self) -> None:
        self._drop(broken=self._given_up is not None or self._control.aborted)

    # Starting and ending NCCL

    def _join(self, deadline: Deadline) -> None:
        import cupy
        from cupy.cuda import nccl

        if not nccl.available:
            raise DeviceUnavailable(
                "the workers' GPUs cannot be connected: NCCL is not installed; pip install nvidia-nccl-cu13 brings it"
            )
        # NCCL reads it when a process makes its first communicator. If a user sets it to 1, calls wait inside NCCL.
        os.environ.setdefault("NCCL_COMM_BLOCKING", "0")
        self._library, self._runtime = nccl, cupy.cuda.runtime
        self._runtime.free(0)  # creates the CUDA context, which takes a while, without holding the GIL
        self._device: int = self._runtime.getDevice()
        self._current_stream: Callable[[], int] = lambda: cupy.cuda.get_current_stream().ptr
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._before, self._after = (cupy.cuda.Event(disable_timing=True) for _ in range(2))
        try:
            self._refuse_shared_devices(deadline)
            unique_id = np.zeros(_UNIQUE_ID_BYTES, np.uint8)
            if self.rank == 0:
                unique_id[:] = np.frombuffer(nccl.get_unique_id(), np.uint8)
            self._control.broadcast(unique_id, timeout_s=deadline.left_s)
            # `__new__` keeps the object when `__init__` raises "in progress": its destructor would wait.
            self._nccl = nccl.NcclCommunicator.__new__(nccl.NcclCommunicator)
            _launch(self._nccl.__init__, self.size, unique_id.tobytes(), self.rank)
            self._until(self._is_started, deadline, "the start")
        except BaseException as error:
            self._end(error)
            raise

    def _refuse_shared_devices(self, deadline: Deadline) -> None:
        mine = np.frombuffer(_device_on_host(self._device), np.uint8)
        ranks: dict[bytes, int] = {}
        for rank, theirs in enumerate(self._control.allgather(mine, timeout_s=deadline.left_s)):
            first = ranks.setdefault(theirs.tobytes(), rank)
            if first != rank:
                raise ClusterError(
                    f"ranks {first} and {rank} have the same GPU: give each worker its own by CUDA_VISIBLE_DEVICES"
                )

    def _drop(self, *, broken: bool) -> None:
        """Release NCCL's memory and threads. A broken communicator is aborted, since destroying it would wait."""
        nccl, self._nccl = self._nccl, None
        if nccl is None:
            return
        if not broken:
            nccl.destroy()
            return
        nccl.abort()
        grace = Deadline(_GRACE_SECONDS)
        with suppress(self._runtime.CUDARuntimeError):
            self._after.record(self._stream)
            while not self._is_done() and grace.left_s:  # its kernels exit as soon as they see the abort
                time.sleep(_LOOK_SECONDS)

    # Waiting

    @contextmanager
    def _call(self, name: str, arrays: Sequence[Array], deadline: Deadline) -> Iterator[tuple[Any, int]]:
        """NCCL and the stream for a call started inside; the context ends when the call is done."""
        if self._nccl is None:
            self._join(deadline)
        for array in arrays:
            if array.device.id != self._device:
                raise ValueError(f"the array is on cuda:{array.device.id}, this rank's device is cuda:{self._device}")
        try:
            self._follow_current_stream()
            yield self._nccl, self._stream.ptr
            self._until(self._is_started, deadline, name)
            self._after.record(self._stream)
            self._until(self._is_done, deadline, name)
        except BaseException as error:
            self._end(error)
            raise

    def _follow_current_stream(self) -> None:
        """Order the next call after all work queued on the caller's current stream."""
        current = self._current_stream()
        if self._runtime.streamQuery(current) != 0:
            self._before.record()
            self._stream.wait_event(self._before)

    def _end(self, error: BaseException) -> None:
        """End NCCL's kernels and threads, then raise the cause if the error is NCCL's or CUDA's."""
        foreign = isinstance(error, (self._library.NcclError, self._runtime.CUDARuntimeError))
        cause = self._cause(error) if foreign else None
        self._drop(broken=True)
        if cause is not None:
            raise cause from error

    def _until(self, condition: Callable[[], bool], deadline: Deadline, what: str) -> None:
        began = time.monotonic()
        look = began + _LOOK_SECONDS
        while not condition():
            if self._given_up is not None:
                raise Aborted(str(self._given_up))
            now = time.monotonic()
            if now >= look:
                self._control.check()
                self._is_started()  # raises errors from NCCL's own threads
                deadline.check(f"{what} over NCCL")
                look = now + _LOOK_SECONDS
            if now - began >= _SPIN_SECONDS:
                time.sleep(min(_PAUSES * (now - began), _LONGEST_PAUSE_SECONDS))

    def _is_started(self) -> bool:
        """Whether NCCL has finished starting, on the host, the calls made so far."""
        try:
            self._nccl.check_async_error()
        except KeyError as error:
            _refuse_unless_in_progress(error)
            return False
        return True

    def _is_done(self) -> bool:
        status: int = self._runtime.eventQuery(self._after.ptr)
        if status not in (0, _NOT_READY):
            raise self._runtime.CUDARuntimeError(status)
        return status == 0

    def _cause(self, error: BaseException) -> CommunicatorError:
        """The cause of an NCCL or CUDA error: a lost rank, if one shows in the grace period, or the error itself."""
        grace = Deadline(_GRACE_SECONDS)
        try:
            while grace.left_s:
                self._control.check()
                time.sleep(_LOOK_SECONDS)
        except CommunicatorError as cause:
            return cause
        return CommunicatorError(f"rank {self.rank} of {self.size}, cuda:{self._device}: {error}")


def _device_on_host(device: int) -> bytes:
    """Identifies a rank's GPU as NCCL does: ranks with different NCCL_HOSTID count as on different hosts."""
    host = os.environ.get("NCCL_HOSTID", "")
    return hashlib.blake2b(device_uuid(device) + host.encode(), digest_size=16).digest()


def _reals(array: Array) -> tuple[int, int]:
    """The count of numbers and their NCCL type."""
    numbers, code = _NUMBERS[array.dtype]
    return numbers * array.size, code


def _launch(call: Callable[..., None], *arguments: Any) -> None:
    """Make a call that NCCL may continue in the background."""
    try:
        call(*arguments)
    except KeyError as error:
        _refuse_unless_in_progress(error)


def _refuse_unless_in_progress(error: KeyError) -> None:
    if error.args != (_IN_PROGRESS,):
        raise CommunicatorError(f"NCCL returned the code {error}, which CuPy does not know") from error
