"""Hook of MkDocs: makes the pages that come from the code, and adapts links to files outside `docs/`.

Commands and options come from the command itself, the HTTP API from its OpenAPI document; CONTRIBUTING.md and
CHANGELOG.md are those of the repository's root.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from pipeline.cli import cli
from pipeline.cli.workload_commands import SectionedCommand, WorkloadGroup
from pipeline.service.app import make_app
from pipeline.service.web.reference import Field, objects, operations

ROOT = Path(__file__).resolve().parents[2]
# A page of commands, by the end of the name of the module that defines them.
COMMAND_PAGES = {
    "service": ("Run a service", "The service itself, and its settings and tokens."),
    "admin": ("Operate a service", "For operators: holds and caps, accounts, and copies of the service's jobs."),
    "client": ("Use a service", "Set `MILLRACE_URL` to the service's address and `MILLRACE_TOKEN` to your token."),
    "": ("On this machine", "Commands that need no service."),
}
# A line of a docstring that explains one name.
_DEFINED = re.compile(r"^[ \t]*(\w+)[ \t]+: ", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[([^]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the generated pages, and to the navigation, under How-to, each page that it does not name."""
    for path, text in pages():
        files.append(File.generated(config, path, content=text))
    nav: Any = config.nav
    (how_to,) = (entry["How-to"] for entry in nav if "How-to" in entry)
    how_to += [path for path in sorted(_included(files)) if path not in set(_named(nav))]
    return files


def _included(files: Files) -> Iterator[str]:
    return (file.src_uri for file in files.documentation_pages() if file.inclusion.is_included())


def _named(nav: Any) -> Iterator[str]:
    """The paths in a part of the navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from _named(each)


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Names a file that is not part of the site instead of linking it."""
    folder = Path(page.file.src_uri).parent

    def adapted(link: re.Match[str]) -> str:
        text, target, anchor = link.group(1), link.group(2), link.group(3) or ""
        inside = os.path.normpath(Path("docs") / folder / target)
        for name in (inside.removeprefix("docs/"), inside.lower()):  # the second: CONTRIBUTING.md and the like
            if (found := files.get_file_from_path(name)) and found.inclusion.is_included():
                return f"[{text}]({os.path.relpath(name, folder)}{anchor})"
        if not (ROOT / inside).exists():
            return link.group(0)
        return f"`{inside}`" if text.strip("`/") == inside else f"{text} (`{inside}`)"

    return _LINK.sub(adapted, markdown)


def pages() -> Iterator[tuple[str, str]]:
    """Path below `docs/` and text of each page."""
    for name in ("CONTRIBUTING", "CHANGELOG"):
        text = (ROOT / f"{name}.md").read_text()
        yield f"{name.lower()}.md", re.sub(r"\]\((?!https?:|#)", "](../", text)  # the page lies in docs/
    context = click.Context(cli, info_name="millrace")
    runs = cli.commands["run"]
    assert isinstance(runs, WorkloadGroup)
    yield "reference/commands/run.md", "\n".join(_run_page(runs, context))
    rest = {name: command for name, command in cli.commands.items() if command is not runs}
    for module, (title, text) in COMMAND_PAGES.items():
        named = {name: each for name, each in rest.items() if _module(each) == module or not module}
        rest = {name: each for name, each in rest.items() if name not in named}
        lines = [f"# {title}", "", text, ""]
        for name in sorted(named):
            lines += _command(named[name], context, 2)
        yield f"reference/commands/{module or 'local'}.md", "\n".join(lines)
    service: Any = SimpleNamespace(settings=SimpleNamespace(is_open_to_all=True), proxies=())
    yield "reference/http.md", "\n".join(_http_page(make_app(service).openapi()))


def _module(command: click.Command) -> str:
    if isinstance(command, WorkloadGroup):
        return "client"
    group = command if command.callback is not None or not isinstance(command, click.Group) else None
    called = (group or next(iter(command.commands.values()))).callback
    return called.__module__.rpartition(".")[2] if called.__module__.rpartition(".")[2] in COMMAND_PAGES else ""


