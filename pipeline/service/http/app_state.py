"""The state of a running service, and the dependency through which routes access it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request

from pipeline.service.http.users.proxies import Proxies
from pipeline.service.http.users.sessions import Sessions
from pipeline.service.http.users.tokens import Tokens
from pipeline.service.http.viewing import Viewing
from pipeline.service.reporting.audit import AuditLog
from pipeline.service.roots import DataRoots
from pipeline.service.running.job_process import JobProcesses
from pipeline.service.running.runner import Runner
from pipeline.service.settings import ServiceSettings
from pipeline.service.store import Store


@dataclass(frozen=True, kw_only=True)
class Service:
    """The parts of a service. `workers` describes each worker; `ready` returns why no job can be accepted, if so; files
    are looked at in `processes`."""

    settings: ServiceSettings
    store: Store
    runner: Runner
    roots: DataRoots
    previews: Path
    processes: JobProcesses
    workers: Callable[[], list[dict[str, Any]]]
    ready: Callable[[], str | None]
    tokens: Callable[[], Tokens | None] = lambda: None
    audit: AuditLog | None = None
    stopping: threading.Event = field(default_factory=threading.Event)  # no further job is accepted
    closing: threading.Event = field(default_factory=threading.Event)  # the last job has ended: streams end
    sessions: Sessions = field(init=False)
    proxies: Proxies = field(init=False)
    viewing: Viewing = field(init=False, default_factory=Viewing)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sessions", Sessions(self.store))
        object.__setattr__(self, "proxies", Proxies(self.settings))


async def service_of(request: Request) -> Service:
    """The service that answers a request."""
    service: Service = request.app.state.service
    return service


ThisService = Annotated[Service, Depends(service_of)]
