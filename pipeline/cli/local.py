"""The commands that compute on this machine: run, verify, demo, devices, worker."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.stdout import say
from pipeline.config import Settings, format_bytes, load_settings, of_option, parse_bytes
from pipeline.errors import InputError, MemoryTooSmall, MillraceError, ParameterError, counted, printable
from pipeline.storage.objects import is_url, path_named

if TYPE_CHECKING:
    from pipeline.engine.planned import PlannedDevice, PlannedJob
    from pipeline.engine.run import RunOptions, Stream
    from pipeline.workloads import JobSpec


class _FilePath(click.Path):
    """Refuses an empty name, which would mean the working directory; opening the file finds all other errors."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value):
            self.fail("the name is empty.", param, ctx)
        if is_url(value) and not isinstance(self, _FilePathOrUrl):
            self.fail(f"{value}: name a file on this machine.", param, ctx)
        return super().convert(value, param, ctx)


class _FilePathOrUrl(_FilePath):
    name = "path or URL"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if is_url(value):
            return path_named(value)
        if re.match(r"[A-Za-z][\w+.-]*://", str(value)):
            self.fail(f"{value}: URLs begin with s3://, gs://, az:// or https://; name a file by its path.", param, ctx)
        return super().convert(value, param, ctx)


class _FileFolderOrUrl(_FilePathOrUrl):
    """Also notes whether it is a folder: it ends with a slash or exists as one, and is not a Zarr."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        if ctx is not None:
            is_folder = str(value).endswith("/") or os.path.isdir(path)  # noqa: PTH112 - False for a name that is too long
            ctx.meta[_NAMES_A_FOLDER] = is_folder and not is_url(path) and path.suffix.lower() != ".zarr"
        return path


MUCH_READ = 20  # times the size of the result: the command says so
_NAMES_A_FOLDER = "pipeline.cli.names_a_folder"
FILE_PATH = _FilePath(path_type=Path, readable=False)
FILE_OR_URL = _FilePathOrUrl(path_type=Path, readable=False)
FILE_FOLDER_OR_URL = _FileFolderOrUrl(path_type=Path, readable=False)
# The published outputs of this process.
_published: list[Path] = []
# The outputs that this process was asked for.
_begun: list[Path] = []
# Remarks for the error message: what a failed run kept, or which jobs continue elsewhere.
kept: list[str] = []


@click.command()
@click.argument("folder", type=FILE_PATH)
@click.option(
    "--size", type=click.IntRange(1, 1_000_000), metavar="N", default=2048, show_default=True, help="rows and columns"
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    metavar="N",
    default=0,
    show_default=True,
    help="the same seed gives the same bytes",
)
def demo(folder: Path, size: int, seed: int) -> None:
    """Create synthetic inputs of any size in FOLDER."""
    from pipeline.cli.demo import make_demo_inputs

    for path in make_demo_inputs(folder, size, seed):
        say(str(path))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def devices(as_json: bool) -> None:
    """List the devices of this machine, and why a GPU cannot be used."""
    from pipeline.cli.terminal import device_lines
    from pipeline.engine.devices.discovery import discover
    from pipeline.engine.receipt import to_json

    reports = discover()
    say(to_json([vars(report) for report in reports]) if as_json else "\n".join(device_lines(reports)))


def _setting_options(*names: str) -> list[click.Option]:
    """Settings as options, without defaults: the environment or the file may set those that are not given."""
    return [
        click.Option([f"--{name.replace('_', '-')}", name], metavar=_METAVARS[name], help=info.description)
        for name, info in Settings.model_fields.items()
        if name in names
    ]


_METAVARS = {
    "device": "DEVICE", "memory": "SIZE", "chunk_bytes": "SIZE", "threads": "N", "workers": "N",
    "scheduler": "ADDRESS", "overlap": "N", "metrics_port": "PORT",
    "scheduler_ca": "FILE", "scheduler_cert": "FILE", "scheduler_key": "FILE",
}  # fmt: skip
_CONFIG = click.Option(
    ["--config"], type=FILE_PATH, metavar="FILE", help="TOML file with settings: device, memory, workers, threads …"
)
_DRAIN = click.Option(
    ["--drain-s"],
    type=click.IntRange(0, 86_400),
    metavar="SECONDS",
    default=60,
    show_default=True,
    help="time to finish current chunks after SIGTERM or SIGUSR1",
)
_METRICS_PORT = click.Option(
    ["--metrics-port"],
    metavar="PORT",
    help="port for the first worker's Prometheus metrics, the next for the second's, … [default: any free ports]",
)
_CERTIFICATES = _setting_options("scheduler_ca", "scheduler_cert", "scheduler_key")
_WORKER_OPTIONS = [*_setting_options("device", "workers", "threads"), *_CERTIFICATES, _CONFIG, _METRICS_PORT, _DRAIN]


@click.command(params=[click.Argument(["scheduler"]), *_WORKER_OPTIONS])
def worker(scheduler: str, config: Path | None, drain_s: int, **flags: Any) -> None:
    """Run workers of this machine for the Dask scheduler at SCHEDULER, tcp://HOST:PORT, until stopped.

    By default one process for each GPU, or one on the CPU if there is no GPU. SIGTERM and SIGUSR1 drain: current
    chunks are finished and kept, other workers do the rest.
    """
    from pipeline.cluster.dask.tls import use_certificates
    from pipeline.cluster.dask.worker_processes import serve_workers
    from pipeline.cluster.executor import worker_specs

    try:
        settings = load_settings({**flags, "scheduler": scheduler}, file=config)
    except ParameterError as error:
        raise ParameterError(str(error).replace("--scheduler:", "SCHEDULER:")) from error
    use_certificates(settings)
    serve_workers(scheduler, worker_specs(settings), drain_s, settings.metrics_port)


def run_options() -> dict[str, list[click.Option]]:
    """Options of every `millrace run WORKLOAD`, besides the workload's parameters, by their heading in the help."""
    return {
        "Running": [
            *_setting_options("device", "memory", "workers", "scheduler"),
            click.Option(["--resume"], is_flag=True, help="continue an interrupted run of the same job"),
            click.Option(["--dry-run"], is_flag=True, help="print the plan (chunks, bytes, memory) and stop"),
        ],
        "Output": [
            click.Option(
                ["--output", "template"],
                metavar="NAME",
                help="several inputs: names of the results in the folder OUTPUT, built from {stem}, {suffix}, "
                "{name}, {parent} and {index} [default: {name}]",
            ),
            click.Option(["--preview"], type=FILE_PATH, metavar="FILE", help="also write a small PNG of the result"),
            click.Option(["--no-clobber"], is_flag=True, help="stop if the output exists, instead of replacing it"),
            click.Option(["--json", "as_json"], is_flag=True, help="print the plan or the receipt as JSON"),
            click.Option(["--quiet"], is_flag=True, help="no progress bar and no summary"),
        ],
        "Advanced": [
            *_setting_options("chunk_bytes", "threads", "overlap", "metrics_port"),
            *_CERTIFICATES,
            _CONFIG,
            click.Option(
                ["--checksum"], is_flag=True, help="put the input's SHA-256 in the receipt, even if it is large"
            ),
        ],
    }


