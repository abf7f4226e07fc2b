"""Series of images in every format: any region in any order, the same values back, and NIfTI's header byte by byte."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest

from pipeline.errors import InputError, MillraceError, OutputError
from pipeline.formats.cfl import Cfl
from pipeline.formats.image.base import Region
from pipeline.formats.image.volumes.nifti_header import quaternion_of
from pipeline.formats.series import open_series, series_format_for_output
from pipeline.formats.series.base import SeriesHeader
from pipeline.storage.partial import Opening
from tests.pipeline.formats.kspace.raw_mri import read_cfl

NAMES = ("out.nii", "out.nii.gz", "out.cfl", "out.npy", "out.zarr")


def header(shape, dtype=np.float32, *, is_volume=False, affine=None, voxel=None):
    return SeriesHeader(
        shape=shape, dtype=np.dtype(dtype), is_volume=is_volume, voxel_mm=voxel, affine=affine, title="a scan, cg-sense"
    )


def values(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    real = rng.normal(size=shape)
    return (real + 1j * rng.normal(size=shape) if np.dtype(dtype).kind == "c" else real).astype(dtype)


def regions(shape, is_volume):
    """One image each, in an order of their own."""
    t, z, y, x = shape
    found = [
        Region((time, first, 0, 0), (time + 1, last, y, x))
        for time in range(t)
        for first, last in ([(0, z)] if is_volume else [(n, n + 1) for n in range(z)])
    ]
    return [found[place] for place in np.random.default_rng(1).permutation(len(found))]


def write(path, array, is_volume=False, **options):
    described = header(array.shape, array.dtype, is_volume=is_volume, **options)
    writer = series_format_for_output(path).create(path, described)
    for region in regions(array.shape, is_volume):
        writer.write(region, np.ascontiguousarray(array[region.slices]))
    writer.flush()
    writer.publish()
    writer.discard()
    return described


def read(path, shape, dtype, is_volume):
    """By other means than those that wrote it: [time, z, y, x]."""
    name = path.name
    if name.endswith(".npy"):
        return np.load(path).reshape(shape)
    if name.endswith(".zarr"):
        import zarr

        return zarr.open_group(str(path), mode="r")["0"][...]
    if name.endswith(".cfl"):
        array = read_cfl(path)
        t, z, y, x = shape
        expected = [x, y, z if is_volume else 1, *[1] * 7, t, 1, 1, 1 if is_volume else z, 1, 1]
        assert list(array.shape) == expected
        squeezed = array.reshape(x, y, expected[2], t, expected[13], order="F")
        return squeezed.transpose(3, 2, 1, 0, 4)[..., 0] if is_volume else squeezed.transpose(3, 4, 1, 0, 2)[..., 0]
    raw = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
    fields = nifti_fields(raw)
    x, y, z, t = fields["dim"][1:5]
    return np.frombuffer(raw, dtype, offset=352).reshape(t, z, y, x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.parametrize(
    ("shape", "is_volume"), [((3, 2, 5, 4), False), ((1, 1, 5, 4), False), ((2, 3, 5, 4), True), ((1, 6, 5, 4), True)]
)
def test_what_is_written_is_read_again_in_any_region(tmp_path, name, dtype, shape, is_volume):
    array = values(shape, dtype)
    described = write(tmp_path / name, array, is_volume)
    with open_series(tmp_path / name, described) as reader:
        assert reader.header.dtype == (np.complex64 if name == "out.cfl" else dtype)
        for region in [*regions(shape, is_volume), Region((0, 0, 1, 2), (shape[0], 1, 4, 3)), Region.whole(shape)]:
            found = np.empty(region.shape, reader.header.dtype)
            reader.read(region, found)
            np.testing.assert_array_equal(found, array[region.slices])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_such_series_is_refused(tmp_path, name):
    described, other = header((3, 2, 5, 4)), values((1, 2, 5, 4), np.float32)
    with pytest.raises(InputError, match="out"):
        open_series(tmp_path / name, described)
    write(tmp_path / name, other)
    with pytest.raises(InputError, match="make it again"):
        open_series(tmp_path / name, described)
    if not name.endswith(".zarr"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-20])
        with pytest.raises(InputError, match="again"):
            open_series(tmp_path / name, header((1, 2, 5, 4)))


def nifti_fields(raw):
    """nifti1.h, by offset."""
    assert struct.unpack_from("<i", raw, 0)[0] == 348
    assert raw[344:348] == b"n+1\0"
    assert raw[348:352] == b"\0" * 4
    return {
        "dim": struct.unpack_from("<8h", raw, 40),
        "datatype": struct.unpack_from("<h", raw, 70)[0],
        "bitpix": struct.unpack_from("<h", raw, 72)[0],
        "pixdim": struct.unpack_from("<8f", raw, 76),
        "vox_offset": struct.unpack_from("<f", raw, 108)[0],
        "slope": struct.unpack_from("<2f", raw, 112),
        "units": raw[123],
        "descrip": raw[148:228].rstrip(b"\0"),
        "codes": struct.unpack_from("<2h", raw, 252),
        "quaternion": struct.unpack_from("<6f", raw, 256),
        "sform": np.array(struct.unpack_from("<12f", raw, 280)).reshape(3, 4),
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.parametrize(
    ("shape", "is_volume"), [((1, 1, 5, 7), False), ((3, 4, 5, 7), False), ((2, 6, 5, 7), True), ((1, 1, 1, 1), True)]
)
def test_the_same_values_come_back(tmp_path, name, dtype, shape, is_volume):
    array = values(shape, dtype)
    array[0, 0, 0, 0] = 0
    write(tmp_path / name, array, is_volume)
    np.testing.assert_array_equal(read(tmp_path / name, shape, dtype, is_volume), array)
    left = {"out.hdr"} if name.endswith(".cfl") else set()
    assert {path.name for path in tmp_path.iterdir()} == {name} | left


def test_a_pair_named_in_capitals_is_in_capitals(tmp_path):
    array = values((1, 2, 3, 4), np.complex64)
    write(tmp_path / "OUT.CFL", array)
    assert {path.name for path in tmp_path.iterdir()} == {"OUT.CFL", "OUT.HDR"}
    form = series_format_for_output(tmp_path / "OUT.CFL")
    assert form.also_written(tmp_path / "OUT.CFL") == (tmp_path / "OUT.HDR",)
    assert Cfl(tmp_path / "OUT.CFL").dims[:2] == (4, 3)


def test_a_headers_name_comes_before_that_of_its_samples(tmp_path):
    """Whoever finds the samples under their name finds the header too, and `sealed` is told before either."""
    path, told = tmp_path / "out.cfl", []
    writer = series_format_for_output(path).create(path, header((1, 1, 3, 4), np.complex64))
    partial = tmp_path / "out.cfl.partial"

    def stop():
        told.append(sorted(each.name for each in tmp_path.iterdir()))
        partial.rename(tmp_path / "elsewhere")  # so that the last step fails

    with pytest.raises(MillraceError):
        writer.publish(stop)
    assert told == [["out.cfl.partial", "out.hdr.partial"]]
    assert (tmp_path / "out.hdr").exists()
    assert not path.exists()
    writer.discard()


@pytest.mark.parametrize("name", NAMES)
def test_a_series_is_durable_before_it_has_its_name(tmp_path, steps, name):
    shape = (1, 1, 3, 4)
    writer = series_format_for_output(tmp_path / name).create(tmp_path / name, header(shape))
    writer.write(Region.whole(shape), values(shape, np.float32))
    steps.clear()
    writer.flush()
    flushed = {"out.zarr": "all", "out.nii.gz": "out.nii.gz.samples.partial"}.get(name, f"{name}.partial")
    assert steps == [f"sync {flushed}"]
    steps.clear()
    writer.publish(lambda: steps.append("sealed"))
    named = [f"rename {name}", f"sync {tmp_path.name}"]
    pair = ["sync out.hdr.partial", "rename out.hdr", f"sync {tmp_path.name}"] if name == "out.cfl" else []
    assert steps == ["sync all" if name == "out.zarr" else f"sync {name}.partial", "sealed", *pair, *named]


def test_a_link_in_the_place_of_a_header_is_replaced_and_not_followed(tmp_path):
    """Nobody chose that name: it may lead to a file that the user may not write to."""
    (tmp_path / "secret").write_bytes(b"kept")
    (tmp_path / "out.hdr").symlink_to(tmp_path / "secret")
    array = values((1, 2, 3, 4), np.complex64)
    write(tmp_path / "out.cfl", array)
    assert (tmp_path / "secret").read_bytes() == b"kept"
    assert not (tmp_path / "out.hdr").is_symlink()
    assert Cfl(tmp_path / "out.cfl").dims[:2] == (4, 3)


@pytest.mark.parametrize("name", NAMES)
def test_an_interrupted_series_is_gone_on_with_by_another_process(tmp_path, name):
    array = values((3, 2, 4, 6), np.complex64)
    described = header(array.shape, array.dtype)
    form, path = series_format_for_output(tmp_path / name), tmp_path / name
    order = regions(array.shape, False)
    first = form.create(path, described)
    for region in order[:2]:
        first.write(region, np.ascontiguousarray(array[region.slices]))
    joined = form.create(path, described, Opening.JOIN)
    joined.write(order[2], np.ascontiguousarray(array[order[2].slices]))
    joined.flush()
    joined.discard()
    first.flush()
    first.keep()
    assert not path.exists()
    again = form.create(path, described, Opening.RESUME)
    for region in order[3:]:
        again.write(region, np.ascontiguousarray(array[region.slices]))
    again.publish()
    np.testing.assert_array_equal(read(path, array.shape, np.complex64, False), array)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_left_of_what_is_given_up(tmp_path, name):
    path = tmp_path / name
    writer = series_format_for_output(path).create(path, header((2, 1, 3, 4)))
    writer.write(Region((0, 0, 0, 0), (1, 1, 3, 4)), np.ones((1, 1, 3, 4), np.float32))
    writer.discard()
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def rotation(seed):
    found, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))
    return found if np.linalg.det(found) > 0 else -found


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_niftis_affine_twice(tmp_path, seed, mirrored):
    """The matrix as given, and the quaternion by nifti1.h's own formula of it."""
    axes = rotation(seed) if seed else np.diag([-1.0, -1.0, 1.0])
    axes = axes * [1, 1, -1] if mirrored else axes
    voxel = (1.5, 0.75, 6.0)
    affine = np.eye(4)
    affine[:3, :3], affine[:3, 3] = axes * voxel, (10, -20, 35.5)
    write(tmp_path / "a.nii", values((4, 3, 5, 7), np.float32), affine=affine, voxel=voxel)
    fields = nifti_fields((tmp_path / "a.nii").read_bytes())
    assert fields["dim"] == (4, 7, 5, 3, 4, 1, 1, 1)
    assert (fields["datatype"], fields["bitpix"], fields["vox_offset"], fields["slope"]) == (16, 32, 352, (1, 0))
    assert fields["units"] == 2  # millimetres, and no seconds that nobody knows
    assert fields["codes"] == (1, 1)
    assert fields["descrip"] == b"a scan, cg-sense"
    np.testing.assert_allclose(fields["sform"], affine[:3], rtol=1e-6)
    b, c, d, *offset = fields["quaternion"]
    a = np.sqrt(max(1 - (b * b + c * c + d * d), 0))
    turned = np.array(
        [
            [a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c)],
            [2 * (b * c + a * d), a * a + c * c - b * b - d * d, 2 * (c * d - a * b)],
            [2 * (b * d - a * c), 2 * (c * d + a * b), a * a + d * d - b * b - c * c],
        ]
    )
    pixdim = fields["pixdim"]
    assert pixdim[0] in (-1, 1)
    scaled = turned * [pixdim[1], pixdim[2], pixdim[0] * pixdim[3]]
    np.testing.assert_allclose(scaled, affine[:3, :3], atol=2e-5)
    np.testing.assert_allclose(offset, affine[:3, 3], rtol=1e-6)


