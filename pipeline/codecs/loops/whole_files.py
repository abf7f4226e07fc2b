"""Whole files: small ones of one kind, hundreds in one call. A loop skips those that give an error."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.compiled import compiled
from pipeline.codecs.loops.system import (
    CREATE,
    DONE,
    NO_LINKS,
    READ,
    Memory,
    Table,
    close,
    memcmp,
    open_at,
    pread,
    pwritev,
    renameat,
    stack,
    store_int64,
    take,
    version_of,
)

__all__ = ["DONE", "NO_LINKS"]  # besides the loops

# Columns of a table with a row for each file: offsets of its name and its result's in `names`, its folder by number,
# and its bytes and the time of its last change.
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
        descriptor = open_at(folders[row[HOME]], names.ctypes.data + row[SOURCE], READ, 0, resolve)
        if descriptor < 0:
            continue
        row[NBYTES], row[MTIME] = version_of(descriptor)
        if row[NBYTES] == len(before) + nbytes + len(after):
            is_same = True
            for part, offset in ((before, 0), (after, len(before) + nbytes)):
                if len(part):
                    is_same = is_same and pread(descriptor, found.ctypes.data, len(part), offset) == len(part)
                    is_same = is_same and memcmp(found.ctypes.data, part.ctypes.data, len(part)) == 0
            if is_same:
                ends[number] = DONE
        close(descriptor)


@compiled
def read_files(
    files: Table, ends: NDArray[np.int8], names: Memory, folders: Table, resolve: int, offset: int, target: int,
    nbytes: int,
) -> None:  # fmt: skip
    """Read `nbytes` from `offset` of each file, one after the other to the address `target`. `ends`: DONE for files
    that have not changed since they were listed."""
    for number in range(len(files)):
        row = files[number]
        descriptor = open_at(folders[row[HOME]], names.ctypes.data + row[SOURCE], READ, 0, resolve)
        if descriptor < 0:
            continue
        is_read = pread(descriptor, target + number * nbytes, nbytes, offset) == nbytes
        size, time = version_of(descriptor)  # afterwards: what was written meanwhile shows
        if is_read and size == row[NBYTES] and time == row[MTIME]:
            ends[number] = DONE
        close(descriptor)


@compiled
def write_files(
    files: Table, ends: NDArray[np.int8], names: Memory, folder: int, head: Memory, source: int, nbytes: int
) -> None:
    """Write results into an open folder: `head`, then `nbytes` each, one after the other from the address `source`."""
    pieces = stack(32)
    store_int64(pieces, head.ctypes.data)
    store_int64(pieces + 8, len(head))
    store_int64(pieces + 24, nbytes)
    for number in range(len(files)):
        descriptor = open_at(folder, names.ctypes.data + files[number, RESULT], CREATE, 0o666, 0)
        if descriptor < 0:
            continue
        store_int64(pieces + 16, source + number * nbytes)
        is_done = pwritev(descriptor, pieces, 2, 0) == len(head) + nbytes
        if close(descriptor) == 0 and is_done:
            ends[number] = DONE


@compiled
def move_files(files: Table, ends: NDArray[np.int8], names: Memory, source: int, target: int) -> None:
    """Move results from one open folder to another."""
    for number in range(len(files)):
        name = names.ctypes.data + files[number, RESULT]
        if renameat(source, name, target, name) == 0:
            ends[number] = DONE
