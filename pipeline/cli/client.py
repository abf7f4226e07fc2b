"""The commands of a service's users: submit, jobs, status, wait, logs, cancel, retry, result, workers."""

from __future__ import annotations

import json
import math
import re
import sys
import time as clock
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from pipeline.api_models import SILENT_S
from pipeline.cli.local import FILE_PATH, kept
from pipeline.cli.stdout import say
from pipeline.config import format_bytes, format_seconds
from pipeline.errors import MillraceError, ParameterError, ServiceError, ServiceRefused, counted, printable

if TYPE_CHECKING:
    from pipeline.client import Client, Job

# Exit codes of `wait` and `submit --wait`, besides 0 for success, 1 if the service fails and 2 for a user's mistake.
JOB_FAILED, JOB_CANCELLED, NOT_OVER_IN_TIME = 3, 4, 5
_ENDINGS = {"succeeded": 0, "failed": JOB_FAILED, "cancelled": JOB_CANCELLED}
# How often `jobs --watch` asks.
WATCH_S = 2.0
# Between the first requests of `wait`, if the service is away.
RETRY_S = 0.25
_STATES = ("queued", "planning", "running", "publishing", *_ENDINGS)

JSON = click.option("--json", "as_json", is_flag=True, help="print JSON")


class _Seconds(click.FloatRange):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):  # passes every range check
            self.fail(f"{value} is not a number of seconds.", param, ctx)
        return seconds


SECONDS = _Seconds(0)


@contextmanager
def connected() -> Iterator[Client]:
    """A client of the service. Refusals name options, as those of `run` do."""
    from pipeline.client import Client

    try:
        with Client() as client:
            yield client
    except ServiceRefused as refusal:
        raise ServiceRefused(_with_option(str(refusal))) from refusal


def _with_option(refusal: str) -> str:
    """Names the option in place of the request's field: parameters.size, limits.time_s, after.0."""
    field, _, rest = refusal.partition(": ")
    if field == "parameters":  # of several, which the message names
        return rest
    option = "--" + re.sub(r"^parameters\.|^limits[., ]+|_bytes$|_s$|\.\d+$", "", field).replace("_", "-")
    known = [name for param in click.get_current_context().command.params for name in param.opts]
    return f"{option}: {rest}" if option in known else refusal


def wait_options() -> list[click.Option]:
    return [
        click.Option(
            ["--timeout"], type=SECONDS, metavar="SECONDS", help="maximum seconds to wait, then exit with code 5"
        ),
        click.Option(["--quiet"], is_flag=True, help="no progress bar and no summary"),
    ]


def submit_options() -> list[click.Option]:
    """Options of every `millrace submit WORKLOAD`, besides the workload's parameters."""
    return [
        click.Option(
            ["--priority"],
            type=click.IntRange(-100, 100),
            metavar="N",
            default=0,
            show_default=True,
            help="higher first; above 0 for operators only",
        ),
        click.Option(
            ["--after"], multiple=True, metavar="JOB", help="run only after this job succeeds; may be repeated"
        ),
        click.Option(
            ["--after-any"], multiple=True, metavar="JOB", help="run only after this job ends, however it does"
        ),
        click.Option(
            ["--array"],
            metavar="FROM-TO[%N]",
            help="one job for each number, {index} in paths; with %N at most N at the same time",
        ),
        click.Option(
            ["--time"],
            metavar="TIME",
            help="time limit, such as 2h; the job fails after it and keeps its finished chunks",
        ),
        click.Option(["--memory"], metavar="SIZE", help="limit on host memory, such as 16GiB"),
        click.Option(["--gpu-memory"], metavar="SIZE", help="limit on the memory of each GPU, such as 20GiB"),
        click.Option(["--gpus"], type=click.IntRange(1), metavar="N", help="number of GPUs to run on [default: all]"),
        click.Option(["--no-clobber"], is_flag=True, help="fail if the output exists, instead of replacing it"),
        click.Option(["--webhook"], metavar="URL", help="address to notify when the job ends"),
        click.Option(
            ["--group"], metavar="GROUP", help="one of your groups, whose users see the job [default: your first]"
        ),
        click.Option(["--key"], metavar="KEY", help="idempotency key: repeating the command with it adds no job"),
        click.Option(["--wait"], is_flag=True, help="wait until the job is over; Ctrl-C leaves it running"),
        *wait_options(),
        click.Option(["--json", "as_json"], is_flag=True, help="print JSON"),
    ]