def test_nifti_without_a_place_says_so(tmp_path):
    write(tmp_path / "a.nii", values((1, 2, 5, 7), np.complex64))
    fields = nifti_fields((tmp_path / "a.nii").read_bytes())
    assert fields["dim"] == (3, 7, 5, 2, 1, 1, 1, 1)
    assert (fields["datatype"], fields["bitpix"]) == (32, 64)
    assert fields["codes"] == (0, 0)
    assert fields["pixdim"][1:4] == (1, 1, 1)


def test_axes_that_are_no_rotation_have_no_quaternion():
    sheared = np.eye(4)
    sheared[0, 1] = 0.5
    assert quaternion_of(sheared) == (None, 1.0)
    assert quaternion_of(np.zeros((4, 4))) == (None, 1.0)


def test_zarr_keeps_the_affine(tmp_path):
    import zarr

    affine = np.diag([2.0, 3, 4, 1])
    write(tmp_path / "a.zarr", values((2, 3, 4, 5), np.complex64), affine=affine, voxel=(2, 3, 4))
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="r")
    assert group.attrs["series"]["affine_mm"] == affine.tolist()
    image = group.attrs["ome"]["multiscales"][0]
    assert [axis["name"] for axis in image["axes"]] == list("tzyx")
    assert image["datasets"][0]["coordinateTransformations"] == [{"type": "scale", "scale": [1, 4, 3, 2]}]


def test_names_and_sizes_that_no_format_takes(tmp_path):
    for name, message in (("out", "has no suffix"), ("out.dc", "unsupported MRI image format .dc")):
        with pytest.raises(OutputError, match=message):
            series_format_for_output(tmp_path / name)
    form = series_format_for_output(tmp_path / "a.nii")
    assert "choose .zarr" in form.refusal(header((1, 1, 4, 40_000)), tmp_path / "a.nii")
