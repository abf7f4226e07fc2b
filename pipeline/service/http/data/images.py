"""Pictures of files under the data roots. The files are read in bounded processes of their own, never in the server."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Header, Query, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from pipeline import __version__
from pipeline.api_models import AxisView, ImageView
from pipeline.errors import ParameterError
from pipeline.formats.cfl import files_of
from pipeline.formats.slices import Cut, Part, describe, draw
from pipeline.formats.slices.drawing import LONGEST_SIDE
from pipeline.service.http.app_state import Service, ThisService
from pipeline.service.http.data.files import found_beneath
from pipeline.service.http.identity import Audit, Auditor, CurrentUser
from pipeline.service.http.users.tokens import User
from pipeline.storage.objects import ObjectPath
from pipeline.storage.positional import reading

T = TypeVar("T")

# What one picture may take.
MOST_BYTES, MOST_S = 1 << 30, 20.0
# A Zarr folder with more files has no tag: looking at their dates would take longer than drawing.
_MOST_ENTRIES = 4096

pictures = APIRouter()
FilePath = Annotated[
    str, Query(max_length=4096, description="a file or a Zarr folder under the data roots", examples=["scan.tif"])
]
_PLACES = r"^[A-Za-z]:\d{1,9}(,[A-Za-z]:\d{1,9})*$"
_SPAN = r"^\d{1,12}:\d{1,12}$"
_NUMBER = r"-?\d{1,40}(\.\d{1,20})?(e[-+]?\d{1,3})?"
_LIMITS = rf"^{_NUMBER}:{_NUMBER}(,{_NUMBER}:{_NUMBER})*$"


@pictures.get("/v1/images")
async def show_image(
    service: ThisService, user: CurrentUser, audit: Audit, request: Request, path: FilePath
) -> ImageView:
    """The axes, the pyramid and the channels of an image, a potential map or a series of MRI images."""
    found = await _looked_at(service, user, audit, request, path, describe)
    return ImageView(
        path=path, plane=found.plane, at=dict(found.at), dtype=found.dtype, samples=found.samples, levels=found.levels,
        axes=[AxisView(letter=letter, length=n, step=found.steps.get(letter)) for letter, n in found.axes],
        channels=list(found.channels), colours=list(found.colours),
    )  # fmt: skip


@pictures.get(
    "/v1/images/slice", response_class=Response,
    responses={200: {"content": {"image/png": {}}}, 304: {"description": "the picture is still the same"}},
)  # fmt: skip
async def draw_slice(
    service: ThisService,
    user: CurrentUser,
    audit: Audit,
    request: Request,
    path: FilePath,
    plane: Annotated[
        str | None, Query(pattern="^[A-Za-z]{2}$", description="the axes of rows and columns, as YX")
    ] = None,
    at: Annotated[
        str | None, Query(pattern=_PLACES, max_length=200, description="the index along other axes, as T:0,Z:12")
    ] = None,
    rows: Annotated[str | None, Query(pattern=_SPAN, description="start:stop of those to show, as 0:512")] = None,
    columns: Annotated[str | None, Query(pattern=_SPAN, description="start:stop of those to show")] = None,
    size: Annotated[int, Query(ge=1, le=LONGEST_SIDE, description="pixels of the longest side, at most")] = 1024,
    low: Annotated[
        float | None, Query(allow_inf_nan=False, description="the value that is black; default: percentile 0.1")
    ] = None,
    high: Annotated[
        float | None, Query(allow_inf_nan=False, description="the value that is white; default: percentile 99.9")
    ] = None,
    part: Annotated[Part, Query(description="of complex samples")] = "magnitude",
    composite: Annotated[bool, Query(description="show the channels together, each in its colour")] = False,
    limits: Annotated[
        str | None, Query(pattern=_LIMITS, max_length=600, description="low:high of each channel of a composite")
    ] = None,
    if_none_match: Annotated[str | None, Header(max_length=1000)] = None,
) -> Response:
    """A picture of one plane, of the level of the pyramid that suffices. 8-bit samples stay as they are unless `low` or
    `high` is given.

    The headers `Millrace-Level`, `-Low`, `-High`, `-Limits`, `-Rows` and `-Columns` describe the picture; `-Blocks` is
    1/m if only one in m blocks of the file was read along each axis.
    """
    if low is not None and high is not None and low >= high:
        raise ParameterError(f"low {low:g}: must be below high, {high:g}")
    places = dict(each.split(":") for each in at.split(",")) if at else {}
    cut = Cut(
        plane=plane, at={letter: int(index) for letter, index in places.items()}, rows=_span(rows),
        columns=_span(columns), size=size, low=low, high=high, part=part,
        composite=composite, limits=_limits(limits),
    )  # fmt: skip
    tag = await run_in_threadpool(_tag, service, user, path, cut)
    headers = {"Cache-Control": "private, no-cache"} | ({} if tag is None else {"ETag": tag})
    if tag is not None and tag in (each.strip().removeprefix("W/") for each in (if_none_match or "").split(",")):
        return Response(status_code=304, headers=headers)
    made = await _looked_at(service, user, audit, request, path, draw, cut)
    headers |= {
        "Millrace-Level": str(made.level), "Millrace-Blocks": f"1/{made.one_of}", "Millrace-Low": repr(made.low),
        "Millrace-High": repr(made.high), "Millrace-Limits": ",".join(f"{low!r}:{high!r}" for low, high in made.limits),
        "Millrace-Rows": "{:.15g}:{:.15g}".format(*made.rows),
        "Millrace-Columns": "{:.15g}:{:.15g}".format(*made.columns),
    }  # fmt: skip
    return Response(made.png, media_type="image/png", headers=headers)


async def _looked_at(
    service: Service, user: User, audit: Auditor, request: Request, path: str, look: Callable[..., T], *arguments: Any
) -> T:
    """What a function returns for a file, in a bounded process."""
    roots, found = await run_in_threadpool(found_beneath, service, user, path)
    async with service.viewing.turn(user.name):
        if await request.is_disconnected():
            raise HTTPException(503, "the client is gone")
        seen = await run_in_threadpool(
            service.processes.look, found, look, *arguments, known=roots.confine(), most_bytes=MOST_BYTES, most_s=MOST_S
        )
    if service.viewing.is_news(user.name, found):
        audit("view", input=path)
    return seen


def _tag(service: Service, user: User, path: str, cut: Cut) -> str | None:
    """Another one for another picture, or once the file or any file of a Zarr folder has changed; None if that cannot
    be known."""
    _, found = found_beneath(service, user, path)
    if isinstance(found, ObjectPath):
        return None
    parts = []
    with reading(found):
        found.stat()
        for file in dict.fromkeys((found, *(each for each in files_of(found) if each.exists()))):
            parts.append(_version(file.stat()))
        if found.is_dir():
            parts += itertools.islice(_versions_within(found), _MOST_ENTRIES)
            if len(parts) > _MOST_ENTRIES:
                return None
    said = repr((__version__, str(found), parts, cut))
    return f'"{hashlib.sha256(said.encode("utf-8", "surrogateescape")).hexdigest()[:32]}"'


def _versions_within(folder: Path) -> Iterator[tuple[int, ...]]:
    with os.scandir(folder) as entries:
        for each in entries:
            yield _version(each.stat())
            if each.is_dir(follow_symlinks=False):
                yield from _versions_within(Path(each.path))


def _version(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _span(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    start, _, stop = text.partition(":")
    return int(start), int(stop)


def _limits(text: str | None) -> tuple[tuple[float, float], ...]:
    pairs = [each.split(":") for each in text.split(",")] if text else []
    found = tuple((float(low), float(high)) for low, high in pairs)
    for low, high in found:
        if not -math.inf < low <= high < math.inf:
            raise ParameterError(f"limits {low:g}:{high:g}: the first of a pair may not be above the second")
    return found
