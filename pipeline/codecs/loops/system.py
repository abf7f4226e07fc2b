"""Calls of the C library from machine code, and the copies and file accesses that loops share.

Sources: openat2(2), statx(2).
"""

from __future__ import annotations

import errno
import os
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.compiled import c_function, cgutils, compiled, intrinsic, ir, types

Table = NDArray[np.int64]
Memory = NDArray[np.uint8]

LEFT, DONE = 0, 1  # what has become of a chunk, a block or a file
NO_LINKS = 0x04 | 0x08  # in `resolve`: RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
ENOENT = errno.ENOENT

_OPENAT2 = 437  # on every architecture
_STATX_BYTES, _STATX_ROOM, _STATX_MODE, _STATX_SIZE, _STATX_MTIME = 256, 264, 28, 40, 112
_AT_EMPTY_PATH, _STATX_WANTED = 0x1000, 0x241  # type, size and time of the last change
_REGULAR, _KIND = 0o100000, 0o170000
_MOST_PIECES, _PIECES_BYTES = 1024, 16 << 10  # of memory in one call, IOV_MAX


_int, _long = "int32", "int64"  # of the C library; pointers are longs
_syscall = c_function("syscall", _long, _long, _long, _long, _long)
_statx = c_function("statx", _int, _long, _int, "uint32", _long, returns=_int)
pread = c_function("pread", _int, _long, _long, _long)
preadv = c_function("preadv", _int, _long, _int, _long)
pwrite = c_function("pwrite", _int, _long, _long, _long)
pwritev = c_function("pwritev", _int, _long, _int, _long)
close = c_function("close", _int, returns=_int)
readlinkat = c_function("readlinkat", _int, _long, _long, _long)
renameat = c_function("renameat", _int, _long, _int, _long, returns=_int)
memcpy = c_function("memcpy", _long, _long, _long)
memset = c_function("memset", _long, _int, _long)
memcmp = c_function("memcmp", _long, _long, _long, returns=_int)
_errno_location = c_function("__errno_location")


