"""Many small files, compared, read, written and renamed by the loops of `pipeline.codecs.loops.whole_files`, hundreds
in one call. A loop skips files with any error; the caller's slower way names it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.parallel import for_each, threads_for
from pipeline.storage.confinement import in_its_folder, is_confined

# Of fewer files, loading the loops takes longer than they save: alone, or where Numba is loaded.
FEW, FEW_WITH_NUMBA = 1000, 100
_LOOPS = "pipeline.codecs.loops.whole_files"

Numbers = NDArray[np.int64]


def loops_for(count: int) -> ModuleType | None:
    """The loops, if they are loaded, or worth loading for so many files."""
    is_worth_it = count >= (FEW_WITH_NUMBA if "numba" in sys.modules else FEW) or (count and _LOOPS in sys.modules)
    return import_module(_LOOPS) if is_worth_it else None


def prepare(count: int) -> Callable[[], None]:
    """Begin to load the loops in a thread, if so many files will use them: meanwhile a GPU starts. Returns a function
    that waits until they are loaded."""
    if count < FEW or _LOOPS in sys.modules:
        return lambda: None
    thread = threading.Thread(target=_load, name="load-file-loops")
    thread.start()
    return thread.join


def _load() -> None:
    loops = import_module(_LOOPS)
    # The first call takes longest.
    loops.move_files(np.zeros((0, 5), np.int64), np.zeros(0, np.int8), np.zeros(1, np.uint8), 0, 0)


class WholeFiles:
    """Files by their absolute paths, and the names of their results in one folder."""

    def __init__(self, loops: ModuleType, paths: Sequence[str], results: Sequence[str]) -> None:
        self._loops = loops
        parts = [path.rpartition("/") for path in paths]
        homes = {home: number for number, home in enumerate(dict.fromkeys(home for home, _, _ in parts))}
        self._homes = [home or "/" for home in homes]
        self._resolve = loops.NO_LINKS if any(is_confined(Path(home, "_")) for home in self._homes) else 0
        names = os.fsencode("\0".join((*(name for _, _, name in parts), *results, "")))
        self._names = np.frombuffer(names, np.uint8)
        starts = [0, *accumulate(len(name) + 1 for name in names.split(b"\0")[:-2])]
        self.rows: Numbers = np.zeros((len(paths), 5), np.int64)
        self.rows[:, loops.SOURCE], self.rows[:, loops.RESULT] = np.array(starts, np.int64).reshape(2, -1)
        self.rows[:, loops.HOME] = [homes[home] for home, _, _ in parts]

    def expect(self, versions: Sequence[tuple[int, int]]) -> None:
        """The bytes of each file, and the time of its last change."""
        self.rows[:, [self._loops.NBYTES, self._loops.MTIME]] = versions

    def versions(self, numbers: Numbers) -> list[tuple[int, int]]:
        """As `expect`, of files that were looked at."""
        return [(size, time) for size, time in self.rows[numbers][:, [self._loops.NBYTES, self._loops.MTIME]].tolist()]

    def match(self, numbers: Numbers, before: bytes, nbytes: int, after: bytes) -> NDArray[np.bool_]:
        """Look at files, in several threads. Returns which have these bytes before and after `nbytes` of others."""
        loops, rows, ends = self._loops, self.rows[numbers], np.zeros(len(numbers), np.int8)
        beside, next_row = [np.array(bytearray(part), np.uint8) for part in (before, after)], np.zeros(1, np.int64)

        def share(_: int) -> None:
            loops.match_files(
                next_row, rows, ends, self._names, folders, self._resolve, beside[0], nbytes, beside[1]
            )  # fmt: skip

        with self._opened(rows) as folders:
            for_each(share, range(threads_for(-(-len(numbers) // 64), 0)))
        self.rows[numbers] = rows
        is_alike: NDArray[np.bool_] = ends == loops.DONE
        return is_alike

    def read(self, rows: slice, offset: int, target: NDArray[Any]) -> list[int]:
        """Fill `target`, an array for each file, with the bytes from `offset`. Returns the places of those left."""
        loops, chosen, ends = self._loops, self.rows[rows], np.zeros(len(target), np.int8)
        with self._opened(chosen) as folders:
            loops.read_files(
                chosen, ends, self._names, folders, self._resolve, offset, target.ctypes.data, target[0].nbytes
            )
        return self._left(ends)

    def write(self, rows: slice, folder: int, head: bytes, source: NDArray[Any]) -> list[int]:
        """Write results into an open folder: the head, and an array of `source` each. Returns the places left."""
        ends, before = np.zeros(len(source), np.int8), np.array(bytearray(head), np.uint8)
        self._loops.write_files(
            self.rows[rows], ends, self._names, folder, before, source.ctypes.data, source[0].nbytes
        )
        return self._left(ends)

    def move(self, numbers: Numbers, source: int, target: int) -> list[int]:
        """Move results from one open folder to another. Returns the numbers of those left."""
        ends = np.zeros(len(numbers), np.int8)
        self._loops.move_files(self.rows[numbers], ends, self._names, source, target)
        left: list[int] = numbers[self._left(ends)].tolist()
        return left

    def _left(self, ends: NDArray[np.int8]) -> list[int]:
        left: list[int] = np.flatnonzero(ends != self._loops.DONE).tolist()
        return left

    @contextmanager
    def _opened(self, rows: Numbers) -> Iterator[Numbers]:
        """Descriptors of the folders of these rows, by number; -1 where one does not open."""
        folders = np.full(len(self._homes), -1, np.int64)
        try:
            for number in np.unique(rows[:, self._loops.HOME]).tolist():
                with suppress(OSError), in_its_folder(Path(self._homes[number], "_")) as here:
                    folders[number] = os.open(here.parent, os.O_PATH | os.O_DIRECTORY)
            yield folders
        finally:
            for descriptor in folders[folders >= 0].tolist():
                os.close(descriptor)
