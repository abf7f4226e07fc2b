"""The commands that run a service: serve, config check, token."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

from pipeline.cli.client import JSON, iso_time
from pipeline.cli.help import Group, SectionedCommand
from pipeline.cli.local import FILE_PATH
from pipeline.cli.stdout import say
from pipeline.config import merged
from pipeline.errors import UserError, printable
from pipeline.service.http.users.tokens import Role
from pipeline.service.settings import ServiceSettings, StateSettings, load_service_settings

# Heading of the help, setting, and what its value is.
SECTIONS = {
    "Files": {
        "data_roots": "FOLDER:…", "group_roots": "GROUP=FOLDER:…", "state_dir": "FOLDER", "keep_days": "DAYS",
    },
    "Network": {"host": "ADDRESS", "port": "PORT", "tls_cert": "FILE", "tls_key": "FILE"},
    "Workers": {
        "device": "DEVICE", "workers": "N", "threads": "N", "memory": "SIZE", "scheduler": "ADDRESS",
        "scheduler_ca": "FILE", "scheduler_cert": "FILE", "scheduler_key": "FILE",
    },
    "Users": {
        "tokens_file": "FILE", "trusted_proxies": "ADDRESS,…", "proxy_user_header": "HEADER",
        "proxy_groups_header": "HEADER", "proxy_operator_group": "GROUP", "proxy_viewer_group": "GROUP",
        "audit_log": "FILE", "audit_log_bytes": "SIZE", "audit_log_files": "N",
    },
    "Jobs": {
        "jobs_at_once": "N", "jobs_at_once_of_an_owner": "N", "jobs_waiting_of_an_owner": "N", "quota_days": "DAYS",
        "limits": "NAME=VALUE,…", "planning_s": "SECONDS", "drain_s": "SECONDS",
    },
    "Notifications": {"webhook_url": "URL", "webhook_hosts": "HOST,…", "webhook_secret_file": "FILE"},
}  # fmt: skip
_CONFIG = click.Option(
    ["--config"], type=FILE_PATH, metavar="FILE", help="TOML file with any of these settings; options take precedence"
)


def _sections() -> dict[str, list[click.Option]]:
    """Every setting as an option, without defaults: the environment or the file may set those that are not given."""
    found = {title: [_setting(*each) for each in section.items()] for title, section in SECTIONS.items()}
    return {**found, "Files": [_CONFIG, *found["Files"]]}


def _setting(name: str, metavar: str) -> click.Option:
    info = ServiceSettings.model_fields[name]
    text = info.description or ""
    if not info.is_required() and str(info.default) not in ("None", "", "[]", "{}") and "[default:" not in text:
        text += f" [default: {info.default}]"
    return click.Option([f"--{name.replace('_', '-')}", name], metavar=metavar, help=text)


@click.command(
    cls=SectionedCommand,
    sections=_sections(),
    epilog="millrace serve --data-roots /data\n"
    "millrace serve --config /etc/millrace.toml --host 0.0.0.0 --tokens-file /etc/millrace/tokens",
)
def serve(config: Path | None, **flags: Any) -> None:
    """Run the service: accept jobs over HTTP, keep them on disk and run them."""
    from pipeline.service.server import serve as run_server

    settings = load_service_settings(flags, file=config).settings
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("distributed").setLevel(logging.WARNING)
    logging.getLogger("MDAnalysis").setLevel(logging.ERROR)  # it warns about optional packages
    run_server(settings, on_ready=lambda address: click.echo(f"Millrace serves at {address}"))


@click.group(cls=Group)
def config() -> None:
    """Check the settings of a service."""


@config.command(cls=SectionedCommand, sections=_sections(), epilog="millrace config check --config /etc/millrace.toml")
def check(config: Path | None, **flags: Any) -> None:
    """Print the service's settings with the source of each, and the files and folders that cannot be used."""
    from pipeline.service.preflight import unusable_paths

    in_force = load_service_settings(flags, file=config)
    say("\n".join(in_force.lines()))
    faults = list(unusable_paths(in_force.settings))
    for fault in faults:
        click.echo(f"millrace: {printable(fault)}", err=True)
    if faults:
        raise SystemExit(UserError.exit_code)


