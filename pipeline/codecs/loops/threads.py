"""Threads that share a loop of machine code without the interpreter: one pool a process, whose threads wait in the
system. Threads of Python take the interpreter's lock twice for each call that they help: on 16 cores, jobs of Blosc-LZ4
took 1.2 times as long.

A loop takes row after row of a table (see `take`) until none is left. The calling thread takes part, so a call never
depends on a free thread.

    caller      adds its call to the pool, wakes threads, runs the loop, removes the call, waits for its helpers
    threads     help the call with rows left that has the fewest helpers; sleep if there is none

Sources: pthread_cond_wait(3), pthread_create(3).
"""

from __future__ import annotations

import os
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.compiled import c_function, carray, cgutils, compiled, intrinsic, ir, types
from pipeline.codecs.loops.system import (
    Memory,
    Table,
    call,
    load_int64,
    pointer,
    stack,
    store_int64,
)
from pipeline.codecs.parallel import for_each, thread_count
from pipeline.codecs.scratch import Use, scratch

OF_SAMPLES, OF_ENCODED, OF_PREDICTED = range(3)  # uses of a thread's memory, see `room`
_USES, _NAMES = 3, get_args(Use)
_LARGEST_KEPT_BYTES = 8 << 20

# Of a pool: the lock, what threads wait on, and the addresses of calls. A zeroed lock or condition is ready for use.
_WAKE, _CALLS, _POOL_BYTES = 64, 128, 640  # the lock comes first
# Of a call: what the caller waits on, an entry (see `entry_of`) and its arguments, the table of `_table`, the address
# of the next row's number, how many rows there are, and how many threads help and may help.
_DONE, _ENTRY, _GIVEN, _SHARED, _NEXT, _ROWS, _HELPERS, _MOST, _CALL_BYTES = (0, *range(64, 128, 8))

_int, _long = "int32", "int64"
_lock = c_function("pthread_mutex_lock", _long, returns=_int)
_unlock = c_function("pthread_mutex_unlock", _long, returns=_int)
_wait = c_function("pthread_cond_wait", _long, _long, returns=_int)
_wake = c_function("pthread_cond_signal", _long, returns=_int)
_create = c_function("pthread_create", _long, _long, _long, _long, returns=_int)
_detach = c_function("pthread_detach", _long, returns=_int)
_malloc = c_function("malloc", _long)
_free = c_function("free", _long, returns="void")


def entry_of(loop: Any) -> Any:
    """For compiled functions: of a tuple, the addresses of a C function and of a copy of the tuple on the stack. The C
    function takes a number and the tuple's address, and calls the loop with the number and the tuple's members. What
    the loop returns is lost, and so are its errors."""

    @intrinsic
    def entry(context: Any, given: Any) -> Any:
        kinds = tuple(types.unliteral(kind) for kind in (types.int64, *given.types))
        loop.callee.compile(kinds)
        result = loop.callee.overloads[kinds]

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            word, members = ir.IntType(64), arguments[0].type
            context.active_code_library.add_linking_library(result.library)
            function = ir.Function(
                builder.module, ir.FunctionType(word, [word, word]), f"entry_{result.fndesc.mangled_name}"
            )
            function.linkage = "internal"
            inner = ir.IRBuilder(function.append_basic_block())
            number, at = function.args
            packed = inner.load(inner.inttoptr(at, members.as_pointer()))
            parts = [inner.extract_value(packed, place) for place in range(len(members))]
            context.call_internal_no_propagate(inner, result.fndesc, result.signature, [number, *parts])
            inner.ret(word(0))
            copy = cgutils.alloca_once_value(builder, arguments[0])
            found = [builder.ptrtoint(each, word) for each in (function, copy)]
            return context.make_tuple(builder, signature.return_type, found)

        return types.UniTuple(types.int64, 2)(given), generate

    entry.py_func = loop.py_func  # changes of the loop change the key in Numba's cache
    return entry


@compiled
def room(memory: Any, shared: Any, use: Any) -> Any:
    """A thread's memory for one use, of the bytes that `shared` says."""
    return carray(pointer(load_int64(memory + 16 * use)), (shared[2 + 2 * use],), np.uint8)


@compiled
def _add(address: Any, number: Any) -> None:
    store_int64(address, load_int64(address) + number)


@compiled
def _to_help(pool: Any) -> Any:
    """The call with rows left that has the fewest helpers; 0: none."""
    found, fewest = np.int64(0), np.int64(1 << 30)
    for place in range(pool + _CALLS, pool + _POOL_BYTES, 8):
        at = load_int64(place)
        if at and load_int64(load_int64(at + _NEXT)) < load_int64(at + _ROWS):
            helpers = load_int64(at + _HELPERS)
            if helpers < min(fewest, load_int64(at + _MOST)):
                found, fewest = at, helpers
    return found


