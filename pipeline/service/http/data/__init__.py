"""What lies under the data roots: folders, and pictures of files."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from pipeline.service.http.data.files import folders
from pipeline.service.http.data.images import pictures
from pipeline.service.http.identity import user_of

data = APIRouter(tags=["data"], dependencies=[Depends(user_of)])
data.include_router(folders)
data.include_router(pictures)
