"""Whole runs on volumes of scanners and electron microscopes, cut into chunks, compressed, and from an object store."""

from __future__ import annotations

import mrcfile
import nibabel
import numpy as np
import pytest

from kernels.smoothing import uniform_filter
from tests.images import read_image

OPTIONS = ("--size", "3", "--device", "cpu", "--chunk-bytes", "60K", "--quiet")
AFFINE = np.array([[0, -2, 0, 30], [1.5, 0, 0, -7], [0, 0, 2.5, 9], [0, 0, 0, 1]])


@pytest.fixture
def samples():
    return np.random.default_rng(0).integers(0, 4096, (2, 13, 37, 53)).astype(np.int16)  # [t, z, y, x]


def smoothed(samples):
    return np.stack([uniform_filter(volume, 3) for volume in samples])


@pytest.mark.parametrize(("source", "target"), [("in.nii.gz", "out.nii"), ("in.nii", "out.nii.gz")])
def test_a_time_series_of_volumes(tmp_path, millrace, samples, source, target):
    image = nibabel.Nifti1Image(samples.T, AFFINE)
    image.header.set_xyzt_units("mm", "sec")
    nibabel.save(image, tmp_path / source)
    code, _, error = millrace("run", "smooth", tmp_path / source, tmp_path / target, *OPTIONS)
    assert (code, error) == (0, "")
    found = nibabel.load(tmp_path / target)
    np.testing.assert_array_equal(np.asanyarray(found.dataobj).T, smoothed(samples), strict=True)
    np.testing.assert_array_equal(found.affine, AFFINE)


def test_a_tomogram_and_a_part_of_it(tmp_path, millrace, samples):
    with mrcfile.new(tmp_path / "in.mrc") as made:
        made.set_data(samples[0])
        made.voxel_size = 13.5
    cropped = ("--crop", "Z=2:9,X=10:50")
    for name, crop, part in (("out.mrc", (), np.s_[:]), ("part.mrc", cropped, np.s_[2:9, :, 10:50])):
        code, _, error = millrace("run", "smooth", tmp_path / "in.mrc", tmp_path / name, *OPTIONS, *crop)
        assert (code, error) == (0, "")
        with mrcfile.open(tmp_path / name) as found:
            np.testing.assert_array_equal(found.data, smoothed(samples)[0][part], strict=True)
            assert found.voxel_size.tolist() == pytest.approx((13.5, 13.5, 13.5))


def test_a_compressed_volume_in_an_object_store(tmp_path, s3, millrace, samples):
    nibabel.save(nibabel.Nifti1Image(samples.T, np.diag([1, 1, 1, 1])), tmp_path / "in.nii.gz")
    (s3 / "in.nii.gz").put([(tmp_path / "in.nii.gz").read_bytes()])
    code, _, error = millrace("run", "smooth", s3 / "in.nii.gz", tmp_path / "out.zarr", *OPTIONS)
    assert (code, error) == (0, "")
    np.testing.assert_array_equal(read_image(tmp_path / "out.zarr"), smoothed(samples), strict=True)
