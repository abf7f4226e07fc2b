"""Strips and tiles of one file, read and decoded or encoded and written by machine code: a thread's share is one call,
which never holds the interpreter's lock.

A block that gives an error is left to the caller, whose slower way names the fault. No decoder writes past the size
that the file's tags declare.

Sources: TIFF 6.0, section 14 (predictor 2); TIFF Technical Note 3 (predictor 3); libdeflate.h; zstd.h.
"""

from __future__ import annotations

import ctypes
import functools
from importlib import import_module
from typing import Any

import numpy as np

from kernels.runtime.compiled import carray, compiled, intrinsic, ir, types
from pipeline.codecs.loops.system import (
    DONE,
    LEFT,
    Table,
    call,
    copy_items,
    memcpy,
    memset,
    pointer,
    pread,
    pwrite,
    stack,
    store_int64,
    take,
)
from pipeline.codecs.loops.threads import OF_ENCODED, OF_PREDICTED, OF_SAMPLES, entry_of, room, share

# Columns of a table with a row for each block. OFFSET: in the file, or the address of the encoded bytes; HEIGHT: rows
# of pixels that are encoded; MEMORY: of the decoded block, 0 to use the thread's; HELD: whether it holds the block;
# PART: the address of the part of the region's array; INSIDE: the byte of the block where the part begins. Of blocks to
# write, OFFSET and LENGTH are where in the file their encoded bytes and the int64 number of these belong.
OFFSET, LENGTH, HEIGHT, MEMORY, HELD, PART, INSIDE, EXTENTS = range(8)
# Of a block, see `read_tiles`.
WIDTH, SAMPLES, ITEMSIZE, PREDICTOR, SWAPPED = range(5)
NO_PREDICTOR, OF_INTEGERS, OF_FLOATS = 1, 2, 3
# Of a codec: its scheme, the addresses of functions that decode or encode, and that make and free what they need for
# it, and the level of encoding.
_SCHEME, _CALL, _NEW, _FREE, _LEVEL = range(5)
_SCHEMES = _RAW, _DEFLATE, _ZSTD, _LZW, _PACKBITS = range(5)
_DECODERS = {
    "deflate": (_DEFLATE, "_deflate", "libdeflate_", ("zlib_decompress", "alloc_decompressor", "free_decompressor")),
    "Zstandard": (_ZSTD, "_zstd", "ZSTD_", ("decompressDCtx", "createDCtx", "freeDCtx")),
    "LZW": (_LZW, "_imcd", "imcd_", ("lzw_decode", "lzw_new", "lzw_del")),
    "PackBits": (_PACKBITS, "_imcd", "imcd_", ("packbits_decode",)),
}


_ENCODERS = {
    "deflate": (_DEFLATE, "_deflate", "libdeflate_", ("zlib_compress", "alloc_compressor", "free_compressor")),
    "zstd": (_ZSTD, "_zstd", "ZSTD_", ("compressCCtx", "createCCtx", "freeCCtx")),
    "lzw": (_LZW, "_imcd", "imcd_", ("lzw_encode",)),
}


def decoder(name: str) -> Table | None:
    """A codec for `read_tiles`, in imagecodecs' libraries; None if they lack it. "none": uncompressed."""
    return np.zeros(5, np.int64) if name == "none" else _codec(*_DECODERS[name])


def encoder(name: str, level: int | None) -> Table | None:
    """A codec for `write_tiles`, as `decoder`."""
    if name == "none":
        return np.zeros(5, np.int64)
    found = _codec(*_ENCODERS[name])
    return None if found is None else np.append(found[:_LEVEL], level or 0)


@functools.cache
def _codec(scheme: int, module: str, prefix: str, functions: tuple[str, ...]) -> Table | None:
    found = np.zeros(5, np.int64)
    # The module is loaded; its own libraries are searched too.
    library = ctypes.CDLL(import_module(f"imagecodecs.{module}").__file__)
    found[_SCHEME] = scheme
    try:
        for column, function in enumerate(functions, _CALL):
            found[column] = ctypes.cast(library[prefix + function], ctypes.c_void_p).value or 0
    except AttributeError:
        return None
    return found


