"""The HTTP API: JSON over /v1, server-sent events, probes and metrics. OpenAPI describes it at /openapi.json."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Depends, FastAPI, Header, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from pipeline import __version__, archive
from pipeline.config import brief, explain
from pipeline.errors import ParameterError
from pipeline.service.access import Gate, owner_of
from pipeline.service.jobs import TERMINAL, CancelRequested, State
from pipeline.service.problems import MEDIA_TYPE, Problem, install
from pipeline.service.roots import DataRoots
from pipeline.service.runner import Runner
from pipeline.service.scrape import TargetGroup, exposition, target_groups
from pipeline.service.settings import ServiceSettings
from pipeline.service.store import JobFilter, NewJob, Store, StoredJob
from pipeline.service.tokens import Tokens
from pipeline.service.views import (
    Accepted,
    EventView,
    JobPage,
    JobView,
    ProgressView,
    Submission,
    WorkerView,
    WorkloadView,
    refuse_unknown,
)
from pipeline.service.web.pages import add_pages
from pipeline.workloads import workloads

EVENTS_POLL_S = 0.25
HEARTBEAT_S = 15.0
MOST_LISTED = 10_000
MOST_EVENTS = 1000
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "content": {MEDIA_TYPE: {}}} for status in (400, 401, 403, 404, 409, 413, 415, 422, 503)
}


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


def make_app(service: Service) -> FastAPI:
    """The ASGI application of one service."""
    app = FastAPI(
        title="Millrace", version=__version__, description="Batch jobs on every GPU of a node.",
        responses=_PROBLEMS, docs_url=None, redoc_url=None,
    )  # fmt: skip
    install(app)
    app.add_middleware(Gate, loopback_alone=service.settings.on_loopback and service.settings.tokens_file is None)
    app.state.service = service
    _add_jobs(app, service)
    _add_results(app, service)
    _add_probes(app, service)
    add_pages(app, service)
    return app


def _add_jobs(app: FastAPI, service: Service) -> None:
    store, runner = service.store, service.runner
    owner_needed = Depends(owner_of(service.tokens))

    @app.post("/v1/jobs", status_code=201, tags=["jobs"], response_model=Accepted)
    def submit(
        request: Submission,
        owner: str = owner_needed,
        idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
    ) -> Response:
        """Accept a job, or an array of them. They are on disk when this answers.

        With an Idempotency-Key the same request may be sent again: the answer is the same, and so are the jobs.
        """
        if service.stopping.is_set():
            raise HTTPException(503, "the service is stopping; submit the job again when it is back")
        new = [_checked(each, service.roots) for each in request.jobs(owner, secrets.token_hex(6))]
        body = hashlib.sha256(json.dumps(request.model_dump(), sort_keys=True).encode()).hexdigest()
        ids = store.accept(
            new, now=time.time(), key=idempotency_key, body_sha256=body,
            most_of_an_owner=service.settings.jobs_waiting_of_an_owner,
        )  # fmt: skip
        runner.wake()
        views = [JobView.of(store.job(each)) for each in ids]
        accepted = Accepted(array=views[0].array, jobs=views).model_dump_json()
        return Response(accepted, 201, {"Location": f"/v1/jobs/{ids[0]}"}, "application/json")

    @app.get("/v1/jobs", tags=["jobs"], dependencies=[owner_needed], response_model=JobPage)
    def list_jobs(
        state: State | None = None,
        owner: Annotated[str | None, Query(max_length=64)] = None,
        workload: Annotated[str | None, Query(max_length=64)] = None,
        array: Annotated[str | None, Query(max_length=64)] = None,
        before: Annotated[int | None, Query(ge=1, le=2**62)] = None,
        limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 100,
    ) -> Response:
        """Jobs that fit, the newest first."""
        wanted = JobFilter(state=state, owner=owner, workload=workload, array_id=array, before=before)
        jobs, following = store.list_json(wanted, limit=limit)
        return Response(f'{{"jobs":{jobs},"next":{json.dumps(following)}}}', media_type="application/json")

    @app.get("/v1/jobs/{job}", tags=["jobs"], dependencies=[owner_needed])
    def show(job: str) -> JobView:
        """One job."""
        return JobView.of(store.job(job))

    @app.post("/v1/jobs/{job}/cancel", tags=["jobs"])
    def cancel(job: str, owner: str = owner_needed) -> JobView:
        """Stop a job and remove what it has written so far. One that has been cancelled stays so."""
        _refuse_others(store.job(job), owner)
        _, actions = store.apply(job, CancelRequested(), now=time.time())
        runner.act(job, actions)
        return JobView.of(store.job(job))

    @app.post("/v1/jobs/{job}/retry", tags=["jobs"])
    def retry(job: str, owner: str = owner_needed) -> JobView:
        """Queue a failed or cancelled job again; chunks that are finished are kept."""
        _refuse_others(store.job(job), owner)
        _, actions = store.retry(job, now=time.time())
        runner.act(job, actions)
        return JobView.of(store.job(job))

    @app.get("/v1/jobs/{job}/log", tags=["jobs"], dependencies=[owner_needed])
    def log(
        job: str,
        after: Annotated[int, Query(ge=0, le=2**62)] = 0,
        limit: Annotated[int, Query(ge=1, le=MOST_EVENTS)] = MOST_EVENTS,
    ) -> list[EventView]:
        """What happened to a job since the event numbered `after`."""
        store.job(job)
        return [EventView.of(each) for each in store.events(job, after=after, limit=limit)]

    @app.get(
        "/v1/jobs/{job}/events", tags=["jobs"], dependencies=[owner_needed], response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {}}}},
    )  # fmt: skip
    async def events(
        job: str, request: Request, last_event_id: Annotated[int, Header(ge=0, le=2**62)] = 0
    ) -> StreamingResponse:
        """Server-sent events until the job is over: `state`, `log` and `progress`, each with JSON as its data."""
        await run_in_threadpool(store.job, job)
        stream = _events(service, job, last_event_id, request)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    @app.get("/v1/workloads", tags=["workloads"], dependencies=[owner_needed])
    def list_workloads() -> list[WorkloadView]:
        """What can be submitted."""
        return [
            WorkloadView(name=name, summary=kind.summary, parameters=kind.Parameters.model_json_schema())
            for name, kind in workloads().items()
        ]

    @app.get("/v1/workers", tags=["workers"], dependencies=[owner_needed])
    def list_workers() -> list[WorkerView]:
        """What jobs run on."""
        return [WorkerView.model_validate(each) for each in service.workers()]


def _add_results(app: FastAPI, service: Service) -> None:
    store = service.store
    owner_needed = Depends(owner_of(service.tokens))

    @app.get("/v1/jobs/{job}/receipt", tags=["results"], dependencies=[owner_needed], response_class=JSONResponse)
    def receipt(job: str) -> Response:
        """What was made, from what, how fast and how right."""
        found = json.dumps(_succeeded(store, job).receipt)  # in ASCII: a path in it may be no text
        return Response(found, media_type="application/json")

    @app.get(
        "/v1/jobs/{job}/result", tags=["results"], dependencies=[owner_needed], response_class=FileResponse,
        responses={200: {"content": {"application/octet-stream": {}, archive.MEDIA_TYPE: {}}}},
    )  # fmt: skip
    def result(job: str) -> Response:
        """The output itself; one that is a folder, as a tar archive."""
        output = service.roots.within(_succeeded(store, job).asked.output)
        if output.is_dir():
            disposition = f"attachment; filename*=UTF-8''{quote(output.name, safe='')}.tar"
            return StreamingResponse(
                archive.packed(output), media_type=archive.MEDIA_TYPE, headers={"Content-Disposition": disposition}
            )
        if not output.is_file():
            raise HTTPException(409, f"{output.name} is no more where job {job} put it")
        return FileResponse(output, filename=output.name, media_type="application/octet-stream")

    @app.get(
        "/v1/jobs/{job}/preview", tags=["results"], dependencies=[owner_needed], response_class=FileResponse,
        responses={200: {"content": {"image/png": {}}}},
    )  # fmt: skip
    def preview(job: str) -> FileResponse:
        """A small picture of the result."""
        picture = service.previews / f"{_succeeded(store, job).job.id}.png"
        if not picture.is_file():
            raise HTTPException(404, f"job {job} has no preview")
        return FileResponse(picture, media_type="image/png")


def _add_probes(app: FastAPI, service: Service) -> None:
    @app.get("/livez", tags=["probes"], response_class=PlainTextResponse)
    async def livez() -> str:
        """The process answers, however many others wait for the store."""
        return "ok\n"

    @app.get("/readyz", tags=["probes"], response_class=PlainTextResponse)
    def readyz() -> str:
        """Jobs can be accepted and run: the store can be written, and there is a worker."""
        missing = service.ready()
        if missing is not None:
            raise HTTPException(503, missing)
        return "ok\n"

    @app.get("/metrics", tags=["probes"], response_class=PlainTextResponse)
    def metrics() -> Response:
        """For Prometheus."""
        return Response(exposition(service.store, service.workers), media_type=CONTENT_TYPE_LATEST)

    @app.get("/metrics/targets", tags=["probes"])
    def targets() -> list[TargetGroup]:
        """Where the workers serve their metrics, for Prometheus' HTTP service discovery."""
        return target_groups(service.workers())


