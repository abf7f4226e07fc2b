"""The routes of the web pages."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from pipeline import __version__
from pipeline.api_models import SILENT_S, TERMINAL, State, WorkerView
from pipeline.config import format_bytes
from pipeline.engine.stages import STAGES
from pipeline.errors import MillraceError, printable
from pipeline.service.http.app_state import Service, ThisService
from pipeline.service.http.data.files import FolderPath, NamePart, list_files
from pipeline.service.http.identity import Audit, submitter_of, user_of, visible_job
from pipeline.service.http.users.sessions import COOKIE
from pipeline.service.http.users.tokens import User, digest_of
from pipeline.service.http.views import progress_view
from pipeline.service.jobs import ACTIVE
from pipeline.service.roots import is_text
from pipeline.service.store import JobFilter, StoredJob
from pipeline.service.web.reference import marked, objects, operations
from pipeline.service.web.values import FILTERS, facts_of, fields_of, percent, stages_of, viewable
from pipeline.storage.objects import ObjectPath, is_url
from pipeline.workloads import workloads

FOLDER = Path(__file__).parent
A_PAGE = 50
# How long after a job's end its preview may still be drawn.
DRAWING_S = 60.0
# Nothing external, nothing inline: text of a job's name or message cannot become a script.
POLICY = "; ".join(
    (
        "default-src 'none'", "style-src 'self'", "script-src 'self'", "img-src 'self'", "connect-src 'self'",
        "form-action 'self'", "base-uri 'none'", "frame-ancestors 'none'",
    )
)  # fmt: skip


class Login(BaseModel):
    """The body of a sign-in."""

    model_config = ConfigDict(extra="forbid")

    token: str = Field(max_length=200)


def add_pages(app: FastAPI) -> None:
    """Adds the pages and their static files."""
    app.mount("/static", StaticFiles(directory=FOLDER / "static"), name="static")
    app.include_router(_pages)
    app.state.error_page = _error_page


_pages = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


async def _viewer(request: Request) -> User:
    """The signed-in user; redirects to the sign-in page without one."""
    try:
        return await user_of(request)
    except HTTPException as error:
        service: Service = request.app.state.service
        if error.status_code != 401 or service.tokens() is None:  # signing in here would not help
            raise
        asked = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        raise HTTPException(307, "sign in", {"Location": f"/login?next={quote(asked)}"}) from error


_Viewer = Annotated[User, Depends(_viewer)]


async def _submitter(viewer: _Viewer) -> User:
    return await submitter_of(viewer)


_Submitter = Annotated[User, Depends(_submitter)]


@_pages.get("/")
def queue(
    service: ThisService,
    viewer: _Viewer,
    state: Annotated[str, Query()] = "",
    owner: Annotated[str, Query()] = "",
    workload: Annotated[str, Query()] = "",
    array: Annotated[str, Query()] = "",
    before: Annotated[int | None, Query(ge=1, le=2**62)] = None,
) -> Response:
    wanted = {"state": state, "owner": owner.strip(), "workload": workload, "array": array}
    fitting = JobFilter(
        state=wanted["state"] or None, owner=wanted["owner"] or None, workload=wanted["workload"] or None,
        array_id=wanted["array"] or None, before=before, groups=viewer.visible_groups,
    )  # fmt: skip
    found = service.store.list_jobs(fitting, limit=A_PAGE + 1)

    def query(**changes: Any) -> str:
        """The current filters with these changes, as a query string."""
        kept = {name: value for name, value in {**wanted, **changes}.items() if value}
        return f"?{urlencode(kept)}" if kept else ""

    holds = {(each.kind, each.name) for each in service.store.rules(now=time.time()).holds}
    held = holds & {("all", ""), ("owner", viewer.name), *(("group", group) for group in viewer.groups)}
    return _page(
        "queue.html", held=bool(held), jobs=found[:A_PAGE], counts=service.store.counts(viewer.visible_groups),
        query=query,
        wanted={**wanted, "before": before or ""}, workloads=list(workloads()), viewer=viewer, here="/",
        older=found[A_PAGE - 1].number if len(found) > A_PAGE else None,
    )  # fmt: skip


@_pages.get("/jobs/{job}")
def show(service: ThisService, viewer: _Viewer, job: str) -> Response:
    stored = visible_job(service, viewer, job)
    receipt: Mapping[str, Any] = stored.receipt or {}
    progress = progress_view(stored, service.runner.under_way(job))
    stages = {stage.name: stage for stage in progress.stages or stages_of(receipt)}
    # The preview of jobs that ran together is drawn on request.
    has_preview = "together" in receipt or (service.previews / f"{stored.job.id}.png").is_file()
    drawing = stored.job.state is State.SUCCEEDED and time.time() - (stored.finished_at or 0.0) < DRAWING_S
    rates = {name: f"{format_bytes(stages[name].rate)}/s" if name in stages else "–" for name in ("read", "write")}
    return _page(
        "job.html", stored=stored, events=service.store.events(job), progress=progress,
        stages=stages, stage_names=STAGES, rates=rates,
        summary={"facts": facts_of(receipt), "overlap": percent(receipt.get("overlap_efficiency"))},
        receipt=json.dumps(receipt, indent=2) if receipt else None, has_result=_has_result(service, stored),
        viewed=_viewed(service, stored),
        may_change=viewer.is_operator or (viewer.role == "user" and viewer.name == stored.asked.owner),
        has_preview=has_preview, may_be_drawing=drawing and not has_preview, viewer=viewer, here="",
    )  # fmt: skip


@_pages.get("/submit")
def submit(
    service: ThisService,
    viewer: _Submitter,
    workload: str = "smooth",
    like: str = "",
    source: Annotated[str, Query(alias="input", max_length=4096)] = "",
) -> Response:
    known, earlier = workloads(), visible_job(service, viewer, like).asked if like else None
    name = earlier.workload if earlier is not None else workload
    if name not in known:
        raise HTTPException(404, f"there is no workload {name}")
    return _page(
        "submit.html", workload=known[name], names=list(known), like=earlier, source=source,
        fields=fields_of(name, {} if earlier is None else earlier.parameters),
        roots=", ".join(map(str, service.roots.of(viewer.groups[0]).roots)), viewer=viewer, here="/submit",
    )  # fmt: skip


@_pages.get("/data")
def browse(
    service: ThisService, viewer: _Viewer, path: FolderPath = None, after: NamePart = "", contains: NamePart = ""
) -> Response:
    found = list_files(service, viewer, path, after, contains.strip(), A_PAGE)
    above = [] if found.path is None else list(reversed(Path(found.path).parents))
    roots = [root for each in service.roots.seen_by(viewer.visible_groups) for root in each.roots]
    crumbs = [each for each in above if any(each == root or root in each.parents for root in roots)]
    return _page(
        "data.html", found=found, crumbs=crumbs, contains=contains.strip(), after=after, viewer=viewer, here="/data",
    )  # fmt: skip


@_pages.get("/view")
def view(
    viewer: _Viewer, path: Annotated[list[Annotated[str, Query(max_length=4096)]], Query(min_length=1, max_length=2)]
) -> Response:
    folders = ["" if is_url(each) else each.rpartition("/")[0] for each in path]
    names = [printable(each.rpartition("/")[2]) for each in path]
    return _page("view.html", paths=path, folders=folders, names=names, viewer=viewer, here="")


@_pages.get("/workers")
def workers(service: ThisService, viewer: _Viewer) -> Response:
    found = [WorkerView.model_validate(each) for each in service.workers()]
    return _page(
        "workers.html", workers=found, silent_s=SILENT_S, missing=service.ready(), viewer=viewer,
        here="/workers",
    )  # fmt: skip


@_pages.get("/api")
def http_api(service: ThisService, viewer: _Viewer, request: Request) -> Response:
    document = request.app.openapi()
    found = list(operations(document))
    groups = {tag: [each for each in found if each.tag == tag] for tag in dict.fromkeys(each.tag for each in found)}
    return _page(
        "api.html", groups=groups.items(), objects=list(objects(document)), viewer=viewer, here="",
        address=str(request.base_url).rstrip("/"), needs_token=not service.settings.is_open_to_all,
    )  # fmt: skip


@_pages.get("/login")
def login_page(next: str = "/") -> Response:  # noqa: A002
    return _page("login.html", next=next if _is_own(next) else "/", viewer=None, here="")


@_pages.post("/login")
def login(service: ThisService, given: Login, audit: Audit, request: Request) -> Response:
    tokens = service.tokens()
    token = tokens.with_digest(digest_of(given.token)) if tokens is not None else None
    if token is None:
        raise HTTPException(401, "the token is not known here, or has expired")
    cookie, lasts_s = service.sessions.begin(token)
    request.state.user = token.user
    audit("sign in", token=token.id)
    response = Response(status_code=204)
    response.set_cookie(
        COOKIE, cookie, max_age=int(lasts_s), httponly=True, samesite="strict", secure=request.url.scheme == "https"
    )
    return response


@_pages.post("/logout")
def logout(service: ThisService, audit: Audit, request: Request) -> Response:
    if cookie := request.cookies.get(COOKIE):
        tokens, began_with = service.tokens(), service.sessions.token_of(cookie)
        token = tokens.with_digest(began_with) if tokens is not None and began_with is not None else None
        if token is not None:
            request.state.user = token.user
            audit("sign out", token=token.id)
        service.sessions.end(cookie)
    response = RedirectResponse("/login", 303)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return response


def _page(name: str, status: int = 200, **values: Any) -> HTMLResponse:
    text = _environment().get_template(name).render(**values)
    return HTMLResponse(text, status, headers={"Content-Security-Policy": POLICY, "Cache-Control": "no-store"})


def _error_page(status: int, detail: str) -> Response:
    title = HTTPStatus(status).phrase
    said = "There is no such page." if detail == title else detail
    return _page("error.html", status, title=title, detail=said, viewer=None, here="")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.globals |= {"version": __version__, "ACTIVE": ACTIVE, "TERMINAL": TERMINAL}
    environment.filters |= FILTERS | {"marked": marked}
    return environment


def _has_result(service: Service, stored: StoredJob) -> bool:
    """Whether there is a result to download."""
    if stored.job.state is not State.SUCCEEDED:
        return False
    try:
        output = service.roots.of(stored.asked.group).within(stored.asked.output)
        return not isinstance(output, ObjectPath) and output.exists()
    except MillraceError:
        return False


def _viewed(service: Service, stored: StoredJob) -> list[str]:
    """The input and the result of a job that succeeded, as far as they can be looked at."""
    if stored.job.state is not State.SUCCEEDED or not viewable(stored.asked.output):
        return []
    roots = service.roots.of(stored.asked.group)
    try:
        found = [roots.within(each) for each in (stored.asked.input, stored.asked.output)]
    except MillraceError:
        return []
    return [str(each) for each in found if viewable(str(each)) and is_text(each)]


def _is_own(path: str) -> bool:
    """Whether a path stays on this service: browsers take // and /\\ for the start of a host."""
    return re.fullmatch(r"/(?![/\\])[^\x00-\x20\x7f]*", path) is not None
