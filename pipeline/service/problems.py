"""Errors as HTTP answers: problem details (RFC 9457), one JSON object that says what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from pipeline.config import explain
from pipeline.errors import MillraceError, OutputError, StorageError, UserError
from pipeline.service.jobs import IllegalTransition
from pipeline.service.store import NoSuchJob

MEDIA_TYPE = "application/problem+json"
# The first class that an error belongs to decides.
_STATUS: Mapping[type[MillraceError], int] = {
    NoSuchJob: 404,
    OutputError: 409,
    UserError: 422,
    StorageError: 503,
    MillraceError: 500,
}


class Problem(BaseModel):
    """What an answer that is no success says (RFC 9457)."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str


def problem(status: int, detail: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An answer of that status; `detail` is for people."""
    content = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail).model_dump()
    return JSONResponse(content, status, dict(headers or {}), MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Every error of the app comes out as a problem."""

    @app.exception_handler(MillraceError)
    def _ours(request: Request, error: MillraceError) -> JSONResponse:
        status = next(status for kind, status in _STATUS.items() if isinstance(error, kind))
        return problem(status, str(error))

    @app.exception_handler(IllegalTransition)
    def _illegal(request: Request, error: IllegalTransition) -> JSONResponse:
        return problem(409, f"job {error.job.id} is {error.job.state}: it cannot take that now")

    @app.exception_handler(RequestValidationError)
    def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return problem(422, _fault(error.errors()[0]))

    @app.exception_handler(HTTPException)
    def _http(request: Request, error: HTTPException) -> JSONResponse:
        return problem(error.status_code, str(error.detail), error.headers)

    @app.exception_handler(Exception)
    def _internal(request: Request, error: Exception) -> JSONResponse:
        return problem(500, f"internal error: {type(error).__name__}; the server's log says more")


def _fault(fault: Mapping[str, Any]) -> str:
    """One fault of a request in one line, with where it is."""
    if fault["type"] == "json_invalid":
        return f"the body is no JSON: {fault['ctx']['error']}"
    where = ".".join(str(part) for part in fault["loc"] if part not in ("body", "query", "path", "header"))
    if fault["type"] == "extra_forbidden":
        return f"{where}: there is no such field"
    if fault["type"] == "missing":
        return f"{where or 'the body'}: is missing"
    return f"{where}: {explain(fault)}" if where else explain(fault)
