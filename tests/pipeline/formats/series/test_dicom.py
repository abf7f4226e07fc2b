"""DICOM: the values within half a shade, the geometry of the affine, and a conformant file by dciodvfy."""

from __future__ import annotations

import shutil
import subprocess
import sys

import numpy as np
import pydicom
import pytest

from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.run import RunOptions, run_job
from pipeline.engine.verify import Verification, recorded_job
from pipeline.errors import InputError, ParameterError
from pipeline.formats.image.base import Region
from pipeline.formats.series import open_series, series_format_for_output
from pipeline.formats.series.base import SeriesHeader
from tests.pipeline.workloads.mri.mri_jobs import images, job, write_h5

# Oblique, with unequal spacings.
ROTATION = np.linalg.qr(np.array([[-1.2, 0.5, 0.3], [0.5, -1.6, 0.4], [0.35, 0.6, -2.9]]))[0]
AFFINE = np.eye(4)
AFFINE[:3, :3], AFFINE[:3, 3] = ROTATION * np.array([1.25, 1.75, 3.0]), (30, 40, 5)


def described(shape=(2, 3, 5, 7), dtype=np.float32, affine=AFFINE):
    return SeriesHeader(
        shape=shape, dtype=np.dtype(dtype), is_volume=True, voxel_mm=(1, 1, 1), affine=affine, title="a scan, cg-sense"
    )


def write(path, array, header):
    writer = series_format_for_output(path).create(path, header)
    for time in reversed(range(len(array))):
        region = Region((time, 0, 0, 0), (time + 1, *array.shape[1:]))
        writer.write(region, np.ascontiguousarray(array[region.slices]))
    writer.publish()
    writer.discard()


@pytest.mark.parametrize("shape", [(1, 1, 5, 7), (2, 3, 5, 7), (1, 4, 2, 3)])
@pytest.mark.parametrize("largest", [3.0, 1e-20, 1e9, 0.0])
def test_values_come_back_within_half_a_shade(tmp_path, shape, largest):
    array = np.random.default_rng(0).uniform(0, largest, shape).astype(np.float32)
    write(tmp_path / "a.dcm", array, described(shape))
    found = pydicom.dcmread(tmp_path / "a.dcm")
    slope = float(found.SharedFunctionalGroupsSequence[0].PixelValueTransformationSequence[0].RescaleSlope)
    shades = found.pixel_array.reshape(shape)
    assert np.abs(shades * slope - array).max() <= 0.5001 * slope
    if largest:
        assert shades.max() == 65535
        assert slope == pytest.approx(float(array.max()) / 65535, rel=1e-6)
    with open_series(tmp_path / "a.dcm", described(shape)) as reader:
        out = np.full(shape, np.nan, np.float32)
        reader.read(Region.whole(shape), out)
        np.testing.assert_allclose(out, shades * slope, rtol=1e-6)
        assert np.abs(out - array).max() <= reader.half_unit


def test_every_pixel_is_where_the_affine_puts_it(tmp_path):
    write(tmp_path / "a.dcm", np.ones((2, 3, 5, 7), np.float32), described())
    found = pydicom.dcmread(tmp_path / "a.dcm")
    shared = found.SharedFunctionalGroupsSequence[0]
    x, y = np.reshape(shared.PlaneOrientationSequence[0].ImageOrientationPatient, (2, 3)).astype(float)
    rows, columns = map(float, shared.PixelMeasuresSequence[0].PixelSpacing)
    frames = found.PerFrameFunctionalGroupsSequence
    assert len(frames) == found.NumberOfFrames == 6
    for number, frame in enumerate(frames):
        corner = np.array(frame.PlanePositionSequence[0].ImagePositionPatient, float)
        time, place = divmod(number, 3)
        content = frame.FrameContentSequence[0]
        assert (content.TemporalPositionIndex, content.InStackPositionNumber) == (time + 1, place + 1)
        for row, column in ((0, 0), (4, 6), (2, 1)):
            left, back, up = corner + x * columns * column + y * rows * row
            np.testing.assert_allclose([-left, -back, up], (AFFINE @ [column, row, place, 1])[:3], atol=1e-5)


@pytest.mark.skipif(shutil.which("dciodvfy") is None, reason="dciodvfy of dicom3tools is not installed")
@pytest.mark.parametrize("shape", [(1, 1, 5, 7), (2, 3, 5, 7)])
def test_the_file_conforms_by_dciodvfy(tmp_path, shape):
    write(tmp_path / "a.dcm", np.random.default_rng(0).uniform(0, 3, shape).astype(np.float32), described(shape))
    checked = subprocess.run(["dciodvfy", tmp_path / "a.dcm"], capture_output=True, text=True, check=False)
    assert "EnhancedMRImage" in checked.stderr
    assert "Error" not in checked.stderr
    assert checked.returncode == 0


def test_a_job_to_dicom_can_be_verified(tmp_path):
    source, output = write_h5(tmp_path / "in.h5", slices=2), tmp_path / "out.dcm"
    options = {"traj_units": "cycles/pixel", "iterations": 3}
    expected, _ = images(source, tmp_path / "out.npy", **options)
    run_job(*job(source, output, **options))
    with Verification(recorded_job(output), CpuDevice(2), RunOptions(memory_bytes=64 << 20), None) as verification:
        verification.run(lambda chunk: None, lambda plan: None).refuse_differences()
    found = pydicom.dcmread(output)
    slope = float(found.SharedFunctionalGroupsSequence[0].PixelValueTransformationSequence[0].RescaleSlope)
    np.testing.assert_allclose(found.pixel_array * slope, expected[0], atol=0.51 * slope)


def test_what_dicom_cannot_hold_is_refused(tmp_path, monkeypatch):
    form, path = series_format_for_output(tmp_path / "a.dcm"), tmp_path / "a.dcm"
    assert "DICOM holds magnitudes; choose .nii" in form.refusal(described(dtype=np.complex64), path)
    assert "DICOM needs the field of view" in form.refusal(described(affine=None), path)
    assert "one DICOM file holds 4 GiB" in form.refusal(described((1, 1 << 11, 1 << 10, 1 << 10)), path)
    assert "one DICOM file holds" in form.refusal(described((1, 1, 1, 70_000)), path)
    assert form.refusal(described(), path) is None
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(ParameterError, match=r"a\.dcm: DICOM needs pydicom: pip install pydicom$"):
        form.refusal(described(), path)


def test_damaged_files_get_one_line(tmp_path):
    path = tmp_path / "a.dcm"
    write(path, np.ones((2, 3, 5, 7), np.float32), described())
    whole = path.read_bytes()
    rows = whole.index(b"\x28\x00\x10\x00US") + 4
    # Rows of an unknown representation, and of a length of no whole number: pydicom's errors are of many kinds.
    unknown, odd = (whole[:rows] + part + whole[rows + len(part) :] for part in (b"U?", b"US\x03"))
    for damaged in (b"", whole[:100], whole[:700], whole[1000:], unknown, odd):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"a\.dcm: damaged, or not a DICOM file of MR images"):
            open_series(path, described())
    path.write_bytes(whole)
    with pytest.raises(InputError, match="holds 6 frames of 5 × 7; make it again"):
        open_series(path, described((2, 3, 7, 5)))
