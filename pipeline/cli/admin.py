"""The commands of a service's operators, millrace admin, and the accounts, millrace usage."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any

import click

from pipeline.cli.client import JSON, NOT_OVER_IN_TIME, SECONDS, connected, iso_time, say_each
from pipeline.cli.help import Group
from pipeline.cli.stdout import say
from pipeline.config import format_bytes, parse_bytes
from pipeline.errors import ParameterError, printable

POLL_S = 1.0


@click.group(cls=Group)
def admin() -> None:
    """Hold, release, drain, cancel and limit the jobs of a service; for operators."""


def _name(_: Any, option: click.Parameter, text: str | None) -> str | None:
    from pipeline.service.http.users.tokens import is_name

    if text and not is_name(text):
        raise ParameterError(f"{option.opts[0]} {text!r}: a name has up to 64 letters, digits and . _ @ -")
    return text


def _target(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--all", "everything", is_flag=True, help="everyone's jobs"),
        click.option(
            "--group",
            metavar="GROUP",
            callback=_name,
            help="the jobs of this group; '' is the group of users without one",
        ),
        click.option("--user", "owner", metavar="NAME", callback=_name, help="this user's jobs"),
        click.argument("jobs", nargs=-1, metavar="[JOB]…"),
    ):
        command = option(command)
    return command


def _body(jobs: tuple[str, ...], owner: str | None, group: str | None, everything: bool) -> dict[str, Any]:
    if bool(jobs) + (owner is not None) + (group is not None) + everything != 1:
        raise ParameterError("name jobs, or one of --user, --group and --all")
    if jobs:
        return {"jobs": list(jobs)}
    return {"everything": True} if everything else {"owner": owner} if owner is not None else {"group": group}


def _asked(path: str, body: dict[str, Any] | None = None) -> Any:
    with connected() as client:
        if body is None:
            return client.request("GET", f"/v1/{path}")
        return client.request("POST", f"/v1/{path}", json=body)


@admin.command()
@_target
@JSON
def hold(as_json: bool, **target: Any) -> None:
    """Hold queued jobs until `release`. Running jobs continue."""
    _say_queue(_asked("admin/hold", _body(**target)), as_json)


@admin.command()
@_target
@JSON
def release(as_json: bool, **target: Any) -> None:
    """End a hold; --all ends that of the whole queue, which `drain` also sets."""
    _say_queue(_asked("admin/release", _body(**target)), as_json)


@admin.command()
@click.option(
    "--timeout", type=SECONDS, metavar="SECONDS", help="maximum seconds to wait for running jobs, then exit with code 5"
)
@JSON
def drain(timeout: float | None, as_json: bool) -> None:
    """Start no further jobs, and wait until those that run have finished. `release --all` ends it, also after a restart
    of the service."""
    end = None if timeout is None else time.monotonic() + timeout
    found = _asked("admin/hold", {"everything": True})
    while found["running"] and (end is None or time.monotonic() < end):
        time.sleep(POLL_S)
        found = _asked("admin/queue")
    _say_queue(found, as_json)
    if found["running"]:
        raise SystemExit(NOT_OVER_IN_TIME)


@admin.command()
@_target
@JSON
def cancel(as_json: bool, **target: Any) -> None:
    """Cancel anyone's jobs and remove their partial outputs."""
    cancelled: list[str] = []
    found = {"more": True}
    while found["more"]:
        found = _asked("admin/cancel", _body(**target))
        cancelled += found["jobs"]
    if as_json:
        say(json.dumps(cancelled))
    elif cancelled:
        say("\n".join(f"{job}  cancelled" for job in cancelled))


@admin.command()
@JSON
def queue(as_json: bool) -> None:
    """Show the holds, and how many jobs run and wait."""
    _say_queue(_asked("admin/queue"), as_json)


def _say_queue(found: Any, as_json: bool) -> None:
    if as_json:
        say(json.dumps(found, indent=2))
        return
    lines = [f"{found['running']} running, {found['queued']} queued"]
    for each in found["holds"]:
        whose = {"all": "everything", "owner": f"user {each['name']}"}.get(each["kind"], f"group {each['name']}")
        lines.append(f"held: {whose}, by {each['held_by']} since {iso_time(each['at'])}")
    say("\n".join(lines))


