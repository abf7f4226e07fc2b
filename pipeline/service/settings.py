"""Settings of a service: a TOML file, overridden by MILLRACE_… variables, overridden by flags."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from pipeline.config import DEVICE, SCHEDULER, NamedPath, format_bytes, merged, parse_bytes, whole
from pipeline.errors import ParameterError

JOBS = "jobs.sqlite"  # in the state_dir
_MOST_OF_A_DATABASES_PATH = 504  # bytes: SQLite's 512, less the end of its log's name
LOOPBACKS = ("127.0.0.1", "::1", "localhost")


def _listed(value: Any) -> Any:
    """Splits folders at colons, as in PATH."""
    return [part for part in value.split(":") if part] if isinstance(value, str) else value


def _by_group(value: Any) -> Any:
    """Splits GROUP=FOLDER:FOLDER,GROUP=FOLDER."""
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in value.split(",") if part]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError(f"{value!r} is not GROUP=FOLDER:FOLDER,…")
    return {group.strip(): folders for group, _, folders in pairs}


def _networks(value: Any) -> Any:
    """Splits addresses and networks at commas."""
    parts = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    for part in parts:
        try:
            ip_network(part)
        except ValueError as error:
            raise ValueError(f"{part!r} is neither an address nor a network such as 10.0.0.0/8") from error
    return parts


def _absolute(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:  # the user has no home, as often in containers
        raise ValueError(f"{path}: ~ has no home folder here; write the whole path") from error


def _short_enough(state_dir: Path) -> Path:
    if len(os.fsencode(state_dir / JOBS)) > _MOST_OF_A_DATABASES_PATH:
        most = _MOST_OF_A_DATABASES_PATH - len(f"/{JOBS}")
        raise ValueError(f"{state_dir}: SQLite takes a folder's whole name of at most {most} bytes; choose another")
    return state_dir


def _header(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9-]+", value):
        raise ValueError(f"{value!r} is no name of an HTTP header")
    return value.lower()


_Header = Annotated[str, AfterValidator(_header)]
_Folder = Annotated[NamedPath, AfterValidator(_absolute)]
_Count = Annotated[int, BeforeValidator(whole)]


class ServiceSettings(BaseModel):
    """Settings of `millrace serve`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    state_dir: Annotated[_Folder, AfterValidator(_short_enough)] = Field(
        Path("~/.local/state/millrace"), validate_default=True, description="folder for jobs and previews"
    )
    data_roots: Annotated[list[_Folder], BeforeValidator(_listed)] = Field(
        description="folders whose files jobs may read and write, separated by colons"
    )
    group_roots: Annotated[
        dict[str, Annotated[list[_Folder], BeforeValidator(_listed)]], BeforeValidator(_by_group)
    ] = Field(
        {}, description="folders that take the place of the data roots for the jobs of a group: GROUP=FOLDER:FOLDER,…"
    )
    host: str = Field("127.0.0.1", description="address to listen on; tokens are required unless it is loopback")
    port: _Count = Field(8765, ge=0, le=65535, description="port to listen on; 0: any free port")
    scheduler: str | None = Field(
        None,
        pattern=SCHEDULER,
        description="tcp://HOST:PORT of a Dask scheduler whose workers run the jobs",
    )
    device: str = Field("auto", pattern=DEVICE, description="device of the workers of this machine")
    workers: Annotated[int | None, BeforeValidator(whole)] = Field(
        None, ge=1, le=1024, description="worker processes on the CPU; by default one if there is no GPU"
    )
    threads: Annotated[int | None, BeforeValidator(whole)] = Field(
        None, ge=1, le=1024, description="compute threads in each process"
    )
    memory: Annotated[int, BeforeValidator(parse_bytes)] = Field(
        "1GiB",
        validate_default=True,
        ge=1 << 20,
        description="memory limit for the ring buffers of all jobs, such as 2GiB",
    )
    tokens_file: _Folder | None = Field(
        None, description="file of the users' tokens: lines that `millrace token` prints"
    )
    trusted_proxies: Annotated[list[str], BeforeValidator(_networks)] = Field(
        [], description="addresses or networks of reverse proxies whose headers are believed, separated by commas"
    )
    proxy_user_header: _Header | None = Field(
        None, description="header in which the trusted proxies name the user, such as X-Forwarded-User; by default none"
    )
    proxy_groups_header: _Header | None = Field(
        None, description="header in which they name the user's groups, separated by commas"
    )
    proxy_operator_group: str | None = Field(None, description="group of a proxy's users who are operators")
    proxy_viewer_group: str | None = Field(None, description="group of a proxy's users who may only look")
    quota_days: _Count = Field(30, ge=1, le=366, description="days, of which today is the last, that quotas are for")
    jobs_at_once: _Count = Field(2, ge=1, le=1024, description="maximum number of running jobs")
    jobs_at_once_of_an_owner: _Count = Field(8, ge=1, le=1024, description="maximum number of one owner's running jobs")
    jobs_waiting_of_an_owner: _Count = Field(10_000, ge=1, description="maximum number of one owner's unfinished jobs")
    keep_days: _Count = Field(90, ge=1, le=36_500, description="days to keep records of finished jobs; outputs stay")
    drain_s: _Count = Field(10, ge=0, le=86_400, description="seconds for running jobs to stop after SIGTERM")

    @property
    def on_loopback(self) -> bool:
        return self.host in LOOPBACKS

    @property
    def is_open_to_all(self) -> bool:
        """Whether everybody who reaches it is its one user, an operator."""
        return self.tokens_file is None and self.proxy_user_header is None


@dataclass(frozen=True, kw_only=True)
class InForce:
    """The settings with the source of each."""

    settings: ServiceSettings
    sources: Mapping[str, str]

    def lines(self) -> list[str]:
        """The output of `millrace config check`."""
        values = self.settings.model_dump(mode="json")
        values["memory"] = format_bytes(self.settings.memory)
        width = max(map(len, values))
        return [f"{name:{width}}  {_shown(value)}  ({self.sources[name]})" for name, value in values.items()]


def load_service_settings(flags: Mapping[str, Any], *, file: Path | None = None) -> InForce:
    """The settings; `flags` that are None were not given.

    Raises ParameterError, which names the source of a wrong value.
    """
    settings, sources = merged(ServiceSettings, flags, file)
    if settings.proxy_user_header is not None and not settings.trusted_proxies:
        raise ParameterError("proxy_user_header: set trusted_proxies too: only their headers are believed")
    if not settings.on_loopback and settings.is_open_to_all:
        raise ParameterError(f"host {settings.host} is open to others: set a tokens_file, or listen on 127.0.0.1")
    return InForce(settings=settings, sources=sources)


def _shown(value: Any) -> str:
    if value in (None, [], {}):
        return "–"
    if isinstance(value, dict):
        return ",".join(f"{name}={_shown(each)}" for name, each in value.items())
    return ":".join(map(str, value)) if isinstance(value, list) else str(value)
