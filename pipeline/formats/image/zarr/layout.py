"""Which array of a Zarr hierarchy is the image, and what its axes are.

Sources: Zarr v2 and v3 specifications; OME-Zarr (NGFF) 0.4 and 0.5, section "multiscales".
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.errors import InputError, counted
from pipeline.formats.image.base import AXES
from pipeline.formats.image.metadata import Calibration
from pipeline.formats.image.metadata.ome_zarr import from_multiscales
from pipeline.formats.image.pyramid import LABELS

_ORDER = "TCZYX"
COLOURS_MARK = "millrace:colours"  # a group's attribute: its channels are the samples of a pixel
_IN_WORDS = {"TIME": "T", "CHANNEL": "C", "BAND": "C"}  # spellings of xarray's users and rioxarray
# Attributes that are read, or that a result has of its own.
_KNOWN = {"ome", "multiscales", "omero", LABELS, "version", "_creator", "_ARRAY_DIMENSIONS", COLOURS_MARK}
_NUMBERED = re.compile(r"(.*\d)?")  # no name, or a generated one: dim_0


@dataclass(frozen=True)
class Layout:
    """How the image's axes map to the array's.

    stored   : a letter for each of the array's axes (of `AXES`); '?' for any other, whose length is 1
    axes     : the image's axes, of `AXES` in this order
    metadata : what a new Zarr takes over: `omero`, and `image-label` of labels
    levels   : of the pyramid
    name     : of the image; empty if it has none of its own
    left_out : what a result does not have, in words
    """

    stored: str
    axes: str
    calibration: Calibration = field(default_factory=Calibration)
    metadata: dict[str, Any] = field(default_factory=dict)
    levels: int = 1
    name: str = ""
    left_out: tuple[str, ...] = ()

    def shape(self, stored_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The image's shape, from the array's."""
        return tuple(stored_shape[self.stored.index(letter)] for letter in self.axes)

    @property
    def order(self) -> tuple[int, ...]:
        """The transposition to the image's axes from the array's, omitting those that the image lacks."""
        kept = [letter for letter in self.stored if letter in self.axes]
        return tuple(kept.index(letter) for letter in self.axes)


def find_array(node: Any, path: Path, level: int = 0) -> tuple[Any, Layout]:
    """The image's array within an opened node (zarr's or that of `nodes`), and its layout. InputError unless one.

    level : of the pyramid, if there is one
    """
    if hasattr(node, "chunks"):  # an array
        return node, replace(_plain_layout(node, path), left_out=_others(node.attrs.asdict()))
    attributes = node.attrs.asdict()
    ome = attributes.get("ome", attributes)
    multiscales = ome.get("multiscales") if isinstance(ome, Mapping) else None
    if multiscales is not None:
        return _multiscale_image(node, multiscales, ome, path, level)
    arrays = [name for name, _ in node.arrays()]
    if len(arrays) == 1:
        array = node[arrays[0]]
        left_out = _others(attributes, array.attrs.asdict())
        return array, replace(_plain_layout(array, path), left_out=left_out)
    members = sorted(arrays) or sorted(name for name, _ in node.groups())
    if not members:
        raise InputError(f"{path}: a Zarr group without any array; check the path")
    kind = "several arrays" if arrays else "further groups"
    named = ", ".join(members[:5])
    raise InputError(f"{path}: a Zarr group of {kind} ({named}); name the one to read, as in {path / members[0]}")


def _multiscale_image(
    node: Any, multiscales: Any, ome: Mapping[str, Any], path: Path, number: int
) -> tuple[Any, Layout]:
    """A level of the first (by the specification: the default) multiscale image."""
    try:
        image = multiscales[0]
        level, *smaller = image["datasets"]
        array = node[str(level["path"])]
        axes = [axis if isinstance(axis, str) else axis["name"] for axis in image.get("axes", "tczyx")]
    except (LookupError, TypeError, AttributeError) as exc:
        raise InputError(f"{path}: its OME metadata (multiscales) is incomplete ({exc!r}); export it again") from exc
    if not hasattr(array, "chunks"):
        raise InputError(f"{path}: its OME metadata names {level['path']}, which is not an array; export it again")
    _check_levels(node, array, smaller, path)
    letters = "".join(axis.upper() if axis.upper() in _ORDER else "?" for axis in map(str, axes))
    if node.attrs.asdict().get(COLOURS_MARK) is True:
        letters = letters.replace("C", "S")
    omero = ome.get("omero")
    found = _layout(letters, array.shape, path)
    calibration = from_multiscales(image, level, omero, letters, array.shape)
    metadata = {key: ome[key] for key in ("omero", LABELS) if isinstance(ome.get(key), Mapping)}
    title = str(image.get("name") or "").strip("/ ")
    layout = replace(
        found, calibration=calibration, metadata=metadata, levels=1 + len(smaller),
        name="" if title == path.stem else title,
        left_out=(*_others(node.attrs.asdict(), ome), *(("labels",) if _has_labels(node) else ())),
    )  # fmt: skip
    return (node[str(smaller[number - 1]["path"])] if number else array), layout


