"""What a service answers, read and checked: whoever else answers under its address is found out here."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import MillraceError, ServiceError, ServiceRefused

_PROBLEM = "application/problem+json"
# What a service says of each job, and of each thing that happened to it.
OF_A_JOB = frozenset(
    (
        "id", "owner", "workload", "input", "output", "parameters", "priority", "state", "cancelling", "attempts",
        "chunks", "chunks_done", "error", "submitted_at", "started_at", "finished_at",
    )
)  # fmt: skip
OF_AN_EVENT = frozenset(("number", "at", "kind", "message"))


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a job: `kind` is state, log or progress, `data` what the service says of it."""

    kind: str
    data: Mapping[str, Any]
    number: int | None


def checked(response: Any) -> Any:
    """The answer, where it is a success."""
    if response.is_success:
        return response
    response.read()
    try:
        if response.headers.get("content-type") != _PROBLEM:
            raise ValueError
        detail = str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        detail = f"status {response.status_code} from {response.url}: is that a Millrace service?"
        if response.has_redirect_location:
            detail = f"{response.url}: leads on to {response.headers['location']}; set MILLRACE_URL to the place there"
    if response.status_code == 401:
        detail = f"{detail}: set MILLRACE_TOKEN to what whoever runs the service has given you"
    kind: type[MillraceError] = ServiceRefused if response.status_code < 500 else ServiceError
    raise kind(detail)


def json_of(response: Any) -> Any:
    """ServiceError where it has none."""
    try:
        return response.json()
    except ValueError as error:
        raise ServiceError(f"{response.url}: answers no JSON: is that a Millrace service?") from error


def an_object(answer: Any, keys: Collection[str] = ()) -> dict[str, Any]:
    """An answer that is to be an object with these keys. ServiceError where another program has answered."""
    return objects([answer], keys)[0]


def objects(answer: Any, keys: Collection[str] = ()) -> list[dict[str, Any]]:
    """As `an_object`, of a list of them."""
    if isinstance(answer, list) and all(isinstance(each, dict) and each.keys() >= set(keys) for each in answer):
        return answer
    said = f"{answer!r:.80}"
    raise ServiceError(f"the answer is none that this version knows ({said}): is MILLRACE_URL that of a service?")


def as_json(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as they are sent: NaN and infinities, which are no JSON, as text. ServiceRefused where one is none."""
    sent = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in parameters.items()
    }
    for name, value in sent.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ServiceRefused(f"parameters.{name}: {error}; give a number, a text or a list of them") from error
    return sent


def parsed(lines: Iterator[str]) -> Iterator[Event]:
    """Server-sent events."""
    fields: dict[str, str] = {}
    for line in lines:
        if line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value
        elif not line and "data" in fields:
            try:
                number = int(fields["id"]) if "id" in fields else None
                data = json.loads(fields["data"])
            except ValueError as error:
                raise ServiceError(f"an event that is none: {fields}") from error
            yield Event(kind=fields.get("event", "message"), data=data, number=number)
            fields.clear()
