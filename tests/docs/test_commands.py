"""Each `millrace` command in the documentation is one that the program takes, with its parameters."""

from __future__ import annotations

import re
from typing import Any

import click
import pytest

from pipeline.cli import cli
from pipeline.cli.local import _parameters
from pipeline.cli.workload_commands import WorkloadGroup
from pipeline.errors import ParameterError
from pipeline.workloads import workload_named
from tests.docs.pages import PAGES, ROOT, blocks, commands, name_of

# Workloads of packages that pages make up.
MADE_UP = {"despeckle", "binning", "sharpen"}


def check(words: list[str]) -> None:
    """Raises ClickException or ParameterError if the program would refuse this command line before it reads a file."""
    command: click.Command = cli
    context = click.Context(cli, info_name="millrace")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, found, words = command.resolve_command(context, words)
        assert found is not None
        workload = name if isinstance(command, WorkloadGroup) else None
        command, parent = found, context
        context = click.Context(command, info_name=name, parent=parent)
        if workload is not None:
            parsed = command.make_context(workload, list(words), parent=parent).params
            named = {key for key, value in parsed.items() if value is not None}
            fields = workload_named(workload).Parameters.model_fields
            _parameters(workload, {key: parsed[key] for key in named & {*fields}})
            return
    if not isinstance(command, click.Group) or words:
        command.make_context(command.name, list(words), parent=context.parent)


def in_blocks() -> list[Any]:
    found = []
    for page in PAGES:
        for language, text in blocks(page):
            if language not in ("", "bash", "console"):
                continue
            for words in commands(text):
                if not ({"…", *MADE_UP} & {*words[:2]} or any("…" in word for word in words)):
                    found.append(pytest.param(words, id=f"{name_of(page)}: {' '.join(words)[:60]}"))
    return found


@pytest.mark.parametrize("words", in_blocks())
def test_commands_in_blocks_are_accepted(words):
    check(words)


def test_nothing_installs_what_others_publish_under_our_name():
    """The package index has a `millrace`, a `pipeline` and a `kernels` of other people."""
    theirs = re.compile(r"pip install '?(?:millrace\[|pipeline\b|kernels\b)")
    sources = [*PAGES, *(path for name in ("pipeline", "kernels", "deploy") for path in (ROOT / name).rglob("*.py"))]
    assert [name_of(path) for path in sources if theirs.search(path.read_text())] == []


def test_commands_in_sentences_exist():
    """`millrace jobs [--state …]` within a line: the command's name, and the names of its options."""
    unknown = []
    for page in PAGES:
        for text in re.findall(r"`millrace ([a-z][^`]*)`", page.read_text()):
            command: click.Command | None = cli
            words = text.split()
            while isinstance(command, click.Group) and words and re.fullmatch(r"[a-z][a-z-]*", words[0]):
                if words[0] in MADE_UP:
                    break
                command = command.get_command(click.Context(command), words.pop(0))
            if command is None:
                unknown.append(f"{name_of(page)}: millrace {text}")
            elif not isinstance(command, click.Group):
                known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
                given = re.findall(r"(?<![\w-])--[a-z][a-z-]*", " ".join(words))
                unknown += [f"{name_of(page)}: millrace {text}: {each}" for each in given if each not in known]
    assert not unknown, "\n".join(unknown)


@pytest.mark.parametrize(
    "words", [["run", "smoth", "a.tif", "b.tif"], ["run", "smooth", "a.tif"], ["jobs", "--no-such-option"]]
)
def test_a_wrong_command_is_found(words):
    with pytest.raises(click.ClickException):
        check(words)


def test_a_wrong_parameter_is_found():
    with pytest.raises(ParameterError):
        check(["run", "smooth", "a.tif", "b.tif", "--sigma", "-2"])
