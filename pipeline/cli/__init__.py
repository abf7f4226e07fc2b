"""The `millrace` command."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

import click

from pipeline import __version__
from pipeline.cli import client as client_commands
from pipeline.cli import local as local_commands
from pipeline.cli import service as service_commands
from pipeline.cli.kernels import kernels_group
from pipeline.cli.stdout import open_closed_streams, settle, watched_stdout
from pipeline.errors import MillraceError, OperatorError, printable, shortage
from pipeline.stopping import Stopped, raise_on_signals


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="millrace")
def cli() -> None:
    """Process large images, potential maps and MRI raw data on every GPU of a machine, or on its CPU."""


class WorkloadGroup(click.Group, ABC):
    """One subcommand for each workload, with an option for each parameter."""

    path: Any  # the type of input and output

    @abstractmethod
    def further_options(self) -> list[click.Option]:
        """Options that every subcommand takes."""

    @abstractmethod
    def carry_out(self, workload: str, parameters: dict[str, Any], **options: Any) -> None:
        """Runs the subcommand."""

    def list_commands(self, context: click.Context) -> list[str]:
        from pipeline.workloads import unusable, workloads

        for line in unusable():
            click.echo(f"millrace: {printable(line)}", err=True)
        return list(workloads())

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        from pipeline.config import spellings
        from pipeline.workloads import workload_named
        from pipeline.workloads.common.storage import StorageParameters

        try:
            workload = workload_named(name)
        except KeyError:
            return None
        declared = sorted(
            workload.Parameters.model_fields.items(), key=lambda each: each[0] in StorageParameters.model_fields
        )  # those last
        fields = {spellings(field, info)[0]: info for field, info in declared}
        parameters = [
            click.Argument(["input"], type=self.path),
            click.Argument(["output"], type=self.path),
            *(_parameter_option(field, info) for field, info in fields.items()),
            *self.further_options(),
        ]

        def callback(**options: Any) -> None:
            given = {field: options.pop(field) for field in list(options) if field in fields}
            self.carry_out(name, _given(given), **options)

        return click.Command(name, params=parameters, help=workload.summary, callback=callback)


class RunGroup(WorkloadGroup):
    path = local_commands.FILE_PATH

    def further_options(self) -> list[click.Option]:
        return local_commands.run_options()

    def list_commands(self, context: click.Context) -> list[str]:
        from pipeline.workloads import LOCAL_ONLY

        return sorted([*super().list_commands(context), *LOCAL_ONLY])

    def carry_out(self, workload: str, parameters: dict[str, Any], **options: Any) -> None:
        local_commands.run(workload, parameters, **options)


class SubmitGroup(WorkloadGroup):
    path = str  # on the service's machine

    def further_options(self) -> list[click.Option]:
        return client_commands.submit_options()

    def carry_out(self, workload: str, parameters: dict[str, Any], **options: Any) -> None:
        client_commands.submit(workload, parameters, **options)


@cli.group(name="run", cls=RunGroup)
def run_group() -> None:
    """Run a job on this machine, without a service: millrace run WORKLOAD INPUT OUTPUT."""


@cli.group(name="submit", cls=SubmitGroup)
def submit_group() -> None:
    """Submit a job to a service: millrace submit WORKLOAD INPUT OUTPUT. Paths are on the service's machine.

    Set MILLRACE_URL to the service's address and MILLRACE_TOKEN to your token.
    """


for _command in (*local_commands.COMMANDS, kernels_group, *service_commands.COMMANDS, *client_commands.COMMANDS):
    cli.add_command(_command)


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None}


def _parameter_option(name: str, info: Any) -> click.Option:
    """A workload parameter as an option; pydantic checks the value, as in the API."""
    from pipeline.config import spellings

    declared = [*(f"--{each.replace('_', '-')}" for each in spellings(name, info)), name]
    if info.annotation is bool:
        return click.Option(declared, is_flag=True, default=None, help=info.description)
    alternatives = (info.annotation, *get_args(info.annotation))  # of Literal[…] | None
    choices = [choice for each in alternatives for choice in get_args(each) if isinstance(choice, str)]
    text = info.description or ""
    kind = get_origin(info.annotation)
    several = kind in (dict, list)
    named = "NAME=VALUE" if kind is dict else declared[0][2:].upper().replace("-", "_")
    if info.is_required():
        text += " [required]"
    elif info.default is not None and not several:
        text += f" [default: {','.join(map(str, info.default)) if isinstance(info.default, tuple) else info.default}]"
    return click.Option(
        declared,
        multiple=several,
        type=click.Choice(choices) if choices else str,
        metavar=None if choices else named,
        help=text,
    )


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
        _fail(f"{error.format_message()} (see {command} --help)", 2)
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
