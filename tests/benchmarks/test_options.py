"""The benchmarks' command lines: what scripts/bench names is there, and says what it measures."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.options import Options

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench"
BENCHMARKS = SCRIPT.parents[1] / "benchmarks"
NAMED = re.findall(r"[a-z]+(?:/[a-z]+)?", re.search("NAME is one of\n((?:# .*\n)*)", SCRIPT.read_text())[1])


def _name(path):
    return str((path.parent if path.name == "__main__.py" else path.with_suffix("")).relative_to(BENCHMARKS))


def test_all_benchmarks_are_named_once():
    mains = [_name(path) for path in BENCHMARKS.rglob("*.py") if "\ndef main()" in path.read_text()]
    assert sorted(NAMED) == sorted(mains)


@pytest.mark.parametrize("name", NAMED)
def test_help_is_what_the_module_says_of_itself(name, monkeypatch, capsys):
    module = import_module(f"benchmarks.{name}{'/__main__' * (BENCHMARKS / name).is_dir()}".replace("/", "."))
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        module.main()
    said = capsys.readouterr().out
    assert said.startswith(f"usage: scripts/bench {name} ")
    assert module.__doc__.strip() in said


@pytest.mark.parametrize(("given", "chosen"), [([], ["one", "two"]), (["three", "one"], ["three", "one"])])
def test_parts(given, chosen):
    options = Options("x", None)
    options.add_parts(("one", "two", "three"), default=("one", "two"))
    assert options.parse_args(given).parts == chosen


def test_a_part_that_is_none_is_refused(capsys):
    options = Options("x", None)
    options.add_parts(("one", "two"), default=("one", "two"))
    with pytest.raises(SystemExit, match="2"):
        options.parse_args(["one", "four"])
    assert "there is no 'four'; there are one, two" in capsys.readouterr().err