@intrinsic
def pointer(context: Any, address: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, given: Any) -> Any:
        return builder.inttoptr(given[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def load_int32(context: Any, address: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, given: Any) -> Any:
        return builder.load(builder.inttoptr(given[0], ir.IntType(32).as_pointer()))

    return types.int32(types.int64), generate


@intrinsic
def load_int64(context: Any, address: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, given: Any) -> Any:
        return builder.load(builder.inttoptr(given[0], ir.IntType(64).as_pointer()))

    return types.int64(types.int64), generate


@intrinsic
def store_int64(context: Any, address: Any, number: Any) -> Any:
    def generate(context: Any, builder: Any, _: Any, given: Any) -> Any:
        builder.store(given[1], builder.inttoptr(given[0], ir.IntType(64).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@partial(intrinsic, prefer_literal=True)
def stack(context: Any, nbytes: Any) -> Any:
    """The address of as many bytes, a constant, of the calling function's stack: compiled sooner than an array."""

    def generate(_: Any, builder: Any, __: Any, ___: Any) -> Any:
        words = ir.ArrayType(ir.IntType(64), -(-nbytes.literal_value // 8))
        return builder.ptrtoint(cgutils.alloca_once(builder, words), ir.IntType(64))

    return types.int64(nbytes), generate


@intrinsic
def take(context: Any, address: Any) -> Any:
    """The number at an address, which grows by one: each thread gets another."""

    def generate(_: Any, builder: Any, __: Any, given: Any) -> Any:
        at = builder.inttoptr(given[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", at, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic
def call(context: Any, function: Any, given: Any) -> Any:
    """What the C function at an address returns for these numbers and addresses; of an `int`, only 32 bits count."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        numbers = [
            context.cast(builder, number, kind, types.int64)
            for number, kind in zip(cgutils.unpack_tuple(builder, arguments[1]), signature.args[1].types, strict=True)
        ]
        kind = ir.FunctionType(word, [word] * len(numbers))
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), numbers)

    return types.int64(types.int64, given), generate


@compiled
def open_at(folder: Any, name: Any, flags: Any, mode: Any, resolve: Any) -> Any:
    """A descriptor, or minus the error's number."""
    how = stack(24)
    store_int64(how, flags)
    store_int64(how + 8, mode)
    store_int64(how + 16, resolve)
    found = _syscall(_OPENAT2, folder, name, how, 24)
    return found if found >= 0 else -np.int64(load_int32(_errno_location()))


@compiled
def is_link(folder: Any, name: Any) -> Any:
    return readlinkat(folder, name, stack(8), 1) >= 0


@compiled
def version_of(descriptor: Any) -> Any:
    """The bytes of a regular file, -1 for others, and the time of its last change in nanoseconds."""
    at = stack(_STATX_ROOM)
    empty_name = at + _STATX_BYTES
    store_int64(empty_name, 0)
    if _statx(descriptor, empty_name, _AT_EMPTY_PATH, _STATX_WANTED, at) != 0:
        return np.int64(-1), np.int64(0)
    if load_int32(at + _STATX_MODE) & _KIND != _REGULAR:
        return np.int64(-1), np.int64(0)
    seconds, fraction = load_int64(at + _STATX_MTIME), np.int64(load_int32(at + _STATX_MTIME + 8))
    return load_int64(at + _STATX_SIZE), seconds * 1_000_000_000 + fraction


@compiled
def size_of(descriptor: Any) -> Any:
    """The bytes of a regular file; -1 for others."""
    return version_of(descriptor)[0]


@compiled
def _rows(extents: Any) -> Any:
    """How many rows along its last axis an array has."""
    count = 1
    for axis in range(len(extents) - 1):
        count *= extents[axis]
    return count


@compiled
def _offset(row: Any, strides: Any, extents: Any) -> Any:
    """The offset in bytes of a row of an array."""
    offset = 0
    for axis in range(len(extents) - 2, -1, -1):
        offset += row % extents[axis] * strides[axis]
        row //= extents[axis]
    return offset


@compiled
def copy_items(target: Any, target_strides: Any, source: Any, source_strides: Any, extents: Any, itemsize: Any) -> None:
    """Copy an array of items between two addresses."""
    last = len(extents) - 1
    step, other, count = target_strides[last], source_strides[last], extents[last]
    for row in range(_rows(extents)):
        to, at = target + _offset(row, target_strides, extents), source + _offset(row, source_strides, extents)
        if step == itemsize and other == itemsize:
            memcpy(to, at, count * itemsize)
        elif itemsize == 1:
            for item in range(count):
                memcpy(to + item * step, at + item * other, 1)
        elif itemsize == 2:
            for item in range(count):
                memcpy(to + item * step, at + item * other, 2)
        elif itemsize == 4:
            for item in range(count):
                memcpy(to + item * step, at + item * other, 4)
        else:
            for item in range(count):
                memcpy(to + item * step, at + item * other, itemsize)


@compiled
def in_runs(descriptor: Any, offset: Any, start: Any, strides: Any, extents: Any, itemsize: Any, writes: Any) -> Any:
    """Read or write an array, whose last axis is contiguous, straight from or to a file, from a byte on. Returns
    whether it is done."""
    length, rows = extents[len(extents) - 1] * itemsize, _rows(extents)
    pieces, used, end, nbytes = stack(_PIECES_BYTES), 0, 0, 0
    for row in range(rows):
        at = start + _offset(row, strides, extents)
        if used and at == end:
            last = pieces + 16 * used - 8
            store_int64(last, load_int64(last) + length)
        else:
            store_int64(pieces + 16 * used, at)
            store_int64(pieces + 16 * used + 8, length)
            used += 1
        end, nbytes = at + length, nbytes + length
        if used == _MOST_PIECES or row == rows - 1:
            done = pwritev(descriptor, pieces, used, offset) if writes else preadv(descriptor, pieces, used, offset)
            if done != nbytes:
                return False
            offset, used, nbytes = offset + nbytes, 0, 0
    return True