def submit(
    workload: str, parameters: dict[str, Any], *, input: str, output: str, priority: int, after: tuple[str, ...],  # noqa: A002
    after_any: tuple[str, ...], time: str | None, memory: str | None, gpu_memory: str | None, gpus: int | None,
    no_clobber: bool, webhook: str | None, array: str | None, group: str | None, key: str | None, wait: bool,
    timeout: float | None, quiet: bool, as_json: bool,
) -> None:  # fmt: skip
    """Submit a job to the service."""
    if timeout is not None and not wait:
        raise ParameterError("--timeout limits --wait: pass both, or neither")
    with connected() as client:
        limits = {"time": time, "memory": memory, "gpu_memory": gpu_memory, "gpus": gpus}
        asked = {
            "priority": priority, "after": after, "after_any": after_any, "webhook": webhook, "group": group,
            "key": key, "no_clobber": no_clobber,
            "limits": {name: value for name, value in limits.items() if value is not None}, **parameters,
        }  # fmt: skip
        if array is None:
            jobs = [client.submit(workload, input, output, **asked)]
        else:
            jobs = client.submit_array(workload, input, output, array, **asked)
        if not wait:
            _show(jobs, as_json, lambda job: job.id, listed=array is not None)
        if sys.stderr.isatty() and not quiet:
            _show_estimate(jobs)
        if not wait:
            return
        _wait(jobs, timeout, _end_of(timeout), quiet, as_json, listed=array is not None)


@click.command()
@click.option("--state", type=click.Choice(_STATES), help="only jobs in this state")
@click.option("--owner", metavar="NAME", help="only jobs of this owner")
@click.option("--group", metavar="GROUP", help="only jobs of this group")
@click.option("--workload", metavar="WORKLOAD", help="only jobs of this workload")
@click.option("--array", metavar="ARRAY", help="only jobs of this array")
@click.option(
    "--limit", type=click.IntRange(1), metavar="N", default=50, show_default=True, help="maximum number of jobs"
)
@click.option("--watch", is_flag=True, help="keep the list up to date until Ctrl-C; to a file or pipe, print changes")
@JSON
def jobs(limit: int, watch: bool, as_json: bool, **filters: str | None) -> None:
    """List jobs, the newest first."""
    if watch and as_json:
        raise ParameterError("--watch prints lines for people: leave --json out, or ask again with it")
    with connected() as client:
        if watch:
            _watch(lambda: list(client.jobs(limit=limit, **filters)))
        found = list(client.jobs(limit=limit, **filters))
        if as_json:
            _show(found, as_json, _line, listed=True)
        elif found:
            say("\n".join(_table(found)))


@click.command()
@click.argument("job")
@JSON
def status(job: str, as_json: bool) -> None:
    """Show one job."""
    with connected() as client:
        _show([client.job(job)], as_json, lambda found: "\n".join(_details(found)))


@click.command(params=[click.Argument(["job_ids"], nargs=-1, required=True, metavar="JOB…"), *wait_options()])
@JSON
def wait(job_ids: tuple[str, ...], timeout: float | None, quiet: bool, as_json: bool) -> None:
    """Wait until jobs are over. Exit code 3 if one failed, 4 if one was cancelled, 5 on timeout."""
    with connected() as client:
        end = _end_of(timeout)
        _wait([_awaited(client, each, end) for each in job_ids], timeout, end, quiet, as_json, listed=len(job_ids) > 1)


@click.command()
@click.argument("job")
@click.option("--follow", "-f", is_flag=True, help="keep printing until the job is over")
@JSON
def logs(job: str, follow: bool, as_json: bool) -> None:
    """Print what happened to a job."""
    with connected() as client:
        found = client.job(job)
        events = (each.data for each in found.events() if each.kind != "progress") if follow else iter(found.log())
        for event in events:
            say(json.dumps(event) if as_json else f"{iso_time(event['at'])}  {printable(event['message'])}")


JOBS = click.argument("job_ids", nargs=-1, required=True, metavar="JOB…")


@click.command()
@JOBS
@JSON
def cancel(job_ids: tuple[str, ...], as_json: bool) -> None:
    """Cancel jobs and remove their partial outputs."""
    with connected() as client:
        _change([client.job(each) for each in job_ids], lambda job: job.cancel(), as_json)


@click.command()
@JOBS
@JSON
def retry(job_ids: tuple[str, ...], as_json: bool) -> None:
    """Queue failed or cancelled jobs again; finished chunks are kept."""
    with connected() as client:
        _change([client.job(each) for each in job_ids], lambda job: job.retry(), as_json)


