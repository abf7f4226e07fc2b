"""What several tests do with image files and the command."""

from __future__ import annotations

import numpy as np

from pipeline.formats import image as images
from pipeline.formats.image.base import ImageHeader, Region


def write_image(path, samples, axes="YXS", storage=None, **known):
    """Store samples under a name whose suffix says the format; `known`: further facts of the header."""
    header = ImageHeader(shape=samples.shape, axes=axes, dtype=samples.dtype, **known)
    writer = images.create_image(path, header, storage=storage)
    writer.write(Region.whole(samples.shape), np.ascontiguousarray(samples))
    writer.publish()
    return path


def read_image(path):
    """All samples of an image file."""
    with images.open_image(path) as reader:
        samples = np.empty(reader.header.shape, reader.header.dtype)
        reader.read(Region.whole(samples.shape), samples)
    return samples


def version(path):
    """Another one once the file has been written or replaced; that it was read does not count."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def names_in(folder):
    """The names in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir())
