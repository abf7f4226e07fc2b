"""Files of every format, opened by what they state: the values that were written, along the right axes."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest

from pipeline.errors import InputError, MillraceError
from pipeline.formats.grid import create_map
from pipeline.formats.grid.base import GridHeader
from pipeline.formats.image.base import Region
from pipeline.formats.series import series_format_for_output
from pipeline.formats.series.base import SeriesHeader
from pipeline.formats.slices import SUFFIXES, open_stack
from tests.images import write_image

RANDOM = np.random.default_rng(3)


def opened(path):
    """Letters of the axes, and all samples."""
    with open_stack(path) as reader:
        samples = np.empty(reader.header.shape, reader.header.dtype)
        reader.read(Region.whole(samples.shape), samples)
        return reader.header.axes, samples


def written(path, writer, samples):
    writer.write(Region.whole(samples.shape), samples)
    writer.publish()
    return path


def scan(path, shape, dtype, *, is_volume=True):
    samples = RANDOM.normal(size=shape).astype(dtype)
    if dtype == np.complex64:
        samples += (1j * RANDOM.normal(size=shape)).astype(dtype)
    header = SeriesHeader(
        shape=shape, dtype=np.dtype(dtype), is_volume=is_volume, voxel_mm=(1.0, 2.0, 3.0), affine=np.eye(4)
    )
    written(
        path, series_format_for_output(path).create(path, header), np.abs(samples) if path.suffix == ".dcm" else samples
    )
    return np.abs(samples) if path.suffix == ".dcm" else samples


@pytest.mark.parametrize("name", ["a.mrc", "a.map", "a.dx", "a.dx.gz", "a.cube", "a.npy", "a.zarr"])
def test_maps(tmp_path, name):
    samples = (RANDOM.normal(size=(7, 11, 13)) * 1e3).astype(np.float32)
    header = GridHeader.orthogonal(samples.shape, (-1.0, 2.0, 0.0), 0.5, units="kT/e", title="a test")
    written(tmp_path / name, create_map(tmp_path / name, header), samples)
    axes, found = opened(tmp_path / name)
    assert axes == ("ZYX" if name in ("a.npy", "a.zarr") else "XYZ")
    expected = samples.T if name == "a.zarr" else samples
    np.testing.assert_allclose(found, expected, rtol=0 if name.endswith(("mrc", "map", "npy", "zarr")) else 1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz", "a.npy", "a.zarr", "a.cfl"])
@pytest.mark.parametrize("shape", [(3, 5, 7, 11), (1, 5, 7, 11), (1, 1, 7, 11)])
def test_series(tmp_path, name, dtype, shape):
    samples = scan(tmp_path / name, shape, dtype)
    axes, found = opened(tmp_path / name)
    kept = shape if name == "a.zarr" else shape[next(n for n in range(3) if shape[n] > 1 or n == 2) :]
    assert axes == "TZYX"[-len(kept) :]
    np.testing.assert_array_equal(found, samples.reshape(kept))
    if name == "a.cfl":
        np.testing.assert_array_equal(opened(tmp_path / "a.hdr")[1], found)


def test_slices_of_a_cfl_are_an_axis_of_their_own(tmp_path):
    samples = scan(tmp_path / "a.cfl", (3, 5, 7, 11), np.complex64, is_volume=False)
    axes, found = opened(tmp_path / "a.cfl")
    assert axes == "LTYX"
    np.testing.assert_array_equal(found, samples.swapaxes(0, 1))


def test_dicom(tmp_path):
    pytest.importorskip("pydicom")
    samples = scan(tmp_path / "a.dcm", (2, 3, 7, 11), np.float32)
    axes, found = opened(tmp_path / "a.dcm")
    assert axes == "ZYX"
    stored = np.float64(samples.max()) / 65535
    np.testing.assert_allclose(found * stored, samples.reshape(6, 7, 11), rtol=0, atol=stored)


@pytest.mark.parametrize("spaces", ["%.5g ", "%12.6e ", "%s  "])
def test_maps_of_other_programs(tmp_path, spaces):
    """APBS and others write numbers of any width."""
    values = RANDOM.normal(size=(3, 4, 5))
    texts = [spaces % value for value in values.ravel()]
    lines = ["".join(texts[at : at + 3]) + "\n" for at in range(0, len(texts), 3)]
    head = (
        "# by hand\nobject 1 class gridpositions counts 3 4 5\norigin 0 0 0\ndelta 1 0 0\ndelta 0 1 0\ndelta 0 0 1\n"
        "object 2 class gridconnections counts 3 4 5\nobject 3 class array type double rank 0 items 60 data follows\n"
    )
    (tmp_path / "a.dx").write_text(head + "".join(lines) + 'attribute "dep" string "positions"\n')
    axes, found = opened(tmp_path / "a.dx")
    assert axes == "XYZ"
    np.testing.assert_allclose(found, values, rtol=1e-4)
    (tmp_path / "b.dx.gz").write_bytes(gzip.compress((tmp_path / "a.dx").read_bytes()))
    np.testing.assert_array_equal(opened(tmp_path / "b.dx.gz")[1], found)


def test_an_mrc_of_sixteen_bits_in_the_other_byte_order(tmp_path):
    samples = RANDOM.integers(-999, 999, (3, 5, 7), np.int16)
    head = bytearray(1024)
    struct.pack_into(">4i", head, 0, 7, 5, 3, 1)
    struct.pack_into(">3i", head, 64, 1, 2, 3)
    struct.pack_into(">i", head, 92, 80)
    head[212:216] = b"\x11\x11\0\0"
    (tmp_path / "a.mrc").write_bytes(bytes(head) + bytes(80) + samples.astype(">i2").tobytes())
    axes, found = opened(tmp_path / "a.mrc")
    assert axes == "ZYX"
    np.testing.assert_array_equal(found, samples)


def test_scaled_nifti(tmp_path):
    scan(tmp_path / "a.nii", (1, 3, 5, 7), np.float32)
    data = bytearray((tmp_path / "a.nii").read_bytes())
    stored = RANDOM.integers(0, 999, (3, 5, 7), np.int16)
    struct.pack_into("<2h", data, 70, 4, 16)
    struct.pack_into("<2f", data, 112, 0.25, -8)
    (tmp_path / "a.nii").write_bytes(data[:352] + stored.tobytes())
    np.testing.assert_array_equal(opened(tmp_path / "a.nii")[1], stored / 4 - 8)


def test_colours_and_many_axes_of_npy(tmp_path):
    for shape, dtype, axes in (
        ((5, 7), "f4", "YX"), ((5, 7, 3), "u1", "YXS"), ((5, 7, 3), "f4", "ZYX"), ((2, 5, 7, 4), "u2", "ZYXS"),
        ((2, 3, 4, 5, 7), "f8", "TCZYX"), ((2, 2, 3, 4, 5, 7), "u1", "fTCZYX"),
    ):  # fmt: skip
        samples = np.ones(shape, dtype)
        np.save(tmp_path / "a.npy", samples)
        found = opened(tmp_path / "a.npy")
        assert found[0] == axes
        assert found[1].dtype == samples.dtype
    np.save(tmp_path / "a.npy", np.asfortranarray(RANDOM.random((5, 7))))
    np.testing.assert_array_equal(opened(tmp_path / "a.npy")[1], np.load(tmp_path / "a.npy"))


def assert_refused(path, said=""):
    with pytest.raises(MillraceError) as refused:
        opened(path)
    assert "\n" not in str(refused.value)
    assert path.stem in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize("suffix", sorted({*SUFFIXES, ".nii.gz"} - {".zarr"}))
@pytest.mark.parametrize("content", [b"", b"nonsense\n" * 3, b"\xff" * 4000, bytes(4000), b"\x1f\x8b\x08" + bytes(40)])
def test_damaged_files_are_refused_in_a_line(tmp_path, suffix, content):
    (tmp_path / f"a{suffix}").write_bytes(content)
    assert_refused(tmp_path / f"a{suffix}")


def test_headers_that_promise_too_much_are_refused(tmp_path):
    for shape in ((3,), (0, 4), ()):
        np.save(tmp_path / "a.npy", np.zeros(shape))
        assert_refused(tmp_path / "a.npy", "is not an image")
    np.save(tmp_path / "a.npy", np.array([["a", "b"]]))
    assert_refused(tmp_path / "a.npy", "are not samples")
    np.save(tmp_path / "a.npy", np.zeros((1,) * 12, np.uint8))
    assert_refused(tmp_path / "a.npy", "12 axes")
    dx = b"object 1 class gridpositions counts 99999 99999 99999\nobject 3 class array items 9 data follows\n1 2 3\n"
    (tmp_path / "a.dx").write_bytes(dx)
    assert_refused(tmp_path / "a.dx")
    (tmp_path / "a.cube").write_bytes(b"a\nb\n-3 0 0 0\n9 1 0 0\n9 0 1 0\n9 0 0 1\n")
    assert_refused(tmp_path / "a.cube", "orbitals")
    scan(tmp_path / "a.nii", (1, 3, 5, 7), np.float32)
    (tmp_path / "a.nii").write_bytes((tmp_path / "a.nii").read_bytes()[:-1])
    assert_refused(tmp_path / "a.nii", "truncated")
    (tmp_path / "folder").mkdir()
    assert_refused(tmp_path / "folder", "is a folder but not a Zarr array")
    assert_refused(tmp_path / "absent.mrc", "no such file")


def test_every_suffix_is_known_once(tmp_path):
    assert len(SUFFIXES) == len(set(SUFFIXES))
    write_image(tmp_path / "a.tif", np.ones((5, 7), np.uint8), "YX")
    (tmp_path / "a.tif").rename(tmp_path / "renamed.dat")
    assert opened(tmp_path / "renamed.dat")[0] == "YX", "images are found by their first bytes"
    (tmp_path / "b.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64))
    with pytest.raises(InputError, match="unsupported image format"):
        open_stack(tmp_path / "b.h5")
