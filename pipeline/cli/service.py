"""The commands that run a service: serve, config check, token."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pipeline.cli.local import FILE_PATH
from pipeline.cli.stdout import say
from pipeline.errors import UserError, printable
from pipeline.service.settings import ServiceSettings, load_service_settings


def _options(command: Callable[..., None]) -> Callable[..., None]:
    """Every setting as an option, without defaults: the environment or the file may set those that are not given."""
    for name, info in reversed(ServiceSettings.model_fields.items()):
        text = info.description or ""
        if not info.is_required() and info.default is not None:
            text += f" [default: {info.default}]"
        command = click.option(f"--{name.replace('_', '-')}", name, help=text)(command)
    return click.option("--config", type=FILE_PATH, help="TOML file with any of the settings below")(command)


@click.command()
@_options
def serve(config: Path | None, **flags: Any) -> None:
    """Run the service: accept jobs over HTTP, keep them on disk and run them."""
    from pipeline.service.server import serve as run_server

    settings = load_service_settings(flags, file=config).settings
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("distributed").setLevel(logging.WARNING)
    logging.getLogger("MDAnalysis").setLevel(logging.ERROR)  # it warns about optional packages
    run_server(settings, on_ready=lambda address: click.echo(f"Millrace serves at {address}"))


@click.group()
def config() -> None:
    """Inspect settings."""


@config.command()
@_options
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


@click.command()
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice(["user", "operator"]),
    default="user",
    show_default=True,
    help="operators may raise priorities",
)
def token(name: str, role: str) -> None:
    """Create a token for NAME: prints the line for the tokens_file on stdout and the token, once, on stderr."""
    from pipeline.service.http.tokens import new_token, token_line

    made = new_token()
    say(token_line(name, made, role))
    click.echo(f"token of {name}, not shown again: {made}", err=True)


COMMANDS = (serve, config, token)
