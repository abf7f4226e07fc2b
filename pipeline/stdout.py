"""What a command says on stdout: whoever reads it may go away, and a file that it goes to may be full."""

from __future__ import annotations

import os
import sys

import click

from pipeline.errors import StorageError

READER_WENT_AWAY = 141


def say(text: str, *, besides: str = "") -> None:
    """A reader that went away ends the program as it does other filters.

    besides : what whoever learns that this could not be written has to know too

    Raises StorageError where it cannot be written.
    """
    try:
        click.echo(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _write_no_more()
        raise SystemExit(READER_WENT_AWAY) from None
    except OSError as error:
        _write_no_more()
        raise StorageError(f"stdout: {error.strerror}{besides}") from error


def open_closed_streams() -> None:
    """A stream that the caller has closed leads nowhere: else the next file to be opened would stand in its place."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - open to the end
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _write_no_more() -> None:
    """What is still buffered goes nowhere, so that the interpreter's end does not complain of it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
