"""The communicator of a single rank."""

from __future__ import annotations

from pipeline.cluster.communicators.base import Array, Communicator, Deadline, Op, on_gpu


class SoloCommunicator(Communicator):
    """A single rank: every collective is a copy."""

    def __init__(self, *, epoch: int = 1) -> None:
        super().__init__(0, 1, epoch=epoch)

    def _allreduce(self, array: Array, op: Op, out: Array, deadline: Deadline) -> None:
        _copy(array, out)

    def _reduce(self, array: Array, op: Op, root: int, out: Array | None, deadline: Deadline) -> None:
        assert out is not None
        _copy(array, out)

    def _broadcast(self, array: Array, root: int, deadline: Deadline) -> None:
        pass

    def _allgather(self, array: Array, out: Array, deadline: Deadline) -> None:
        _copy(array[None], out)

    def _barrier(self, deadline: Deadline) -> None:
        pass

    def _check(self) -> None:
        pass

    def _abort(self) -> None:
        pass

    def _close(self) -> None:
        pass


def _copy(array: Array, out: Array) -> None:
    out[...] = array
    if on_gpu(array):
        array.device.synchronize()
