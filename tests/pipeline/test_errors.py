"""How messages say things."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from pipeline import errors
from pipeline.errors import MillraceError, counted, too_little_memory


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, "chunk"), "0 chunks"),
        ((1, "chunk"), "1 chunk"),
        ((2, "chunk"), "2 chunks"),
        ((12_345, "unfinished job"), "12,345 unfinished jobs"),
        ((1, "axis", "axes"), "1 axis"),
        ((3, "axis", "axes"), "3 axes"),
    ],
)
def test_one_of_a_thing_is_no_plural(arguments, said):
    assert counted(*arguments) == said


def test_every_error_stands_in_the_tree_and_every_exit_code_in_the_manual():
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, MillraceError)]
    page = (Path(__file__).parents[2] / "docs" / "running.md").read_text(encoding="utf-8")
    for kind in kinds:
        assert re.search(rf"\b{kind.__name__}\b", str(errors.__doc__))
        assert f"\n| {kind.exit_code} | " in page


def _led_to(cause: BaseException, error: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "MemoryError"),
        (MemoryError("Unable to allocate 64.0 GiB"), "Unable to allocate 64.0 GiB"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (_led_to(OSError("a.so: failed to map segment from shared object"), OSError("none")), "a.so: failed to map"),
    ],
)
def test_too_little_memory_is_told_however_it_is_said(error, said):
    line = too_little_memory(error)
    assert line is not None
    assert said in line
    assert "lower --memory" in line


@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O error"), _led_to(KeyError("a"), ValueError("b"))])
def test_other_errors_have_to_do_with_other_things(error):
    assert too_little_memory(error) is None
