"""The routes of the web pages, and how values read on them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from http import HTTPStatus
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
from pipeline.engine.stages import STAGES, StageTotals
from pipeline.errors import MillraceError, counted
from pipeline.service.access import COOKIE, LOCAL_OWNER, owner_of
from pipeline.service.jobs import ACTIVE, TERMINAL, State
from pipeline.service.store import JobFilter, StoredJob
from pipeline.service.views import ProgressView, StageView, WorkerView
from pipeline.workloads import workloads

if TYPE_CHECKING:
    from fastapi import FastAPI

    from pipeline.service.api import Service

FOLDER = Path(__file__).parent
A_PAGE = 50
COOKIE_DAYS = 30
# For so long after a job's end its picture may still come.
DRAWING_S = 60.0
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
    router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
    environment, owner_of_request, store = _environment(), owner_of(service.tokens), service.store

    async def viewer(request: Request) -> str:
        try:
            return await owner_of_request(request)
        except HTTPException as error:
            asked = request.url.path + (f"?{request.url.query}" if request.url.query else "")
            raise HTTPException(307, "sign in", {"Location": f"/login?next={quote(asked)}"}) from error

    viewing = Depends(viewer)

    def page(name: str, status: int = 200, **values: Any) -> HTMLResponse:
        text = environment.get_template(name).render(signed_in=service.tokens() is not None, **values)
        return HTMLResponse(text, status, headers={"Content-Security-Policy": POLICY, "Cache-Control": "no-store"})

    @router.get("/")
    def queue(
        state: Annotated[str, Query()] = "",
        owner: Annotated[str, Query()] = "",
        workload: Annotated[str, Query()] = "",
        array: Annotated[str, Query()] = "",
        before: Annotated[int | None, Query(ge=1, le=2**62)] = None,
        viewer: str = viewing,
    ) -> Response:
        wanted = {"state": state, "owner": owner.strip(), "workload": workload, "array": array}
        fitting = JobFilter(
            state=wanted["state"] or None, owner=wanted["owner"] or None, workload=wanted["workload"] or None,
            array_id=wanted["array"] or None, before=before,
        )  # fmt: skip
        found = store.list_jobs(fitting, limit=A_PAGE + 1)

        def query(**changes: Any) -> str:
            """The filters in force with some of them changed, as the end of a link."""
            kept = {name: value for name, value in {**wanted, **changes}.items() if value}
            return f"?{urlencode(kept)}" if kept else ""

        return page(
            "queue.html", jobs=found[:A_PAGE], counts=store.counts(), wanted={**wanted, "before": before or ""},
            older=found[A_PAGE - 1].number if len(found) > A_PAGE else None, viewer=viewer, query=query,
            workloads=list(workloads()), here="/",
        )  # fmt: skip

    @router.get("/jobs/{job}")
    def show(job: str, viewer: str = viewing) -> Response:
        stored = store.job(job)
        receipt: Mapping[str, Any] = stored.receipt or {}
        progress = ProgressView.of(stored, service.runner.under_way(job))
        stages = {stage.name: stage for stage in progress.stages or _stages(receipt)}
        has_preview = (service.previews / f"{stored.job.id}.png").is_file()
        drawing = stored.job.state is State.SUCCEEDED and time.time() - (stored.finished_at or 0.0) < DRAWING_S
        rates = {name: f"{format_bytes(stages[name].rate)}/s" if name in stages else "–" for name in ("read", "write")}
        return page(
            "job.html", stored=stored, events=store.events(job), progress=progress, stages=stages, rates=rates,
            summary={"facts": _facts(receipt), "overlap": _percent(receipt.get("overlap_efficiency"))},
            receipt=json.dumps(receipt, indent=2) if receipt else None, stage_names=STAGES, viewer=viewer, here="",
            has_preview=has_preview, may_be_drawing=drawing and not has_preview,
            has_result=_has_result(service, stored),
        )  # fmt: skip

    @router.get("/submit")
    def submit(workload: str = "smooth", like: str = "", viewer: str = viewing) -> Response:
        known, earlier = workloads(), store.job(like).asked if like else None
        name = earlier.workload if earlier is not None else workload
        if name not in known:
            raise HTTPException(404, f"there is no workload {name}")
        return page(
            "submit.html", workload=known[name], names=list(known), fields=_fields(name), like=earlier, viewer=viewer,
            roots=", ".join(map(str, service.roots.roots)), here="/submit",
        )  # fmt: skip

    @router.get("/workers")
    def workers(viewer: str = viewing) -> Response:
        found = [WorkerView.model_validate(each) for each in service.workers()]
        return page("workers.html", workers=found, missing=service.ready(), viewer=viewer, here="/workers")

    @router.get("/login")
    def login_page(next: str = "/") -> Response:  # noqa: A002
        return page("login.html", next=next if _is_own(next) else "/", viewer=None, here="")

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

    @router.post("/logout")
    def logout() -> Response:
        response = RedirectResponse("/login", 303)
        response.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return response

    def error_page(status: int, detail: str) -> Response:
        title = HTTPStatus(status).phrase
        said = "There is no such page." if detail == title else detail
        return page("error.html", status, title=title, detail=said, viewer=None, here="")

    app.include_router(router)
    app.state.error_page = error_page


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.globals |= {"version": __version__, "ACTIVE": ACTIVE, "TERMINAL": TERMINAL, "LOCAL_OWNER": LOCAL_OWNER}
    environment.filters |= {"moment": _moment, "iso": _iso, "lasted": _lasted, "share": _share, "bytes": format_bytes}
    return environment


def _stages(receipt: Mapping[str, Any]) -> list[StageView]:
    """How busy each stage was in a run that is over."""
    totals = {
        name: StageTotals(seconds=stage["seconds"], nbytes=stage["bytes"], lanes=stage["lanes"])
        for name, stage in receipt.get("stages", {}).items()
    }
    return StageView.all_of(totals, receipt.get("wall_seconds") or 0.0)


def _facts(receipt: Mapping[str, Any]) -> dict[str, str]:
    """What of a receipt people ask first."""
    device, audit = receipt.get("device", {}), receipt.get("audit", {})
    found = {"Chunks": f"{receipt['chunks']:,}"} if "chunks" in receipt else {}
    if receipt.get("resumed_chunks"):
        found["Chunks"] += f", {receipt['resumed_chunks']:,} of them by an earlier run"
    if "wall_seconds" in receipt:
        found["Streaming"] = f"{receipt['wall_seconds']:.3g} s"
    if device:
        found["Device"] = ", ".join(str(device[name]) for name in ("name", "model") if name in device)
    if "samples" in audit:
        unit = f" {audit['unit']}" if audit.get("unit") else ""
        found["Audit"] = (
            f"{counted(audit['samples'], 'sample')} computed again: worst error {audit['worst_error']:.3g}{unit}, "
            f"tolerated {audit['tolerance']:.3g}"
        )
    return found


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * ratio:.0f} %"


def _has_result(service: Service, stored: StoredJob) -> bool:
    """Whether there is something to download."""
    if stored.job.state is not State.SUCCEEDED:
        return False
    try:
        return service.roots.within(stored.asked.output).exists()
    except MillraceError:
        return False


def _is_own(path: str) -> bool:
    """Whether a path leads to this service and nowhere else: browsers take // and /\\ for the beginning of a host."""
    return re.fullmatch(r"/(?![/\\])[^\x00-\x20\x7f]*", path) is not None


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
    """How long the job has been at work, or was."""
    if stored.started_at is None:
        return "–"
    seconds = max((stored.finished_at or time.time()) - stored.started_at, 0.0)
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _share(stored: StoredJob) -> float:
    """Of the job's chunks, those that are in; 1 once it has succeeded."""
    if stored.job.state is State.SUCCEEDED:
        return 1.0
    return stored.job.chunks_done / stored.job.chunks if stored.job.chunks else 0.0
