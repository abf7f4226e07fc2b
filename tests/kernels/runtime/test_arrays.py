"""Arrays that may take a result, by the memory between their first and last bytes, on the host and on a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernels.runtime.arrays import check_out, check_workers


class OnDevice:
    """Like a CuPy array: not NumPy's, and with a pointer."""

    def __init__(self, array: np.ndarray) -> None:
        self.data = SimpleNamespace(ptr=array.ctypes.data)
        self.shape, self.strides, self.dtype, self.flags = array.shape, array.strides, array.dtype, array.flags
        self.size, self.nbytes = array.size, array.nbytes


MEMORY = np.zeros(100, np.float32)
KINDS = pytest.mark.parametrize("kind", [lambda array: array, OnDevice], ids=["NumPy", "like CuPy"])
# An input, and the place for a result of ten numbers.
OVERLAPS = {
    "the same": (MEMORY[20:30], MEMORY[20:30]),
    "one further": (MEMORY[20:30], MEMORY[21:31]),
    "one before": (MEMORY[20:30], MEMORY[19:29]),
    "within": (MEMORY, MEMORY[50:60]),
    "around": (MEMORY[22:24], MEMORY[20:30]),
    "backwards": (MEMORY[29:19:-1], MEMORY[20:30]),
    "the end of a backwards one": (MEMORY[39:29:-1], MEMORY[21:31]),
    "between strides": (MEMORY[::50], MEMORY[20:30]),
    "the last of strides": (MEMORY[:30:29], MEMORY[29:39]),
    "bytes": (MEMORY.view(np.uint8)[119:121], MEMORY[20:30]),
    "columns": (MEMORY.reshape(10, 10)[:, 3], MEMORY[90:100]),
}
APART = {
    "the next": (MEMORY[20:30], MEMORY[30:40]),
    "the one before": (MEMORY[20:30], MEMORY[10:20]),
    "before a backwards one": (MEMORY[39:29:-1], MEMORY[20:30]),
    "nothing": (MEMORY[25:25], MEMORY[20:30]),
    "the last column": (MEMORY.reshape(10, 10)[:9, 3], MEMORY[90:100]),
}


@KINDS
@pytest.mark.parametrize(("given", "out"), OVERLAPS.values(), ids=OVERLAPS)
def test_no_result_goes_where_an_input_lies(kind: Any, given: np.ndarray, out: np.ndarray) -> None:
    free = kind(np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="out shares memory with filters, which would be overwritten before it is"):
        check_out(kind(out), (10,), np.float32, apart_from={"images": free, "mask": None, "filters": kind(given)})


@KINDS
@pytest.mark.parametrize(("given", "out"), APART.values(), ids=APART)
def test_memory_beside_an_input_will_do(kind: Any, given: np.ndarray, out: np.ndarray) -> None:
    check_out(kind(out), (10,), np.float32, apart_from={"images": kind(given)})


@KINDS
def test_the_very_same_elements_may_be_allowed(kind: Any) -> None:
    out = MEMORY[20:30]
    check_out(kind(out), (10,), np.float32, apart_from={"values": kind(MEMORY[20:30])}, may_be="values")
    for name in ("one further", "one before", "backwards", "within", "around"):
        given, out = OVERLAPS[name]
        with pytest.raises(ValueError, match="out shares memory with values"):
            check_out(kind(out), (10,), np.float32, apart_from={"values": kind(given)}, may_be="values")
    inputs = {"values": kind(MEMORY[20:30]), "heads": kind(MEMORY[20:30])}
    with pytest.raises(ValueError, match="out shares memory with heads"):
        check_out(kind(MEMORY[20:30]), (10,), np.float32, apart_from=inputs, may_be="values")


def test_what_lies_on_the_host_is_apart_from_what_lies_on_a_device() -> None:
    out = MEMORY[20:30]
    check_out(OnDevice(out), (10,), np.float32, apart_from={"samples": OnDevice(MEMORY[:10]), "mask": out})


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (MEMORY[:9], r"out must be a C-contiguous ndarray of shape \(10,\) and dtype float32"),
        (MEMORY[:20:2], "out must be a C-contiguous ndarray"),
        (np.zeros(10), "out must be a C-contiguous ndarray"),
        (OnDevice(MEMORY[:10]), "out must be a C-contiguous ndarray"),
        ([0.0] * 10, "out must be a C-contiguous ndarray"),
        (np.frombuffer(bytes(40), np.float32), "out is read-only"),
    ],
)
def test_what_cannot_take_the_result_is_refused(out: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_out(out, (10,), np.float32, apart_from={"values": np.zeros(10, np.float32)})


def test_no_array_given_is_one_that_is_made() -> None:
    check_out(None, (10,), np.float32, apart_from={"values": MEMORY})


@pytest.mark.parametrize("workers", [None, 1, 64])
def test_numbers_of_threads(workers: int | None) -> None:
    check_workers(workers)


@pytest.mark.parametrize("workers", [0, -1, True, 1.0, "2"])
def test_no_numbers_of_threads(workers: Any) -> None:
    with pytest.raises(ValueError, match="workers must be a whole number of threads, 1 or more; got"):
        check_workers(workers)