async def _events(service: Service, job: str, after: int, request: Request) -> AsyncIterator[str]:
    store, said, quiet = service.store, None, time.monotonic()
    with store.news.of(job) as news:
        while not (service.closing.is_set() or await request.is_disconnected()):
            news.clear()
            stored = await run_in_threadpool(store.job, job)
            page = await run_in_threadpool(partial(store.events, job, after=after, limit=MOST_EVENTS))
            for event in page:
                after, quiet = event.number, time.monotonic()
                yield f"id: {after}\nevent: {event.kind}\ndata: {EventView.of(event).model_dump_json()}\n\n"
            progress = ProgressView.of(stored, service.runner.under_way(job))
            if progress != said:
                said, quiet = progress, time.monotonic()
                yield f"event: progress\ndata: {progress.model_dump_json()}\n\n"
            if len(page) == MOST_EVENTS:
                continue
            if stored.job.state in TERMINAL:
                return
            if time.monotonic() - quiet > HEARTBEAT_S:
                quiet = time.monotonic()
                yield ": still there\n\n"
            with suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), EVENTS_POLL_S)


def _checked(new: NewJob, roots: DataRoots) -> NewJob:
    """Refuses what could never run, and says where it writes. The input itself may still be on its way."""
    refuse_unknown(new.workload, list(workloads()))
    roots.within(new.input)
    written = roots.writable(new.output)
    kind = workloads()[new.workload]
    try:
        parameters = kind.Parameters(**new.parameters)
    except ValidationError as error:
        fault = error.errors()[0]
        where = f"parameters.{brief(str(fault['loc'][0]))}: " if fault["loc"] else "parameters: "
        raise ParameterError(f"{where}{explain(fault)}") from error
    roots.check_further(parameters.further_files)
    kind.refuse_output(Path(new.output))
    # A link may lead to a folder whose name is no text.
    return replace(new, written=os.fsencode(written).decode(errors="backslashreplace"))


def _refuse_others(stored: StoredJob, owner: str) -> None:
    if stored.asked.owner != owner:
        raise HTTPException(403, f"job {stored.job.id} is {stored.asked.owner}'s, and you are {owner}")


def _succeeded(store: Store, job: str) -> StoredJob:
    stored = store.job(job)
    if stored.job.state is not State.SUCCEEDED:
        raise HTTPException(409, f"job {job} is {stored.job.state}: there is no result")
    return stored
