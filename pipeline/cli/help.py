"""The layout of `--help`: commands and options under headings, whole summaries, and suggestions for wrong names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

Sections = Mapping[str, Sequence[click.Option]]


class SectionedCommand(click.Command):
    """A command whose help lists the options under headings, and ends with examples.

    params : its arguments
    epilog : the examples, one a line
    """

    def __init__(
        self, name: str | None, *, sections: Sections, params: Sequence[click.Parameter] = (), **more: Any
    ) -> None:
        self.sections = sections
        options = [option for section in sections.values() for option in section]
        super().__init__(name, params=[*params, *options], **more)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shown: dict[str, Sequence[click.Parameter]] = dict(self.sections)
        if (own := self.get_help_option(ctx)) is not None:
            *_, last = shown
            shown[last] = [*shown[last], own]
        for title, options in shown.items():
            records = [record for option in options if (record := option.get_help_record(ctx)) is not None]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.splitlines():
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")


class Group(click.Group):
    """A group whose help shows the whole first sentence of each command, under headings if it has any.

    sections : the heading of each command; set it before the help is shown
    """

    sections: Mapping[str, str] = {}
    heading = "Commands"  # of the others

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of their definition

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                text = " ".join((command.help or "").split("\n\n")[0].split())
                heading = self.sections.get(name, self.heading)
                records.setdefault(heading, []).append((name, text.split(". ")[0].removesuffix(".")))
        for title in sorted(records, key=[*self.sections.values(), self.heading].index):
            with formatter.section(title):
                formatter.write_dl(records[title])


def did_you_mean(name: str, known: Iterable[str], group: str = "") -> str:
    """The known name that a user may have meant, in a group of commands, as the end of a message; or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f"; did you mean {group}{close[0]}?" if close else ""
