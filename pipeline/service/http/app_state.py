"""The parts of a running service, and how a route comes by them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request

from pipeline.service.http.tokens import Tokens
from pipeline.service.roots import DataRoots
from pipeline.service.runner import Runner
from pipeline.service.settings import ServiceSettings
from pipeline.service.store import Store


@dataclass(frozen=True, kw_only=True)
class Service:
    """What the API speaks for. `workers` tells each worker's device; `ready` says what is missing, if anything."""

    settings: ServiceSettings
    store: Store
    runner: Runner
    roots: DataRoots
    previews: Path
    workers: Callable[[], list[dict[str, Any]]]
    ready: Callable[[], str | None]
    tokens: Callable[[], Tokens | None] = lambda: None
    stopping: threading.Event = field(default_factory=threading.Event)  # no job is taken any more
    closing: threading.Event = field(default_factory=threading.Event)  # nor will one run on: streams end


async def service_of(request: Request) -> Service:
    """The service that a request is made of."""
    service: Service = request.app.state.service
    return service


ThisService = Annotated[Service, Depends(service_of)]
