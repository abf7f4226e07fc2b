"""An OME-Zarr 0.5 image in the making: a group with one multiscale level, '0', channels before the spatial axes."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from pipeline.errors import OutputError
from pipeline.formats.base import ImageHeader, ImageWriter, Region
from pipeline.formats.partial import Opening, PartialFolder, Sealed, not_told
from pipeline.formats.region_fit import require_fit
from pipeline.formats.writable import writing

_ARRAY = "0"
_STORED_ORDER = "CZYX"
# Low chunks: the bands of rows in which wide images are worked on shall hold whole ones. 2 MiB each; of a narrow image
# as many rows as make a file worth its while.
_CHUNK_ROWS = 256
_CHUNK_BYTES = 2 << 20
_SMALLEST_BYTES = 64 << 10
_TYPES = {"C": "channel", "Z": "space", "Y": "space", "X": "space"}


class ZarrWriter(ImageWriter):
    """Chunks of 2 MiB, Zstandard after a byte shuffle, level 1.

    Regions of whole chunks are stored by several threads at once. A chunk that a region covers in part is read,
    changed and written back, by one thread of one process at a time: right in any order, but slower.
    """

    def __init__(self, path: Path, header: ImageHeader, opening: Opening) -> None:
        self.path = path
        self.header = header
        self._stored = "".join(letter for letter in _STORED_ORDER if letter in header.axes)
        self._order = tuple(header.axes.index(letter) for letter in self._stored)
        self._chunk = chunk_shape(header)
        self._sharing = threading.Lock()
        self._folder = PartialFolder(path, _is_an_earlier_result, opening)
        try:
            with writing(path):
                if opening is Opening.NEW:
                    self._array = self._create_array(tuple(self._chunk[axis] for axis in self._order))
                else:
                    self._array = self._existing_array()
        except BaseException:
            self._folder.keep() if opening is Opening.RESUME else self._folder.discard()
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
        with nullcontext() if whole_chunks else self._alone(), writing(self.path, samples.nbytes):
            self._array[box] = samples.transpose(self._order)

    def flush(self) -> None:
        self._folder.flush()

    def keep(self) -> None:
        self._folder.keep()

    def publish(self, sealed: Sealed = not_told) -> None:
        self._folder.publish(sealed)

    def discard(self) -> None:
        self._folder.discard()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other thread, nor any other process that has joined, changes a part of a chunk meanwhile."""
        with self._sharing, (self._folder.path / "zarr.json").open("rb") as locked:
            fcntl.flock(locked, fcntl.LOCK_EX)
            yield

    def _existing_array(self) -> Any:
        import zarr

        array = zarr.open_array(store=str(self._folder.path / _ARRAY), mode="r+")
        if array.shape != tuple(self.header.shape[axis] for axis in self._order) or array.dtype != self.header.dtype:
            raise OutputError(f"{self._folder.path}: holds {array.dtype} {array.shape}: run again without --resume")
        return array.with_config({"write_empty_chunks": True})

    def _create_array(self, chunk: tuple[int, ...]) -> Any:
        import zarr
        from zarr.codecs import BloscCodec

        group = zarr.create_group(store=str(self._folder.path), zarr_format=3, attributes={"ome": self._ome_metadata()})
        return group.create_array(
            _ARRAY,
            shape=tuple(self.header.shape[axis] for axis in self._order),
            dtype=self.header.dtype,
            chunks=chunk,
            compressors=BloscCodec(typesize=self.header.dtype.itemsize, cname="zstd", clevel=1, shuffle="shuffle"),
            fill_value=0,
            dimension_names=tuple(self._stored.lower()),
            # A chunk of -0.0 equals the fill value 0.0, and would come back as it.
            config={"write_empty_chunks": True},
        )

    def _ome_metadata(self) -> dict[str, Any]:
        """https://ngff.openmicroscopy.org/0.5; sizes and units as the input had them."""
        metadata = self.header.metadata
        scale, unit = metadata.get("scale", {}), metadata.get("unit", {})
        axes = [
            {"name": letter.lower(), "type": _TYPES[letter]} | ({"unit": unit[letter]} if letter in unit else {})
            for letter in self._stored
        ]
        steps = [{"type": "scale", "scale": [float(scale.get(letter, 1.0)) for letter in self._stored]}]
        image = {
            "name": self.path.stem,
            "axes": axes,
            "datasets": [{"path": _ARRAY, "coordinateTransformations": steps}],
        }
        described: dict[str, Any] = {"version": "0.5", "multiscales": [image]}
        if "omero" in metadata:
            described["omero"] = metadata["omero"]
        return described


def chunk_shape(header: ImageHeader) -> tuple[int, ...]:
    """The chunks of such an image, in the image's axes."""
    sizes = dict(zip(header.axes, header.shape, strict=True))
    columns = min(_CHUNK_BYTES // (_CHUNK_ROWS * header.dtype.itemsize), sizes["X"])
    rows = max(_CHUNK_ROWS, _SMALLEST_BYTES // (columns * header.dtype.itemsize))
    chunk = {"C": 1, "Z": 1, "Y": min(rows, sizes["Y"]), "X": columns}
    return tuple(chunk[letter] for letter in header.axes)


def _is_an_earlier_result(folder: Path) -> bool:
    """Whether the folder holds what this writer makes and nothing else, which alone is replaced."""
    return {entry.name for entry in folder.iterdir()} <= {"zarr.json", _ARRAY} and (folder / "zarr.json").is_file()
