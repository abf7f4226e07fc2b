"""The ASGI application of a service: HTTP API and web pages."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from pipeline import __version__
from pipeline.service.http.admin import accounts, admin
from pipeline.service.http.api import probes, v1
from pipeline.service.http.app_state import Service
from pipeline.service.http.data import data
from pipeline.service.http.edge.access import Gate
from pipeline.service.http.edge.recent import RecentAnswers
from pipeline.service.http.problems import MEDIA_TYPE, Problem, install
from pipeline.service.web.pages import add_pages

_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "content": {MEDIA_TYPE: {}}}
    for status in (400, 401, 403, 404, 409, 413, 415, 422, 429, 503)
}


def make_app(service: Service) -> FastAPI:
    """The ASGI application of one service."""
    app = FastAPI(
        title="Millrace", version=__version__, description="Batch jobs on every GPU of a node.",
        responses=_PROBLEMS, docs_url=None, redoc_url=None,
    )  # fmt: skip
    install(app)
    app.add_middleware(RecentAnswers)  # within the gate
    app.add_middleware(Gate, loopback_alone=service.settings.is_open_to_all, proxies=service.proxies)
    app.state.service = service
    app.include_router(v1)
    app.include_router(data)
    app.include_router(accounts)
    app.include_router(admin)
    app.include_router(probes)
    add_pages(app)
    return app
