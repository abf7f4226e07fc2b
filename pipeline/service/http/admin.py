"""What operators do over HTTP, and the accounts, of which everyone may read those of their groups."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from datetime import date, timedelta
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from pipeline.api_models import CancelledView, CapView, QueueView, State, UsageView
from pipeline.service.http.app_state import Service, ThisService
from pipeline.service.http.identity import Audit, CurrentUser, Operator, operator_of, user_of
from pipeline.service.http.views import JobId
from pipeline.service.jobs import ACTIVE, CancelRequested, IllegalTransition
from pipeline.service.store.limits import HoldKind
from pipeline.service.store.records import day_of

# Jobs of one request: their partial outputs are removed before it is answered.
MOST_JOBS = 200
_EPOCH = date(1970, 1, 1)
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._@-]{1,64}$")]
_Group = Annotated[str, Field(pattern=r"^[A-Za-z0-9._@-]{0,64}$")]


def _iso_date(text: Any) -> Any:
    """Refuses what pydantic takes for dates too, such as seconds."""
    if isinstance(text, str) and not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
        raise ValueError("must be a date such as 2026-11-01")
    return text


_Day = Annotated[date, BeforeValidator(_iso_date)]

admin = APIRouter(prefix="/v1/admin", tags=["admin"], dependencies=[Depends(operator_of)])
accounts = APIRouter(tags=["accounts"], dependencies=[Depends(user_of)])


class Target(BaseModel):
    """One of: some jobs, those of an owner or of a group, or everything."""

    model_config = ConfigDict(extra="forbid")

    jobs: list[JobId] = Field([], max_length=MOST_JOBS)
    owner: _Name | None = None
    group: _Group | None = None
    everything: bool = False

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if bool(self.jobs) + (self.owner is not None) + (self.group is not None) + self.everything != 1:
            raise ValueError("name jobs, an owner, a group, or everything")
        return self

    @property
    def hold(self) -> tuple[HoldKind, str]:
        if self.owner is not None:
            return "owner", self.owner
        return ("group", self.group) if self.group is not None else ("all", "")


class CapChange(BaseModel):
    """A limit for an owner or a group, or with the name "" for each one without a limit of its own; null removes it."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["owner", "group"]
    name: _Group = ""
    what: Literal["running", "unfinished", "gpu_hours", "device_hours", "bytes", "jobs"]
    value: float | None = Field(gt=0, le=1e18)


@admin.get("/queue")
def queue(service: ThisService) -> QueueView:
    """The holds, and how many jobs run and wait."""
    counts = service.store.counts()
    holds = service.store.rules(now=time.time()).holds
    return QueueView(holds=holds, running=sum(counts[state] for state in ACTIVE), queued=counts[State.QUEUED])


@admin.post("/hold")
def hold(service: ThisService, user: Operator, audit: Audit, target: Target) -> QueueView:
    """Let queued jobs wait until they are released; those that run go on."""
    if target.jobs:
        service.store.hold_jobs(target.jobs, True, by=user.name, now=time.time())
    else:
        service.store.hold(*target.hold, by=user.name, now=time.time())
    audit("hold", **target.model_dump(exclude_defaults=True))
    return queue(service)


@admin.post("/release")
def release(service: ThisService, user: Operator, audit: Audit, target: Target) -> QueueView:
    """End a hold."""
    if target.jobs:
        service.store.hold_jobs(target.jobs, False, by=user.name, now=time.time())
    else:
        service.store.release(*target.hold, now=time.time())
    service.runner.wake()
    audit("release", **target.model_dump(exclude_defaults=True))
    return queue(service)


@admin.post("/cancel")
def cancel(service: ThisService, user: Operator, audit: Audit, target: Target) -> CancelledView:
    """Cancel jobs, at most 200 at a time; `more` is true if there are others."""
    found = target.jobs or service.store.unfinished(owner=target.owner, group=target.group, limit=MOST_JOBS + 1)
    for job in found[:MOST_JOBS]:
        with suppress(IllegalTransition):  # it has ended meanwhile
            cancel_job(service, job, by=user.name)
    audit("cancel", **target.model_dump(exclude_defaults=True) | {"jobs": found[:MOST_JOBS]})
    return CancelledView(jobs=found[:MOST_JOBS], more=len(found) > MOST_JOBS)


def cancel_job(service: Service, job: str, *, by: str) -> None:
    """Cancels a job and removes its partial output; its log names who did, if not its owner."""
    if service.store.job(job).asked.owner != by:
        service.store.log(job, f"cancelled by {by}", now=time.time())
    _, actions = service.store.apply(job, CancelRequested(), now=time.time())
    service.runner.act(job, actions)


@admin.get("/caps")
def caps(service: ThisService) -> list[CapView]:
    """The limits that operators have set."""
    return service.store.rules(now=time.time()).caps


@admin.post("/caps")
def change_cap(service: ThisService, audit: Audit, change: CapChange) -> list[CapView]:
    """Set or remove a limit; it is in force at once, and stays over restarts."""
    if change.value is None:
        service.store.remove_cap(change.kind, change.name, change.what, now=time.time())
    else:
        service.store.set_cap(change.kind, change.name, change.what, change.value, now=time.time())
    audit(
        "cap",
        kind=change.kind,
        name=change.name,
        cap=change.what,
        value="none" if change.value is None else change.value,
    )
    service.runner.wake()
    return caps(service)


@accounts.get("/v1/usage")
def usage(
    service: ThisService,
    user: CurrentUser,
    since: Annotated[
        _Day | None, Query(description="the first day, UTC; by default the first that quotas count")
    ] = None,
    until: Annotated[_Day | None, Query(description="the day after the last, UTC")] = None,
    daily: Annotated[bool, Query(description="each day by itself")] = False,
) -> list[UsageView]:
    """What was used, by owner and group: everyone sees the accounts of their groups, operators all."""
    first = since or _EPOCH + timedelta(days=day_of(time.time()) - service.settings.quota_days + 1)
    found = service.store.usage(
        first=(first - _EPOCH).days,
        until=None if until is None else (until - _EPOCH).days,
        groups=user.visible_groups,
        daily=daily,
    )
    return [
        UsageView(**vars(each) | {"day": None if each.day is None else _EPOCH + timedelta(days=each.day)})
        for each in found
    ]
