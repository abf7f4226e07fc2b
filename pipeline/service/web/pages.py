"""The routes of the web pages, and how values read on them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from pipeline import __version__
from pipeline.config import format_bytes
from pipeline.engine.stages import STAGES
from pipeline.service.access import COOKIE, LOCAL_OWNER, owner_of
from pipeline.service.jobs import ACTIVE, TERMINAL, State
from pipeline.service.store import StoredJob
from pipeline.workloads import workloads

if TYPE_CHECKING:
    from fastapi import FastAPI

    from pipeline.service.api import Service

FOLDER = Path(__file__).parent
A_PAGE = 50
COOKIE_DAYS = 30
# Nothing from elsewhere, nothing inline: what a job's name or message holds cannot become a script.
POLICY = "; ".join(
    (
        "default-src 'none'", "style-src 'self'", "script-src 'self'", "img-src 'self'", "connect-src 'self'",
        "form-action 'self'", "base-uri 'none'", "frame-ancestors 'none'",
    )
)  # fmt: skip


class Login(BaseModel):
    """Who signs in."""

    model_config = ConfigDict(extra="forbid")

    token: str = Field(max_length=200)


def add_pages(app: FastAPI, service: Service) -> None:
    """Adds every page and the files they need."""
    app.mount("/static", StaticFiles(directory=FOLDER / "static"), name="static")
    app.include_router(_router(service, _environment()))


def _router(service: Service, environment: Environment) -> APIRouter:
    router, owner_of_request = (
        APIRouter(include_in_schema=False, default_response_class=HTMLResponse),
        owner_of(service.tokens),
    )
    store = service.store

    def viewer(request: Request) -> str:
        try:
            return owner_of_request(request)
        except HTTPException as error:
            raise HTTPException(307, "sign in", {"Location": f"/login?next={quote(request.url.path)}"}) from error

    viewing = Depends(viewer)

    def page(name: str, **values: Any) -> HTMLResponse:
        text = environment.get_template(name).render(signed_in=service.tokens() is not None, **values)
        return HTMLResponse(text, headers={"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"})

    @router.get("/")
    def queue(
        state: Annotated[str, Query()] = "",
        owner: Annotated[str, Query()] = "",
        workload: Annotated[str, Query()] = "",
        before: Annotated[int | None, Query(ge=1, le=2**62)] = None,
        viewer: str = viewing,
    ) -> Response:
        wanted = {"state": state, "owner": owner, "workload": workload}
        filters = {name: value for name, value in wanted.items() if value}
        found = store.list_jobs(**filters, before=before, limit=A_PAGE + 1)
        older = urlencode({**filters, "before": found[A_PAGE - 1].number}) if len(found) > A_PAGE else None
        return page(
            "queue.html", jobs=found[:A_PAGE], counts=store.counts(), wanted=wanted, older=older, viewer=viewer,
            states=list(State), workloads=list(workloads()),
        )  # fmt: skip

    @router.get("/jobs/{job}")
    def show(job: str, viewer: str = viewing) -> Response:
        stored = store.job(job)
        receipt: Mapping[str, Any] = stored.receipt or {}
        return page(
            "job.html", stored=stored, events=store.events(job), stages=_stages(receipt), viewer=viewer,
            receipt=json.dumps(receipt, indent=2) if receipt else None,
            has_preview=(service.previews / f"{stored.job.id}.png").is_file(),
        )  # fmt: skip

    @router.get("/submit")
    def submit(workload: str = "smooth", viewer: str = viewing) -> Response:
        known = workloads()
        if workload not in known:
            raise HTTPException(404, f"there is no workload {workload}")
        return page("submit.html", workload=known[workload], names=list(known), fields=_fields(workload), viewer=viewer)

    @router.get("/workers")
    def workers(viewer: str = viewing) -> Response:
        return page("workers.html", workers=service.workers(), missing=service.ready(), viewer=viewer)

    @router.get("/login")
    def login_page(next: str = "/") -> Response:  # noqa: A002
        return page("login.html", next=next if next.startswith("/") and not next.startswith("//") else "/", viewer=None)

    @router.post("/login")
    def login(given: Login, request: Request) -> Response:
        tokens = service.tokens()
        if tokens is None or tokens.owner(given.token) is None:
            raise HTTPException(401, "the token is not known here")
        response = Response(status_code=204)
        response.set_cookie(
            COOKIE, given.token, max_age=COOKIE_DAYS * 86_400, httponly=True, samesite="strict",
            secure=request.url.scheme == "https",
        )  # fmt: skip
        return response

    @router.get("/logout")
    def logout() -> Response:
        response = RedirectResponse("/login", 303)
        response.delete_cookie(COOKIE)
        return response

    return router


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.globals |= {"version": __version__, "ACTIVE": ACTIVE, "TERMINAL": TERMINAL, "LOCAL_OWNER": LOCAL_OWNER}
    environment.filters |= {"moment": _moment, "iso": _iso, "lasted": _lasted, "share": _share, "bytes": format_bytes}
    return environment


def _stages(receipt: Mapping[str, Any]) -> list[dict[str, Any]]:
    """How busy each stage was, as shares of the wall time."""
    stages, wall = receipt.get("stages", {}), receipt.get("wall_seconds") or 0.0
    if not wall:
        return []
    return [
        {
            "name": name,
            "busy": min(stages[name]["seconds"] / stages[name]["lanes"] / wall, 1.0),
            "rate": format_bytes(stages[name]["bytes"] / wall),
        }
        for name in STAGES
        if name in stages
    ]


def _fields(workload: str) -> list[dict[str, Any]]:
    """The workload's parameters as the form asks for them."""
    schema = workloads()[workload].Parameters.model_json_schema()
    fields = []
    for name, what in schema["properties"].items():
        kinds = [what, *what.get("anyOf", [])]
        choices = next((kind["enum"] for kind in kinds if "enum" in kind), None)
        default = what.get("default")
        fields.append(
            {
                "name": name,
                "choices": choices,
                "flag": any(kind.get("type") == "boolean" for kind in kinds),
                "default": ",".join(map(str, default)) if isinstance(default, list) else default,
                "help": what.get("description", ""),
                "required": name in schema.get("required", []),
            }
        )
    return fields


def _iso(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def _moment(at: float | None) -> str:
    return "–" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _lasted(stored: StoredJob) -> str:
    """How long the job has been at work, where it is over."""
    if stored.started_at is None or stored.finished_at is None:
        return "–"
    seconds = stored.finished_at - stored.started_at
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _share(stored: StoredJob) -> float:
    """Of the job's chunks, those that are in; 1 once it has succeeded."""
    if stored.job.state is State.SUCCEEDED:
        return 1.0
    return stored.job.chunks_done / stored.job.chunks if stored.job.chunks else 0.0