def _others(*attributes: Mapping[str, Any]) -> tuple[str, ...]:
    """The attributes that no image of ours has."""
    names = [str(name) for each in attributes for name in each if name not in _KNOWN]
    return (f"attributes {', '.join(dict.fromkeys(names))}",) if names else ()


def _has_labels(node: Any) -> bool:
    """Whether there are label images below the image."""
    with suppress(Exception):  # absent, or nothing that any reader takes for labels
        return bool(node["labels"].attrs.asdict())
    return False


def _check_levels(node: Any, array: Any, smaller: Any, path: Path) -> None:
    """InputError unless each smaller level is an array of the same axes and dtype, and no larger than that before."""
    before = array
    for number, dataset in enumerate(smaller, 1):
        where = f"{path}: level {number} of its pyramid"
        try:
            name = str(dataset["path"])
            level = node[name]
        except (LookupError, TypeError, OSError) as exc:
            raise InputError(f"{where} is missing; copy it again, or remove the level from its metadata") from exc
        if not hasattr(level, "chunks"):
            raise InputError(f"{where} ({name}) is not an array; export it again")
        found, expected = f"{tuple(level.shape)} {level.dtype}", f"{tuple(before.shape)} {before.dtype}"
        if level.ndim != before.ndim or level.dtype != before.dtype or any(map(operator.gt, level.shape, before.shape)):
            raise InputError(
                f"{where} ({name}) is {found}, and does not fit the level before it of {expected}; export it again"
            )
        before = level


def _plain_layout(array: Any, path: Path) -> Layout:
    """Axes by the array's own names (Zarr v3; xarray's attribute in v2), else by their number.

    InputError if some of three or more axes are named, but not y and x: a guess could mix up axes.
    """
    found = getattr(array.metadata, "dimension_names", None) or array.attrs.get("_ARRAY_DIMENSIONS")
    names = [str(name or "") for name in found] if isinstance(found, list | tuple) else []
    letters = [_IN_WORDS.get(name, name) if name in {*_ORDER, *_IN_WORDS} else "?" for name in map(str.upper, names)]
    if {"Y", "X"} <= set(letters):
        return _layout("".join(letters), array.shape, path)
    if array.ndim > 2 and not all(_NUMBERED.fullmatch(name) for name in names):
        raise InputError(
            f"{path}: its axes are named {', '.join(names)}, so y and x are unknown; rename these two axes y and x"
        )
    ambiguous = "YXS" if array.ndim == 3 and array.shape[-1] <= 4 else "ZYX"
    by_number = {2: "YX", 3: ambiguous, 4: "ZYXS", 5: "TCZYX"}.get(array.ndim)
    if by_number is None:
        axes = counted(array.ndim, "axis", "axes")
        raise InputError(f"{path}: an array of {axes} without names; 2 to 5 are supported: extract one image")
    return _layout(by_number, array.shape, path)


def _layout(stored: str, shape: tuple[int, ...], path: Path) -> Layout:
    if len(stored) != len(shape) or not set("YX") <= set(stored) or any(stored.count(a) > 1 for a in AXES):
        raise InputError(f"{path}: axes {stored} do not describe an array of shape {shape}; export it again")
    if min(shape) < 1:
        raise InputError(f"{path}: an array of shape {shape} has no samples; check the input")
    for letter, size in zip(stored, shape, strict=True):
        if letter not in AXES and size > 1:
            raise InputError(
                f"{path}: holds {size:,} positions along an axis other than t, c, z, y and x; extract one of them first"
            )
    # Of OME-Zarr's usual five axes those of length 1 are only padding; elsewhere they are intended.
    filler = {letter for letter, size in zip(stored, shape, strict=True) if size == 1 and len(shape) == 5} - set("YX")
    return Layout(stored, "".join(letter for letter in AXES if letter in stored and letter not in filler))
