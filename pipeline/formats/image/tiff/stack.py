"""Arranging a TIFF's pages along the image's axes: plain stacks, ImageJ, OME-TIFF and tifffile's own.

The pages are authoritative; a description only defines their meaning (planes, channels, time points). If the two
contradict each other, the file is refused: a truncated stack must not pass for a single image.

Sources: ImageJ's TiffDecoder; OME-TIFF specification (TiffData); tifffile's "shaped" JSON description.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from pipeline.errors import InputError, counted
from pipeline.formats.image.base import AXES
from pipeline.formats.image.metadata.notes import text_of
from pipeline.formats.image.tiff.ifd import MAX_PAGES, Directory, Tag
from pipeline.formats.image.tiff.levels import brief, count_levels, level_pages
from pipeline.formats.image.tiff.page import Page, is_beside_the_image, read_page


@dataclass(frozen=True)
class Stack:
    """The image: its shape, axes and levels (see `ImageHeader`), and the pages, in the order of the axes T, C and Z."""

    shape: tuple[int, ...]
    axes: str
    pages: tuple[Page, ...]
    first: Directory
    levels: int = 1
    ome: ElementTree.Element | None = None  # its OME-XML, of one image

    @property
    def free_text(self) -> str:
        """The description, if it is none of the dialects."""
        text = text_of(self.first.blob(Tag.IMAGE_DESCRIPTION))
        return "" if text.startswith("ImageJ=") or text.rstrip().endswith("OME>") or _is_shaped(text) else text


@dataclass(frozen=True)
class _Declared:
    """A description's account of the pages: axis letters and sizes, slowest first; its author; page of each plane."""

    axes: str
    sizes: tuple[int, ...]
    by: str
    page_of_plane: tuple[int, ...] | None = None
    ome: ElementTree.Element | None = None


def arrange(directories: Sequence[Directory]) -> Stack:
    """Read every page and order them. InputError if pages differ, or have other axes than T, C and Z."""
    # Smaller copies and masks do not count as pages; newer files keep them in SubIFDs, outside the chain.
    kept = [directory for directory in directories if not is_beside_the_image(directory)] or list(directories)
    pages = [read_page(directory) for directory in kept]
    first, path = pages[0], kept[0].file.path
    for page in pages[1:]:
        if (page.shape, page.dtype) != (first.shape, first.dtype):
            raise InputError(
                f"{path}: page {page.index} is {brief(page.shape, page.dtype)}, but page {first.index} is "
                f"{brief(first.shape, first.dtype)}; split the file into images of one kind"
            )
    levels = count_levels(directories, kept, first)
    declared = _described(kept[0], first, len(pages)) or _Declared("Z", (len(pages),), "")
    if declared.page_of_plane is not None:
        by_index = {page.index: page for page in pages}
        pages = [_numbered(by_index, index, path) for index in declared.page_of_plane]
        unnamed = by_index.keys() - declared.page_of_plane
        if unnamed:
            planes = counted(len(pages), "plane")
            raise kept[0].fault(
                Tag.IMAGE_DESCRIPTION,
                f"OME-XML declares {planes}, none of them page {min(unnamed)}; export the file again",
            )
    if declared.ome is None:  # OME-XML states one size for all
        _refuse_mixed_sizes(kept)
    count = math.prod(declared.sizes)
    if len(pages) == 1 < count:
        pages, levels = _beyond_the_first(kept[0], first, declared, count), 1  # at most of the first plane
    if len(pages) != count:
        raise InputError(
            f"{path}: its {declared.by} description declares {counted(count, 'plane')}, but the file has "
            f"{counted(len(pages), 'page')}; copy it again, or remove the description (tag 270)"
            f"{_perhaps_turned(len(pages), first, count)}"
        )
    return replace(_ordered(kept[0], pages, declared), levels=levels)


def at_level(directories: Sequence[Directory], stack: Stack, level: int) -> Stack:
    """A level of an arranged pyramid, 1 or more. InputError if the pages of the image differ there."""
    pages = level_pages(directories, stack.pages, level)
    sizes = dict(zip("YX", pages[0].shape, strict=False))
    shape = tuple(sizes.get(letter, n) for letter, n in zip(stack.axes, stack.shape, strict=True))
    return replace(stack, pages=pages, shape=shape)


def _refuse_mixed_sizes(directories: Sequence[Directory]) -> None:
    """InputError if a page states another pixel size than the first."""
    first = directories[0]
    for directory in directories[1:]:
        for tag in (Tag.X_RESOLUTION, Tag.Y_RESOLUTION):
            if not directory.differs(tag, first):
                continue
            mine, firsts = directory.rational(tag) or (0, 0), first.rational(tag) or (0, 0)
            if not all(mine + firsts) or math.isclose(mine[0] / mine[1], firsts[0] / firsts[1], rel_tol=1e-6):
                continue
            raise directory.fault(
                tag,
                f"is {mine[0] / mine[1]:g}, but page {first.index} has {firsts[0] / firsts[1]:g}: pixels of two sizes; "
                "split the file",
            )