@click.command()
@click.argument("job")
@click.argument("path", type=FILE_PATH, required=False)
@click.option("--receipt", is_flag=True, help="print the receipt instead")
@JSON
def result(job: str, path: Path | None, receipt: bool, as_json: bool) -> None:
    """Download a job's output, a file or a folder, to PATH [default: its name, in the working directory]."""
    if receipt and path is not None:
        raise ParameterError(f"--receipt only prints the receipt; PATH {path} is not used: leave one of them out")
    if path == Path("-"):
        raise ParameterError("PATH -: a result is not written to standard output; name a file")
    with connected() as client:
        found = client.job(job)
        if receipt:
            say(json.dumps(found.receipt, indent=2))
            return
        fetched = found.result(path or Path(Path(found.view["output"]).name))
        say(json.dumps({"job": found.id, "path": str(fetched)}) if as_json else printable(str(fetched)))


@click.command()
@JSON
def workers(as_json: bool) -> None:
    """List the service's workers."""
    with connected() as client:
        found = client.workers()
    say_each(found, as_json, _worker_line)


def _show_estimate(found: list[Any]) -> None:
    """What the first of the jobs will take, on stderr; nothing if the service cannot tell yet."""
    with suppress(MillraceError):
        estimate = found[0].estimate()
        each = "each: " if len(found) > 1 else ""
        click.echo(f"estimate: {each}{_estimated(estimate)}", err=True)


def _estimated(estimate: dict[str, Any]) -> str:
    seconds = estimate["seconds"]
    lasts = (
        "time unknown without an earlier job" if seconds is None else f"about {format_seconds(seconds)} on this service"
    )
    return (
        f"reads {format_bytes(estimate['read_bytes'])}, writes {format_bytes(estimate['written_bytes'])}, "
        f"{format_bytes(estimate['memory_bytes'])} of buffers, {lasts}"
    )


def _watch(listed: Callable[[], list[Any]]) -> NoReturn:
    """Lists the jobs again and again: in place on a terminal; else a line for each job that has changed."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    if is_terminal():
        console = Console()
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                rows = _table(listed())[: console.height - 1]
                live.update(Text("\n".join(rows), no_wrap=True, overflow="ellipsis"), refresh=True)
                clock.sleep(WATCH_S)
    shown: dict[str, Any] = {}
    while True:
        for job in reversed(listed()):
            now = job.state, job.view["chunks_done"], job.view["cancelling"]
            if shown.get(job.id) != now:
                shown[job.id] = now
                say(_line(job))
        sys.stdout.flush()
        clock.sleep(WATCH_S)


def is_terminal() -> bool:
    return sys.stdout.isatty()


def _table(found: list[Any]) -> list[str]:
    """A header and a line for each job, in columns."""
    rows = [("JOB", "STATE", "PROGRESS", "AGE", "OWNER", "WORKLOAD", "INPUT → OUTPUT"), *map(_row, found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return ["  ".join((*map(str.ljust, row[:-1], widths), row[-1])) for row in rows]


def _row(job: Any) -> tuple[str, ...]:
    view = job.view
    done, chunks = view["chunks_done"], view["chunks"]
    progress = f"{100 * done // chunks} %" if chunks else ""
    what = f"{view['input']} → {view['output']}" + (f": {view['error']}" if view["error"] else "")
    state = f"{view['state']} (stopping)" if view["cancelling"] else view["state"]
    age = _age(clock.time() - view["submitted_at"])
    return tuple(map(printable, (view["id"], state, progress, age, view["owner"], view["workload"], what)))


def _age(seconds: float) -> str:
    """Whole units, as far as they say something."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _end_of(timeout: float | None) -> float:
    return math.inf if timeout is None else clock.monotonic() + timeout


def _awaited(client: Client, job: str, end: float) -> Job:
    """The job, even if the service is away as the wait begins: it may be starting again."""
    from pipeline.client import MOST_OUTAGE_S, ForeignAnswer

    last, is_told = min(end, clock.monotonic() + MOST_OUTAGE_S), False
    while True:
        try:
            return client.job(job)
        except ForeignAnswer:
            raise
        except ServiceError as error:
            left = last - clock.monotonic()
            if left <= 0:
                raise
            if not is_told:
                click.echo(f"millrace: {error}; asking again for up to {format_seconds(left)}", err=True)
            is_told = True
        clock.sleep(RETRY_S)


def _wait(found: list[Any], timeout: float | None, end: float, quiet: bool, as_json: bool, *, listed: bool) -> NoReturn:
    """Waits for the jobs and exits with the code of their outcomes."""
    for job in found:
        try:
            job.wait(progress=not quiet, timeout_s=None if timeout is None else max(end - clock.monotonic(), 0.0))
        except TimeoutError as error:
            click.echo(f"millrace: job {job.id} is {job.state} after {timeout:g} s; it continues", err=True)
            raise SystemExit(NOT_OVER_IN_TIME) from error
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C
                left = " ".join(each.id for each in found if each.view["state"] not in _ENDINGS)
                kept.append(f"the submitted jobs continue: millrace wait {left}")
            raise
    if as_json or not quiet:
        _show(found, as_json, _line, listed=listed)
    raise SystemExit(max(_ENDINGS[job.state] for job in found))


