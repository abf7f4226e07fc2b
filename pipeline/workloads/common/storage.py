"""The parameters that choose how an output image is stored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from pipeline.formats.image.base import Storage
from pipeline.workloads.protocol import BETWEEN_NUMBERS, Parameters


class StorageParameters(Parameters):
    """Base of the parameters of workloads that write images."""

    chunks: tuple[int, ...] | None = Field(
        None,
        description="Zarr: pixels of a chunk, TIFF: of a tile: one number for rows and columns, or one for each axis",
    )
    shards: tuple[int, ...] | None = Field(
        None, description="Zarr: pixels of a file of several chunks, in the same form [default: 16 MiB past 8 GiB]"
    )
    compression: Literal["none", "lz4", "zstd", "deflate", "lzw", "jpeg2000"] | None = Field(
        None, description="compression of the output [default: Zarr zstd; TIFF none, or as the input]"
    )

    levels: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="levels of the output's pyramid, the image included; auto: as many as viewers need, if the input "
        "has several, or if Zarr or tiled TIFF has more than 4096 rows or columns",
        json_schema_extra={"unit": "auto|N"},
    )

    @field_validator("levels", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        return int(value) if isinstance(value, str) and value.strip().isdecimal() else value

    @field_validator("chunks", "shards", mode="before")
    @classmethod
    def _sizes(cls, value: Any) -> Any:
        text = str(value) if isinstance(value, int) else value
        return BETWEEN_NUMBERS.sub(",", text).split(",") if isinstance(text, str) else text

    @property
    def storage(self) -> Storage:
        return Storage(
            chunks=self.chunks,
            shards=self.shards,
            compression=self.compression,
            levels=None if self.levels == "auto" else self.levels,
        )