def _numbered(by_index: dict[int, Page], index: int, path: Path) -> Page:
    if index not in by_index:
        raise InputError(
            f"{path}: page 0, tag ImageDescription: OME-XML names page {index}, which is missing; copy the file again"
        )
    return by_index[index]


def _beyond_the_first(directory: Directory, page: Page, declared: _Declared, count: int) -> list[Page]:
    """ImageJ (past 4 GiB) and tifffile write only one directory, with the further planes right after the first."""
    end = int(page.offsets[0, 0, 0]) + count * page.plane_bytes
    if count > MAX_PAGES or not page.one_run or end > directory.file_bytes:
        raise InputError(
            f"{directory.file.path}: its {declared.by} description declares {count:,} planes, but the file holds one; "
            "it is truncated (copy it again) or a page of a larger stack (remove the description, tag 270)"
            f"{_perhaps_turned(1, page, count)}"
        )
    return [page.moved(plane) for plane in range(count)]


def _perhaps_turned(page_count: int, page: Page, planes: int) -> str:
    """Another reason for missing planes: tifffile's ImageJ files of one column have a row for each plane."""
    if page_count * page.shape[0] != planes:
        return ""
    return "; if these are images of one column, tifffile has transposed them: save them as .npy or .zarr"


def _ordered(directory: Directory, pages: list[Page], declared: _Declared) -> Stack:
    """Put pages in the order T, C, Z, from that of the declared axes."""
    path, first = directory.file.path, pages[0]
    long = [(letter, size) for letter, size in zip(declared.axes, declared.sizes, strict=True) if size > 1]
    letters = "".join(letter for letter, _ in long)
    planes = "".join(letter for letter in AXES if letter in letters)
    if sorted(letters) != sorted(planes) or not set(planes) <= set("TCZ"):
        sizes = " × ".join(f"{letter}={size}" for letter, size in long)
        raise InputError(f"{path}: pages along {sizes}; only T, C and Z are supported: extract one series first")
    table = np.arange(len(pages)).reshape([size for _, size in long])
    table = table.transpose([letters.index(letter) for letter in planes])
    rows, columns, samples = first.shape
    return Stack(
        shape=(*table.shape, rows, columns, *([samples] if samples > 1 else [])),
        axes=f"{planes}YX{'S' if samples > 1 else ''}",
        pages=tuple(pages[index] for index in table.ravel().tolist()),
        first=directory,
        ome=declared.ome,
    )


def _described(directory: Directory, page: Page, page_count: int) -> _Declared | None:
    """What the first page's ImageDescription declares, in one of three dialects; None if it is free text."""
    description = directory.text(Tag.IMAGE_DESCRIPTION)
    if description.startswith("ImageJ="):
        return _imagej(description, page, page_count)
    if description.endswith("OME>"):
        return _ome(directory, description, page, page_count)
    if _is_shaped(description):
        return _shaped(directory.file.path, description, page, page_count)
    return None


def _is_shaped(description: str) -> bool:
    return description.startswith("{") and '"shape":' in description


def _imagej(description: str, page: Page, page_count: int) -> _Declared | None:
    fields = dict(line.split("=", 1) for line in description.splitlines() if "=" in line)

    def size(key: str) -> int:
        text = fields.get(key, "1").strip()
        return int(text) if text.isdecimal() and len(text) < 10 else 1

    sizes = {"T": size("frames"), "Z": size("slices"), "C": size("channels")}
    if sizes["C"] == page.shape[2] > 1:  # written by Bio-Formats: the page's own samples
        sizes["C"] = 1
    if math.prod(sizes.values()) == 1:  # a plain stack, or none; `images` alone is often stale
        return _Declared("Z", (size("images"),), "ImageJ") if page_count == 1 else None
    # 'czt': channels change from one page to the next, time points last.
    order = fields.get("order", "czt").strip().upper()
    axes = order[::-1] if sorted(order) == ["C", "T", "Z"] else "TZC"
    return _Declared(axes, tuple(sizes[letter] for letter in axes), "ImageJ")


def _shaped(path: Path, description: str, page: Page, page_count: int) -> _Declared | None:
    try:
        fields = json.loads(description)
        shape = [int(size) for size in fields["shape"]]
        axes = str(fields.get("axes", ""))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None  # free text after all
    planes, rest = divmod(math.prod(shape), math.prod(page.shape))
    if rest == 0 and len(axes) == len(shape) and axes.endswith("X") and shape[-1] == 1 < page.shape[1]:
        # tifffile drops a last axis of length one: the rows of such pages are the image's columns.
        raise InputError(
            f"{path}: its tifffile description declares axes {axes} = {' × '.join(map(str, shape))}, but each page is "
            f"{brief(page.shape, page.dtype)}: tifffile transposes images of one column; save it as .npy or .zarr"
        )
    if rest or planes <= 1 or min(shape) < 1:
        return None  # each page was written separately
    lead = next((n for n in range(1, len(shape)) if math.prod(shape[:n]) == planes), None)
    if lead is None:
        return None
    letters = axes[:lead] if len(axes) == len(shape) else "?" * lead
    if "Z" not in letters:
        # An axis without a known name is a stack; a second one stays unknown, and is refused.
        unnamed = next((n for n in range(lead) if letters[n] in "?QI" and shape[n] > 1), None)
        if unnamed is not None:
            letters = letters[:unnamed] + "Z" + letters[unnamed + 1 :]
    if page_count > planes and page_count % planes == 0 and sum(size > 1 for size in shape[:lead]) == 1:
        return None  # several series of one kind, one after another: one stack
    return _Declared(letters, tuple(shape[:lead]), "tifffile")


