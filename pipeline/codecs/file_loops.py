"""Files of many chunks, read and decoded or encoded and written by machine code: a thread's share is one call, which
never holds the interpreter's lock.

The loops handle the usual case. A chunk that gives an error, or whose file they do not understand, is left to the
caller, whose slower way names the fault.

Sources: openat2(2), statx(2); c-blosc 1.21, blosc.h and README_CHUNK_FORMAT.rst.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from kernels.runtime.compiled import compiled
from pipeline.codecs.chunk_codec import BLOSC, ENCODED, RAW
from pipeline.codecs.parallel import for_each

LEFT, DONE = 0, 1  # what has become of a chunk
NONE, FAULT = -1, -2  # in place of a descriptor
NO_LINKS = 0x04 | 0x08  # in `resolve`: RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH

# Columns of a table with a row for each chunk. NAME, PARENT: offsets in `names`. MEMORY: of the
# decoded chunk, 0 to use the thread's; HELD: whether it holds the chunk. PART: the address of the part of the region's
# array, or of LENGTH encoded bytes; INSIDE: the byte of the chunk where the part begins; then the part's extents.
NAME, PARENT, MEMORY, HELD, PART, LENGTH, INSIDE, EXTENTS = range(8)

_OPENAT2 = 437  # on every architecture
_STATX_BYTES, _STATX_MODE, _STATX_SIZE, _STATX_MTIME = 256, 28, 40, 112
_AT_EMPTY_PATH, _STATX_WANTED = 0x1000, 0x241  # type, size and time of the last change
_REGULAR, _KIND = 0o100000, 0o170000
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_ENOENT = errno.ENOENT
_MOST_PIECES = 1024  # of memory in one call, IOV_MAX
_SHARES, _SHARED_BYTES = 4, 4 << 20  # of a region's bytes that threads read together
_HEADER_BYTES, _BLOSC_VERSION, _BLOSC_STORED = 16, 2, 2

Table = NDArray[np.int64]
Memory = NDArray[np.uint8]


def _c(name: str, *arguments: Any, returns: Any = types.int64) -> Any:
    return types.ExternalFunction(name, returns(*arguments))


_int, _long = types.int32, types.int64  # of the C library; pointers are longs
_syscall = _c("syscall", _long, _long, _long, _long, _long)
_statx = _c("statx", _int, _long, _int, types.uint32, _long, returns=_int)
pread = _c("pread", _int, _long, _long, _long)
_preadv = _c("preadv", _int, _long, _int, _long)
pwrite = _c("pwrite", _int, _long, _long, _long)
_pwritev = _c("pwritev", _int, _long, _int, _long)
_close = _c("close", _int, returns=_int)
_readlinkat = _c("readlinkat", _int, _long, _long, _long)
_renameat = _c("renameat", _int, _long, _int, _long, returns=_int)
memcpy = _c("memcpy", _long, _long, _long)
_memcmp = _c("memcmp", _long, _long, _long, returns=_int)
_errno_location = _c("__errno_location")


@intrinsic  # type: ignore[untyped-decorator]
def _load_int32(context: Any, address: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, given: Any) -> Any:
        return builder.load(builder.inttoptr(given[0], ir.IntType(32).as_pointer()))

    return types.int32(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _load_int64(context: Any, address: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, given: Any) -> Any:
        return builder.load(builder.inttoptr(given[0], ir.IntType(64).as_pointer()))

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def take(context: Any, address: Any) -> Any:
    """The number at an address, which grows by one: each thread gets another."""

    def generate(_: Any, builder: Any, __: Any, given: Any) -> Any:
        at = builder.inttoptr(given[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", at, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
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


@functools.cache
def blosc_functions() -> tuple[int, int]:
    """The addresses of `blosc_decompress_ctx` and `blosc_compress_ctx` in imagecodecs' library; 0 if it has none."""
    import imagecodecs._blosc

    library = ctypes.CDLL(imagecodecs._blosc.__file__)  # which is loaded; its own libraries are searched too
    try:
        functions = library.blosc_decompress_ctx, library.blosc_compress_ctx
    except AttributeError:
        return 0, 0
    return tuple(ctypes.cast(each, ctypes.c_void_p).value or 0 for each in functions)  # type: ignore[return-value]


