"""Groups and arrays of a Zarr hierarchy from their metadata alone, without the zarr library, which is slow to import.

They offer what `layout.find_array` and the reader use of that library's nodes. Anything unusual is left to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.formats.image.zarr.chunk_files import open_regular
from pipeline.formats.image.zarr.stored_array import StoredArray, stored_array
from pipeline.storage.objects import ObjectPath

_LARGEST_METADATA_BYTES = 1 << 24
_NAMES = re.compile(r"\w[\w .-]*(/\w[\w .-]*)*")
_OF_V3 = {"zarr_format", "node_type", "attributes", "shape", "data_type", "chunk_grid", "chunk_key_encoding",
          "fill_value", "codecs", "dimension_names", "storage_transformers"}  # fmt: skip
_DTYPE = re.compile(r"[<>|]?[a-z]\w*")


class UnusualError(Exception):
    """Metadata that only the zarr library understands."""


class Attributes(dict[str, Any]):
    """Attributes of a node."""

    def asdict(self) -> dict[str, Any]:
        return dict(self)


@dataclass(frozen=True)
class ArrayMetadata:
    """An array's metadata, as the file holds them."""

    content: Mapping[str, Any]

    @property
    def dimension_names(self) -> Any:
        return self.content.get("dimension_names")

    def to_dict(self) -> dict[str, Any]:
        return dict(self.content)


@dataclass(frozen=True)
class Array:
    """An array; `path` is its place below the root. UnusualError unless it is stored as `StoredArray` can describe."""

    path: str
    metadata: ArrayMetadata
    attrs: Attributes
    stored: StoredArray = field(init=False)

    def __post_init__(self) -> None:
        content = self.metadata.content
        dtype = content.get("data_type") or content.get("dtype")
        _need(isinstance(dtype, str) and _DTYPE.fullmatch(dtype) and np.dtype(dtype).kind in "buif")
        fill = content.get("fill_value")
        _need(fill is None or type(fill) in (bool, int, float))
        _need(fill is None or (type(fill) is bool) == (np.dtype(dtype).kind == "b"))
        if fill is not None and np.dtype(dtype).kind in "ui":
            _need(type(fill) is int and np.iinfo(dtype).min <= fill <= np.iinfo(dtype).max)
        found = stored_array(content, fill)
        if found is None:
            raise UnusualError
        object.__setattr__(self, "stored", found)
        names = content.get("dimension_names")
        _need(names is None or (len(names) == self.ndim and all(name is None or type(name) is str for name in names)))
        shapes = (found.shape, found.file_shape, found.codec.shape)
        _need(all(type(size) is int and size >= 0 for sizes in shapes for size in sizes))
        _need(min(found.codec.shape, default=0) > 0 and {len(sizes) for sizes in shapes} == {self.ndim})
        _need(sorted(found.codec.order) == list(range(self.ndim)))
        _need(all(a == b * c for a, b, c in zip(found.file_shape, found.codec.shape, found.per_file, strict=True)))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def ndim(self) -> int:
        return len(self.stored.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.stored.codec.dtype

    @property
    def chunks(self) -> tuple[int, ...]:
        return self.stored.codec.shape

    @property
    def fill_value(self) -> Any:
        return self.stored.fill_value


@dataclass(frozen=True)
class Group:
    """A group; its members are looked up in its folder."""

    root: Path
    path: str
    attrs: Attributes

    def __getitem__(self, name: str) -> Array | Group:
        """UnusualError for names of more than letters, digits, `_`, `-`, `.` and blanks."""
        _need(_NAMES.fullmatch(name) and ".." not in name)
        return node(self.root, f"{self.path}/{name}" if self.path else name)

    def arrays(self) -> Iterator[tuple[str, Array]]:
        return ((name, found) for name, found in self._members() if isinstance(found, Array))

    def groups(self) -> Iterator[tuple[str, Group]]:
        return ((name, found) for name, found in self._members() if isinstance(found, Group))

    def _members(self) -> Iterator[tuple[str, Array | Group]]:
        for entry in sorted((self.root / self.path).iterdir()):
            # An object store's listing does not show which names are prefixes.
            if entry.is_dir() or (isinstance(entry, ObjectPath) and not entry.exists()):
                yield entry.name, self[entry.name]


def node(root: Path, path: str = "") -> Array | Group:
    """The node at `path` below `root`. UnusualError if it is not plain; InputError as `open_regular`."""
    folder = root / path
    content = _read(folder / "zarr.json")
    if content is not None:
        attributes = _attributes(content.get("attributes", {}))
        _need(content.get("zarr_format") == 3)
        if content.get("node_type") == "group":
            _need(set(content) <= {"zarr_format", "node_type", "attributes"})
            return Group(root, path, attributes)
        _need(content.get("node_type") == "array" and set(content) <= _OF_V3)
        return Array(path, ArrayMetadata(content), attributes)
    array, group = _read(folder / ".zarray"), _read(folder / ".zgroup")
    _need((array is None) != (group is None))
    attributes = _attributes(_read(folder / ".zattrs") or {})
    if array is None:
        return Group(root, path, attributes)
    _need(array.get("zarr_format") == 2 and isinstance(array.get("dtype"), str))
    return Array(path, ArrayMetadata(array), attributes)


def _need(condition: object) -> None:
    if not condition:
        raise UnusualError


def _attributes(found: Any) -> Attributes:
    _need(isinstance(found, dict))
    return Attributes(found)


def _read(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file."""
    if isinstance(path, ObjectPath):
        try:
            data = bytes(path.get(_LARGEST_METADATA_BYTES)[0])
        except FileNotFoundError:
            return None
    else:
        file = open_regular(path)
        if file is None:
            return None
        with closing(file):
            _need(file.size <= _LARGEST_METADATA_BYTES)
            data = file.head(file.size)
    found = json.loads(data)
    _need(isinstance(found, dict))
    return dict(found)