def _ome(directory: Directory, xml: str, page: Page, page_count: int) -> _Declared:
    path = directory.file.path
    try:
        root = ElementTree.fromstring(xml)
        elsewhere = root.find("{*}BinaryOnly")
        if elsewhere is not None:
            name = elsewhere.get("MetadataFile", "a companion")
            raise directory.fault(
                Tag.IMAGE_DESCRIPTION, f"OME-XML is in another file, {name}; join the files of the image first"
            )
        images = root.findall("{*}Image")
        if len(images) != 1:
            raise directory.fault(
                Tag.IMAGE_DESCRIPTION, f"OME-XML of {counted(len(images), 'image')}; extract the one you want first"
            )
        pixels = images[0].find("{*}Pixels")
        if pixels is None:
            raise ValueError("no Pixels element")
        sizes = {letter: int(pixels.get(f"Size{letter}", "1")) for letter in "TZC"}
        axes = pixels.get("DimensionOrder", "XYCZT")[:1:-1]
        if sorted(axes) != ["C", "T", "Z"] or min(sizes.values()) < 1:
            raise ValueError("invalid DimensionOrder or sizes")
        if sizes["C"] % page.shape[2] == 0:  # OME counts the samples of a page as channels
            sizes["C"] //= page.shape[2]
        contradiction = _contradiction(pixels, page)
        if contradiction is not None:
            raise directory.fault(Tag.IMAGE_DESCRIPTION, f"OME-XML declares {contradiction}; export the file again")
        count = math.prod(sizes.values())
        if count > page_count:
            raise directory.fault(
                Tag.IMAGE_DESCRIPTION,
                f"OME-XML declares {counted(count, 'plane')}, but the file has {counted(page_count, 'page')}; it is "
                "truncated or one of several files: join them first",
            )
        shape = tuple(sizes[letter] for letter in axes)
        return _Declared(axes, shape, "OME-XML", _ome_pages(directory, root, pixels, axes, shape), root)
    except (ElementTree.ParseError, ValueError, RecursionError) as exc:
        raise InputError(
            f"{path}: page {page.index}, tag ImageDescription: OME-XML that cannot be read ({exc}); export it again, "
            "or remove the description (tag 270)"
        ) from exc


def _contradiction(pixels: ElementTree.Element, page: Page) -> str | None:
    """How the declared rows, columns or samples differ from the page's; None if they do not."""
    for name, size in (("SizeX", page.shape[1]), ("SizeY", page.shape[0])):
        if int(pixels.get(name, size)) != size:
            return f"{name} {pixels.get(name)}, but page {page.index} has {size:,}"
    declared = pixels.get("Type")
    known = {"float": "float32", "double": "float64", "bit": page.dtype.name}
    if declared is not None and known.get(declared, declared) != page.dtype.name:
        return f"samples of {declared}, but page {page.index} has {page.dtype.name}"
    return None


def _ome_pages(
    directory: Directory, root: ElementTree.Element, pixels: ElementTree.Element, axes: str, shape: tuple[int, ...]
) -> tuple[int, ...]:
    """The page of every plane, planes in the order of `axes`, slowest first."""
    count, path = math.prod(shape), directory.file.path
    places = pixels.findall("{*}TiffData") or [ElementTree.Element("TiffData")]
    pages = [-1] * count
    for place in places:
        uuid = place.find("{*}UUID")
        if uuid is not None and (uuid.text or "").strip() != root.get("UUID"):
            name = uuid.get("FileName")
            if name is not None and name != path.name:
                raise directory.fault(
                    Tag.IMAGE_DESCRIPTION, f"OME-XML keeps planes in another file, {name}; join the files first"
                )
        start = 0
        for letter, size in zip(axes, shape, strict=True):
            start = start * size + min(int(place.get(f"First{letter}", "0")), size)
        planes = int(place.get("PlaneCount", "1" if "IFD" in place.attrib else str(count)))
        page = int(place.get("IFD", "0"))
        for plane in range(max(start, 0), min(start + planes, count)):
            pages[plane] = page + plane - start
    if -1 in pages:
        raise directory.fault(
            Tag.IMAGE_DESCRIPTION, f"OME-XML leaves plane {pages.index(-1)} without a page; export the file again"
        )
    return tuple(pages)
