"""Chunks that are files of their own or lie in shards, read and decoded or encoded and written by machine code.

The loops handle the usual case. A chunk that gives an error, or whose file they do not understand, is left to the
caller, whose slower way names the fault.

Source: c-blosc 1.21, blosc.h and README_CHUNK_FORMAT.rst.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from kernels.runtime.compiled import compiled
from pipeline.codecs.chunk_codec import BLOSC, ENCODED, RAW
from pipeline.codecs.loops.system import (
    CREATE,
    DONE,
    ENOENT,
    FOLDER,
    LEFT,
    NO_LINKS,
    READ,
    Memory,
    Table,
    call,
    close,
    copy_items,
    in_runs,
    is_link,
    load_int32,
    memcpy,
    memset,
    open_at,
    pread,
    pwrite,
    renameat,
    size_of,
    stack,
    store_int64,
    take,
)
from pipeline.codecs.loops.threads import OF_ENCODED, OF_SAMPLES, entry_of, room, share
from pipeline.codecs.parallel import for_each

NONE, FAULT, WHOLE = -1, -2, -3  # in place of a descriptor, or of a chunk's bytes

# Columns of a table with a row for each chunk. NAME, PARENT: offsets in `names`. MEMORY: of the decoded chunk, 0 to use
# the thread's; HELD: whether it holds the chunk. PART: the address of the part of the region's array, or of LENGTH
# encoded bytes; INSIDE: the byte of the chunk where the part begins; then the part's extents. OFFSET, LENGTH: of the
# chunk in its file; to read, LENGTH is WHOLE if the chunk is the file, NONE if it is not stored. To write, MEMORY is
# where the chunk is encoded, 0: in a file; LENGTH becomes its bytes.
NAME, PARENT, OFFSET, LENGTH, MEMORY, HELD, PART, INSIDE, EXTENTS = range(9)

_SHARES, _SHARED_BYTES = 4, 4 << 20  # of a region's bytes that threads read together
_NAME_BYTES = 256  # of an unfinished file
_HEADER_BYTES, _BLOSC_VERSION, _BLOSC_STORED = 16, 2, 2


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
def is_sound(chunk: int, size: int, nbytes: int) -> Any:
    """Whether the header of a Blosc chunk at an address declares its length and these decoded bytes, and its table of
    blocks lies within the chunk: the decoder trusts them."""
    if size < _HEADER_BYTES:
        return False
    first = load_int32(chunk)  # version, version of the codec, flags, bytes of an item
    if first & 0xFF != _BLOSC_VERSION or (first >> 24) & 0xFF == 0:
        return False
    decoded, block = np.int64(np.uint32(load_int32(chunk + 4))), np.int64(np.uint32(load_int32(chunk + 8)))
    if np.int64(np.uint32(load_int32(chunk + 12))) != size or decoded != nbytes:
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
        start = load_int32(chunk + place)
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
    row: Any, names: Any, folder: Any, descriptor: Any, kind: Any, decoder: Any, strides: Any, shape: Any, item: Any,
    samples: Any, encoded: Any,
) -> Any:  # fmt: skip
    """Read and decode one chunk, and copy its part. `descriptor`: of its file, or an error; `samples`, `encoded`:
    memory of the thread."""
    itemsize, extents, nbytes, memory = len(item), row[EXTENTS:], len(samples), row[MEMORY]
    if memory == 0:
        memory = samples.ctypes.data
    if row[HELD] == 0:
        offset, length = row[OFFSET], row[LENGTH]
        if length == NONE or descriptor == -ENOENT:
            if length != NONE and is_link(folder, names.ctypes.data + row[NAME]):
                return LEFT  # a broken link is no missing chunk
            _fill(memory, nbytes, item)
        elif descriptor < 0:
            return LEFT
        else:
            is_placed = False
            if length == WHOLE:
                length = size_of(descriptor)
            if kind == RAW:
                is_done = length == nbytes
                is_whole = row[MEMORY] == 0 and strides[0, -1] == itemsize
                for axis in range(len(shape)):
                    is_whole = is_whole and extents[axis] == shape[axis]
                if is_done and is_whole:
                    is_done = in_runs(descriptor, offset, row[PART], strides[0], extents, itemsize, False)
                    is_placed = True
                elif is_done:
                    first, last = 0, nbytes
                    if row[MEMORY] == 0:  # what lies before and after the part is not needed
                        first = row[INSIDE] // strides[1, 0] * strides[1, 0]
                        last = first + extents[0] * strides[1, 0]
                    is_done = pread(descriptor, memory + first, last - first, offset + first) == last - first
            else:
                is_done = 0 <= length <= len(encoded)
                is_done = is_done and pread(descriptor, encoded.ctypes.data, length, offset) == length
                is_done = is_done and is_sound(encoded.ctypes.data, length, nbytes)
                is_done = is_done and np.int32(call(decoder, (encoded.ctypes.data, memory, nbytes, 1))) == nbytes
            if is_placed or not is_done:
                return DONE if is_done else LEFT
    copy_items(row[PART], strides[0], memory + row[INSIDE], strides[1], extents, itemsize)
    return DONE


@compiled
def _read_chunks(
    memory: Any, next_row: Any, table: Any, ends: Any, names: Any, folder: Any, resolve: Any, kind: Any, decoder: Any,
    strides: Any, shape: Any, item: Any, shared: Any,
) -> None:  # fmt: skip
    """Read and decode chunks, and copy a part of each to the region's array, until the table has no further row.

    memory   : of the thread, see `room`: for a decoded and an encoded chunk
    next_row : (1,), of all threads
    ends     : becomes DONE for each chunk that is done
    names    : bytes
    resolve  : of openat2: NO_LINKS, or 0
    kind     : RAW or BLOSC; `decoder`: see `blosc_functions`
    strides  : (2, axes) in bytes: of the region's array and of a chunk; `shape`: of a chunk
    item     : the bytes of the fill value
    shared   : see `in_threads`
    """
    samples, encoded = room(memory, shared, OF_SAMPLES), room(memory, shared, OF_ENCODED)
    known, descriptor = np.int64(-1), np.int64(-1)  # of a shard, several chunks are read
    while True:
        number = take(next_row.ctypes.data)
        if number >= len(table):
            break
        row = table[number]
        if row[HELD] == 0 and row[LENGTH] != NONE and row[NAME] != known:
            if descriptor >= 0:
                close(descriptor)
            known = row[NAME]
            descriptor = open_at(folder, names.ctypes.data + known, READ, 0, resolve)
        ends[number] = _read_chunk(
            row, names, folder, descriptor, kind, decoder, strides, shape, item, samples, encoded
        )
    if descriptor >= 0:
        close(descriptor)


_reading = entry_of(_read_chunks)


@compiled
def read_chunks(given: tuple[Any, ...]) -> None:
    """`_read_chunks` in several threads; `given`: from `next_row` on."""
    share(_reading(given), given[-1], given[0], len(given[1]))


@compiled
def open_files(files: Table, heads: Memory, names: Memory, name_at: Table, folder: int, resolve: int) -> None:
    """Open files, and read how each begins.

    files : (files, 2): becomes a descriptor, NONE if there is no such file or FAULT, and the file's bytes
    heads : (files, bytes)
    """
    for number in range(len(files)):
        name = names.ctypes.data + name_at[number]
        descriptor = open_at(folder, name, READ, 0, resolve)
        files[number, 0] = descriptor
        if descriptor < 0:
            files[number, 0] = NONE if descriptor == -ENOENT and not is_link(folder, name) else FAULT
            continue
        files[number, 1] = size_of(descriptor)
        some = min(files[number, 1], heads.shape[1])
        if some < 0 or pread(descriptor, heads[number].ctypes.data, some, 0) != some:
            close(descriptor)
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
            close(files[number, 0])


@compiled
def _write_file(
    row: Any, kind: Any, encoder: Any, options: Any, codec: Any, strides: Any, shape: Any, itemsize: Any, samples: Any,
    encoded: Any, descriptor: Any,
) -> Any:  # fmt: skip
    """Encode a chunk, and write it unless it is for memory. Returns whether that is done."""
    source, nbytes, target = row[PART], row[LENGTH], row[MEMORY]
    if kind != ENCODED:
        nbytes, extents = len(samples), row[EXTENTS:]
        row[LENGTH] = nbytes
        is_whole, is_packed, size = True, True, itemsize
        for axis in range(len(shape) - 1, -1, -1):
            is_whole = is_whole and extents[axis] == shape[axis]
            is_packed = is_packed and strides[0, axis] == size
            size *= shape[axis]
        if kind == RAW and is_whole and strides[0, -1] == itemsize:
            return in_runs(descriptor, row[OFFSET], source, strides[0], extents, itemsize, True)
        if not (is_whole and is_packed):
            if not is_whole:
                memset(samples.ctypes.data, 0, len(samples))
            copy_items(samples.ctypes.data + row[INSIDE], strides[1], source, strides[0], extents, itemsize)
            source = samples.ctypes.data
        if kind == BLOSC:
            if target == 0:
                target = encoded.ctypes.data
            level, shuffle, block_bytes = options[0], options[1], options[2]
            most = nbytes + _HEADER_BYTES  # data that do not shrink are stored as they are
            given = level, shuffle, itemsize, nbytes, source, target, most, codec.ctypes.data
            nbytes = np.int64(np.int32(call(encoder, (*given, block_bytes, 1))))
            source = target
            if nbytes <= 0:
                return False
            row[LENGTH] = nbytes
    if row[MEMORY]:
        return True
    return pwrite(descriptor, source, nbytes, row[OFFSET]) == nbytes


@compiled
def _digits(number: Any) -> Any:
    """Eight letters for a number, as the bytes of an integer."""
    found = np.int64(0)
    for place in range(8):
        found |= (97 + (number >> (4 * place) & 15)) << (8 * place)
    return found


@compiled
def _write_chunks(
    memory: Any, next_row: Any, table: Any, ends: Any, names: Any, folder: Any, begun: Any, temporary: Any, kind: Any,
    encoder: Any, options: Any, codec: Any, strides: Any, shape: Any, itemsize: Any, shared: Any,
) -> None:  # fmt: skip
    """Write files of one chunk each, until the table has no further row: each is old or new, never partial. Or encode
    chunks in memory, or write them to an open file.

    folder    : below which the files' folders, PARENT, must exist; no link is followed
    begun     : the folder of unfinished files; NONE: `folder` is the open file, or chunks go to memory
    temporary : how names there begin, without a zero, of this call alone
    options   : level, shuffle and bytes of a block of Blosc, 0: its own choice; `codec`: its name, which ends with 0
    The others are as `_read_chunks` has them; of ENCODED chunks, PART and LENGTH are the bytes. What a chunk has beyond
    its part is zero.
    """
    samples, encoded = room(memory, shared, OF_SAMPLES), room(memory, shared, OF_ENCODED)
    unfinished, first, parent, known = stack(_NAME_BYTES), True, np.int64(-1), np.int64(-1)
    is_file = begun >= 0
    while True:
        number = take(next_row.ctypes.data)
        if number >= len(table):
            break
        row, descriptor = table[number], np.int64(folder)
        if first and is_file:  # a name of this thread: that of its first chunk
            first = False
            memcpy(unfinished, temporary.ctypes.data, len(temporary))
            store_int64(unfinished + len(temporary), _digits(number))
            store_int64(unfinished + len(temporary) + 8, 0)
        if is_file and row[PARENT] != known:
            if parent >= 0:
                close(parent)
            known = row[PARENT]
            parent = open_at(folder, names.ctypes.data + known, FOLDER, 0, NO_LINKS)
        if is_file:
            if parent < 0:
                continue
            descriptor = open_at(begun, unfinished, CREATE, 0o666, NO_LINKS)
            if descriptor < 0:
                continue
        is_done = _write_file(
            row, kind, encoder, options, codec, strides, shape, itemsize, samples, encoded, descriptor
        )
        if is_file:
            is_done = close(descriptor) == 0 and is_done
            is_done = is_done and renameat(begun, unfinished, parent, names.ctypes.data + row[NAME]) == 0
        if is_done:
            ends[number] = DONE
    if parent >= 0:
        close(parent)


_writing = entry_of(_write_chunks)


@compiled
def write_chunks(given: tuple[Any, ...]) -> None:
    """`_write_chunks` in several threads; `given`: from `next_row` on."""
    share(_writing(given), given[-1], given[0], len(given[1]))