def run(
    workload: str,
    parameters: dict[str, Any],
    *,
    inputs: tuple[Path, ...],
    output: Path,
    template: str | None,
    config: Path | None,
    preview: Path | None,
    checksum: bool,
    resume: bool,
    dry_run: bool,
    no_clobber: bool,
    as_json: bool,
    quiet: bool,
    **flags: Any,
) -> None:
    """Run a job on this machine, or one for each of many files."""
    from pipeline.cli.many import run_many
    from pipeline.cli.terminal import plan_lines, published_before_line, result_line, status
    from pipeline.cluster.executor import open_executor
    from pipeline.engine.listing import is_many
    from pipeline.engine.receipt import to_json
    from pipeline.engine.run import RunOptions, check_preview, published_before, write_preview
    from pipeline.workloads import LOCAL_ONLY, JobSpec, workload_named
    from pipeline.workloads.paths import refuse_existing_results
    from pipeline.workloads.protocol import Prefetches

    settings = load_settings(flags, file=config)
    if workload in LOCAL_ONLY and settings.scheduler is not None:
        raise ParameterError(f"{workload} runs on this machine alone: leave --scheduler out")
    kind = workload_named(workload)
    options = RunOptions(
        memory_bytes=settings.memory, chunk_bytes=settings.chunk_bytes, checksum=checksum, resume=resume
    )
    if (
        len(inputs) > 1
        or template is not None
        or click.get_current_context().meta[_NAMES_A_FOLDER]
        or is_many(inputs[0], kind)
    ):
        _refuse_for_many(
            (*inputs, output), {"--preview": preview is not None, "--checksum": checksum, "--no-clobber": no_clobber}
        )
        run_many(
            workload, _parameters(workload, parameters), inputs, output, template, settings, options,
            dry_run=dry_run, as_json=as_json, quiet=quiet, kept=kept,
        )  # fmt: skip
        return
    _begun.append(output)
    spec = JobSpec(workload=workload, input=inputs[0], output=output, parameters=_parameters(workload, parameters))
    if preview is not None:
        check_preview(spec, preview)
    slow = kind if isinstance(kind, Prefetches) else None
    with ExitStack() as held:
        with status(f"opening {printable(inputs[0].name)} and planning", shown=_on_terminal(quiet)):
            held.enter_context(slow.prefetch(spec) if slow else nullcontext())
            executor = held.enter_context(open_executor(settings, slow.modules(spec) if slow else ()))
            job = _planned(spec, executor.device, options)
        if dry_run:
            job.output.discard()
            plan = job.describe()
            say(to_json(plan) if as_json else "\n".join(map(printable, plan_lines(plan))))
            return
        _announce(job, options, quiet)
        if settings.metrics_port is not None:
            from pipeline.metrics import serve

            serve(settings.metrics_port)
        before = published_before(job) if resume else None
        older = os.path.lexists(output)
        if before is None and no_clobber:
            refuse_existing_results(kind, spec)
        receipt = before or _carried_out(job, options, executor.stream, quiet, no_clobber)
    if preview is not None:
        try:
            write_preview(job.job, preview)
        except MillraceError as error:
            raise type(error)(f"{output} is complete, but not its preview: {error}") from error
    if as_json or not quiet:
        line = result_line if before is None else published_before_line
        replaced = "; replaced an older result" if older and before is None else ""
        say(to_json(receipt) if as_json else printable(line(receipt)) + replaced, besides=f"; {output} is complete")


