"""Writing an OME-Zarr 0.5 image: a group with one multiscale level, '0'."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from pipeline.errors import OutputError
from pipeline.formats.image.base import ImageHeader, PartialWriter, Region, require_fit
from pipeline.storage.partial import Opening, PartialFolder, behind_link
from pipeline.storage.writable import writing

_ARRAY = "0"


class ZarrWriter(PartialWriter):
    """Writes chunks of Zstandard, level 1, after a byte shuffle.

    Several threads store regions of whole chunks at once. A chunk that a region covers in part is read, changed and
    written back, by one thread of one process at a time: correct in any order, but slower.
    """

    def __init__(
        self,
        path: Path,
        header: ImageHeader,
        opening: Opening,
        *,
        stored: str,
        chunk: tuple[int, ...],
        attributes: Mapping[str, Any],
    ) -> None:
        """`stored`: the header's axes in the array's order; `chunk`: in the header's; `attributes`: of the group."""
        self.path = path
        self.header = header
        self._stored = stored
        self._order = tuple(header.axes.index(letter) for letter in stored)
        self._chunk = chunk
        self._sharing = threading.Lock()
        self._partial: PartialFolder = PartialFolder(behind_link(path), _is_an_earlier_result, opening)
        try:
            with writing(path):
                self._array = self._create_array(attributes) if opening is Opening.NEW else self._existing_array()
        except BaseException:
            self._partial.keep() if opening is Opening.RESUME else self._partial.discard()
            raise

    def write(self, region: Region, samples: NDArray[Any]) -> None:
        require_fit(self.header, region, samples)
        if samples.size == 0:
            return
        whole_chunks = all(
            start % block == 0 and (stop % block == 0 or stop == size)
            for start, stop, block, size in zip(region.start, region.stop, self._chunk, self.header.shape, strict=True)
        )
        box = tuple(region.slices[axis] for axis in self._order)
        with (
            writing(self.path, samples.nbytes),
            self._partial.in_use(),
            nullcontext() if whole_chunks else self._alone(),
        ):
            self._array[box] = samples.transpose(self._order)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Exclude all other threads and joined processes from changing parts of chunks."""
        with self._sharing, os.fdopen(self._partial.open_file("zarr.json")) as locked:
            fcntl.flock(locked, fcntl.LOCK_EX)
            yield

    def _existing_array(self) -> Any:
        import zarr

        from pipeline.formats.image.zarr.lazy_store import PartialFiles

        array = zarr.open_array(store=PartialFiles(self._partial), path=_ARRAY, mode="r+")
        if array.shape != tuple(self.header.shape[axis] for axis in self._order) or array.dtype != self.header.dtype:
            raise OutputError(f"{self._partial.path}: holds {array.dtype} {array.shape}: run again without --resume")
        return array.with_config({"write_empty_chunks": True})

    def _create_array(self, attributes: Mapping[str, Any]) -> Any:
        import zarr
        from zarr.codecs import BloscCodec

        from pipeline.formats.image.zarr.lazy_store import PartialFiles

        group = zarr.create_group(store=PartialFiles(self._partial), zarr_format=3, attributes=dict(attributes))
        return group.create_array(
            _ARRAY,
            shape=tuple(self.header.shape[axis] for axis in self._order),
            dtype=self.header.dtype,
            chunks=tuple(self._chunk[axis] for axis in self._order),
            compressors=BloscCodec(typesize=self.header.dtype.itemsize, cname="zstd", clevel=1, shuffle="shuffle"),
            fill_value=0,
            dimension_names=tuple(self._stored.lower()),
            # Otherwise a chunk of -0.0 equals the fill value 0.0, and would be read back as that.
            config={"write_empty_chunks": True},
        )


def ome_metadata(
    path: Path, axes: Sequence[Mapping[str, str]], transformations: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The metadata of an image of one level. https://ngff.openmicroscopy.org/0.5"""
    level = {"path": _ARRAY, "coordinateTransformations": list(transformations)}
    return {"version": "0.5", "multiscales": [{"name": path.stem, "axes": list(axes), "datasets": [level]}]}


def _is_an_earlier_result(folder: Path) -> bool:
    """Whether the folder holds only what this writer makes, and so may be replaced."""
    return {entry.name for entry in folder.iterdir()} <= {"zarr.json", _ARRAY} and (folder / "zarr.json").is_file()
