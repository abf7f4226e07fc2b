"""The `millrace` command."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, get_args

import click

from pipeline import __version__, client_commands, service_commands
from pipeline.config import Settings, explain, load_settings
from pipeline.errors import MillraceError, ParameterError, counted, printable, too_many_files
from pipeline.kernels_command import kernels_group
from pipeline.stdout import open_closed_streams, say, settle, watched_stdout
from pipeline.stopping import Stopped, raise_on_signals

FilePath = click.Path(path_type=Path, readable=False)  # who opens a file says why it cannot be read
# The outputs of this process that stand under their final names.
_published: list[Path] = []
# The outputs that this process was told to make.
_begun: list[Path] = []
# What a run that failed has kept, for whoever reads why it failed.
_kept: list[str] = []


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="millrace")
def cli() -> None:
    """Process large images, potential maps and MRI raw data on every GPU of a machine, or on its CPU."""


class WorkloadGroup(click.Group, ABC):
    """One subcommand a workload, with an option for each of its parameters."""

    path: Any  # the type of input and output

    @abstractmethod
    def further_options(self) -> list[click.Option]:
        """What every subcommand takes besides."""

    @abstractmethod
    def carry_out(self, workload: str, parameters: dict[str, Any], **options: Any) -> None:
        """Do what the subcommand is for."""

    def list_commands(self, context: click.Context) -> list[str]:
        from pipeline.workloads import workloads

        return list(workloads())

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        from pipeline.workloads import workload_named

        try:
            workload = workload_named(name)
        except KeyError:
            return None
        fields = workload.Parameters.model_fields
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
    path = FilePath

    def further_options(self) -> list[click.Option]:
        return _run_options()

    def carry_out(self, workload: str, parameters: dict[str, Any], **options: Any) -> None:
        _run(workload, parameters, **options)


class SubmitGroup(WorkloadGroup):
    path = str  # of the service's machine

    def further_options(self) -> list[click.Option]:
        return client_commands.submit_options()

    def carry_out(self, workload: str, parameters: dict[str, Any], **options: Any) -> None:
        client_commands.submit(workload, parameters, **options)


@cli.group(name="run", cls=RunGroup)
def run_group() -> None:
    """Run one job here and now: millrace run WORKLOAD INPUT OUTPUT."""


@cli.group(name="submit", cls=SubmitGroup)
def submit_group() -> None:
    """Hand a job to a service: millrace submit WORKLOAD INPUT OUTPUT, with paths as they are on the service's machine.

    MILLRACE_URL says where the service is, MILLRACE_TOKEN who you are.
    """


@cli.command()
@click.argument("folder", type=FilePath)
@click.option("--size", type=click.IntRange(1, 1_000_000), default=2048, show_default=True, help="rows and columns")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="the same seed makes the same bytes")
def demo(folder: Path, size: int, seed: int) -> None:
    """Make synthetic inputs of any size in FOLDER."""
    from pipeline.demo import make_demo_inputs

    for path in make_demo_inputs(folder, size, seed):
        say(str(path))


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def devices(as_json: bool) -> None:
    """List what jobs can run on here, and why a GPU cannot be used."""
    from pipeline.engine.discovery import discover
    from pipeline.engine.receipt import to_json
    from pipeline.terminal import device_lines

    reports = discover()
    say(to_json([vars(report) for report in reports]) if as_json else "\n".join(device_lines(reports)))


def _setting_options(*names: str) -> list[click.Option]:
    """Settings as options. None has a default: what is not given may stand in the environment or the file."""
    options = [(name, Settings.model_fields[name].description) for name in names]
    return [
        *(click.Option([f"--{name.replace('_', '-')}", name], help=text) for name, text in options),
        click.Option(["--config"], type=FilePath, help="a TOML file that may set the above"),
    ]


_DRAIN = click.Option(
    ["--drain-s"],
    type=click.IntRange(0, 86_400),
    default=60,
    show_default=True,
    help="seconds that SIGTERM and SIGUSR1 leave it to finish the chunks in hand",
)
_METRICS_PORT = click.Option(
    ["--metrics-port"],
    help="serve the first worker's Prometheus metrics on this port, the second's on the next; default any free ones",
)
_WORKER_OPTIONS = [*_setting_options("device", "workers", "threads"), _METRICS_PORT, _DRAIN]


@cli.command(params=[click.Argument(["scheduler"]), *_WORKER_OPTIONS])
def worker(scheduler: str, config: Path | None, drain_s: int, **flags: Any) -> None:
    """Let this machine work for the Dask scheduler at SCHEDULER, tcp://HOST:PORT, until stopped.

    One process for each GPU, or on the CPU where there is none, unless the options say otherwise. SIGTERM and SIGUSR1
    drain: chunks in hand are finished and kept, other workers do the rest.
    """
    from pipeline.cluster.place import worker_specs
    from pipeline.cluster.worker_processes import serve_workers

    settings = load_settings({**flags, "scheduler": scheduler}, file=config)
    serve_workers(scheduler, worker_specs(settings), drain_s, settings.metrics_port)


for _command in (kernels_group, *service_commands.COMMANDS, *client_commands.COMMANDS):
    cli.add_command(_command)


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None}


def _parameter_option(name: str, info: Any) -> click.Option:
    """A workload parameter as an option; pydantic checks the value, so that the API refuses the same ones."""
    if info.annotation is bool:
        return click.Option([f"--{name.replace('_', '-')}", name], is_flag=True, default=None, help=info.description)
    alternatives = (info.annotation, *get_args(info.annotation))  # of Literal[…] | None
    choices = [choice for each in alternatives for choice in get_args(each) if isinstance(choice, str)]
    text = info.description or ""
    if info.default is not None:
        text += f" [default: {info.default}]"
    return click.Option(
        [f"--{name.replace('_', '-')}", name],
        type=click.Choice(choices) if choices else str,
        metavar=None if choices else name.upper(),
        help=text,
    )


def _run_options() -> list[click.Option]:
    return [
        *_setting_options(*Settings.model_fields),
        click.Option(["--preview"], type=FilePath, help="also write a small PNG of the result here"),
        click.Option(["--checksum"], is_flag=True, help="SHA-256 of the input in the receipt however large it is"),
        click.Option(["--resume"], is_flag=True, help="go on where an interrupted run of the same job stopped"),
        click.Option(["--dry-run"], is_flag=True, help="print the plan (chunks, bytes, memory) and stop"),
        click.Option(["--json", "as_json"], is_flag=True, help="print the plan or the receipt as JSON"),
        click.Option(["--quiet"], is_flag=True, help="no progress bar and no summary"),
    ]


def _run(
    name: str,
    parameters: dict[str, Any],
    *,
    input: Path,  # noqa: A002 - the argument's name in the command's help
    output: Path,
    config: Path | None,
    preview: Path | None,
    checksum: bool,
    resume: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    **flags: Any,
) -> None:
    from pipeline.cluster.place import open_place
    from pipeline.engine.receipt import to_json
    from pipeline.engine.run import RunEvents, RunOptions, check_preview, plan_job, published_before, run_job
    from pipeline.terminal import plan_lines, progress_bar, published_before_line, result_line
    from pipeline.workloads import JobSpec, workload_named

    _begun.append(output)
    settings = load_settings(flags, file=config)
    spec = JobSpec(workload=name, input=input, output=output, parameters=_parameters(name, parameters))
    if preview is not None:
        check_preview(spec, preview)
    options = RunOptions(
        memory_bytes=settings.memory, chunk_bytes=settings.chunk_bytes, checksum=checksum, resume=resume
    )
    workload = workload_named(name)
    with workload.begun(spec), open_place(settings, workload.modules(spec)) as place:
        job = plan_job(spec, place.device, options)
        if dry_run:
            job.workload.discard()
            plan = job.describe()
            say(to_json(plan) if as_json else "\n".join(map(printable, plan_lines(plan))))
            return
        if settings.metrics_port is not None:
            from pipeline.metrics import serve

            serve(settings.metrics_port)
        receipt = published_before(job) if resume else None
        line = published_before_line if receipt is not None else result_line
        shown = receipt is None and not quiet and sys.stderr is not None and sys.stderr.isatty()
        with progress_bar(job.plan, printable(output.name), shown=shown, note=job.workload.progress_note) as bar:
            events = RunEvents(
                on_written=bar.written,
                on_recut=bar.recut,
                on_published=lambda: _published.append(output),
                on_kept=lambda kept, chunks: _kept.append(
                    f"{kept} of {counted(chunks, 'chunk')} kept: go on with --resume"
                ),
            )
            receipt = receipt or run_job(job, options, events=events, stream=place.stream)
    if preview is not None:
        try:
            job.workload.write_preview(preview)
        except MillraceError as error:
            raise type(error)(f"{output} is complete, but not its preview: {error}") from error
    if as_json or not quiet:
        say(to_json(receipt) if as_json else printable(line(receipt)), besides=f"; {output} is complete")


def _parameters(name: str, given: dict[str, Any]) -> Any:
    from pydantic import ValidationError

    from pipeline.workloads import workload_named

    try:
        return workload_named(name).Parameters(**given)
    except ValidationError as error:
        fault = error.errors()[0]
        where = f"--{str(fault['loc'][0]).replace('_', '-')}: " if fault["loc"] else ""
        raise ParameterError(f"{where}{explain(fault)}") from error


def main() -> NoReturn:
    """Run the command; every way out is one line on stderr and a documented exit code."""
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
        _fail("; ".join([str(error), *_kept]), error.exit_code)
    except Stopped as stop:
        _fail("; ".join([f"stopped by {stop.signal.name}", *_left_behind()]), 128 + stop.signal)
    except Exception as error:
        if not _working_folder_is_there():
            _fail("the folder that this was started in is gone: change to another, and run again", 2)
        if os.environ.get("MILLRACE_DEBUG"):
            raise
        way_out = too_many_files(error)
        if way_out is not None:
            _fail(f"{error}; {way_out}", 1)
        _fail(f"internal error: {type(error).__name__}: {error} (MILLRACE_DEBUG=1 shows where; please report it)", 1)
    finally:
        settle(sys.stderr)
    sys.exit(0)


def _working_folder_is_there() -> bool:
    try:
        return bool(Path.cwd())
    except OSError:
        return False


def _left_behind() -> list[str]:
    """What there is of the output of a run that was stopped."""
    from pipeline.workloads.base import ledger_path

    if _published:
        return [f"{_published[-1]} is complete"]
    found = ["nothing was published"] if _begun else []
    if not _kept and any(any(ledger_path(output).glob("chunks-*.json")) for output in _begun):
        _kept.append("what an earlier run has kept is still there for --resume")
    return [*found, *_kept]


def _fail(message: str, code: int) -> NoReturn:
    _leave(f"millrace: {printable(' '.join(message.split()))}", code)


def _leave(text: str, code: int) -> NoReturn:
    with suppress(OSError):  # the code says it too
        click.echo(text, err=True)
    sys.exit(code)
