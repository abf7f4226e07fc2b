"""Readers that fill arrays of any strides, so that a chunk at the image's edge is read into its place."""

import numpy as np
import pytest

from pipeline.formats.image import ImageHeader, Region, Storage, format_for_output, open_image
from pipeline.workloads.common.halo import read_with_borders


def stored(path, image, axes, **storage):
    header = ImageHeader(shape=image.shape, axes=axes, dtype=image.dtype)
    writer = format_for_output(path, Storage(**storage)).create(path, header)
    writer.write(Region.whole(image.shape), image)
    writer.publish()
    return open_image(path)


@pytest.mark.parametrize(
    ("name", "shape", "axes", "storage"),
    [
        ("a.zarr", (101, 67), "YX", {"chunks": (16,), "compression": "none"}),
        ("a.zarr", (101, 67), "YX", {"chunks": (16,), "compression": "lz4"}),
        ("a.tif", (101, 67), "YX", {"chunks": (16,), "compression": "deflate"}),
        ("a.tif", (101, 67), "YX", {}),
        ("a.tif", (41, 37, 3), "YXS", {"chunks": (16,), "compression": "deflate"}),
        ("a.tif", (5, 41, 37), "ZYX", {"chunks": (16,), "compression": "deflate"}),
    ],
    ids=str,
)
def test_what_lies_around_the_array_is_left_alone(tmp_path, name, shape, axes, storage):
    image = np.random.default_rng(0).integers(1, 60_000, shape).astype(np.uint16)
    with stored(tmp_path / name, image, axes, **storage) as reader:
        assert reader.any_strides
        room = np.zeros([size + 4 for size in shape], image.dtype)
        inner = tuple(slice(2, -2) for _ in shape)
        reader.read(Region.whole(shape), room[inner])
        np.testing.assert_array_equal(room, np.pad(image, 2))


def test_pages_of_several_axes_are_read_into_contiguous_arrays(tmp_path):
    image = np.random.default_rng(0).integers(1, 60_000, (3, 2, 21, 17)).astype(np.uint16)
    with stored(tmp_path / "a.tif", image, "CZYX", chunks=(16,), compression="deflate") as reader:
        assert not reader.any_strides
        with pytest.raises(ValueError, match="C-contiguous"):
            reader.read(Region.whole(image.shape), np.zeros((3, 2, 21, 20), np.uint16)[..., 3:])
        region = Region(tuple(-2 for _ in image.shape), tuple(size + 2 for size in image.shape))
        out = np.zeros(region.shape, np.uint16)
        read_with_borders(reader, region, "constant", 0, out)
        np.testing.assert_array_equal(out, np.pad(image, 2))


def test_a_chunk_at_the_edge_is_read_into_its_place(tmp_path, monkeypatch):
    image = np.random.default_rng(0).integers(1, 60_000, (64, 48)).astype(np.uint16)
    with stored(tmp_path / "a.zarr", image, "YX", chunks=(16,)) as reader:
        read, targets = reader.read, []
        monkeypatch.setattr(reader, "read", lambda region, target: (targets.append(target), read(region, target)))
        out = np.zeros((68, 52), np.uint16)
        read_with_borders(reader, Region((-2, -2), (66, 50)), "reflect", 0, out)
        assert [np.shares_memory(target, out) for target in targets] == [True]
        np.testing.assert_array_equal(out, np.pad(image, 2, mode="symmetric"))
