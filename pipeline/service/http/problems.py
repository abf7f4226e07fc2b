"""Errors as HTTP answers: problem details (RFC 9457), a JSON object with what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match, Mount

from pipeline.config import brief, explain
from pipeline.errors import MillraceError, ServiceRefused, StorageError, UserError
from pipeline.service.http.identity import note_refusal
from pipeline.service.jobs import CancelRequested, IllegalTransition, RetryRequested
from pipeline.service.store import DependencyForgotten, NoSuchJob, OutputTaken

MEDIA_TYPE = "application/problem+json"
_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
# The first matching class decides.
_STATUS: Mapping[type[MillraceError], int] = {
    NoSuchJob: 404,
    OutputTaken: 409,
    DependencyForgotten: 409,
    ServiceRefused: 409,
    UserError: 422,
    StorageError: 503,
    MillraceError: 500,
}

# What to do if a job is not in the state that a request needs.
_WAYS_OUT: Mapping[type, str] = {
    CancelRequested: "there is nothing left to cancel",
    RetryRequested: "only failed and cancelled jobs can be retried; submit a new job to run it again",
}
# Why a body cannot be read; FastAPI's own message does not say.
_UNREAD: Mapping[type[Exception], str] = {
    RecursionError: "the body is nested too deeply",
    UnicodeDecodeError: "the body is not UTF-8 text",
    ValueError: "a number in the body has too many digits",
}


class Problem(BaseModel):
    """An error answer (RFC 9457)."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str


def problem(status: int, detail: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An answer with that status; `detail` is for people."""
    detail = detail.encode(errors="replace").decode()  # it may quote a lone surrogate, which UTF-8 cannot encode
    content = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail).model_dump()
    return JSONResponse(content, status, dict(headers or {}), MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Answers every error of the app with a problem, or with `app.state.error_page` if a browser requested a page."""

    def answer(request: Request, status: int, detail: str, headers: Mapping[str, str] | None = None) -> Response:
        for_people = "text/html" in request.headers.get("accept", "") and not request.url.path.startswith("/v1/")
        if status >= 400 and for_people and hasattr(app.state, "error_page"):
            page: Response = app.state.error_page(status, detail)
            return page
        if (status, detail) == (404, HTTPStatus(404).phrase):
            detail = f"there is nothing at {brief(request.url.path)}; see /openapi.json"
        return problem(status, detail, headers)

    @app.exception_handler(MillraceError)
    def _ours(request: Request, error: MillraceError) -> Response:
        status = next(status for kind, status in _STATUS.items() if isinstance(error, kind))
        return answer(request, status, str(error))

    @app.exception_handler(IllegalTransition)
    def _illegal(request: Request, error: IllegalTransition) -> Response:
        return answer(request, 409, f"job {error.job.id} {error.job.state.told}: {_WAYS_OUT[type(error.event)]}")

    @app.exception_handler(RequestValidationError)
    def _invalid(request: Request, error: RequestValidationError) -> Response:
        return answer(request, 422, _fault(error.errors()[0]))

    @app.exception_handler(HTTPException)
    def _http(request: Request, error: HTTPException) -> Response:
        note_refusal(request, error.status_code, str(error.detail))
        allowed = {"Allow": _allowed(app, request)} if error.status_code == 405 else {}
        detail = next((said for kind, said in _UNREAD.items() if isinstance(error.__cause__, kind)), error.detail)
        return answer(request, error.status_code, str(detail), {**(error.headers or {}), **allowed})

    @app.exception_handler(Exception)
    def _internal(request: Request, error: Exception) -> Response:
        return answer(request, 500, f"internal error: {type(error).__name__}; see the server's log")


def _allowed(app: FastAPI, request: Request) -> str:
    """The methods of all routes at a request's path; Starlette lists only those of the first."""
    routes = [route for route in app.routes if not isinstance(route, Mount)]  # which match every method

    def is_taken(method: str) -> bool:
        asked = "GET" if method == "HEAD" else method  # see Gate
        return any(route.matches({**request.scope, "method": asked})[0] is Match.FULL for route in routes)

    return ", ".join(filter(is_taken, _METHODS)) or "GET, HEAD"  # for a static file


def _fault(fault: Mapping[str, Any]) -> str:
    """One fault of a request and its place, in one line."""
    if fault["type"] == "json_invalid":
        return f"the body is not JSON: {fault['ctx']['error']}"
    where = brief(".".join(str(part) for part in fault["loc"] if part not in ("body", "query", "path", "header")))
    if fault["type"] == "extra_forbidden":
        return f"{where}: there is no such field"
    if fault["type"] == "missing":
        return f"{where or 'the body'}: is missing"
    return f"{where}: {explain(fault)}" if where else explain(fault)
