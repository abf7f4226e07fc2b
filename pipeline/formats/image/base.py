"""What every image format offers: a header without the pixels, any region in, any region out, atomic publishing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import counted
from pipeline.formats import Reader
from pipeline.storage.partial import Callback, Opening, PartialFile, PartialFolder, no_callback

# What the formats without narrower limits (TIFF, Zarr, NPY) hold.
AXES = ("YX", "YXC", "ZYX", "ZYXC")
DTYPES = ("uint8", "uint16", "int16", "float32", "float64")

# What a TIFF's metadata may say of its samples: "photometric", and the last of "extra_samples".
WHITE_IS_ZERO, INKS = 0, 5
STRAIGHT_ALPHA = 2


@dataclass(frozen=True)
class Region:
    """A box of samples: `start` inclusive, `stop` exclusive, one entry an axis of the image."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Self:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))


@dataclass(frozen=True, kw_only=True)
class ImageHeader:
    """What an image file declares about itself.

    shape    : samples along each axis
    axes     : a letter an axis: Z (planes, pages), Y (rows), X (columns), C (channels, always last)
    dtype    : in native byte order
    maxval   : the largest sample value the file allows, where the format states one (PNM, PAM)
    metadata : what the same format can carry over to a new file (resolution, tuple type, pixel size, …)
    """

    shape: tuple[int, ...]
    axes: str
    dtype: np.dtype[Any]
    maxval: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the samples, uncompressed."""
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize

    @property
    def misread_elsewhere(self) -> str | None:
        """What formats that know gray, RGB and straight alpha alone would show instead; None where they are right."""
        photometric, extra = self.metadata.get("photometric"), self.metadata.get("extra_samples", ())
        channels = self.shape[-1] if self.axes.endswith("C") else 1
        if photometric == WHITE_IS_ZERO:
            return "a negative of this image, in which 0 is white"
        if photometric == INKS and channels <= 4:
            return f"other colours than those of this image, whose {counted(channels, 'channel')} are inks"
        if extra and channels in (2, 4) and extra[-1] != STRAIGHT_ALPHA:
            kind = "multiplied into the colours" if extra[-1] == 1 else "no alpha"
            return f"the last channel of this image as alpha, which it says is {kind}"
        return None

    @property
    def channel_axis(self) -> int | None:
        return self.axes.index("C") if "C" in self.axes else None


class ImageReader(Reader):
    """An image file open for reading. `read` may be called from several threads at once."""

    header: ImageHeader
    # How the file is cut (tiles, compressed strips, Zarr chunks): reading along these boundaries decodes nothing twice.
    # None: every region costs the same.
    block_shape: tuple[int, ...] | None = None

    @abstractmethod
    def read(self, region: Region, out: NDArray[Any]) -> None:
        """Fill `out` (C-contiguous, the region's shape, the header's dtype) with the region's samples.

        Raises InputError where the file turns out truncated or corrupt, StorageError where reading fails.
        """

    def hold_at_most(self, budget_bytes: int) -> int:
        """Keep no more than this between reads (decoded blocks), where that can be; returns what may be kept."""
        return 0


class ImageWriter(ABC):
    """An image being written beside its final name. `write` may be called from several threads, on disjoint regions.

    Nothing stands under the final name until `publish`, and an older file there stays intact until then. One writer
    owns the image; others may have joined it, from other processes, to `write` and `flush` their share.
    """

    path: Path
    header: ImageHeader

    @abstractmethod
    def write(self, region: Region, samples: NDArray[Any]) -> None:
        """Store `samples` (C-contiguous, the region's shape, the header's dtype). StorageError where the disk fails."""

    @abstractmethod
    def flush(self) -> None:
        """Make durable what has been written so far."""

    @abstractmethod
    def publish(self, on_sealed: Callback = no_callback) -> None:
        """Make every byte durable, call `on_sealed`, then rename to the final name at once."""

    @abstractmethod
    def keep(self) -> None:
        """Close, and leave what was written where it is, for a writer opened with RESUME; harmless after `publish`."""

    @abstractmethod
    def discard(self) -> None:
        """Remove what was written; harmless after `publish` or a second time."""


class PartialWriter(ImageWriter):
    """A writer into one partial output; subclasses set `_partial` and implement `write`."""

    _partial: PartialFile | PartialFolder

    def flush(self) -> None:
        self._partial.flush()

    def publish(self, on_sealed: Callback = no_callback) -> None:
        self._partial.publish(on_sealed)

    def keep(self) -> None:
        self._partial.keep()

    def discard(self) -> None:
        self._partial.discard()


class ImageFormat(ABC):
    """One file format. Instances carry no state; the registry in `pipeline.formats` holds one of each."""

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]

    @abstractmethod
    def recognises(self, path: Path, first_bytes: bytes) -> bool:
        """Whether the file's own first bytes (empty for a folder) say that it is of this format."""

    @abstractmethod
    def open(self, path: Path) -> ImageReader:
        """Read the header alone, and check it against the file's size. InputError names the file and the fault."""

    @abstractmethod
    def refusal(self, header: ImageHeader, path: Path) -> str | None:
        """Why an image like this cannot be stored in this format under that name, and what could; None where it can."""

    def block_shape(self, header: ImageHeader) -> tuple[int, ...] | None:
        """How `create` cuts such an image: regions of whole blocks are written fastest. None: any will do."""
        return None

    @abstractmethod
    def create(self, path: Path, header: ImageHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        """Start a new file beside `path`, or as `opening` says go on with one of the same header. Call `refusal` first.

        OutputError where the folder cannot be written to.
        """


def require_fit(header: ImageHeader, region: Region, samples: NDArray[Any]) -> None:
    """ValueError unless the region lies in the image and `samples` has its shape, the header's dtype and C order.

    A region may be empty; the caller then has nothing to do.
    """
    inside = len(region.start) == len(region.stop) == len(header.shape) and all(
        0 <= start <= stop <= size for start, stop, size in zip(region.start, region.stop, header.shape, strict=True)
    )
    if not inside:
        raise ValueError(f"region {region.start} to {region.stop} is not within an image of {header.shape}")
    if samples.shape != region.shape or samples.dtype != header.dtype or not samples.flags.c_contiguous:
        raise ValueError(
            f"an array of {samples.shape} {samples.dtype} stands for a region of {region.shape} {header.dtype}, "
            "which must be C-contiguous"
        )
