"""Output of commands: handles a broken pipe (SIGPIPE), a full disk behind stdout, and closed streams."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

import click

from pipeline.errors import StorageError

READER_WENT_AWAY = 141


def say(text: str, *, besides: str = "") -> None:
    """Print a text. `besides` is added to the error message if that fails."""
    try:
        click.echo(text)
    except StorageError as error:
        raise StorageError(f"{error}{besides}") from error


@contextmanager
def watched_stdout() -> Iterator[None]:
    """Watches everything that a command prints, Click's help and version too.

    A broken pipe ends the program, as in other filters. Raises StorageError if stdout cannot be written.
    """
    stream = sys.stdout
    with redirect_stdout(_Watched(stream)):
        try:
            yield
        finally:
            settle(stream)


class _Watched:
    """A stream whose write errors are translated to ours."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _translated():
            return self._stream.write(text)

    def flush(self) -> None:
        with _translated():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise SystemExit(READER_WENT_AWAY) from None
    except OSError as error:
        raise StorageError(f"stdout: {error.strerror}") from error


def settle(stream: TextIO) -> None:
    """Discards what a stream could not take: otherwise the interpreter would fail at exit with its own code."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def open_closed_streams() -> None:
    """Opens /dev/null for streams that the caller closed: otherwise the next file would take their descriptors."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - stays open
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
