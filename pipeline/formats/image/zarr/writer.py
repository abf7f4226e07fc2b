"""Writing an OME-Zarr 0.5 image: a group of one array a multiscale level, '0' being the image itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.chunk_codec import Stage
from pipeline.codecs.packed import ChunkForm
from pipeline.errors import MillraceError
from pipeline.formats.image.base import ImageHeader, PartialWriter, Region, require_fit
from pipeline.formats.image.pyramid import Reduction, at_level, finish, require_alignment
from pipeline.formats.image.zarr.array_writer import ROOT, ArrayWriter, Shapes, metadata_of
from pipeline.storage.objects import ObjectPath
from pipeline.storage.partial import Callback, Opening, PartialFolder, behind_link, no_callback
from pipeline.storage.partial_objects import PartialObjects
from pipeline.storage.writable import writing

# By name, the codecs after `bytes`; of Blosc with the sample's size. Of its own accord Blosc cuts chunks for Zstandard
# into blocks of 32 KiB, each with a new context: 512 KiB are encoded 1.1 to 2 times as fast, and smaller.
COMPRESSIONS: dict[str, tuple[Stage, ...]] = {
    "none": (),
    "lz4": (Stage("blosc", {"cname": "lz4", "clevel": 5, "shuffle": 1}),),
    "zstd": (Stage("blosc", {"cname": "zstd", "clevel": 1, "shuffle": 1, "blocksize": 512 << 10}),),
    "deflate": (Stage("gzip", {"level": 5}),),
}
DEFAULT_COMPRESSION = "zstd"


class ZarrWriter(PartialWriter):
    """Writes chunks, each in a file of its own or several in a shard, by default of Zstandard after a byte shuffle.

    The further levels of a pyramid are made of the regions as they come (see `pyramid`).
    """

    def __init__(
        self, path: Path, header: ImageHeader, opening: Opening, *, stored: str, chunk: tuple[int, ...],
        attributes: Mapping[str, Any], order: tuple[int, ...] | None = None, shard: tuple[int, ...] | None = None,
        compression: str = DEFAULT_COMPRESSION, further: Sequence[Shapes] = (),
    ) -> None:  # fmt: skip
        """`stored`: the array's axes; `order`: which of the header's each is, by default that of the same letter;
        `chunk`, `shard`: in the header's order, a shard in whole chunks; `attributes`: of the group; `compression`: of
        `COMPRESSIONS`; `further`: those of each further level."""
        self.path = path
        self.header = header
        order = order or tuple(header.axes.index(letter) for letter in stored)
        self._reduction = Reduction.of(header)
        self._partial: PartialFolder | PartialObjects
        if isinstance(path, ObjectPath):
            described = [metadata_of(str(level)) for level in range(len(further) + 1)]
            self._partial = PartialObjects(path, (*described, ROOT), opening)
        else:
            self._partial = PartialFolder(behind_link(path), _is_an_earlier_result, opening)
        try:
            array = partial(ArrayWriter, path, order=order, stages=COMPRESSIONS[compression], names=stored.lower())
            self._levels = [
                array(at_level(header, level), self._partial, name=str(level), shapes=shapes)
                for level, shapes in enumerate([(chunk, shard), *further])
            ]
            with writing(path):
                if opening is Opening.NEW:
                    group = {"attributes": dict(attributes), "zarr_format": 3, "node_type": "group"}
                    self._partial.put(ROOT, [json.dumps(group, indent=2).encode()])
                for level in self._levels:
                    level.create() if opening is Opening.NEW else level.join()
        except BaseException:
            self._partial.keep() if opening is Opening.RESUME else self._partial.discard()
            raise

    def write(self, region: Region, samples: NDArray[Any]) -> None:
        self._write(region, samples, self._levels[0].write)

    def chunk_form(self, region: Region) -> ChunkForm | None:
        """As `pipeline.workloads.protocol.TakesPacked`."""
        return self._levels[0].chunk_form(region)

    def write_packed(self, region: Region, samples: NDArray[Any], chunks: Sequence[NDArray[np.uint8]]) -> None:
        """As `write`; `chunks`: those of the image itself, encoded, in the order of `chunk_form`."""
        self._write(region, samples, lambda part, _: self._levels[0].write_packed(part, chunks))

    def _write(
        self, region: Region, samples: NDArray[Any], write_image: Callable[[Region, NDArray[Any]], None]
    ) -> None:
        require_fit(self.header, region, samples)
        if samples.size == 0:
            return
        count = len(self._levels) - 1
        if count:
            require_alignment(self.header, region)
        write_image(region, samples)
        for level, part, reduced in self._reduction.levels_of(region, samples, count):
            self._levels[level].write(part, reduced)

    def flush(self) -> None:
        for level in self._levels:
            level.write_held()
        super().flush()

    def publish(self, on_sealed: Callback = no_callback) -> None:
        finish(
            self.header,
            len(self._levels),
            lambda level, region: self._levels[level].read(region),
            lambda level, region, samples: self._levels[level].write(region, samples),
        )
        for level in self._levels:
            level.write_held()
        super().publish(on_sealed)

    def keep(self) -> None:
        with suppress(MillraceError, ValueError):  # after an error that said more, or discarded
            for level in self._levels:
                level.write_held()
        super().keep()

    def discard(self) -> None:
        self._levels = []  # which closes their spools
        super().discard()


def ome_metadata(
    name: str,
    axes: Sequence[Mapping[str, str]],
    *transformations: Sequence[Mapping[str, Any]],
    method: str | None = None,
) -> dict[str, Any]:
    """The metadata of an image; `transformations`: of each level; `method`: by which the further ones are made.

    https://ngff.openmicroscopy.org/0.5
    """
    levels = [
        {"path": str(level), "coordinateTransformations": list(each)} for level, each in enumerate(transformations)
    ]
    image: dict[str, Any] = {"name": name, "axes": list(axes), "datasets": levels}
    return {"version": "0.5", "multiscales": [image if method is None else image | {"type": method}]}


def _is_an_earlier_result(folder: Path) -> bool:
    """Whether the folder holds only what this writer makes, and so may be replaced."""
    names = {entry.name for entry in folder.iterdir()}
    levels = names - {ROOT}
    return len(levels) < len(names) and levels <= {str(level) for level in range(len(levels))}
