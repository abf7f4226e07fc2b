"""The registry of image formats: opening by a file's first bytes, creating by its suffix.

tifffile, zarr and imagecodecs are imported on first use: a PGM job starts without them.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import InputError, OutputError
from pipeline.formats import unsupported_output
from pipeline.formats.image.base import ImageFormat, ImageHeader, ImageReader, ImageWriter, Region, Storage
from pipeline.formats.image.file_list import FileLists
from pipeline.formats.image.metadata import ome_zarr
from pipeline.formats.image.metadata.geotiff import GeoTags
from pipeline.formats.image.npy import Npy
from pipeline.formats.image.png import Png
from pipeline.formats.image.pnm import Pnm
from pipeline.formats.image.pyramid import LABELS
from pipeline.formats.image.tiff import Tiff
from pipeline.formats.image.volumes.mrc import Mrc, MrcTags
from pipeline.formats.image.volumes.nifti import Nifti
from pipeline.formats.image.volumes.nifti_header import NiftiTags
from pipeline.formats.image.zarr import Zarr, is_zarr
from pipeline.storage.object_file import opened_to_read
from pipeline.storage.objects import ObjectPath
from pipeline.storage.partial import Opening
from pipeline.storage.positional import first_bytes, reading

__all__ = ["FORMATS", "ImageHeader", "ImageReader", "ImageWriter", "Opening", "Region", "Storage"]
__all__ += ["create_image", "format_for_output", "not_kept", "open_image"]

FORMATS: tuple[ImageFormat, ...] = (Tiff(), Zarr(), Png(), Pnm(), Npy(), Nifti(), Mrc())

# Metadata that several formats hold, or that few do and people miss: in words, and by the name in a header.
_CARRIED = {
    "profile": ("colour profile", "icc_profile"),
    "orientation": ("orientation", "orientation"),
    "label properties": ("label properties", LABELS),
}
FIRST_BYTES = 512
_BEYOND_ANY_FILE_BYTES = 1 << 62


def open_image(path: Path) -> ImageReader:
    """Read an image's header; close the reader after use. InputError if Millrace cannot read it."""
    form = _format_of(path)
    if form is None:
        known = ", ".join(f"{form.name} ({' '.join(form.suffixes)})" for form in FORMATS)
        raise InputError(f"{path}: unsupported image format; Millrace reads {known}")
    reader = form.open(path)
    if reader.header.nbytes >= _BEYOND_ANY_FILE_BYTES:  # strips and chunks that are not stored may declare any size
        shape = " × ".join(map(str, reader.header.shape))
        reader.close()
        raise InputError(f"{path}: declares an image of {shape}, which is beyond any file; export it again")
    return reader


def format_for_output(path: Path, storage: Storage | None = None) -> ImageFormat:
    """The format that the suffix selects. OutputError if there is none, ParameterError if it does not store so."""
    form = _by_suffix(path)
    if form is None:
        suffixes = [suffix for each in FORMATS for suffix in each.suffixes]
        raise unsupported_output(path, "image format", suffixes)
    return form if storage is None else form.storing(storage)


def create_image(
    path: Path, header: ImageHeader, opening: Opening = Opening.NEW, storage: Storage | None = None
) -> ImageWriter:
    """Start writing an image beside `path`, or resume or join one: see `Opening`.

    OutputError if the format cannot hold it or the folder is not writable.
    """
    form = format_for_output(path, storage)
    refusal = form.refusal(header, path)
    if refusal is not None:
        raise OutputError(refusal)
    return form.create(path, header, opening)


def not_kept(header: ImageHeader, path: Path) -> str | None:
    """The properties of an image that a file of that name cannot state, in words; None if it states all."""
    known, metadata = header.calibration.facts(header.axes), header.metadata
    place = metadata.get("geo")
    if isinstance(place, GeoTags):
        known |= {"place": "georeference"} if place.is_placed else {}
        known |= {"nodata": "nodata value"} if place.nodata is not None else {}
    known |= header.notes.facts()
    for tags in metadata.values():
        known |= tags.facts() if isinstance(tags, NiftiTags | MrcTags) else {}
    known |= {key: words for key, (words, name) in _CARRIED.items() if name in metadata}
    known |= {"display": "display settings"} if ome_zarr.has_display(metadata.get("omero")) else {}
    kept = format_for_output(path).keeps(header, path)
    return ", ".join(words for key, words in known.items() if key not in kept) or None


# Made by the engine of many files of one kind.
_LISTS = FileLists(open_image, format_for_output)


def _format_of(path: Path) -> ImageFormat | None:
    if isinstance(path, ObjectPath) and not path.key:
        raise InputError(f"{path}: is the URL of no object; write it as {path}/KEY")
    with reading(path):
        is_folder = _is_zarr_object(path) if isinstance(path, ObjectPath) else path.is_dir()
        if not is_folder:
            path.stat()
    beginning = b"" if is_folder else first_bytes(path, FIRST_BYTES, opened_to_read)
    for form in (*FORMATS, _LISTS):
        if form.recognises(path, beginning):
            return form
    if is_folder:
        raise InputError(f"{path}: is a folder but not a Zarr array; name an image file in it")
    # The format of the suffix reports what is wrong with the file's start.
    return _by_suffix(path)


def _is_zarr_object(path: ObjectPath) -> bool:
    """Whether metadata of a Zarr lie below the path. A name like a file's is looked up itself first; not a Zarr's,
    for which a web server may send a list of the folder."""
    is_like_a_file = not isinstance(_by_suffix(path), Zarr | None)
    return not (is_like_a_file and path.exists()) and is_zarr(path)


def _by_suffix(path: Path) -> ImageFormat | None:
    name = path.name.lower()
    known = ((suffix, form) for form in (*FORMATS, _LISTS) for suffix in form.suffixes)
    return next((form for suffix, form in known if name.endswith(suffix) and name != suffix), None)
