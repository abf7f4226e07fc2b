"""`millrace run WORKLOAD INPUT… FOLDER`: many files in one run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.stdout import say
from pipeline.config import Settings
from pipeline.errors import UserError, counted, printable
from pipeline.stopping import Stopped

if TYPE_CHECKING:
    from pipeline.engine.run import RunOptions
    from pipeline.workloads import Parameters

# The exit code if some files failed, as that of `millrace wait` if a job did.
SOME_FAILED = 3
_FAULTS_SHOWN = 10


def run_many(
    workload: str, parameters: Parameters, inputs: Sequence[Path], folder: Path, template: str | None,
    settings: Settings, options: RunOptions, *, dry_run: bool, as_json: bool, quiet: bool, kept: list[str],
) -> None:  # fmt: skip
    """Run a job for every file that the inputs stand for. `kept`: takes a remark for the error message."""
    from pipeline.cli.terminal import files_bar
    from pipeline.cluster.executor import open_executor
    from pipeline.engine.listing import DEFAULT_NAME, check_folder, matching, named
    from pipeline.engine.many import ManyEvents, ManyFilesRun, ManyOptions
    from pipeline.engine.receipt import to_json
    from pipeline.formats.image import whole_files
    from pipeline.workloads import workload_named

    kind = workload_named(workload)
    check_folder(inputs, folder, kind)
    files = matching(inputs, kind)
    wait_for_loops = whole_files.prepare(len(files))
    wanted = named(files, folder, DEFAULT_NAME if template is None else template, kind)
    asked = ManyOptions(workload=workload, parameters=parameters, folder=folder, run=options)
    with open_executor(settings) as executor:
        wait_for_loops()
        if dry_run:
            plan = ManyFilesRun(asked, executor.device).describe(wanted)
            say(to_json(plan) if as_json else "\n".join(map(printable, _plan_lines(plan))))
            return
        if settings.metrics_port is not None:
            from pipeline.metrics import serve

            serve(settings.metrics_port)
        shown = not quiet and sys.stderr is not None and sys.stderr.isatty()
        with files_bar(len(wanted), printable(folder.name), shown=shown) as advance:
            run = ManyFilesRun(asked, executor.device, executor.stream, ManyEvents(on_files=advance))
            try:
                receipt = run.run(wanted)
            except UserError:
                raise
            except (Exception, Stopped):
                kept.append(f"{run.published:,} of {counted(len(wanted), 'file')} published: continue with --resume")
                raise
    if as_json or not quiet:
        say(to_json(receipt) if as_json else printable(_result_line(receipt)), besides=f"; {folder} is complete")
    if receipt["failed"]:
        for line in () if quiet else _fault_lines(receipt):
            click.echo(f"millrace: {printable(line)}", err=True)
        sys.exit(SOME_FAILED)


def _plan_lines(plan: Mapping[str, Any]) -> list[str]:
    from pipeline.cli.terminal import plan_lines

    lines = [f"{counted(plan['files'], 'file')} → {plan['output']}"]
    for each in plan["plans"]:
        lines += [f"{counted(each['files'], 'file')} of one kind, such as:", *plan_lines(each)]
    return [*lines, *(f"cannot be used: {why}" for why in plan["failed"].values())]


def _result_line(receipt: Mapping[str, Any]) -> str:
    seconds, done = receipt["wall_seconds"], receipt["published"] - receipt["skipped"]
    skipped = f", {receipt['skipped']:,} published by an earlier run" if receipt["skipped"] else ""
    failed = f", {receipt['failed']:,} failed" if receipt["failed"] else ""
    checked = sum(job["audit"]["samples"] for job in (*receipt["jobs"], *_jobs_of_one_file(receipt)))
    rate = done / max(seconds, 1e-9)
    rate_shown = f"{rate:,.0f}" if rate >= 9.95 else f"{rate:.1f}".removesuffix(".0")
    return (
        f"{receipt['output']}: {counted(done, 'file')} on {receipt['device']['name']} in {seconds:.2f} s "
        f"({rate_shown} {'file' if rate_shown == '1' else 'files'}/s){skipped}{failed}; "
        f"{counted(checked, 'sample')} checked"
    )


def _jobs_of_one_file(receipt: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The receipts of files that this run has processed alone; those of earlier runs may lie beside other results."""
    from pipeline.workloads.paths import receipt_path

    folder = Path(receipt["output"])
    has_any = any(folder.glob(receipt_path(Path("*")).name))
    for *_, name, error in receipt["files"] if has_any else ():
        if error is None:
            with suppress(OSError):  # there is none, or its name would be too long
                job = json.loads(receipt_path(folder / name).read_bytes())
                if job["finished"] >= receipt["started"]:
                    yield job


def _fault_lines(receipt: Mapping[str, Any]) -> list[str]:
    from pipeline.engine.many import TABLE

    # Files of one kind may share one.
    faults = list(dict.fromkeys(row[4] for row in receipt["files"] if row[4] is not None))
    more = len(faults) - _FAULTS_SHOWN
    table = f"{Path(receipt['output'], TABLE)}"
    return [*faults[:_FAULTS_SHOWN], *([f"{counted(more, 'further fault')}: see {table}"] if more > 0 else [])]