@intrinsic
def _swapped(context: Any, number: Any) -> Any:
    """The number with its bytes in reverse order."""

    def generate(_: Any, builder: Any, __: Any, given: Any) -> Any:
        return given[0] if number.bitwidth == 8 else builder.bswap(given[0])

    return number(number), generate


@intrinsic
def _add_up_lanes(context: Any, samples: Any, address: Any, total: Any) -> Any:
    """Add up 16 bytes of samples from `total` on, as a vector: of 2, 4 … neighbours. Returns the last sum, of which the
    bits of a sample count. It waits for the total alone, so that vectors are summed up at the same time."""
    bits = samples.dtype.bitwidth
    lanes, number, word, place = 128 // bits, ir.IntType(bits), ir.IntType(64), ir.IntType(32)
    vector, places = ir.VectorType(number, lanes), ir.VectorType(place, lanes)

    def generate(_: Any, builder: Any, __: Any, given: Any) -> Any:
        zeros, at = ir.Constant(vector, None), builder.inttoptr(given[1], vector.as_pointer())
        sums, step = builder.load(at, align=bits // 8), 1
        while step < lanes:
            shifted = [lanes + lane - step if lane >= step else 0 for lane in range(lanes)]
            sums, step = builder.add(sums, builder.shuffle_vector(zeros, sums, places(shifted))), 2 * step
        last = builder.extract_element(sums, place(lanes - 1))
        first = given[2] if bits == 64 else builder.trunc(given[2], number)
        first = builder.shuffle_vector(builder.insert_element(zeros, first, place(0)), zeros, places([0] * lanes))
        builder.store(builder.add(sums, first), at, align=bits // 8)
        return builder.add(given[2], last if bits == 64 else builder.zext(last, word))

    return types.uint64(samples, types.int64, types.uint64), generate


@compiled
def _add_up(samples: Any, width: Any, step: Any) -> None:
    """Undo differences between samples a `step` apart in rows of `width`."""
    itemsize, lanes = samples.itemsize, 16 // samples.itemsize
    for row in range(0, len(samples), width):
        if step == 1:
            total, number = np.uint64(0), row
            while number + lanes <= row + width:
                total = _add_up_lanes(samples, samples.ctypes.data + number * itemsize, total)
                number += lanes
            while number < row + width:
                total = np.uint64(total + samples[number])
                samples[number] = total
                number += 1
        else:
            for number in range(row + step, row + width):
                samples[number] += samples[number - step]


@compiled
def _restore_integers(samples: Any, form: Any) -> None:
    if form[SWAPPED]:
        for number in range(len(samples)):
            samples[number] = _swapped(samples[number])
    if form[PREDICTOR] == OF_INTEGERS:
        _add_up(samples, form[WIDTH] * form[SAMPLES], form[SAMPLES])


@compiled
def _join(planes: Any, data: Any, width: Any, step: Any, itemsize: Any) -> None:
    """Undo the predictor of floats: of a row, the samples' highest bytes come first, then the next, as differences."""
    _add_up(planes, width * itemsize, step)
    for row in range(0, len(data), width * itemsize):
        for byte in range(itemsize):
            at = row + byte * width
            for number in range(width):
                data[row + number * itemsize + itemsize - 1 - byte] = planes[at + number]


@compiled
def _restore(address: Any, nbytes: Any, planes: Any, form: Any) -> None:
    """Decoded bytes into samples in native order. `planes`: the bytes before the predictor of floats."""
    itemsize = form[ITEMSIZE]
    at, count = pointer(address), nbytes // itemsize
    if form[PREDICTOR] == OF_FLOATS:
        _join(planes[:nbytes], carray(at, (nbytes,), np.uint8), form[WIDTH] * form[SAMPLES], form[SAMPLES], itemsize)
    elif form[PREDICTOR] != OF_INTEGERS and not form[SWAPPED]:
        return
    elif itemsize == 1:
        _restore_integers(carray(at, (count,), np.uint8), form)
    elif itemsize == 2:
        _restore_integers(carray(at, (count,), np.uint16), form)
    elif itemsize == 4:
        _restore_integers(carray(at, (count,), np.uint32), form)
    else:
        _restore_integers(carray(at, (count,), np.uint64), form)


@compiled
def _decoded(codec: Any, state: Any, source: Any, length: Any, target: Any, nbytes: Any) -> Any:
    """Decode exactly `nbytes`; returns whether they were there."""
    if length == 0:
        return False
    if codec[_SCHEME] == _DEFLATE:
        # Without a place for the number of bytes, another number is an error.
        return np.int32(call(codec[_CALL], (state, source, length, target, nbytes, 0))) == 0
    if codec[_SCHEME] == _ZSTD:
        return call(codec[_CALL], (state, target, nbytes, source, length)) == nbytes
    if codec[_SCHEME] == _LZW:
        return call(codec[_CALL], (state, source, length, target, nbytes)) == nbytes
    return call(codec[_CALL], (source, length, target, nbytes, 1)) == nbytes  # 1: between bytes of the target


@compiled
def _read_tile(
    row: Any, descriptor: Any, codec: Any, state: Any, form: Any, strides: Any, samples: Any, planes: Any, encoded: Any
) -> Any:
    row_bytes, extents, memory = strides[1, 0], row[EXTENTS:], row[MEMORY]
    if memory == 0:
        memory = samples.ctypes.data
    nbytes = row[HEIGHT] * row_bytes
    if not row[HELD]:
        first, last = 0, nbytes
        if codec[_SCHEME] == _RAW:
            first = row[INSIDE] // row_bytes * row_bytes
            last = first + extents[0] * row_bytes
            is_done = pread(descriptor, memory + first, last - first, row[OFFSET] + first) == last - first
        else:
            source, is_done = row[OFFSET], True
            if descriptor >= 0:
                source = encoded.ctypes.data
                is_done = pread(descriptor, source, row[LENGTH], row[OFFSET]) == row[LENGTH]
            target = planes.ctypes.data if form[PREDICTOR] == OF_FLOATS else memory
            is_done = is_done and _decoded(codec, state, source, row[LENGTH], target, nbytes)
        if not is_done:
            return LEFT
        _restore(memory + first, last - first, planes, form)
    copy_items(row[PART], strides[0], memory + row[INSIDE], strides[1], extents, form[ITEMSIZE])
    return DONE


@compiled
def _read_tiles(
    memory: Any, next_row: Any, table: Any, ends: Any, descriptor: Any, codec: Any, form: Any, strides: Any, shared: Any
) -> None:
    """Read and decode blocks, and copy a part of each to the region's array, until the table has no further row.

    memory     : of the thread, see `room`: for a decoded block, the longest encoded one, and a block before the
                 predictor of floats is undone
    next_row   : (1,), of all threads
    ends       : becomes DONE for each block that is done
    descriptor : of the file; -1: the encoded bytes are in memory
    codec      : see `decoder`
    form       : of a block: pixels and samples of a row, bytes of a sample, predictor, whether the bytes are swapped
    strides    : (2, 3) in bytes, along rows, columns and samples: of the region's array and of a block
    shared     : see `in_threads`
    """
    samples, planes = room(memory, shared, OF_SAMPLES), room(memory, shared, OF_PREDICTED)
    encoded, state = room(memory, shared, OF_ENCODED), np.int64(0)
    if codec[_NEW]:
        state = call(codec[_NEW], (0,))
    while state or not codec[_NEW]:
        number = take(next_row.ctypes.data)
        if number >= len(table):
            break
        ends[number] = _read_tile(table[number], descriptor, codec, state, form, strides, samples, planes, encoded)
    if state:
        call(codec[_FREE], (state,))


_reading = entry_of(_read_tiles)


@compiled
def read_tiles(given: tuple[Any, ...]) -> None:
    """`_read_tiles` in several threads; `given`: from `next_row` on."""
    share(_reading(given), given[-1], given[0], len(given[1]))


@compiled
def _predict(samples: Any, planes: Any, width: Any, step: Any) -> None:
    """Differences between samples a `step` apart in rows of `width`."""
    for row in range(0, len(samples), width):
        for number in range(row, row + step):
            planes[number] = samples[number]
        for number in range(row + step, row + width):
            planes[number] = samples[number] - samples[number - step]


@compiled
def _split(data: Any, planes: Any, width: Any, step: Any, itemsize: Any) -> None:
    """The predictor of floats, see `_join`."""
    for row in range(0, len(data), width * itemsize):
        for byte in range(itemsize):
            at = row + byte * width
            for number in range(width):
                planes[at + number] = data[row + number * itemsize + itemsize - 1 - byte]
        for number in range(row + width * itemsize - 1, row + step - 1, -1):
            planes[number] -= planes[number - step]


@compiled
def _predicted(samples: Any, planes: Any, form: Any) -> Any:
    """The bytes to encode."""
    width, step, itemsize = form[WIDTH] * form[SAMPLES], form[SAMPLES], form[ITEMSIZE]
    at, to, count = pointer(samples.ctypes.data), pointer(planes.ctypes.data), len(samples) // itemsize
    if form[PREDICTOR] == OF_FLOATS:
        _split(samples, planes, width, step, itemsize)
    elif form[PREDICTOR] != OF_INTEGERS:
        return samples
    elif itemsize == 1:
        _predict(samples, planes, width, step)
    elif itemsize == 2:
        _predict(carray(at, (count,), np.uint16), carray(to, (count,), np.uint16), width, step)
    elif itemsize == 4:
        _predict(carray(at, (count,), np.uint32), carray(to, (count,), np.uint32), width, step)
    else:
        _predict(carray(at, (count,), np.uint64), carray(to, (count,), np.uint64), width, step)
    return planes


@compiled
def _encoded(codec: Any, state: Any, source: Any, nbytes: Any, target: Any, room: Any) -> Any:
    """The number of encoded bytes; none, or fewer, if that fails."""
    if codec[_SCHEME] == _DEFLATE:
        return call(codec[_CALL], (state, source, nbytes, target, room))
    if codec[_SCHEME] == _ZSTD:
        return call(codec[_CALL], (state, target, room, source, nbytes, codec[_LEVEL]))
    return call(codec[_CALL], (source, nbytes, target, room))


@compiled
def _write(descriptor: Any, mapped: Any, offset: Any, source: Any, nbytes: Any) -> Any:
    if offset + nbytes <= len(mapped):
        memcpy(mapped.ctypes.data + offset, source, nbytes)
        return True
    return pwrite(descriptor, source, nbytes, offset) == nbytes


@compiled
def _write_tiles(
    memory: Any, next_row: Any, table: Any, ends: Any, descriptor: Any, mapped: Any, codec: Any, form: Any,
    strides: Any, shared: Any,
) -> None:  # fmt: skip
    """Encode blocks and write them, until the table has no further row; beyond their part of the region they are zero.

    mapped : the file's bytes from the start that are mapped in memory

    The others are as `_read_tiles` has them.
    """
    samples, planes = room(memory, shared, OF_SAMPLES), room(memory, shared, OF_PREDICTED)
    encoded = room(memory, shared, OF_ENCODED)
    state, length_at = np.int64(0), stack(8)
    if codec[_NEW]:
        state = call(codec[_NEW], (codec[_LEVEL],))
    while state or not codec[_NEW]:
        number = take(next_row.ctypes.data)
        if number >= len(table):
            break
        row = table[number]
        count = form[ITEMSIZE]
        for extent in row[EXTENTS:]:
            count *= extent
        if count != len(samples):
            memset(samples.ctypes.data, 0, len(samples))
        copy_items(samples.ctypes.data, strides[1], row[PART], strides[0], row[EXTENTS:], form[ITEMSIZE])
        source = _predicted(samples, planes, form)
        if codec[_SCHEME] != _RAW:
            length = _encoded(codec, state, source.ctypes.data, len(source), encoded.ctypes.data, len(encoded))
            source = encoded
        else:
            length = len(source)
        if not 0 < length <= len(source):
            continue
        store_int64(length_at, length)
        if _write(descriptor, mapped, row[OFFSET], source.ctypes.data, length):
            ends[number] = _write(descriptor, mapped, row[LENGTH], length_at, 8)
    if state:
        call(codec[_FREE], (state,))


_writing = entry_of(_write_tiles)


@compiled
def write_tiles(given: tuple[Any, ...]) -> None:
    """`_write_tiles` in several threads; `given`: from `next_row` on."""
    share(_writing(given), given[-1], given[0], len(given[1]))