def _planned(spec: JobSpec, device: PlannedDevice, options: RunOptions) -> PlannedJob:
    """As `plan_job`, but ParameterError names a --memory that is enough, close to the least."""
    from pipeline.engine.run import plan_job

    def shortage(memory: str) -> float | None:
        """The factor by which the memory must grow."""
        try:
            plan_job(spec, device, replace(options, memory_bytes=parse_bytes(memory))).output.discard()
        except MemoryTooSmall as error:
            return error.times
        return None

    try:
        return plan_job(spec, device, options)
    except MemoryTooSmall as error:
        low, high = options.memory_bytes, _stated(options.memory_bytes * error.times)
        while (times := shortage(high)) is not None:
            low, high = parse_bytes(high), _stated(parse_bytes(high) * max(times, 1.05))
        # Input that is held while it is decoded may take a part that does not grow with the memory.
        while parse_bytes(high) > 1.1 * low:
            middle = _stated(math.sqrt(low * parse_bytes(high)))
            if middle == high:
                break
            if shortage(middle) is None:
                high = middle
            else:
                low = parse_bytes(middle)
        raise ParameterError(
            f"{error.fault}: pass --memory {high}; twice as much reads less of the image again"
        ) from error


def _stated(memory: float) -> str:
    """An amount of memory as an option, rounded up: 361MiB, 2.6GiB."""
    mebibytes = math.ceil(memory / (1 << 20))
    return f"{mebibytes}MiB" if mebibytes < 1024 else f"{math.ceil(mebibytes * 10 / 1024) / 10:g}GiB"


def _refuse_for_many(paths: Sequence[Path], given: Mapping[str, bool]) -> None:
    """ParameterError for a URL, and for an option that belongs to a run of one input."""
    if (url := next((each for each in paths if is_url(each)), None)) is not None:
        raise ParameterError(f"{url}: several inputs are files, with results in a folder; run objects one by one")
    if (option := next((name for name, is_given in given.items() if is_given), None)) is not None:
        raise ParameterError(f"{option}: belongs to one input; leave it out")


def _on_terminal(quiet: bool) -> bool:
    """Whether to show progress."""
    return not quiet and sys.stderr is not None and sys.stderr.isatty()


def _announce(job: PlannedJob, options: RunOptions, quiet: bool) -> None:
    """What the user should know before work starts."""
    remarks = job.job.summary.remarks
    if (lost := remarks.get("not kept")) and not quiet:
        click.echo(printable(f"{job.spec.output} does not keep these properties of {job.spec.input}: {lost}"), err=True)
    if warning := remarks.get("warning"):
        click.echo(f"millrace: warning: {printable(warning)}", err=True)
    plan, read, written = job.plan, job.plan.input_bytes, job.plan.output_bytes
    is_cut = len(plan.chunks) > 1 and options.chunk_bytes is None
    if is_cut and any(map(any, plan.chunks[0].halo)) and read > MUCH_READ * written:
        click.echo(
            f"millrace: warning: chunks are much smaller than their halo: {format_bytes(read)} are read for a "
            f"result of {format_bytes(written)}; raise --memory to read less",
            err=True,
        )


