"""Settings of a service: a TOML file, overridden by MILLRACE_… variables, overridden by flags."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator

from pipeline.api_models import LEAST_MEMORY_BYTES, JobLimits
from pipeline.config import (
    DEVICE,
    SCHEDULER,
    NamedPath,
    format_bytes,
    format_seconds,
    merged,
    named,
    parse_bytes,
    parse_seconds,
    whole,
)
from pipeline.errors import InputError, ParameterError
from pipeline.storage.objects import ObjectPath, is_url

JOBS, AUDIT = "jobs.sqlite", "audit.jsonl"  # in the state_dir
_MOST_OF_A_DATABASES_PATH = 504  # bytes: SQLite's 512, less the end of its log's name
LOOPBACKS = ("127.0.0.1", "::1", "localhost")


# A URL, whose own colons precede // or a port; or the name of a folder.
_ROOT = re.compile(r"(?:s3|gs|az|https?)://[^:]*(?::\d+(?:/[^:]*)?(?![^:]))?|[^:]+", re.IGNORECASE)


def _listed(value: Any) -> Any:
    """Splits folders and URLs at colons, as in PATH."""
    return _ROOT.findall(value) if isinstance(value, str) else value


def _root(value: Any) -> Path:
    """A folder's whole path, or the URL of objects."""
    value = named(value)
    try:
        return ObjectPath.of(str(value)) if is_url(value) else _absolute(Path(value))
    except InputError as error:
        raise ValueError(str(error)) from error


