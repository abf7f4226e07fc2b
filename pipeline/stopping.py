"""Turns SIGINT, SIGTERM and SIGHUP into an exception, so that everything unwinds and nothing half-written stays.

It is not raised inside `held`, which protects steps that create something not yet registered for removal, nor during an
import: a C module may swallow the exception, or be left half-loaded."""

from __future__ import annotations

import atexit
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Between two attempts to raise a signal that arrived during an import.
_AGAIN_S = 0.01


class Stopped(BaseException):
    """One of `SIGNALS` arrived. Its cause is the error, if any, of the `held` step."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)

    def __str__(self) -> str:
        error = f"; {self.__cause__}" if self.__cause__ is not None else ""
        return f"stopped by {self.signal.name}{error}"


class _State:
    """State of the main thread, in which Python runs signal handlers."""

    holding = 0
    waiting: int | None = None


def raise_on_signals() -> None:
    """Makes the first signal raise Stopped in the main thread; later ones are ignored."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # by nohup, or for a shell's background job
            signal.signal(number, _stop)


@contextmanager
def held() -> Iterator[None]:
    """Delays signals until the end of the block, which must be short. No effect outside the main thread."""
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
    """Raises the delayed signal, if any, with the error of the block as its cause."""
    _State.holding -= 1
    if not _State.holding and _State.waiting is not None:
        raise Stopped(_State.waiting) from error


def no_more() -> None:
    """Ignores all further signals, delayed ones included: the program is ending."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    # The interpreter removes its handlers as it ends: another signal would kill it.
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
    """Ignores a second signal, which must not interrupt the cleanup. Not SIG_IGN: if both arrive at once, Python would
    print a traceback for the second."""


def _loading(frame: FrameType | None) -> bool:
    """Whether an import called `frame`, directly or not."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