class _TokenGroup(Group):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """`millrace token NAME …` is short for `millrace token create NAME …`."""
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["create", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_TokenGroup)
def token() -> None:
    """Create, list and revoke the tokens of a service's users."""


def _tokens_file(required: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        "--file", "-f", type=FILE_PATH, metavar="FILE", required=required,
        envvar="MILLRACE_TOKENS_FILE" if required else None,
        help="the service's tokens_file" + (" [default: MILLRACE_TOKENS_FILE]" if required else ", to add the line to"),
    )  # fmt: skip


@token.command()
@click.argument("name")
@click.option(
    "--role", type=click.Choice(get_args(Role)), default="user", show_default=True,
    help="viewers only look; operators see, change and limit everything",
)  # fmt: skip
@click.option("--group", "groups", multiple=True, metavar="GROUP", help="see only this group's jobs; may be repeated")
@click.option("--expires", metavar="WHEN", help="an age such as 12h, 90d or 4w, or a date such as 2027-01-31 (UTC)")
@_tokens_file(required=False)
def create(name: str, role: Role, groups: tuple[str, ...], expires: str | None, file: Path | None) -> None:
    """Create a token for NAME: prints the line for the tokens_file on stdout, or adds it to --file. Prints the token,
    once, on stderr."""
    from pipeline.service.http.users.tokens import add_line, expiry, new_token, token_line

    made = new_token()
    line = token_line(name, made, role, groups, None if expires is None else expiry(expires, time.time()))
    if file is None:
        say(line)
    else:
        add_line(file, line)
    click.echo(f"token of {name}, not shown again: {made}", err=True)


@token.command("list")
@_tokens_file(required=True)
@JSON
def list_tokens(file: Path, as_json: bool) -> None:
    """List the tokens of a file: id, name, role, groups and expiry; the tokens themselves are not in it."""
    from pipeline.service.http.users.tokens import Tokens

    views = [
        {
            "id": each.id, "name": each.user.name, "role": each.user.role, "groups": [*filter(None, each.user.groups)],
            "expires_at": each.expires_at, "expired": not each.is_valid(time.time()),
        }
        for each in Tokens(file, none_allowed=True)
    ]  # fmt: skip
    if as_json:
        say(json.dumps(views, indent=2))
    elif views:
        say("\n".join(_token_line(view) for view in views))


def _token_line(view: dict[str, Any]) -> str:
    said = [view["id"], view["name"], view["role"], ",".join(view["groups"]) or "–"]
    if view["expires_at"] is not None:
        said.append(f"{'expired' if view['expired'] else 'expires'} {iso_time(view['expires_at'])}")
    return "  ".join(said)


@token.command()
@click.argument("who", metavar="NAME|ID")
@_tokens_file(required=True)
def revoke(who: str, file: Path) -> None:
    """Remove all tokens of NAME, or the one with this id, from a file. The service shuts them out at once, and ends the
    sessions that were begun with them."""
    from pipeline.service.http.users.tokens import revoke as revoke_in

    for each in revoke_in(file, who):
        say(f"revoked {each.id} of {each.user.name}")


def _of_the_state(command: Callable[..., None]) -> Callable[..., None]:
    folder = click.option("--state-dir", metavar="FOLDER", help="the service's state folder [default: as for serve]")
    file = click.option("--config", type=FILE_PATH, metavar="FILE", help="TOML file with the service's settings")
    return file(folder(command))


def _state_dir(config: Path | None, state_dir: str | None) -> Path:
    return merged(StateSettings, {"state_dir": state_dir}, config)[0].state_dir


@click.command()
@click.argument("file", type=FILE_PATH)
@_of_the_state
def backup(file: Path, config: Path | None, state_dir: str | None) -> None:
    """Copy the jobs, accounts and limits of a service to a new FILE, while it runs or not."""
    from pipeline.service.store.state_folder import back_up

    back_up(_state_dir(config, state_dir), file)


@click.command()
@click.argument("file", type=FILE_PATH)
@_of_the_state
def restore(file: Path, config: Path | None, state_dir: str | None) -> None:
    """Put a backup in the place of a service's jobs, accounts and limits, while it does not run. Those that were there
    are kept beside it."""
    from pipeline.service.store.state_folder import restore as restore_in

    aside = restore_in(_state_dir(config, state_dir), file)
    say("restored" if aside is None else f"restored; what was there before is {printable(str(aside))}")