def _listed_by_commas(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def checked_url(url: str) -> str:
    """The address of a webhook; ValueError if it is none."""
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc and parts.port != 0
    except ValueError:
        fits = None
    if not fits or not re.fullmatch("[!-~]+", url) or "\\" in url:
        raise ValueError(
            f"{url!a} is not an address like https://hooks.example.org/millrace, without a user or password"
        )
    return url


def _table(form: str) -> Callable[[Any], Any]:
    """Splits NAME=VALUE,NAME=VALUE; `form` for messages."""

    def split(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        pairs = [part.partition("=") for part in value.split(",") if part]
        if not all(equals for _, equals, _ in pairs):
            raise ValueError(f"{value!r} is not {form}")
        return {name.strip(): text for name, _, text in pairs}

    return split


def _networks(value: Any) -> Any:
    """Splits addresses and networks at commas."""
    parts = _listed_by_commas(value)
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
        raise ValueError(f"{value!r} is not the name of an HTTP header")
    return value.lower()


_Header = Annotated[str, AfterValidator(_header)]
_Folder = Annotated[NamedPath, AfterValidator(_absolute)]
_Root = Annotated[Path, PlainValidator(_root)]
_Count = Annotated[int, BeforeValidator(whole)]
_Seconds = Annotated[float | None, BeforeValidator(parse_seconds)]
_Bytes = Annotated[int | None, BeforeValidator(parse_bytes)]
_Devices = Annotated[int | None, BeforeValidator(whole)]


class LimitSettings(BaseModel):
    """Limits of jobs: what a job may take that asks for nothing, and (`…_cap`) the most that it may ask for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    time: _Seconds = Field(default=None, gt=0)
    time_cap: _Seconds = Field(default=None, gt=0)
    memory: _Bytes = Field(default=None, ge=LEAST_MEMORY_BYTES)
    memory_cap: _Bytes = Field(default=None, ge=LEAST_MEMORY_BYTES)
    gpu_memory: _Bytes = Field(default=None, ge=1 << 20)
    gpu_memory_cap: _Bytes = Field(default=None, ge=1 << 20)
    gpus: _Devices = Field(default=None, ge=1)
    gpus_cap: _Devices = Field(default=None, ge=1)

    def granted(self, asked: JobLimits) -> JobLimits:
        """The limits of a job: those it asks for, else the defaults, else the caps. ParameterError above a cap."""
        found: dict[str, Any] = {}
        for name, (field, shown) in _LIMIT_FORMS.items():
            value, default, cap = getattr(asked, field), getattr(self, name), getattr(self, f"{name}_cap")
            if value is None:
                value = min((each for each in (default, cap) if each is not None), default=None)
            elif cap is not None and value > cap:
                raise ParameterError(
                    f"limits.{field}: {shown(value)} is more than the {shown(cap)} that a job may have; ask for less"
                )
            found[field] = value
        return JobLimits(**found)

    def __str__(self) -> str:
        given = self.model_dump(exclude_none=True)
        return ",".join(f"{name}={_LIMIT_FORMS[name.removesuffix('_cap')][1](value)}" for name, value in given.items())


# The field of `JobLimits`, and its form for people.
_LIMIT_FORMS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "time": ("time_s", format_seconds), "memory": ("memory_bytes", format_bytes),
    "gpu_memory": ("gpu_memory_bytes", format_bytes), "gpus": ("gpus", str),
}  # fmt: skip
NO_DEFAULTS = LimitSettings()


class StateSettings(BaseModel):
    """Settings of commands that need only the state folder."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    state_dir: Annotated[_Folder, AfterValidator(_short_enough)] = Field(
        Path("~/.local/state/millrace"), validate_default=True, description="folder for jobs and previews"
    )


class ServiceSettings(StateSettings):
    """Settings of `millrace serve`."""

    model_config = ConfigDict(extra="forbid")

    data_roots: Annotated[list[_Root], BeforeValidator(_listed)] = Field(
        description="folders, and URLs as s3://BUCKET/PREFIX, whose files jobs may read and write, separated by colons"
    )
    group_roots: Annotated[
        dict[str, Annotated[list[_Root], BeforeValidator(_listed)]], BeforeValidator(_table("GROUP=FOLDER:FOLDER,…"))
    ] = Field({}, description="folders that replace the data roots for the jobs of a group: GROUP=FOLDER:FOLDER,…")
    host: str = Field("127.0.0.1", description="address to listen on; tokens are required unless it is loopback")
    port: _Count = Field(8765, ge=0, le=65535, description="port to listen on; 0: any free port")
    scheduler: str | None = Field(
        None,
        pattern=SCHEDULER,
        description="tcp://HOST:PORT or tls://HOST:PORT of a Dask scheduler whose workers run the jobs",
    )
    scheduler_ca: _Folder | None = Field(
        None, description="PEM file that vouches for a tls:// scheduler and its workers"
    )
    scheduler_cert: _Folder | None = Field(None, description="PEM file with the certificate shown to them")
    scheduler_key: _Folder | None = Field(None, description="PEM file with that certificate's private key")
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
    tls_cert: _Folder | None = Field(
        None, description="PEM file with the service's certificate and its chain: it then speaks HTTPS"
    )
    tls_key: _Folder | None = Field(None, description="PEM file with the certificate's private key, unencrypted")
    trusted_proxies: Annotated[list[str], BeforeValidator(_networks)] = Field(
        [], description="addresses or networks of reverse proxies whose headers are believed, separated by commas"
    )
    proxy_user_header: _Header | None = Field(
        None,
        description="header with the user's name, set by trusted proxies, such as X-Forwarded-User; by default none",
    )
    proxy_groups_header: _Header | None = Field(
        None, description="header with the user's groups, separated by commas, set by trusted proxies"
    )
    proxy_operator_group: str | None = Field(None, description="group of a proxy's users who are operators")
    proxy_viewer_group: str | None = Field(None, description="group of a proxy's users who may only look")
    audit_log: _Folder | None = Field(
        None, description="file that records who did what, from where; by default audit.jsonl in the state_dir"
    )
    audit_log_bytes: Annotated[int, BeforeValidator(parse_bytes)] = Field(
        "64MiB", validate_default=True, ge=1 << 12, description="size at which a new file is started"
    )
    audit_log_files: _Count = Field(16, ge=1, le=10_000, description="how many of these files are kept")
    quota_days: _Count = Field(30, ge=1, le=366, description="quotas count the use of this many days, today included")
    jobs_at_once: _Count = Field(2, ge=1, le=1024, description="maximum number of running jobs")
    jobs_at_once_of_an_owner: _Count = Field(8, ge=1, le=1024, description="maximum number of one owner's running jobs")
    jobs_waiting_of_an_owner: _Count = Field(10_000, ge=1, description="maximum number of one owner's unfinished jobs")
    planning_s: _Count = Field(600, ge=1, le=86_400, description="seconds to open and plan a job, before it fails")
    keep_days: _Count = Field(90, ge=1, le=36_500, description="days to keep records of finished jobs; outputs stay")
    limits: Annotated[LimitSettings, BeforeValidator(_table("time=2h,memory_cap=16GiB,…"))] = Field(
        NO_DEFAULTS,
        description="limits of each job: defaults, and caps on what it may ask for, such as "
        "time=12h,time_cap=2d,memory=8GiB,gpu_memory=20GiB,gpus_cap=4 [default: none]",
    )
    webhook_url: Annotated[str, AfterValidator(checked_url)] | None = Field(
        None, description="address to notify of every job that ends"
    )
    webhook_hosts: Annotated[list[str], BeforeValidator(_listed_by_commas)] = Field(
        [], description="hosts that jobs may notify, as HOST or HOST:PORT, separated by commas [default: none]"
    )
    webhook_secret_file: _Folder | None = Field(None, description="file with the secret that signs notifications")
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
        for name in ("memory", "audit_log_bytes"):
            values[name] = format_bytes(values[name])
        values["limits"] = str(self.settings.limits) or None
        width = max(map(len, values))
        return [f"{name:{width}}  {_shown(value)}  ({self.sources[name]})" for name, value in values.items()]


def load_service_settings(flags: Mapping[str, Any], *, file: Path | None = None) -> InForce:
    """The settings; `flags` that are None were not given.

    Raises ParameterError, which names the source of a wrong value.
    """
    settings, sources = merged(ServiceSettings, flags, file)
    if (settings.webhook_url or settings.webhook_hosts) and settings.webhook_secret_file is None:
        raise ParameterError("webhook_secret_file: is not set, and webhooks need it; name a file with a secret")
    if settings.proxy_user_header is not None and not settings.trusted_proxies:
        raise ParameterError("proxy_user_header: set trusted_proxies too: only their headers are believed")
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise ParameterError("tls_cert and tls_key: set both, or neither")
    if not settings.on_loopback and settings.is_open_to_all:
        raise ParameterError(f"host {settings.host} is open to others: set a tokens_file, or listen on 127.0.0.1")
    return InForce(settings=settings, sources=sources)


def _shown(value: Any) -> str:
    if value in (None, [], {}):
        return "–"
    if isinstance(value, dict):
        return ",".join(f"{name}={_shown(each)}" for name, each in value.items())
    return ":".join(map(str, value)) if isinstance(value, list) else str(value)