def _carried_out(
    job: PlannedJob, options: RunOptions, stream: Stream, quiet: bool, no_clobber: bool
) -> Mapping[str, Any]:
    """The receipt of a run, with a progress bar on a terminal."""
    from pipeline.cli.terminal import progress_bar
    from pipeline.engine.run import RunEvents, run_job
    from pipeline.workloads.paths import refuse_existing_results
    from pipeline.workloads.protocol import Progress

    output = job.spec.output
    shown = _on_terminal(quiet)
    note = job.job.progress_note if isinstance(job.job, Progress) else None
    with progress_bar(job.plan, printable(output.name), shown=shown, note=note) as bar:
        events = RunEvents(
            on_written=bar.written,
            on_recut=bar.recut,
            on_computed=(lambda: refuse_existing_results(job.workload, job.spec)) if no_clobber else (lambda: None),
            on_published=lambda: _published.append(output),
            on_kept=lambda count, chunks: kept.append(
                (f"{count} of {counted(chunks, 'chunk')}" if count else "the last iterate")
                + " kept: continue with --resume"
            ),
        )
        receipt = run_job(job, options, events=events, stream=stream)
    if remark := receipt["image"].get("not_converged"):
        click.echo(f"millrace: warning: {remark}", err=True)
    return receipt


def _parameters(name: str, given: dict[str, Any]) -> Any:
    from pydantic import ValidationError

    from pipeline.workloads import workload_named

    try:
        return workload_named(name).Parameters(**given)
    except ValidationError as error:
        raise ParameterError(of_option(error)) from error


def left_behind() -> list[str]:
    """Remarks on what a stopped run left of its output."""
    from pipeline.workloads.paths import ledger_path

    if _published:
        return [f"{_published[-1]} is complete"]
    found = ["nothing was published"] if _begun else []
    if not kept and any(any(ledger_path(output).glob("chunks-*.json")) for output in _begun if not is_url(output)):
        kept.append("what an earlier run has kept is still there for --resume")
    return [*found, *kept]


_VERIFY_OPTIONS = [
    click.Option(
        ["--chunks"], default="8", metavar="N|all", show_default=True, help="number of chunks, chosen at random, or all"
    ),
    click.Option(["--input", "moved_input"], type=FILE_OR_URL, help="where the input is now, if it has moved"),
    *_setting_options("device", "memory", "chunk_bytes", "threads"),
    _CONFIG,
    click.Option(["--json", "as_json"], is_flag=True, help="print JSON"),
    click.Option(["--quiet"], is_flag=True, help="no progress bar and no summary"),
]


@click.command(params=[click.Argument(["output"], type=FILE_OR_URL), *_VERIFY_OPTIONS])
def verify(
    output: Path, chunks: str, moved_input: Path | None, config: Path | None, as_json: bool, quiet: bool, **flags: Any
) -> None:
    """Compute chunks of the result OUTPUT again, from its input and receipt, and compare. Nothing is written.

    Exit code 6 if they differ: by any bit for integers, by more than the workload's tolerance for floats. One device
    computes; --device all means auto.
    """
    from pipeline.cli.terminal import progress_bar
    from pipeline.engine.receipt import to_json
    from pipeline.engine.run import RunOptions, open_device
    from pipeline.engine.verify import Verification, recorded_job
    from pipeline.workloads import workload_named
    from pipeline.workloads.paths import receipt_path
    from pipeline.workloads.protocol import Prefetches, Progress

    if chunks != "all" and not (chunks.isdecimal() and int(chunks)):
        raise ParameterError(f"--chunks {chunks}: must be a whole number above 0, or all")
    count = None if chunks == "all" else int(chunks)
    settings = load_settings(flags, file=config)
    if not is_url(output) and output.exists() and not receipt_path(output).exists():
        raise InputError(f"{output}: has no receipt ({receipt_path(output).name}), so it cannot be verified")
    recorded = recorded_job(output, moved_input)
    kind = workload_named(recorded.spec.workload)
    options = RunOptions(memory_bytes=settings.memory, chunk_bytes=settings.chunk_bytes)
    with kind.prefetch(recorded.spec) if isinstance(kind, Prefetches) else nullcontext():
        device = open_device("auto" if settings.device == "all" else settings.device, settings.threads)
        verification = Verification(recorded, device, options, count)
    shown = _on_terminal(quiet)
    note = verification.job.progress_note if isinstance(verification.job, Progress) else None
    with verification, progress_bar(verification.plan, printable(output.name), shown=shown, note=note) as bar:
        verified = verification.run(bar.written, bar.recut)
    if as_json:
        say(to_json(verified.describe()))
    verified.refuse_differences()
    if not (as_json or quiet):
        say(printable(verified.line()))
