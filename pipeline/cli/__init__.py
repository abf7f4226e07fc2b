"""The `millrace` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn, cast

import click

from pipeline import __version__
from pipeline.cli import local as local_commands
from pipeline.cli.help import Group, did_you_mean
from pipeline.cli.stdout import open_closed_streams, settle, watched_stdout
from pipeline.cli.workload_commands import run_group
from pipeline.errors import MillraceError, OperatorError, printable, shortage
from pipeline.stopping import Stopped, raise_on_signals


class _Commands(Group):
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands and run_group.get_command(ctx, args[0]) is not None:
            ctx.fail(f"{args[0]} is a workload: millrace run {' '.join(args)}")
        if not args[0].startswith("-") and args[0] not in self.commands:
            workloads = run_group.list_commands(ctx)
            meant = did_you_mean(args[0], self.commands) or did_you_mean(args[0], workloads, "run ")
            ctx.fail(f"there is no command {args[0]!r}{meant}")
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="millrace")
def cli() -> None:
    """Process large images, potential maps and MRI raw data on every GPU of a machine, or on its CPU."""


# Where each command is, as MODULE:NAME, or the module alone if its command has the same name.
_COMMANDS = {
    "On this machine": {
        "run": "workload_commands:run_group", "verify": "local", "demo": "local", "devices": "local",
        "worker": "local", "doctor": "doctor:check_machine", "kernels": "kernels:kernels_group",
    },
    "Use a service": {
        "submit": "workload_commands:submit_group",
        **dict.fromkeys(("jobs", "status", "wait", "logs", "cancel", "retry", "result", "workers"), "client"),
    },
    "Run a service": {
        **dict.fromkeys(("serve", "config", "token", "backup", "restore"), "service"),
        **dict.fromkeys(("admin", "usage"), "admin"),
    },
}  # fmt: skip


class _OnDemand(MutableMapping[str, click.Command]):
    """Commands that are imported when they are used, or listed by `--help`: those of a service take 0.15 s."""

    def __init__(self) -> None:
        self._found: dict[str, click.Command | str] = {
            name: place for section in _COMMANDS.values() for name, place in section.items()
        }

    def __getitem__(self, name: str) -> click.Command:
        found = self._found[name]
        if isinstance(found, str):
            module, _, called = found.partition(":")
            found = cast("click.Command", getattr(import_module(f"pipeline.cli.{module}"), called or name))
            self._found[name] = found
        return found

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._found[name] = command

    def __delitem__(self, name: str) -> None:
        del self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


cli.commands = _OnDemand()
cli.sections = {name: title for title, section in _COMMANDS.items() for name in section}


def main() -> NoReturn:
    """Run the command; every failure is one line on stderr and a documented exit code."""
    raise_on_signals()
    open_closed_streams()
    try:
        with watched_stdout():
            cli.main(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        _leave(error.format_message(), 2)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "millrace"
        _fail(f"{error.format_message()} ({_hint(error)}see {command} --help)", 2)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except MillraceError as error:
        if isinstance(error, OperatorError) and os.environ.get("MILLRACE_DEBUG"):
            click.echo(error.trace, err=True, nl=False)
        _fail("; ".join([str(error), *local_commands.kept]), error.exit_code)
    except Stopped as stop:
        _fail("; ".join([str(stop), *local_commands.left_behind()]), 128 + stop.signal)
    except Exception as error:
        if not _working_folder_is_there():
            _fail("the folder that this was started in is gone: change to another, and run again", 2)
        if os.environ.get("MILLRACE_DEBUG"):
            raise
        short = shortage(error)
        if short is not None:
            _fail(short, 1)
        _fail(f"internal error: {type(error).__name__}: {error} (MILLRACE_DEBUG=1 shows where; please report it)", 1)
    finally:
        settle(sys.stderr)
    sys.exit(0)


def _hint(error: click.UsageError) -> str:
    """The way to name a file that was taken for an option."""
    name = error.option_name if isinstance(error, click.NoSuchOption) else None
    files = [each for each in sys.argv[1:] if name and each.startswith(name) and Path(each).exists()]
    return f"the file is ./{files[0]}; " if files else ""


def _working_folder_is_there() -> bool:
    try:
        return bool(Path.cwd())
    except OSError:
        return False


def _fail(message: str, code: int) -> NoReturn:
    _leave(f"millrace: {printable(' '.join(message.split()))}", code)


def _leave(text: str, code: int) -> NoReturn:
    with suppress(OSError):  # the exit code remains
        click.echo(text, err=True)
    sys.exit(code)
