"""Enough of CuPy and NCCL, over threads and NumPy, to run ranks without GPUs: streams that lag behind, calls that are
"in progress", collectives that wait for ever for a rank that does not come, and an abort that ends them."""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import pytest

from pipeline.cluster.communicators.base import combine

IN_PROGRESS, NOT_READY = 7, 600
OPS = {0: "sum", 1: "prod", 2: "max", 3: "min"}
DTYPES = dict(enumerate(("i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8")))

here = threading.local()


class GpuArray(np.ndarray):
    """NumPy's array with what tells a CuPy array from one."""

    @property
    def __cuda_array_interface__(self):
        return self.__array_interface__

    def __array_function__(self, function, types_, arguments, options):
        found = super().__array_function__(function, types_, arguments, options)
        return found.view(GpuArray) if function is np.concatenate else found

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data)

    @property
    def device(self):
        return types.SimpleNamespace(id=getattr(here, "device", 0), synchronize=lambda: None)


def on_device(values):
    return np.array(values).view(GpuArray)


class Stream:
    _numbers = itertools.count(1)
    by_ptr: ClassVar[dict] = {}

    def __init__(self, non_blocking=False):
        assert non_blocking
        self.ptr = next(self._numbers)
        self._queue = ThreadPoolExecutor(1)
        self.by_ptr[self.ptr] = self

    def wait_event(self, event):
        self.put(event.happened.wait)

    def put(self, work):
        self._queue.submit(work)


class Event:
    _numbers = itertools.count(1)
    by_ptr: ClassVar[dict] = {}

    def __init__(self, disable_timing=False):
        self.ptr = next(self._numbers)
        self.happened = threading.Event()
        self.by_ptr[self.ptr] = self

    def record(self, stream=None):
        happened = self.happened = threading.Event()
        if stream is None:
            happened.set()
        else:
            stream.put(happened.set)


class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        super().__init__(f"cudaError {status}")
        self.status = status


class NcclError(RuntimeError):
    pass


class Meeting:
    """What the ranks of one unique id have put down, by the number of their call."""

    def __init__(self, size):
        self.size = size
        self.condition = threading.Condition()
        self.joined = set()
        self.calls = {}

    def exchange(self, number, rank, values, comm):
        """Every rank's values, once all have come; None where this rank has been aborted."""
        with self.condition:
            call = self.calls.setdefault(number, {})
            call[rank] = values
            self.condition.notify_all()
            while len(call) < self.size:
                if comm.aborted:
                    return None
                self.condition.wait(0.01)
            return [call[each] for each in range(self.size)]


_meetings: dict = {}
_meeting = threading.Lock()


class NcclCommunicator:
    error = None

    def __init__(self, size, unique_id, rank):
        with _meeting:
            self._all = _meetings.setdefault(unique_id, Meeting(size))
        self._rank, self._calls, self.aborted, self._slow = rank, itertools.count(), False, 0
        self._all.joined.add(rank)
        raise KeyError(IN_PROGRESS)

    def check_async_error(self):
        if self.error is not None:
            raise self.error
        if len(self._all.joined) < self._all.size:
            raise KeyError(IN_PROGRESS)
        if self._slow:
            self._slow -= 1
            raise KeyError(IN_PROGRESS)

    def allReduce(self, source, target, count, dtype, op, stream):
        self._begin(source, target, count, DTYPES[dtype], stream, lambda all_: reduced(all_, OPS[op]))

    def reduce(self, source, target, count, dtype, op, root, stream):
        assert bool(target) == (self._rank == root)
        self._begin(source, target, count, DTYPES[dtype], stream, lambda all_: reduced(all_, OPS[op]))

    def broadcast(self, source, target, count, dtype, root, stream):
        self._begin(source, target, count, DTYPES[dtype], stream, lambda all_: all_[root])

    def allGather(self, source, target, count, dtype, stream):
        self._begin(source, target, count, DTYPES[dtype], stream, np.concatenate)

    def _begin(self, source, target, count, dtype, stream, combined):
        number = next(self._calls)

        def work():
            found = self._all.exchange(number, self._rank, at(source, count, dtype).copy(), self)
            if found is not None and target:
                result = combined(found)
                at(target, result.size, dtype)[:] = result

        group = getattr(here, "group", None)
        if group is not None:
            group.append((self, stream, work))
            return
        self._launch(stream, work)
        raise KeyError(IN_PROGRESS)

    def _launch(self, stream, work):
        self._slow = 3
        Stream.by_ptr[stream].put(work)

    def abort(self):
        self.aborted = True

    def destroy(self):
        assert not self.aborted


def group_start():
    assert getattr(here, "group", None) is None
    here.group = []


def group_end():
    group, here.group = here.group, None
    for comm, stream, work in group:
        comm._launch(stream, work)
    if group:
        raise KeyError(IN_PROGRESS)


def at(ptr, count, dtype):
    dtype = np.dtype(dtype)
    buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(ptr)
    return np.frombuffer(buffer, dtype)


def reduced(values, op):
    total = values[0].copy()
    for value in values[1:]:
        combine(op, total, value, total)
    return total


def device_uuid(device):
    return bytes([0, device]).ljust(16, b"\1")


def event_query(ptr):
    return 0 if Event.by_ptr[ptr].happened.is_set() else NOT_READY


@contextmanager
def fake_cupy(**changes):
    """`import cupy` finds this; a thread's device is `here.device`."""
    runtime = types.SimpleNamespace(
        getDevice=lambda: getattr(here, "device", 0),
        free=lambda ptr: None,
        eventQuery=event_query,
        streamQuery=lambda ptr: NOT_READY,
        memGetInfo=lambda: (1, 1),
        CUDARuntimeError=CUDARuntimeError,
    )
    nccl = types.SimpleNamespace(
        available=True,
        get_unique_id=lambda: os.urandom(128),
        NcclCommunicator=NcclCommunicator,
        NcclError=NcclError,
        groupStart=group_start,
        groupEnd=group_end,
    )
    for name, value in changes.items():
        setattr(nccl if hasattr(nccl, name) else runtime, name, value)
    cuda = types.SimpleNamespace(
        runtime=runtime,
        nccl=nccl,
        Stream=Stream,
        Event=Event,
        get_current_stream=lambda: types.SimpleNamespace(ptr=0),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_COMM_BLOCKING", "0")
        patch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
        patch.setitem(sys.modules, "cupy.cuda", cuda)
        patch.setattr("pipeline.cluster.communicators.nccl.device_uuid", device_uuid)
        yield
