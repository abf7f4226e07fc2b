"""Runs a solver's iterations: on a GPU as one CUDA graph, whose status is read back while later iterations run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.arrays import namespace
from kernels.runtime.repeated import Captured
from kernels.runtime.threads import check_wanted
from kernels.sense.conjugate_gradient import unchanged
from kernels.sense.resumption import Resumption

# Iterations that a GPU runs ahead of the status that is looked at, so that it never waits.
LAG = 3


class Solver(Protocol):
    """step: one iteration, in place. status: float64 of the device; the last number is what the tolerance applies to.

    state    : the arrays that the next iterations depend on, by name
    restore  : continue from arrays of these names and shapes, which lie on the host
    captured : the steps may be captured in a CUDA graph, by `Captured`; None: they may not
    rests    : once the status has reached the tolerance, further steps change nothing, so the host may look later
    """

    status: Any
    captured: Captured | None
    rests: bool

    def step(self) -> None: ...

    def state(self) -> Mapping[str, Any]: ...

    def restore(self, saved: Mapping[str, NDArray[Any]]) -> None: ...


def iterate(
    solver: Solver,
    iterations: int,
    *,
    tolerance: float = 0.0,
    on_iteration: Callable[[int, NDArray[np.float64]], None] | None = None,
    agreed: Callable[[float], float] = unchanged,
    resumption: Resumption | None = None,
) -> NDArray[np.float64]:
    """The status after each iteration, (n, numbers of a status).

    tolerance    : stop once the status' last number falls to this
    on_iteration : called with the iteration's number and status
    agreed       : maps this process's last number to the one that all processes solving the problem use
    resumption   : continue from a saved state that fits, and save later ones
    """
    xp = namespace(solver.status)
    lag = LAG if xp is not np and solver.rests else 0
    step = solver.step if xp is np or solver.captured is None else solver.captured
    rows, written = _rows(xp, iterations, len(solver.status))
    coming: deque[tuple[int, Any]] = deque()
    first = done = _restored(solver, rows, resumption)
    if done and tolerance > 0 and agreed(float(rows[done - 1, -1])) <= tolerance:
        return np.array(rows[:done])

    def look() -> bool:
        nonlocal done
        number, event = coming.popleft()
        if event is not None:
            event.synchronize()
        done = number + 1
        if on_iteration is not None:
            on_iteration(done, rows[number])
        return tolerance > 0 and agreed(float(rows[number, -1])) <= tolerance

    for number in range(first, iterations):
        check_wanted()
        step()
        xp.positive(solver.status, out=written[number])  # a kernel: a copy takes 5 µs more
        event = None if xp is np else xp.cuda.get_current_stream().record(xp.cuda.Event(disable_timing=True))
        coming.append((number, event))
        save = resumption is not None and number + 1 < iterations and resumption.due()
        if any(look() for _ in range(len(coming) if save else len(coming) - lag)):
            break
        if save and resumption is not None:
            resumption.save({**solver.state(), "status_rows": rows[:done]})
    else:
        while coming and not look():
            pass
    if coming:  # the host must not reuse what is still written
        coming[-1][1].synchronize()
    return np.array(rows[:done])


def _restored(solver: Solver, rows: NDArray[np.float64], resumption: Resumption | None) -> int:
    """The number of iterations that the saved state has seen, 0 without one; fills their rows."""
    if resumption is None or not resumption.fits(solver.state()):
        return 0
    assert resumption.saved is not None, "it fits"
    found = resumption.saved.get("status_rows")
    if found is None or found.ndim != 2 or found.shape[1] != rows.shape[1] or not 0 < len(found) <= len(rows):
        return 0
    solver.restore(resumption.saved)
    rows[: len(found)] = found
    return len(found)


def _rows(xp: Any, count: int, length: int) -> tuple[NDArray[np.float64], Any]:
    """An array on the host, and the same memory for the device to write: pinned, from CuPy's pool."""
    if xp is np:
        rows = np.zeros((count, length))
        return rows, rows
    size = count * length * np.dtype(np.float64).itemsize
    memory = xp.cuda.alloc_pinned_memory(size)
    mapped = xp.cuda.MemoryPointer(xp.cuda.UnownedMemory(memory.ptr, size, memory, xp.cuda.Device().id), 0)
    rows = np.frombuffer(memory, np.float64, count * length).reshape(count, length)
    return rows, xp.ndarray((count, length), np.float64, mapped)