def _change(found: list[Any], change: Callable[[Any], Any], as_json: bool) -> None:
    """Changes every job that the service lets change; refusals are reported at the end."""
    changed, refusals = [], []
    for job in found:
        try:
            changed.append(change(job))
        except ServiceRefused as error:
            refusals.append(str(error))
    if changed or len(found) > 1:
        _show(changed, as_json, _line, listed=len(found) > 1)
    if refusals:
        raise ServiceRefused("; ".join(refusals))


def _show(found: list[Any], as_json: bool, line: Callable[[Any], str], *, listed: bool = False) -> None:
    """`listed`: JSON is a list even for one job."""
    if as_json and not listed:
        say(json.dumps(found[0].view, indent=2))
    else:
        say_each([job.view for job in found] if as_json else found, as_json, line)


def say_each(found: list[Any], as_json: bool, line: Callable[[Any], str]) -> None:
    if as_json:
        say(json.dumps(found, indent=2))
    elif found:
        say("\n".join(map(line, found)))


def _worker_line(worker: dict[str, Any]) -> str:
    said = [worker.get("host") or "", worker["name"], worker.get("model") or ""]
    if (age_s := worker.get("heartbeat_age_s") or 0.0) > SILENT_S:
        said.append(f"last heartbeat {age_s:.0f} s ago")
    if worker.get("load") is not None:
        said.append(f"{100 * worker['load']:.0f} % busy")
    if worker.get("memory_used_bytes") is not None and worker.get("memory_total_bytes"):
        said.append(f"{format_bytes(worker['memory_used_bytes'])} of {format_bytes(worker['memory_total_bytes'])}")
    return "  ".join(said).strip()


def _line(job: Any) -> str:
    view = job.view
    share = f" {view['chunks_done']}/{view['chunks']}" if view["state"] == "running" and view["chunks"] else ""
    said = f": {view['error']}" if view["error"] else ""
    what = f"{view['workload']} {view['input']} → {view['output']}"
    return printable(f"{view['id']}  {view['state']}{share}  {what}{said}")


def _details(job: Any) -> list[str]:
    view = job.view
    aside = " (stopping)" if view["cancelling"] else " (held)" if view["held"] else ""
    rows = {
        "job": view["id"], "state": view["state"] + aside,
        "owner": view["owner"] + (f" ({view['group']})" if view["group"] else ""), "workload": view["workload"],
        "input": view["input"],
        "output": view["output"] + (" (not replaced if it exists)" if view["no_clobber"] else ""),
        "parameters": ", ".join(f"{name} {value}" for name, value in view["parameters"].items()) or "–",
        "priority": view["priority"], "chunks": f"{view['chunks_done']} of {view['chunks'] or '?'}",
        "attempts": view["attempts"], **_taken(view), "submitted": iso_time(view["submitted_at"]),
        "started": iso_time(view["started_at"]), "finished": iso_time(view["finished_at"]),
        "error": view["error"] or "–",
    }  # fmt: skip
    return [printable(f"{name:11} {value}") for name, value in rows.items()]


def _taken(view: dict[str, Any]) -> dict[str, Any]:
    """What the job may take, will by its plan, and took."""
    rows = {"limits": _amounts(view["limits"])}
    if view["estimate"] is not None:
        rows["estimate"] = _estimated(view["estimate"])
    if view["used"]["seconds"]:
        rows["used"] = _amounts({"time_s": view["used"]["seconds"], **view["used"]})
    if view["preemptions"]:
        rows["preempted"] = counted(view["preemptions"], "time")
    return {name: value for name, value in rows.items() if value}


def _amounts(values: dict[str, Any]) -> str:
    """Times, memory and GPUs for people."""
    forms: dict[str, Callable[[Any], str]] = {
        "time_s": format_seconds,
        "memory_bytes": lambda value: f"{format_bytes(value)} of memory",
        "gpu_memory_bytes": lambda value: f"{format_bytes(value)} of GPU memory",
        "gpus": lambda value: counted(value, "GPU"),
    }
    return ", ".join(form(values[name]) for name, form in forms.items() if values.get(name) is not None)


def iso_time(at: float | None) -> str:
    return "–" if at is None else datetime.fromtimestamp(at).astimezone().isoformat(" ", "seconds")