def _amount(of_bytes: bool) -> Callable[[Any, Any, Any], Any]:
    def parsed(_: Any, __: Any, text: str | None) -> Any:
        if text in (None, "none"):
            return text
        try:
            value = float(parse_bytes(text) if of_bytes else text)
            if not 0 < value < math.inf:
                raise ValueError(text)
            return value
        except ValueError as error:
            said = str(error) if of_bytes else f"{text!r} is neither a number above 0 nor none"
            raise click.BadParameter(said) from error

    return parsed


_CAPS = {
    "running": "jobs that may run at the same time",
    "unfinished": "jobs that may be queued or running",
    "gpu_hours": "quota of hours on GPUs, in the service's quota_days",
    "device_hours": "quota of hours on GPUs and CPU workers",
    "bytes": "quota of bytes read and written, such as 10TB",
    "jobs": "quota of jobs that end",
}
_CAP_METAVARS = {"gpu_hours": "HOURS", "device_hours": "HOURS", "bytes": "SIZE"}


def _cap_options(command: Callable[..., None]) -> Callable[..., None]:
    for name, text in reversed(_CAPS.items()):
        parse = _amount(of_bytes=name == "bytes")
        command = click.option(
            f"--{name.replace('_', '-')}", name, callback=parse, metavar=_CAP_METAVARS.get(name, "N"),
            help=f"{text}; none: no cap",
        )(command)  # fmt: skip
    return command


@admin.command()
@click.option(
    "--user",
    "owner",
    metavar="NAME",
    callback=_name,
    help="for this user; without --user and --group: for each user without a cap of their own",
)
@click.option(
    "--group",
    metavar="GROUP",
    callback=_name,
    help="for all users of this group together; '' for each group without a cap of its own",
)
@_cap_options
@JSON
def caps(owner: str | None, group: str | None, as_json: bool, **limits: float | str | None) -> None:
    """Show the caps, or set some. They apply at once and survive restarts."""
    if owner is not None and group is not None:
        raise ParameterError("--user and --group: give one of them")
    whose = {"kind": "owner", "name": owner or ""} if group is None else {"kind": "group", "name": group}
    found = None
    for what, value in limits.items():
        if value is not None:
            found = _asked("admin/caps", whose | {"what": what, "value": None if value == "none" else value})
    found = _asked("admin/caps") if found is None else found
    say_each(found, as_json, _cap_line)


def _cap_line(cap: dict[str, Any]) -> str:
    kind = "user" if cap["kind"] == "owner" else "group"
    whose = f"{kind} {cap['name']}" if cap["name"] else f"each {kind}"
    value = format_bytes(cap["value"]) if cap["what"] == "bytes" else f"{cap['value']:g}"
    return f"{whose}: {cap['what'].replace('_', '-')} {value}"


@click.command()
@click.option(
    "--since",
    metavar="DATE",
    help="the first day, UTC, such as 2026-11-01 [default: the first day that counts for quotas]",
)
@click.option("--until", metavar="DATE", help="the day after the last")
@click.option("--daily", is_flag=True, help="a line for each day")
@JSON
def usage(since: str | None, until: str | None, daily: bool, as_json: bool) -> None:
    """Show what was used, by user and group. A run counts its time for every device that it could use."""
    asked = {"since": since, "until": until, "daily": "true" if daily else None}
    with connected() as client:
        params = {name: value for name, value in asked.items() if value is not None}
        found = client.request("GET", "/v1/usage", params=params)
    say_each(found, as_json, _usage_line)


def _usage_line(row: dict[str, Any]) -> str:
    who = f"{row['owner']} ({row['group']})" if row["group"] else row["owner"]
    jobs = f"{row['succeeded']} succeeded, {row['failed']} failed, {row['cancelled']} cancelled"
    moved = f"{format_bytes(row['read_bytes'])} read, {format_bytes(row['written_bytes'])} written"
    hours = f"{row['gpu_seconds'] / 3600:.2f} GPU-hours, {row['device_seconds'] / 3600:.2f} device-hours"
    return printable("  ".join(filter(None, (row["day"], who, hours, moved, jobs))))