@compiled
def _has_room(memory: Any, shared: Any) -> Any:
    """Whether there is memory for each use, as many bytes as `shared` says; what is too large to keep is freed."""
    for use in range(_USES):
        at, nbytes = memory + 16 * use, load_int64(shared + 16 + 16 * use)
        held = load_int64(at + 8)
        if held < nbytes or held > max(nbytes, _LARGEST_KEPT_BYTES):
            _free(load_int64(at))
            found = _malloc(nbytes)
            store_int64(at, found)
            store_int64(at + 8, nbytes if found else 0)
            if not found:
                return False
    return True


@compiled
def _serve(pool: Any) -> None:
    """A thread of the pool."""
    memory, nothing = stack(48), stack(64)
    for place in range(0, 64, 8):
        store_int64(nothing + place, 0)
        if place < 48:
            store_int64(memory + place, 0)
    _lock(pool)
    while True:
        at = _to_help(pool)
        if at == 0:
            _wait(pool + _WAKE, pool)
            continue
        _add(at + _HELPERS, 1)
        _unlock(pool)
        has_room = _has_room(memory, load_int64(at + _SHARED))
        if has_room:
            call(load_int64(at + _ENTRY), (memory, load_int64(at + _GIVEN)))
            _has_room(memory, nothing)
        _lock(pool)
        if not has_room:
            store_int64(at + _MOST, 0)
        _add(at + _HELPERS, -1)
        if load_int64(at + _HELPERS) == 0:
            _wake(at + _DONE)


_serving = entry_of(_serve)


@compiled
def _start(pool: int, count: int) -> None:
    """Start the threads of a pool."""
    thread, entry = stack(8), _serving(())[0]
    for _ in range(count):
        if _create(thread, 0, entry, pool) == 0:
            _detach(load_int64(thread))


@compiled
def share(loop: Any, shared: Any, next_row: Any, rows: Any) -> None:
    """Call a loop in this thread and others, with the memory of the thread and further arguments.

    loop     : what an entry (see `entry_of`) returns for the further arguments
    shared   : the table of `_table`
    next_row : the loop takes rows by it, of so many
    """
    pool, memory, at = shared[0], shared[1:].ctypes.data, stack(120)
    entry, arguments = loop
    for place in range(0, _CALL_BYTES, 8):
        store_int64(at + place, 0)
    store_int64(at + _ENTRY, entry)
    store_int64(at + _GIVEN, arguments)
    store_int64(at + _SHARED, shared.ctypes.data)
    store_int64(at + _NEXT, next_row.ctypes.data)
    store_int64(at + _ROWS, rows)
    store_int64(at + _MOST, shared[7])
    mine = np.int64(0)  # the place of the call in the pool
    if shared[7] > 0:
        _lock(pool)
        for place in range(pool + _CALLS, pool + _POOL_BYTES, 8):
            if mine == 0 and load_int64(place) == 0:
                mine = np.int64(place)
                store_int64(mine, at)
        for _ in range(min(shared[7], rows - 1)):
            _wake(pool + _WAKE)
        _unlock(pool)
    call(entry, (memory, arguments))
    if mine:
        _lock(pool)
        store_int64(mine, 0)
        while load_int64(at + _HELPERS):
            _wait(at + _DONE, pool)
        _unlock(pool)


# By process, since threads do not survive a fork.
_pools: dict[int, Table] = {}


def _pool() -> int:
    process = os.getpid()
    if process not in _pools:
        made = np.zeros(_POOL_BYTES // 8, np.int64)
        if _pools.setdefault(process, made) is made:  # else another thread was first
            _start(made.ctypes.data, thread_count())
    return _pools[process].ctypes.data


def in_threads(
    loop: Any, rows: Table, ends: NDArray[np.int8], *given: Any, threads: int, room: tuple[int, int, int], copies: bool
) -> None:
    """Call a loop that shares its rows, in so many threads.

    loop   : gets the number of the next row, `rows`, `ends`, what else is given, and the table of `_table`
    room   : bytes of a thread's memory for each use
    copies : whether it only copies, between files and memory. Then threads of Python call it, which the interpreter's
             lock keeps from waiting for each other in the system: 7.4 GB/s from and to files on 16 cores, not 5.5
    """
    next_row = np.zeros(1, np.int64)

    def call_alone(_: int) -> None:
        memory, table = _table(1, room)
        loop((next_row, rows, ends, *given, table))
        del memory

    if copies:
        for_each(call_alone, range(threads))
        return
    memory, table = _table(threads, room)
    loop((next_row, rows, ends, *given, table))
    del memory


def _table(threads: int, room: tuple[int, int, int]) -> tuple[list[Memory], Table]:
    """For `share`: the pool, the address and the bytes of this thread's memory for each use, and how many threads may
    help; and that memory, to keep until the loop returns."""
    memory = [scratch(use, nbytes) for use, nbytes in zip(_NAMES, room, strict=True)]
    spans = (number for each in memory for number in (each.ctypes.data, len(each)))
    return memory, np.array([_pool() if threads > 1 else 0, *spans, threads - 1], np.int64)
