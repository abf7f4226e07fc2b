"""The HTTP API: JSON over /v1, server-sent events, probes and metrics. OpenAPI describes it at /openapi.json."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from pipeline.api_models import (
    TERMINAL,
    Accepted,
    Estimate,
    EventView,
    JobPage,
    JobView,
    State,
    WorkerView,
    WorkloadView,
)
from pipeline.config import brief
from pipeline.errors import OutputError, ParameterError
from pipeline.service.http.admin import cancel_job
from pipeline.service.http.app_state import Service, ThisService
from pipeline.service.http.identity import Audit, CurrentUser, Submitter, is_let_in, own_job, user_of, visible_job
from pipeline.service.http.scrape import TargetGroup, exposition, target_groups
from pipeline.service.http.users.tokens import User
from pipeline.service.http.views import Submission, job_view, progress_view, silent_workers
from pipeline.service.jobs import ACTIVE
from pipeline.service.reporting.webhooks import check_webhook
from pipeline.service.roots import DataRoots
from pipeline.service.running.parameters import parameters_of
from pipeline.service.running.together import draw_late_preview
from pipeline.service.store import JobFilter, NewJob, StoredJob
from pipeline.storage import archive
from pipeline.storage.objects import ObjectPath
from pipeline.storage.positional import PositionalFile
from pipeline.workloads import workload_named, workloads
from pipeline.workloads.paths import refuse_existing, refuse_long_name

# How often a stream checks the progress of a run, which is in memory, and its connection.
RUNNING_POLL_S, IDLE_POLL_S = 0.25, 1.0
# Maximum silence of a stream, and time between its reads of the store.
HEARTBEAT_S = 15.0
MOST_LISTED = 10_000
MOST_EVENTS = 1000


v1 = APIRouter(dependencies=[Depends(user_of)])
probes = APIRouter(tags=["probes"])


@v1.post("/v1/jobs", status_code=201, tags=["jobs"], response_model=Accepted)
def submit(
    service: ThisService,
    user: Submitter,
    audit: Audit,
    request: Submission,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> Response:
    """Accept a job or an array of jobs. They are on disk when this answers.

    A request with an Idempotency-Key can be sent again: it returns the same jobs and creates no others.
    """
    if service.stopping.is_set():
        raise HTTPException(503, "the service is stopping; submit the job again when it is back")
    if request.priority > 0 and not user.is_operator:
        raise HTTPException(403, "priority: only operators may raise it above 0; choose 0 or less")
    group = user.groups[0] if request.group is None else request.group
    if not user.sees(group):
        raise HTTPException(403, f"group: {user.name} does not belong to {brief(group)!r}")
    roots, limits = service.roots.of(group), service.settings.limits.granted(request.limits)
    _check_devices(limits.gpus, len(service.workers()))
    if request.webhook is not None:
        check_webhook(request.webhook, service.settings.webhook_hosts)
    asked = request.jobs(user.name, group, secrets.token_hex(6))
    new = [_checked(replace(each, limits=limits), roots) for each in asked]
    if request.no_clobber:
        try:
            for each in asked:
                refuse_existing(roots.writable(each.output))
        except OutputError:
            if idempotency_key is None or not service.store.has_request(user.name, idempotency_key):
                raise  # otherwise the output may be that of the first request
    body = hashlib.sha256(json.dumps(request.model_dump(), sort_keys=True).encode()).hexdigest()
    ids = service.store.accept(
        new, now=time.time(), key=idempotency_key, body_sha256=body,
        most_of_an_owner=service.settings.jobs_waiting_of_an_owner, groups=user.visible_groups,
    )  # fmt: skip
    service.runner.wake()
    array = service.store.job(ids[0]).asked.array_id
    audit(
        "submit", job=ids[0], jobs=len(ids), array=array, group=group, workload=request.workload,
        input=request.input, output=request.output,
    )  # fmt: skip
    accepted = f'{{"array":{json.dumps(array)},"jobs":{service.store.jobs_json(ids)}}}'
    return Response(accepted, 201, {"Location": f"/v1/jobs/{ids[0]}"}, "application/json")


@v1.get("/v1/jobs", tags=["jobs"], response_model=JobPage)
def list_jobs(
    service: ThisService,
    user: CurrentUser,
    state: State | None = None,
    owner: Annotated[str | None, Query(max_length=64)] = None,
    group: Annotated[str | None, Query(max_length=64)] = None,
    workload: Annotated[str | None, Query(max_length=64)] = None,
    array: Annotated[str | None, Query(max_length=64)] = None,
    before: Annotated[int | None, Query(ge=1, le=2**62)] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 100,
) -> Response:
    """Matching jobs, the newest first."""
    groups = user.visible_groups if group is None else (group,) if user.sees(group) else ()
    wanted = JobFilter(state=state, owner=owner, workload=workload, array_id=array, before=before, groups=groups)
    jobs, following = service.store.list_json(wanted, limit=limit)
    return Response(f'{{"jobs":{jobs},"next":{json.dumps(following)}}}', media_type="application/json")


@v1.get("/v1/jobs/{job}", tags=["jobs"])
def show(service: ThisService, user: CurrentUser, job: str) -> JobView:
    """One job."""
    return job_view(visible_job(service, user, job))


@v1.get("/v1/jobs/{job}/estimate", tags=["jobs"])
def estimate(service: ThisService, user: Submitter, job: str) -> Estimate:
    """What a job will take, by its plan. A job that has not been planned yet is planned for this; its input must be
    there."""
    stored = own_job(service, user, job)
    if stored.estimate is None and stored.job.state is State.QUEUED:
        service.runner.estimate(stored)
        stored = service.store.job(job)
    if stored.estimate is None:
        raise HTTPException(409, f"job {job} {stored.job.state.told}: there is no estimate")
    return stored.estimate


@v1.post("/v1/jobs/{job}/cancel", tags=["jobs"])
def cancel(service: ThisService, user: Submitter, audit: Audit, job: str) -> JobView:
    """Cancel a job and remove its partial output. Cancelling a cancelled job has no effect."""
    owner = own_job(service, user, job).asked.owner
    cancel_job(service, job, by=user.name)
    audit("cancel", job=job, owner=owner)
    return job_view(service.store.job(job))


@v1.post("/v1/jobs/{job}/retry", tags=["jobs"])
def retry(service: ThisService, user: Submitter, audit: Audit, job: str) -> JobView:
    """Queue a failed or cancelled job again; finished chunks are kept."""
    owner = own_job(service, user, job).asked.owner
    _, actions = service.store.retry(job, now=time.time())
    service.runner.act(job, actions)
    audit("retry", job=job, owner=owner)
    return job_view(service.store.job(job))


@v1.get("/v1/jobs/{job}/log", tags=["jobs"])
def log(
    service: ThisService,
    user: CurrentUser,
    job: str,
    after: Annotated[int, Query(ge=0, le=2**62)] = 0,
    limit: Annotated[int, Query(ge=1, le=MOST_EVENTS)] = MOST_EVENTS,
) -> list[EventView]:
    """Events of a job after the one numbered `after`."""
    visible_job(service, user, job)
    return service.store.events(job, after=after, limit=limit)


@v1.get(
    "/v1/jobs/{job}/events", tags=["jobs"], response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}}},
)  # fmt: skip
async def events(
    service: ThisService,
    user: CurrentUser,
    job: str,
    request: Request,
    last_event_id: Annotated[int, Header(ge=0, le=2**62)] = 0,
) -> StreamingResponse:
    """Server-sent events until the job is over: `state`, `log` and `progress`, each with JSON as its data."""
    await run_in_threadpool(visible_job, service, user, job)
    stream = _events(service, job, last_event_id, request)
    return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


@v1.get("/v1/workloads", tags=["workloads"])
def list_workloads() -> list[WorkloadView]:
    """The workloads that can be submitted."""
    return [
        WorkloadView(name=name, summary=kind.summary, parameters=kind.Parameters.model_json_schema())
        for name, kind in workloads().items()
    ]


@v1.get("/v1/workers", tags=["workers"])
def list_workers(service: ThisService) -> list[WorkerView]:
    """The workers that run jobs."""
    return [WorkerView.model_validate(each) for each in service.workers()]


@v1.get("/v1/jobs/{job}/receipt", tags=["results"], response_class=JSONResponse)
def receipt(service: ThisService, user: CurrentUser, job: str) -> Response:
    """The receipt: input, parameters, output, performance and audit."""
    found = json.dumps(_succeeded(service, user, job).receipt)  # in ASCII: a path may not be valid Unicode
    return Response(found, media_type="application/json")


@v1.get(
    "/v1/jobs/{job}/result", tags=["results"], response_class=FileResponse,
    responses={200: {"content": {"application/octet-stream": {}, archive.MEDIA_TYPE: {}}}},
)  # fmt: skip
def result(service: ThisService, user: CurrentUser, audit: Audit, job: str) -> Response:
    """The output; a folder is sent as a tar archive."""
    asked = _succeeded(service, user, job).asked
    audit("download", job=job, owner=asked.owner, output=asked.output)
    output = service.roots.of(asked.group).within(asked.output)
    if isinstance(output, ObjectPath):
        raise HTTPException(409, f"the result of job {job} is in an object store: read it there, at {output}")
    if output.is_dir():
        disposition = f"attachment; filename*=UTF-8''{quote(output.name, safe='')}.tar"
        return StreamingResponse(
            archive.packed(output), media_type=archive.MEDIA_TYPE, headers={"Content-Disposition": disposition}
        )
    if not output.is_file():
        raise HTTPException(409, f"{output.name} is no longer where job {job} wrote it")
    return _OpenFile(output)


class _OpenFile(FileResponse):
    """A file that was opened beneath the data roots, and is sent even if its name leads elsewhere meanwhile."""

    def __init__(self, path: Path) -> None:
        self._file = PositionalFile(path)
        super().__init__(self._file.name, filename=path.name, media_type="application/octet-stream")

    async def __call__(self, *arguments: Any) -> None:
        try:
            await super().__call__(*arguments)
        finally:
            self._file.close()


@v1.get(
    "/v1/jobs/{job}/preview", tags=["results"], response_class=FileResponse,
    responses={200: {"content": {"image/png": {}}}},
)  # fmt: skip
def preview(service: ThisService, user: CurrentUser, job: str) -> FileResponse:
    """A small image of the result."""
    stored = _succeeded(service, user, job)
    picture = service.previews / f"{stored.job.id}.png"
    roots = service.roots.of(stored.asked.group)
    draw_late_preview(stored, roots.within(stored.asked.output), picture, service.processes, roots.confine())
    if not picture.is_file():
        raise HTTPException(404, f"job {job} has no preview")
    return FileResponse(picture, media_type="image/png")


@probes.get("/livez", response_class=PlainTextResponse)
async def livez() -> str:
    """The process answers, even while other requests wait for the store."""
    return "ok\n"


@probes.get("/readyz", response_class=PlainTextResponse)
def readyz(service: ThisService) -> str:
    """Jobs can be accepted and run: the store is writable, and a worker sends heartbeats. Names silent workers."""
    missing = service.ready()
    if missing is not None:
        raise HTTPException(503, missing)
    return "\n".join(["ok", *silent_workers(service.workers()), ""])


@probes.get("/metrics", response_class=PlainTextResponse)
def metrics(service: ThisService) -> Response:
    """Metrics for Prometheus."""
    return Response(exposition(service.store, service.workers), media_type=CONTENT_TYPE_LATEST)


@probes.get("/metrics/targets")
def targets(service: ThisService) -> list[TargetGroup]:
    """Addresses of the workers' metrics, for Prometheus' HTTP service discovery."""
    return target_groups(service.workers())


async def _events(service: Service, job: str, after: int, request: Request) -> AsyncIterator[str]:
    store, said, quiet = service.store, None, time.monotonic()
    stored: StoredJob | None = None
    read_at = quiet
    with store.job_events.of(job) as changed:
        while not (service.closing.is_set() or await request.is_disconnected()) and await is_let_in(request, stored):
            if stored is None or changed.is_set() or time.monotonic() - read_at > HEARTBEAT_S:
                changed.clear()
                read_at = time.monotonic()
                stored = await run_in_threadpool(store.job, job)
                page = await run_in_threadpool(partial(store.events, job, after=after, limit=MOST_EVENTS))
                for event in page:
                    after, quiet = event.number, time.monotonic()
                    yield f"id: {after}\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n"
                if len(page) == MOST_EVENTS:
                    changed.set()  # there may be more
                    continue
            progress = progress_view(stored, service.runner.under_way(job))
            if progress != said:
                said, quiet = progress, time.monotonic()
                yield f"event: progress\ndata: {progress.model_dump_json()}\n\n"
            if stored.job.state in TERMINAL:
                return
            if time.monotonic() - quiet > HEARTBEAT_S:
                quiet = time.monotonic()
                yield ": still there\n\n"
            with suppress(TimeoutError):
                wait_s = RUNNING_POLL_S if stored.job.state in ACTIVE else IDLE_POLL_S
                await asyncio.wait_for(changed.wait(), wait_s)


def _check_devices(asked: int | None, there: int) -> None:
    """A job that asks for more than there are would hide a mistake. Without any worker it is not known."""
    if asked is not None and 0 < there < asked:
        raise ParameterError(
            f"limits.gpus: {asked} are more than the {there} of this service; ask for {there} or fewer"
        )


def _checked(new: NewJob, roots: DataRoots) -> NewJob:
    """The job with its resolved output; refuses what could never run. The input may not exist yet."""
    parameters_of(new, roots)
    read, written = roots.within(new.input), roots.writable(new.output)
    if read == written:
        raise OutputError(f"{new.output} is the input itself: name another output")
    workload_named(new.workload).check_output(Path(new.output))
    refuse_long_name(written)
    # A symlink may lead to a folder whose name is not valid Unicode.
    return replace(new, written=os.fsencode(written).decode(errors="backslashreplace"))


def _succeeded(service: Service, user: User, job: str) -> StoredJob:
    stored = visible_job(service, user, job)
    if stored.job.state is not State.SUCCEEDED:
        raise HTTPException(409, f"job {job} {stored.job.state.told}: there is no result")
    return stored
