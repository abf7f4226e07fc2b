"""The levels of a TIFF's pyramid: SubIFDs of each page, or smaller copies that follow the page in the chain.

Sources: OME-TIFF specification 6.0 (SubIFDs); GDAL's GTiff driver (overviews).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from pipeline.errors import InputError
from pipeline.formats.image.tiff.ifd import Directory, Tag
from pipeline.formats.image.tiff.page import Page, is_beside_the_image, is_smaller_copy, read_page, samples_of


def count_levels(chain: Sequence[Directory], kept: Sequence[Directory], first: Page) -> int:
    """How many levels the image has, itself included.

    chain : all pages
    kept  : those of the image
    first : of those, the first

    InputError if a directory that declares itself a level does not fit the one before it, or pages differ in levels.
    """
    if is_beside_the_image(kept[0]):  # there is no other
        return 1
    found = _in_sub_ifds(kept[0], first)
    for page in kept[1:] if found else ():
        if page.count(Tag.SUB_IFDS) != kept[0].count(Tag.SUB_IFDS):
            raise page.fault(
                Tag.SUB_IFDS,
                f"has {page.count(Tag.SUB_IFDS)}, but page {first.index} has {kept[0].count(Tag.SUB_IFDS)}: a pyramid "
                "must have as many levels on every page; export the file again",
            )
    return 1 + len(found or _in_chain(chain[first.index + 1 :], first))


def level_pages(chain: Sequence[Directory], pages: Sequence[Page], level: int) -> tuple[Page, ...]:
    """The pages of a level, 1 or more, for those of the image. InputError if they differ, or one is missing."""
    first, found = pages[0], []
    for page in pages:
        smaller = _in_sub_ifds(chain[page.index], first) or _in_chain(chain[page.index + 1 :], first)
        if len(smaller) < level:
            raise InputError(
                f"{chain[0].file.path}: page {page.index} lacks level {level} of its pyramid; export the file again"
            )
        found.append(read_page(smaller[level - 1]))
        if found[-1].shape != found[0].shape:
            shapes = [brief(each.shape, page.dtype) for each in (found[-1], found[0])]
            raise InputError(
                f"{chain[0].file.path}: level {level} of page {page.index} is {shapes[0]}, but that of page "
                f"{first.index} is {shapes[1]}; export the file again"
            )
    return tuple(found)


def _in_sub_ifds(page: Directory, first: Page) -> list[Directory]:
    before, levels = first.shape, []
    for directory in page.sub_ifds():
        size = _size_of(directory, first)
        if size is not None and _fits(size, before):
            before = size
            levels.append(directory)
        elif is_smaller_copy(directory):
            shape, dtype = samples_of(directory)
            raise directory.fault(
                Tag.NEW_SUBFILE_TYPE,
                f"declares a level of the pyramid, but it is {brief(shape, dtype)} after one of "
                f"{brief(before, first.dtype)}; export the file again",
            )
    return levels


def _in_chain(following: Sequence[Directory], first: Page) -> list[Directory]:
    """Levels among the pages between one and the next of the image; other samples are those of thumbnails."""
    before, levels = first.shape, []
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
            before = shape
            levels.append(directory)
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
