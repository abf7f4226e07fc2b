"""What a command says on stdout and stderr: whoever reads it may go away, and a file that it goes to may be full."""

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
    """Print a text.

    besides : what whoever learns that this could not be written has to know too
    """
    try:
        click.echo(text)
    except StorageError as error:
        raise StorageError(f"{error}{besides}") from error


@contextmanager
def watched_stdout() -> Iterator[None]:
    """While a command runs, for what Click prints of its own accord too: help and version.

    A reader that went away ends the program as it does other filters; StorageError where stdout cannot be written.
    """
    stream = sys.stdout
    with redirect_stdout(_Watched(stream)):
        try:
            yield
        finally:
            settle(stream)


class _Watched:
    """A stream whose writing fails with errors of ours."""

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
    """Lets what a stream could not take go nowhere: else the interpreter would fail of it at its end, with a code of
    its own."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def open_closed_streams() -> None:
    """A stream that the caller has closed leads nowhere: else the next file to be opened would stand in its place."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - open to the end
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
