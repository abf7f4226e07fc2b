"""What a service answers: problems as errors, JSON by its model, and the events of a job."""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pipeline.api_models import EventView, ProgressView
from pipeline.errors import MillraceError, ServiceError, ServiceRefused

_PROBLEM = "application/problem+json"
# What each kind of event carries; a newer service may send further kinds.
_EVENT_DATA: Mapping[str, Any] = {"state": EventView, "log": EventView, "progress": ProgressView}


class ForeignAnswer(ServiceError):
    """Another program than a Millrace service answered: a retry would not help."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a job. kind: state, log or progress; data: an `EventView` or `ProgressView`."""

    kind: str
    data: Mapping[str, Any]
    number: int | None


def without_password(url: object) -> str:
    """An address for messages, valid or not: without the user and password before its host."""
    return re.sub(r"(?s)^(.*?://)?.*@", r"\1", str(url))


def checked(response: Any) -> Any:
    """The answer, if it is a success. Raises ServiceRefused or ServiceError."""
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
            detail = f"{url}: redirects to {response.headers['location']}; set MILLRACE_URL to that address"
    if response.status_code == 401:
        detail = f"{detail}; set MILLRACE_TOKEN to the token that the service's operator gave you"
    kind: type[MillraceError] = ServiceRefused if response.status_code < 500 else ServiceError
    raise kind(detail)


def json_of(response: Any) -> Any:
    """Raises ForeignAnswer if the answer is not JSON."""
    try:
        return response.json()
    except ValueError as error:
        raise ForeignAnswer(
            f"{without_password(response.url)}: not a JSON answer: is that a Millrace service?"
        ) from error


def expected(kind: Any, answer: Any) -> Any:
    """The answer, unchanged, if it is valid for this model or type. Raises ForeignAnswer."""
    try:
        TypeAdapter(kind).validate_python(answer)
    except ValidationError as error:
        raise ForeignAnswer(f"unknown answer ({answer!r:.80}): is MILLRACE_URL that of a service?") from error
    return answer


def lines_of(pieces: Iterable[bytes]) -> Iterator[str]:
    """Lines of an event stream, which end only at CR LF, LF or CR: a message may contain U+2028."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
    begun = ""
    for piece in pieces:
        *whole, begun = (begun + decoder.decode(piece)).split("\n")
        yield from whole


def parsed(lines: Iterable[str]) -> Iterator[Event]:
    """Parses server-sent events. Raises ForeignAnswer."""
    fields: dict[str, str] = {}
    for line in lines:
        if line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value
        elif not line and "data" in fields:
            yield _event(fields)
            fields.clear()


def _event(fields: Mapping[str, str]) -> Event:
    kind = fields.get("event", "message")
    try:
        number = int(fields["id"]) if "id" in fields else None
        data = expected(_EVENT_DATA.get(kind, dict[str, Any]), json.loads(fields["data"]))
    except (ValueError, ServiceError) as error:
        raise ForeignAnswer(f"malformed event {dict(fields)!r:.200}: is that a Millrace service?") from error
    return Event(kind=kind, data=data, number=number)
