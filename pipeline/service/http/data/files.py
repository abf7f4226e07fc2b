"""Folders under the data roots, for the pages and the API."""

from __future__ import annotations

import heapq
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query

from pipeline.api_models import FileView, FolderView
from pipeline.errors import InputError, UserError
from pipeline.formats import image as images
from pipeline.formats.image.zarr import is_zarr
from pipeline.service.http.app_state import Service, ThisService
from pipeline.service.http.identity import CurrentUser
from pipeline.service.http.users.tokens import User
from pipeline.service.roots import DataRoots, is_text
from pipeline.storage.confinement import open_beneath
from pipeline.storage.objects import ObjectPath
from pipeline.storage.positional import reading

MOST_LISTED = 1000
_IMAGES = tuple(suffix for form in images.FORMATS for suffix in form.suffixes)

FolderPath = Annotated[str | None, Query(max_length=4096)]
NamePart = Annotated[str, Query(max_length=255)]

folders = APIRouter()


@folders.get("/v1/files")
def list_files(
    service: ThisService,
    user: CurrentUser,
    path: FolderPath = None,
    after: NamePart = "",
    contains: NamePart = "",
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 200,
) -> FolderView:
    """A folder under the data roots by name; without a path, the data roots themselves. Hidden files, and names that
    are not UTF-8, are not listed.

    after    : only names after this one
    contains : only names with this text in them, in upper or lower case
    """
    if path is None:
        seen = service.roots.seen_by(user.visible_groups)
        named = [str(root) for each in seen for root in each.roots if not isinstance(root, ObjectPath)]
        entries = [FileView(name=each, path=each, kind="folder", bytes=None, modified_at=None) for each in named]
        return FolderView(path=None, parent=None, entries=entries, next=None, left_out=0)
    roots, folder = found_beneath(service, user, path)
    if isinstance(folder, ObjectPath):
        raise InputError(f"{path}: is in an object store, which is not listed; type the URL of the input")
    wanted = contains.casefold()
    with reading(folder):
        if folder.is_file():
            raise InputError(f"{path}: is a file; name the folder that it is in")
        descriptor = open_beneath(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            names = (each.name for each in os.scandir(descriptor) if not each.name.startswith("."))
            fitting = (name for name in names if name > after and wanted in name.casefold() and is_text(name))
            part = heapq.nsmallest(limit + 1, fitting)
        finally:
            os.close(descriptor)
    entries = list(_usable(roots, folder, part[:limit]))
    return FolderView(
        path=str(folder), parent=None if folder in roots.roots else str(folder.parent), entries=entries,
        next=part[limit - 1] if len(part) > limit else None, left_out=len(part[:limit]) - len(entries),
    )  # fmt: skip


def found_beneath(service: Service, user: User, path: str) -> tuple[DataRoots, Path]:
    """A path under the data roots that a user may see, and those roots. InputError if it is under none of them."""
    error = None
    for roots in service.roots.seen_by(user.visible_groups):
        try:
            return roots, roots.within(path)
        except InputError as outside:
            error = error or outside
    assert error is not None, "everybody has a group"
    raise error


def _usable(roots: DataRoots, folder: Path, names: list[str]) -> Iterator[FileView]:
    for name in names:
        path = folder / name
        try:
            found = roots.within(str(path)).stat()
            kind = _kind(path, found)
        except (UserError, OSError):  # or it was removed meanwhile
            continue
        nbytes = found.st_size if stat.S_ISREG(found.st_mode) else None
        yield FileView(name=name, path=str(path), kind=kind, bytes=nbytes, modified_at=found.st_mtime)


def _kind(path: Path, found: os.stat_result) -> str:
    if stat.S_ISDIR(found.st_mode):
        return "image" if is_zarr(path) else "folder"
    return "image" if path.name.lower().endswith(_IMAGES) else "file"
