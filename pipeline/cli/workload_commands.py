"""`millrace run WORKLOAD` and `millrace submit WORKLOAD`: one command for each workload, with an option for each
parameter."""

from __future__ import annotations

import re
import types
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

import click

from pipeline.cli import local as local_commands
from pipeline.cli.help import Group, SectionedCommand, Sections, did_you_mean
from pipeline.errors import printable

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

# Options of `millrace run` that `millrace submit` does not have.
_ONLY_LOCAL = re.compile(r" --(?:device|preview) \S+")
_METAVARS = {int: "N", float: "X", Path: "FILE"}


class WorkloadGroup(Group, ABC):
    """One subcommand for each workload."""

    heading = "Workloads"
    path: Any  # the type of the input
    output: Any  # and of the output

    def inputs(self) -> click.Argument:
        """The argument before OUTPUT."""
        return click.Argument(["input"], type=self.path)

    @abstractmethod
    def further_options(self) -> Sections:
        """Options that every subcommand takes, by the heading of the help under which they are listed."""

    @abstractmethod
    def carry_out(self, workload: str, parameters: dict[str, Any], **options: Any) -> None:
        """Runs the subcommand."""

    def example(self, arguments: str) -> str:
        """An example of the workload as one of this command."""
        return arguments

    def list_commands(self, ctx: click.Context) -> list[str]:
        from pipeline.workloads import unusable, workloads

        for line in unusable():
            click.echo(f"millrace: {printable(line)}", err=True)
        return list(workloads())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        from pipeline.config import spellings
        from pipeline.workloads import workload_named
        from pipeline.workloads.common.storage import StorageParameters

        try:
            workload = workload_named(cmd_name)
        except KeyError:
            return None
        fields = {spellings(field, info)[0]: info for field, info in workload.Parameters.model_fields.items()}
        options = {name: _parameter_option(name, info) for name, info in fields.items()}
        stored = [options.pop(name) for name in StorageParameters.model_fields if name in options]
        further = self.further_options()
        sections = {"Parameters": [*options.values()], **further, "Output": [*stored, *further.get("Output", ())]}

        def callback(**given: Any) -> None:
            parameters = {name: given.pop(name) for name in list(given) if name in fields}
            asked = {name: value for name, value in parameters.items() if value is not None}
            self.carry_out(cmd_name, asked, **given)

        return SectionedCommand(
            cmd_name,
            params=[self.inputs(), click.Argument(["output"], type=self.output)],
            sections=sections,
            help=workload.summary,
            callback=callback,
            epilog="\n".join(
                f"{ctx.command_path} {cmd_name} {self.example(each)}"
                for each in getattr(workload, "examples", _examples(fields))
            ),
        )

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            known = self.list_commands(ctx)
            meant = did_you_mean(args[0], known)
            ctx.fail(f"there is no workload {args[0]!r}{meant or ';'} there are {', '.join(known)}")
        return super().resolve_command(ctx, args)


class _Inputs(click.Argument):
    """One or more inputs. Of a single argument, click would say that the first is missing, not OUTPUT."""

    def get_error_hint(self, ctx: click.Context | None) -> str:
        return "'INPUT'"

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        found = super().process_value(ctx, value)
        if not found and not ctx.resilient_parsing:
            raise click.UsageError("Missing argument 'OUTPUT'.", ctx)
        return found


class RunGroup(WorkloadGroup):
    path = local_commands.FILE_OR_URL
    output = local_commands.FILE_FOLDER_OR_URL

    def inputs(self) -> click.Argument:
        return _Inputs(["inputs"], type=self.path, nargs=-1, metavar="INPUT…")

    def further_options(self) -> Sections:
        return local_commands.run_options()

    def list_commands(self, ctx: click.Context) -> list[str]:
        from pipeline.workloads import LOCAL_ONLY

        return sorted([*super().list_commands(ctx), *LOCAL_ONLY])

    def carry_out(self, workload: str, parameters: dict[str, Any], **options: Any) -> None:
        local_commands.run(workload, parameters, **options)


