"""What a service answers, read and checked: whoever else answers under its address is found out here."""

from __future__ import annotations

import codecs
import io
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
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


class MalformedEvent(ServiceError):
    """What was sent is no event of a Millrace service: to ask again would not help."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a job: `kind` is state, log or progress, `data` what the service says of it."""

    kind: str
    data: Mapping[str, Any]
    number: int | None


def without_password(url: object) -> str:
    """An address as messages may show it, whatever is wrong with it: less the user and password before its host."""
    return re.sub(r"(?s)^(.*?://)?.*@", r"\1", str(url))


def checked(response: Any) -> Any:
    """The answer, where it is a success."""
    if response.is_success:
        return response
    response.read()
    url = without_password(response.url)
    try:
        if response.headers.get("content-type") != _PROBLEM:
            raise ValueError
        detail = str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        detail = f"status {response.status_code} from {url}: is that a Millrace service?"
        if response.has_redirect_location:
            detail = f"{url}: leads on to {response.headers['location']}; set MILLRACE_URL to the place there"
    if response.status_code == 401:
        detail = f"{detail}: set MILLRACE_TOKEN to what whoever runs the service has given you"
    kind: type[MillraceError] = ServiceRefused if response.status_code < 500 else ServiceError
    raise kind(detail)


def json_of(response: Any) -> Any:
    """ServiceError where it has none."""
    try:
        return response.json()
    except ValueError as error:
        raise ServiceError(f"{without_password(response.url)}: answers no JSON: is that a Millrace service?") from error


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


def lines_of(pieces: Iterable[bytes]) -> Iterator[str]:
    """The lines of an event stream, which end at CR LF, LF or CR and nowhere else: a message may hold U+2028."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
    begun = ""
    for piece in pieces:
        *whole, begun = (begun + decoder.decode(piece)).split("\n")
        yield from whole


def parsed(lines: Iterable[str]) -> Iterator[Event]:
    """Server-sent events. MalformedEvent where one cannot be read."""
    fields: dict[str, str] = {}
    for line in lines:
        if line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value
        elif not line and "data" in fields:
            yield _event(fields)
            fields.clear()


def _event(fields: Mapping[str, str]) -> Event:
    try:
        number = int(fields["id"]) if "id" in fields else None
        (data,) = objects([json.loads(fields["data"])])
    except (ValueError, ServiceError) as error:
        raise MalformedEvent(f"an event that is none: {dict(fields)!r:.200}: is that a Millrace service?") from error
    return Event(kind=fields.get("event", "message"), data=data, number=number)