@compiled
def _open(folder: Any, name: Any, flags: Any, mode: Any, resolve: Any) -> Any:
    """A descriptor, or minus the error's number."""
    how = np.array([flags, mode, resolve], np.int64)
    found = _syscall(_OPENAT2, folder, name, how.ctypes.data, 24)
    return found if found >= 0 else -np.int64(_load_int32(_errno_location()))


@compiled
def _version(descriptor: Any) -> Any:
    """The bytes of a regular file, -1 for others, and the time of its last change in nanoseconds."""
    found = np.zeros(_STATX_BYTES + 1, np.uint8)  # ends with an empty name
    at = found.ctypes.data
    if _statx(descriptor, at + _STATX_BYTES, _AT_EMPTY_PATH, _STATX_WANTED, at) != 0:
        return np.int64(-1), np.int64(0)
    if _load_int32(at + _STATX_MODE) & _KIND != _REGULAR:
        return np.int64(-1), np.int64(0)
    seconds, fraction = _load_int64(at + _STATX_MTIME), np.int64(_load_int32(at + _STATX_MTIME + 8))
    return _load_int64(at + _STATX_SIZE), seconds * 1_000_000_000 + fraction


@compiled
def _size(descriptor: Any) -> Any:
    """The bytes of a regular file; -1 for others."""
    return _version(descriptor)[0]


@compiled
def copy_items(target: Any, target_strides: Any, source: Any, source_strides: Any, extents: Any, itemsize: Any) -> None:
    """Copy an array of items between two addresses."""
    axes = len(extents)
    count, last = 1, axes - 1
    for axis in range(last):
        count *= extents[axis]
    index = np.zeros(axes, np.int64)
    step, other = target_strides[last], source_strides[last]
    for _ in range(count):
        if step == itemsize and other == itemsize:
            memcpy(target, source, extents[last] * itemsize)
        elif itemsize == 1:
            for item in range(extents[last]):
                memcpy(target + item * step, source + item * other, 1)
        elif itemsize == 2:
            for item in range(extents[last]):
                memcpy(target + item * step, source + item * other, 2)
        elif itemsize == 4:
            for item in range(extents[last]):
                memcpy(target + item * step, source + item * other, 4)
        else:
            for item in range(extents[last]):
                memcpy(target + item * step, source + item * other, itemsize)
        for axis in range(last - 1, -1, -1):
            index[axis] += 1
            target += target_strides[axis]
            source += source_strides[axis]
            if index[axis] < extents[axis]:
                break
            target -= index[axis] * target_strides[axis]
            source -= index[axis] * source_strides[axis]
            index[axis] = 0


@compiled
def _in_runs(descriptor: Any, start: Any, strides: Any, extents: Any, itemsize: Any, writes: Any) -> Any:
    """Read or write an array, whose last axis is contiguous, straight from or to a file. Returns whether it is done."""
    last, offset = len(extents) - 1, 0
    length, count = extents[last] * itemsize, 1
    for axis in range(last):
        count *= extents[axis]
    pieces, used, nbytes = np.empty((_MOST_PIECES, 2), np.int64), 0, 0
    index = np.zeros(last + 1, np.int64)
    for number in range(count):
        if used and pieces[used - 1, 0] + pieces[used - 1, 1] == start:
            pieces[used - 1, 1] += length
        else:
            pieces[used, 0], pieces[used, 1] = start, length
            used += 1
        nbytes += length
        if used == _MOST_PIECES or number == count - 1:
            if writes:
                done = _pwritev(descriptor, pieces.ctypes.data, used, offset)
            else:
                done = _preadv(descriptor, pieces.ctypes.data, used, offset)
            if done != nbytes:
                return False
            offset, used, nbytes = offset + nbytes, 0, 0
        for axis in range(last - 1, -1, -1):
            index[axis] += 1
            start += strides[axis]
            if index[axis] < extents[axis]:
                break
            start -= index[axis] * strides[axis]
            index[axis] = 0
    return True


@compiled
def is_sound(data: Any, nbytes: Any) -> Any:
    """As `_is_sound`, of an array."""
    return _is_sound(data.ctypes.data, len(data), nbytes)


