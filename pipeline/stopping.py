"""Ctrl-C and its kin: they unwind everything, so that nothing half-written stays, but not in the middle of a step that
makes something which is not yet known to those who would remove it, nor while a module is loaded: one in C may swallow
what is raised there, or be left half-loaded."""

from __future__ import annotations

import atexit
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# How long until a signal that came while a module was loaded is looked at again.
_AGAIN_S = 0.01


class Stopped(BaseException):
    """One of `SIGNALS` came. Its cause is the error, if any, of the step that held the signal."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)

    def __str__(self) -> str:
        error = f"; {self.__cause__}" if self.__cause__ is not None else ""
        return f"stopped by {self.signal.name}{error}"


class _State:
    """Of the main thread, which is the one that Python stops."""

    holding = 0
    waiting: int | None = None


def raise_on_signals() -> None:
    """From now on the main thread raises Stopped when the first comes; the others are ignored from then on."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or a shell's background job: leave it so
            signal.signal(number, _stop)


@contextmanager
def held() -> Iterator[None]:
    """A signal waits until the end of this, which must not take long. Other threads are not stopped anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _State.holding += 1
    try:
        yield
    except BaseException as error:
        _release(error)
        raise
    _release(None)


def _release(error: BaseException | None) -> None:
    """Raises the signal that waits, if any; an error of the held step becomes its cause."""
    _State.holding -= 1
    if not _State.holding and _State.waiting is not None:
        raise Stopped(_State.waiting) from error


def no_more() -> None:
    """The program ends anyway: from now on nothing stops it, nor does one that waits for a module to be loaded."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    # The interpreter takes its own handlers away as it ends: one more signal would kill it.
    for number in (*SIGNALS, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)


def _stop(number: int, frame: FrameType | None) -> None:
    for each in SIGNALS:
        signal.signal(each, _pass_over)
    atexit.register(no_more)
    _raise_when_it_can_be(number, frame)


def _raise_when_it_can_be(number: int, frame: FrameType | None) -> None:
    if _State.holding:
        _State.waiting = number
    elif _loading(frame):
        signal.signal(signal.SIGALRM, lambda _, later: _raise_when_it_can_be(number, later))
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    else:
        raise Stopped(number)


def _pass_over(number: int, frame: FrameType | None) -> None:
    """A second signal must not interrupt the cleaning up. A function, not SIG_IGN: of one that came at the same moment
    as the first, and then found itself ignored, Python would print a traceback."""


def _loading(frame: FrameType | None) -> bool:
    """Whether `frame` was called, however indirectly, by an import."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
