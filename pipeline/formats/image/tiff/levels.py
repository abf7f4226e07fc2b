"""The levels of a TIFF's pyramid: SubIFDs of each page, or smaller copies that follow the page in the chain.

Samples of levels are not read. Sources: OME-TIFF specification 6.0 (SubIFDs); GDAL's GTiff driver (overviews).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from pipeline.errors import InputError
from pipeline.formats.image.tiff.ifd import Directory, Tag
from pipeline.formats.image.tiff.page import Page, is_beside_the_image, is_smaller_copy, samples_of


def count_levels(chain: Sequence[Directory], kept: Sequence[Directory], first: Page) -> int:
    """How many levels the image has, itself included.

    chain : all pages
    kept  : those of the image
    first : of those, the first

    InputError if a directory that declares itself a level does not fit the one before it, or pages differ in levels.
    """
    if is_beside_the_image(kept[0]):  # there is no other
        return 1
    levels = _in_sub_ifds(kept, first)
    return levels if levels > 1 else _in_chain(chain[first.index + 1 :], first)


def _in_sub_ifds(kept: Sequence[Directory], first: Page) -> int:
    before, levels = first.shape, 1
    for directory in kept[0].sub_ifds():
        size = _size_of(directory, first)
        if size is not None and _fits(size, before):
            before, levels = size, levels + 1
        elif is_smaller_copy(directory):
            shape, dtype = samples_of(directory)
            raise directory.fault(
                Tag.NEW_SUBFILE_TYPE,
                f"declares a level of the pyramid, but it is {brief(shape, dtype)} after one of "
                f"{brief(before, first.dtype)}; export the file again",
            )
    for page in kept[1:] if levels > 1 else ():
        if page.count(Tag.SUB_IFDS) != kept[0].count(Tag.SUB_IFDS):
            raise page.fault(
                Tag.SUB_IFDS,
                f"has {page.count(Tag.SUB_IFDS)}, but page {first.index} has {kept[0].count(Tag.SUB_IFDS)}: a pyramid "
                "must have as many levels on every page; export the file again",
            )
    return levels


def _in_chain(following: Sequence[Directory], first: Page) -> int:
    """Levels among the pages between the first and the second of the image; other samples are those of thumbnails."""
    before, levels = first.shape, 1
    for directory in itertools.takewhile(is_beside_the_image, following):
        if not is_smaller_copy(directory):
            continue
        shape = _size_of(directory, first)
        if shape is None:
            continue
        if shape[0] > first.shape[0] or shape[1] > first.shape[1]:
            raise directory.fault(
                Tag.NEW_SUBFILE_TYPE,
                f"declares a smaller copy, but it is {brief(shape, first.dtype)} and page {first.index} is "
                f"{brief(first.shape, first.dtype)}; export the file again",
            )
        if _fits(shape, before):
            before, levels = shape, levels + 1
    return levels


def _size_of(directory: Directory, first: Page) -> tuple[int, int, int] | None:
    """None if the samples differ from those of the image in number or kind."""
    with suppress(InputError):
        shape, dtype = samples_of(directory)
        if shape[2] == first.shape[2] and dtype == first.stored_dtype:
            return shape
    return None


def _fits(shape: tuple[int, int, int], before: tuple[int, int, int]) -> bool:
    """Whether a level may follow one of the shape `before`."""
    is_smaller = shape[:2] != before[:2] and shape[0] <= before[0] and shape[1] <= before[1]
    return shape[2] == before[2] and is_smaller


def brief(shape: tuple[int, int, int], dtype: np.dtype[Any]) -> str:
    rows, columns, samples = shape
    return f"{columns} × {rows} × {samples} {dtype.name}"