class SubmitGroup(WorkloadGroup):
    path = output = str  # on the service's machine

    def further_options(self) -> Sections:
        from pipeline.cli.client import submit_options

        return {"Submitting": submit_options()}

    def example(self, arguments: str) -> str:
        return _ONLY_LOCAL.sub("", arguments)

    def carry_out(self, workload: str, parameters: dict[str, Any], **options: Any) -> None:
        from pipeline.cli.client import submit

        submit(workload, parameters, **options)


@click.group(name="run", cls=RunGroup, options_metavar="", subcommand_metavar="WORKLOAD INPUT… OUTPUT [OPTIONS]")
def run_group() -> None:
    """Run a job on this machine, without a service: millrace run WORKLOAD INPUT OUTPUT.

    `millrace run WORKLOAD --help` lists the options of a workload.
    """


@click.group(name="submit", cls=SubmitGroup, options_metavar="", subcommand_metavar="WORKLOAD INPUT OUTPUT [OPTIONS]")
def submit_group() -> None:
    """Submit a job to a service: millrace submit WORKLOAD INPUT OUTPUT. Paths are on the service's machine.

    Set MILLRACE_URL to the service's address and MILLRACE_TOKEN to your token.
    """


def _examples(fields: Mapping[str, FieldInfo]) -> tuple[str, str]:
    """Examples of a workload that names none: with the options that it needs, each with its field's first example."""
    needed = "".join(
        f" --{name.replace('_', '-')} {(info.examples or [_metavar(info)])[0]}"
        for name, info in fields.items()
        if info.is_required()
    )
    return f"in.tif out.tif{needed}", f"in.zarr out.zarr{needed} --device cuda --preview out.png"


def _parameter_option(name: str, info: FieldInfo) -> click.Option:
    """A workload parameter as an option; pydantic checks the value, as in the API."""
    from pipeline.config import spellings

    declared = [*(f"--{each.replace('_', '-')}" for each in spellings(name, info)), name]
    if info.annotation is bool:
        return click.Option(declared, is_flag=True, default=None, help=info.description)
    alternatives = _alternatives(info.annotation)
    # Of a number or a word, pydantic checks the number.
    choices = [] if int in alternatives else [each for each in alternatives if isinstance(each, str)]
    text = info.description or ""
    kind = get_origin(info.annotation)
    several = kind in (dict, list)
    if info.is_required():
        text += " [required]"
    elif info.default is not None and not several:
        text += f" [default: {','.join(map(str, info.default)) if isinstance(info.default, tuple) else info.default}]"
    return click.Option(
        declared,
        multiple=several,
        type=click.Choice(choices) if choices else str,
        metavar=None if choices else "NAME=VALUE" if kind is dict else name.upper() if several else _metavar(info),
        help=text,
    )


def _alternatives(annotation: Any) -> list[Any]:
    """The values of a Literal, and the types that a union allows."""
    kind = get_origin(annotation)
    if kind is Annotated:
        return _alternatives(get_args(annotation)[0])
    if kind in (Union, types.UnionType):
        return [each for part in get_args(annotation) for each in _alternatives(part)]
    return list(get_args(annotation)) if str(kind) == "typing.Literal" else [annotation]


def _metavar(info: FieldInfo) -> str:
    """What a value is: its unit, if the field has one (`json_schema_extra={"unit": "Å"}`), or its type."""
    extra = info.json_schema_extra
    unit = str(extra["unit"]) if isinstance(extra, dict) and "unit" in extra else None
    kinds = [each for each in _alternatives(info.annotation) if each is not type(None)]
    several = len(kinds) == 1 and get_origin(kinds[0]) is tuple
    kind = _alternatives(get_args(kinds[0])[0])[0] if several else kinds[0] if len(kinds) == 1 else str
    one = unit or _METAVARS.get(kind, "TEXT")
    return f"{one},…" if several else one