@compiled
def _is_sound(chunk: Any, size: Any, nbytes: Any) -> Any:
    """Whether the header of a Blosc chunk at an address declares its length and these decoded bytes, and its table of
    blocks lies within the chunk: the decoder trusts them."""
    if size < _HEADER_BYTES:
        return False
    first = _load_int32(chunk)  # version, version of the codec, flags, bytes of an item
    if first & 0xFF != _BLOSC_VERSION or (first >> 24) & 0xFF == 0:
        return False
    decoded, block = np.int64(np.uint32(_load_int32(chunk + 4))), np.int64(np.uint32(_load_int32(chunk + 8)))
    if np.int64(np.uint32(_load_int32(chunk + 12))) != size or decoded != nbytes:
        return False
    if (first >> 16) & _BLOSC_STORED:
        return size == nbytes + _HEADER_BYTES
    if nbytes == 0:
        return True
    if block == 0 or block > decoded:
        return False
    end = _HEADER_BYTES + 4 * -(-nbytes // block)
    if end > size:
        return False
    for place in range(_HEADER_BYTES, end, 4):
        start = _load_int32(chunk + place)
        if start < end or start > size - 4:
            return False
    return True


@compiled
def _fill(memory: Any, nbytes: Any, item: Any) -> None:
    done = len(item)
    memcpy(memory, item.ctypes.data, done)
    while done < nbytes:
        some = min(done, nbytes - done)
        memcpy(memory + done, memory, some)
        done += some


@compiled
def _read_chunk(
    row: Any, names: Any, folder: Any, resolve: Any, kind: Any, decoder: Any, strides: Any, shape: Any, item: Any,
    samples: Any, encoded: Any,
) -> Any:  # fmt: skip
    """Read and decode one chunk, and copy its part. `samples`, `encoded`: memory of the thread."""
    itemsize, extents, nbytes, memory = len(item), row[EXTENTS:], len(samples), row[MEMORY]
    if memory == 0:
        memory = samples.ctypes.data
    if row[HELD] == 0:
        name = names.ctypes.data + row[NAME]
        descriptor = _open(folder, name, _READ, 0, resolve)
        if descriptor == -_ENOENT:
            link = np.empty(1, np.uint8)
            if _readlinkat(folder, name, link.ctypes.data, 1) >= 0:
                return LEFT  # a broken link is no missing chunk
            _fill(memory, nbytes, item)
        elif descriptor < 0:
            return LEFT
        else:
            length, is_placed = _size(descriptor), False
            if kind == RAW:
                is_done = length == nbytes
                is_whole = row[MEMORY] == 0 and strides[0, -1] == itemsize
                for axis in range(len(shape)):
                    is_whole = is_whole and extents[axis] == shape[axis]
                if is_done and is_whole:
                    is_done = _in_runs(descriptor, row[PART], strides[0], extents, itemsize, False)
                    is_placed = True
                elif is_done:
                    first, last = 0, nbytes
                    if row[MEMORY] == 0:  # what lies before and after the part is not needed
                        first = row[INSIDE] // strides[1, 0] * strides[1, 0]
                        last = first + extents[0] * strides[1, 0]
                    is_done = pread(descriptor, memory + first, last - first, first) == last - first
            else:
                is_done = 0 <= length <= len(encoded)
                is_done = is_done and pread(descriptor, encoded.ctypes.data, length, 0) == length
                is_done = is_done and _is_sound(encoded.ctypes.data, length, nbytes)
                is_done = is_done and np.int32(call(decoder, (encoded.ctypes.data, memory, nbytes, 1))) == nbytes
            _close(descriptor)
            if is_placed or not is_done:
                return DONE if is_done else LEFT
    copy_items(row[PART], strides[0], memory + row[INSIDE], strides[1], extents, itemsize)
    return DONE


@compiled
def read_chunks(
    next_row: Table, table: Table, ends: NDArray[np.int8], names: Memory, folder: int, resolve: int, kind: int,
    decoder: int, strides: Table, shape: Table, item: Memory, samples: Memory, encoded: Memory,
) -> None:  # fmt: skip
    """Read and decode chunks, and copy a part of each to the region's array, until the table has no further row.

    next_row : (1,), of all threads
    ends     : becomes DONE for each chunk that is done
    resolve  : of openat2: NO_LINKS, or 0
    kind     : RAW or BLOSC; `decoder`: see `blosc_functions`
    strides  : (2, axes) in bytes: of the region's array and of a chunk; `shape`: of a chunk
    item     : the bytes of the fill value
    samples, encoded : memory of the thread, as many bytes as a decoded and an encoded chunk may have
    """
    while True:
        number = take(next_row.ctypes.data)
        if number >= len(table):
            return
        ends[number] = _read_chunk(
            table[number], names, folder, resolve, kind, decoder, strides, shape, item, samples, encoded
        )


@compiled
def open_files(files: Table, heads: Memory, names: Memory, name_at: Table, folder: int, resolve: int) -> None:
    """Open files, and read how each begins.

    files : (files, 2): becomes a descriptor, NONE if there is no such file or FAULT, and the file's bytes
    heads : (files, bytes)
    """
    link = np.empty(1, np.uint8)
    for number in range(len(files)):
        name = names.ctypes.data + name_at[number]
        descriptor = _open(folder, name, _READ, 0, resolve)
        files[number, 0] = descriptor
        if descriptor < 0:
            is_missing = descriptor == -_ENOENT and _readlinkat(folder, name, link.ctypes.data, 1) < 0
            files[number, 0] = NONE if is_missing else FAULT
            continue
        files[number, 1] = _size(descriptor)
        some = min(files[number, 1], heads.shape[1])
        if some < 0 or pread(descriptor, heads[number].ctypes.data, some, 0) != some:
            _close(descriptor)
            files[number, 0] = FAULT


@compiled
def read_spans(spans: Table) -> bool:
    """Read parts of open files. `spans`: descriptor, offset, address and bytes of each. Returns whether all is read."""
    done = 0
    for descriptor, offset, address, nbytes in spans:
        done += pread(descriptor, address, nbytes, offset) == nbytes
    return done == len(spans)


def read_shared(spans: Table) -> bool:
    """As `read_spans`, in several threads if there is much to read: one thread reads 2.5 GB/s into pinned memory, while
    others compute."""
    shares = min(_SHARES, len(spans)) if spans[:, 3].sum() >= _SHARED_BYTES else 1
    found = [False] * shares

    def read(share: int) -> None:
        found[share] = bool(read_spans(np.ascontiguousarray(spans[share::shares])))

    for_each(read, range(shares))
    return all(found)


@compiled
def close_files(files: Table) -> None:
    """Close what `open_files` has opened."""
    for number in range(len(files)):
        if files[number, 0] >= 0:
            _close(files[number, 0])


@compiled
def _write_file(
    row: Any, kind: Any, encoder: Any, options: Any, codec: Any, strides: Any, shape: Any, itemsize: Any, samples: Any,
    encoded: Any, descriptor: Any,
) -> Any:  # fmt: skip
    """Encode a chunk and write it. Returns whether that is done."""
    source, nbytes = row[PART], row[LENGTH]
    if kind != ENCODED:
        nbytes, extents = len(samples), row[EXTENTS:]
        is_whole, is_packed, size = True, True, itemsize
        for axis in range(len(shape) - 1, -1, -1):
            is_whole = is_whole and extents[axis] == shape[axis]
            is_packed = is_packed and strides[0, axis] == size
            size *= shape[axis]
        if kind == RAW and is_whole and strides[0, -1] == itemsize:
            return _in_runs(descriptor, source, strides[0], extents, itemsize, True)
        if not (is_whole and is_packed):
            if not is_whole:
                samples[:] = 0
            copy_items(samples.ctypes.data + row[INSIDE], strides[1], source, strides[0], extents, itemsize)
            source = samples.ctypes.data
        if kind == BLOSC:
            level, shuffle, block_bytes = options[0], options[1], options[2]
            given = level, shuffle, itemsize, nbytes, source, encoded.ctypes.data, len(encoded), codec.ctypes.data
            nbytes = np.int64(np.int32(call(encoder, (*given, block_bytes, 1))))
            source = encoded.ctypes.data
            if nbytes <= 0:
                return False
    return pwrite(descriptor, source, nbytes, 0) == nbytes


@compiled
def write_chunks(
    next_row: Table, table: Table, ends: NDArray[np.int8], names: Memory, folder: int, begun: int, temporary: Memory,
    kind: int, encoder: int, options: Table, codec: Memory, strides: Table, shape: Table, itemsize: int,
    samples: Memory, encoded: Memory,
) -> None:  # fmt: skip
    """Write files of one chunk each, until the table has no further row: each is old or new, never partial.

    folder    : below which the files' folders, PARENT, must exist; no link is followed
    begun     : the folder of unfinished files; `temporary`: a name there, of this thread, until a file is whole
    options   : level, shuffle and bytes of a block of Blosc, 0: its own choice; `codec`: its name, which ends with 0
    The others are as `read_chunks` has them; of ENCODED chunks, PART and LENGTH are the bytes. What a chunk has beyond
    its part is zero.
    """
    parent, known = np.int64(-1), np.int64(-1)
    while True:
        number = take(next_row.ctypes.data)
        if number >= len(table):
            break
        row = table[number]
        if row[PARENT] != known:
            if parent >= 0:
                _close(parent)
            known = row[PARENT]
            parent = _open(folder, names.ctypes.data + known, _FOLDER, 0, NO_LINKS)
        if parent < 0:
            continue
        descriptor = _open(begun, temporary.ctypes.data, _CREATE, 0o666, NO_LINKS)
        if descriptor < 0:
            continue
        is_done = _write_file(
            row, kind, encoder, options, codec, strides, shape, itemsize, samples, encoded, descriptor
        )
        is_done = _close(descriptor) == 0 and is_done
        if is_done and _renameat(begun, temporary.ctypes.data, parent, names.ctypes.data + row[NAME]) == 0:
            ends[number] = DONE
    if parent >= 0:
        _close(parent)


# Whole files: small ones of one kind. Columns of a table with a row for each: offsets of its name and its result's in
# `names`, its folder by number, and its bytes and the time of its last change.
SOURCE, RESULT, HOME, NBYTES, MTIME = range(5)


@compiled
def match_files(
    next_row: Table, files: Table, ends: NDArray[np.int8], names: Memory, folders: Table, resolve: int, before: Memory,
    nbytes: int, after: Memory,
) -> None:  # fmt: skip
    """Look at files, until the table has no further row. `ends`: DONE for those with the same bytes before and after
    `nbytes` of others; NBYTES and MTIME become those of every file that opens.

    folders : descriptors, by number
    """
    found = np.empty(max(len(before), len(after)), np.uint8)
    while True:
        number = take(next_row.ctypes.data)
        if number >= len(files):
            return
        row = files[number]
        descriptor = _open(folders[row[HOME]], names.ctypes.data + row[SOURCE], _READ, 0, resolve)
        if descriptor < 0:
            continue
        row[NBYTES], row[MTIME] = _version(descriptor)
        if row[NBYTES] == len(before) + nbytes + len(after):
            is_same = True
            for part, offset in ((before, 0), (after, len(before) + nbytes)):
                if len(part):
                    is_same = is_same and pread(descriptor, found.ctypes.data, len(part), offset) == len(part)
                    is_same = is_same and _memcmp(found.ctypes.data, part.ctypes.data, len(part)) == 0
            if is_same:
                ends[number] = DONE
        _close(descriptor)


@compiled
def read_files(
    files: Table, ends: NDArray[np.int8], names: Memory, folders: Table, resolve: int, offset: int, target: int,
    nbytes: int,
) -> None:  # fmt: skip
    """Read `nbytes` from `offset` of each file, one after the other to the address `target`. `ends`: DONE for files
    that have not changed since they were listed."""
    for number in range(len(files)):
        row = files[number]
        descriptor = _open(folders[row[HOME]], names.ctypes.data + row[SOURCE], _READ, 0, resolve)
        if descriptor < 0:
            continue
        is_read = pread(descriptor, target + number * nbytes, nbytes, offset) == nbytes
        size, time = _version(descriptor)  # afterwards: what was written meanwhile shows
        if is_read and size == row[NBYTES] and time == row[MTIME]:
            ends[number] = DONE
        _close(descriptor)


@compiled
def write_files(
    files: Table, ends: NDArray[np.int8], names: Memory, folder: int, head: Memory, source: int, nbytes: int
) -> None:
    """Write results into an open folder: `head`, then `nbytes` each, one after the other from the address `source`."""
    pieces = np.empty((2, 2), np.int64)
    pieces[0, 0], pieces[0, 1], pieces[1, 1] = head.ctypes.data, len(head), nbytes
    for number in range(len(files)):
        descriptor = _open(folder, names.ctypes.data + files[number, RESULT], _CREATE, 0o666, 0)
        if descriptor < 0:
            continue
        pieces[1, 0] = source + number * nbytes
        is_done = _pwritev(descriptor, pieces.ctypes.data, 2, 0) == len(head) + nbytes
        if _close(descriptor) == 0 and is_done:
            ends[number] = DONE


@compiled
def move_files(files: Table, ends: NDArray[np.int8], names: Memory, source: int, target: int) -> None:
    """Move results from one open folder to another."""
    for number in range(len(files)):
        name = names.ctypes.data + files[number, RESULT]
        if _renameat(source, name, target, name) == 0:
            ends[number] = DONE