def _run_page(group: WorkloadGroup, parent: click.Context) -> Iterator[str]:
    context = click.Context(group, info_name="run", parent=parent)
    commands = {name: group.get_command(context, name) for name in group.list_commands(context)}
    yield from ("# millrace run", "", "```", "millrace run WORKLOAD INPUT… OUTPUT [OPTIONS]", "```", "")
    yield "Every workload takes the options of the first three sections, and every filter those of the fourth."
    yield "Its own parameters follow under its name."
    further = group.further_options()
    named = {title: list(options) for title, options in further.items()}
    shared = {option.name for options in further.values() for option in options}
    own = {name: _own_options(command, shared) for name, command in commands.items()}
    filters = [options for options in own.values() if any(option.name == "crop" for option in options)]
    helped = [{(option.name, option.help) for option in options} for options in filters]
    common = set.intersection(*helped)
    named["Filters of images"] = [option for option in filters[0] if (option.name, option.help) in common]
    for title, options in named.items():
        yield from ("", f"## {title}", "", *_options(options, context))
    for name, command in commands.items():
        assert command is not None
        rest = [option for option in own[name] if (option.name, option.help) not in common]
        yield from ("", f"## {name}", "", _text(command.help), "")
        yield from ("```", *(command.epilog or "").splitlines(), "```", "", *_options(rest, context))


def _own_options(command: click.Command | None, shared: Container[str | None]) -> list[click.Option]:
    """The parameters of a workload."""
    assert isinstance(command, SectionedCommand)
    return [option for options in command.sections.values() for option in options if option.name not in shared]


def _command(command: click.Command, parent: click.Context, level: int) -> Iterator[str]:
    context = click.Context(command, info_name=command.name, parent=parent)
    yield from (f"{'#' * level} {context.command_path}", "", _text(command.help), "")
    if isinstance(command, WorkloadGroup):
        yield from ("The parameters of each workload are those of [`millrace run`](run.md).", "")
        for options in command.further_options().values():
            yield from _options(options, context)
        return
    if isinstance(command, click.Group) and not command.invoke_without_command:
        for name in command.list_commands(context):
            if (each := command.get_command(context, name)) is not None:
                yield from _command(each, context, level + 1)
        return
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    serve = cli.commands["serve"]
    if command is not serve and [each.name for each in command.params] == [each.name for each in serve.params]:
        yield from ("```", usage, "```", "", "Its options are those of [`millrace serve`](#millrace-serve).", "")
    elif isinstance(command, SectionedCommand):
        yield from ("```", *(command.epilog or usage).splitlines(), "```", "")
        for title, options in command.sections.items():
            yield from (f"**{title}**", "", *_options(options, context))
    else:
        yield from ("```", usage, "```", "", *_options(command.get_params(context), context))
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            if (each := command.get_command(context, name)) is not None:
                yield from _command(each, context, level + 1)


def _options(options: Iterable[click.Parameter], context: click.Context) -> Iterator[str]:
    for option in options:
        record = option.get_help_record(context)
        if record is not None and record[1] and "--help" not in option.opts:
            yield from (f"`{record[0]}`", f":   {_text(record[1])}", "")


def _text(text: str | None) -> str:
    """Plain text as Markdown: nothing of it is a mark, but for code between backticks."""

    def escaped(part: str) -> str:
        return part if part.startswith("`") else re.sub(r"([\\*_\[\]<>|])", r"\\\1", part)

    listed = _DEFINED.sub(r"\n\n- `\1`: ", text or "")
    paragraphs = (" ".join(each.split()) for each in listed.split("\n\n"))
    return "\n\n".join("".join(map(escaped, re.split("(`[^`]*`)", each))) for each in paragraphs if each)


def _http_page(document: Mapping[str, Any]) -> Iterator[str]:
    yield from ("# HTTP API", "", "The running service describes it on its page `/api`, and at `/openapi.json`.")
    yield from ("[The service](../service.md#the-http-api) explains keys, arrays, events and webhooks.", "")
    for each in operations(document):
        yield from (f"## {each.method} {each.path}", "", _text(each.text), "", *_fields(each.parameters))
        if each.body:
            yield from (f"Body: {each.body}.", "")
        yield from (f"Answer: {each.answer}. Refusals: {', '.join(map(str, each.refusals))}.", "")
        yield from ("```", each.curl, "```", "")
    yield from ("## Objects", "")
    for found in objects(document):
        yield from (f"### {found.name}", "", _text(found.text), "")
        if found.values:
            yield from (", ".join(f"`{value}`" for value in found.values), "")
        yield from _fields(found.fields)


def _fields(fields: Iterable[Field]) -> Iterator[str]:
    for each in fields:
        where, needed = f"{each.where}, " if each.where else "", " Required." if each.required else ""
        yield from (f"`{each.name}`", f":   {where}{each.kind}. {_text(each.text)}{needed}", "")
