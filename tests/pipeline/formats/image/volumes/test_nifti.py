"""NIfTI against nibabel: values, sizes and place of what either wrote."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

from pipeline.errors import OutputError
from pipeline.formats import image as images
from pipeline.formats.image.base import Region
from pipeline.formats.image.metadata import Calibration, Step
from pipeline.formats.image.metadata.notes import Notes
from pipeline.formats.image.volumes.nifti import Nifti
from pipeline.workloads.common.crop import RegionParameters
from tests.images import read_image, write_image
from tests.pipeline.formats.image.contract import Case, FormatContract, assert_same_bits, input_error

RANDOM = np.random.default_rng(5)
# Sizes of 0.5, 1 and 1.5, x and y turned by the angle of 3, 4 and 5, x mirrored.
OBLIQUE = np.array([[-0.3, -0.8, 0, 90.5], [-0.4, 0.6, 0, -12.25], [0, 0, 1.5, 7.0], [0, 0, 0, 1]])


class TestNiftiContract(FormatContract):
    format = Nifti()
    cases = (
        Case(suffix=".nii", axes="ZYX", dtype="int16"),
        Case(suffix=".nii", axes="TCZYX", dtype="float64"),
        Case(suffix=".nii", axes="YXS", dtype="uint8"),
    )
    refused = (
        Case(suffix=".nii", axes="YX", dtype="bool"),
        Case(suffix=".nii", axes="YXS", dtype="uint16"),
        Case(suffix=".nii", axes="YXS", dtype="uint8", channels=2),
    )
    header_bytes = 352


class TestNiftiGzContract(FormatContract):
    format = Nifti()
    cases = (Case(suffix=".nii.gz", axes="TCZYX", dtype="uint16"),)
    refused = (Case(suffix=".nii.gz", axes="YX", dtype="float16"),)
    header_bytes = 64


def saved(path: Path, shape: tuple[int, ...], dtype: Any = np.int16, *, kind: Any = nibabel.Nifti1Image) -> Any:
    """An image that nibabel made, [x, y, z, t, …], with everything a header states."""
    values = RANDOM.integers(0, 99, shape).astype(dtype)
    made = kind(values, OBLIQUE, dtype=dtype)
    made.set_qform(OBLIQUE, code=1)
    made.header.set_xyzt_units("mm", "msec")
    if len(shape) > 3:
        made.header["pixdim"][4] = 2500
    made.header["descrip"], made.header["aux_file"] = "BOLD, run 2", "motion.txt"
    made.header["cal_min"], made.header["cal_max"], made.header["toffset"] = 10, 90, 500
    made.header.set_intent("z score", name="Z")
    made.header.set_dim_info(slice=2)
    made.header.set_slice_duration(0.1)
    made.header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", b"stained by A. Person"))
    nibabel.save(made, path)
    return nibabel.load(path)


def copied(source: Path, target: Path, crop: str | None = None) -> Any:
    """What a filter that changes no sample makes of it."""
    reader = images.open_image(source)
    part = RegionParameters(crop=crop).part(reader, source)
    with part:
        samples = np.empty(part.header.shape, part.header.dtype)
        part.read(Region.whole(samples.shape), samples)
        writer = images.create_image(target, part.header)
    writer.write(Region.whole(samples.shape), samples)
    writer.publish()
    return nibabel.load(target)


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image])
@pytest.mark.parametrize(("shape", "axes"), [((7, 5, 3), "ZYX"), ((7, 5, 1, 4), "TYX"), ((7, 5, 3, 2, 4), "TCZYX")])
def test_a_nifti_of_a_nifti_has_every_field(
    suffix: str, kind: Any, shape: tuple[int, ...], axes: str, tmp_path: Path
) -> None:
    source, target = tmp_path / f"in{suffix}", tmp_path / f"out{suffix}"
    expected = saved(source, shape, kind=kind)
    with images.open_image(source) as reader:
        header = reader.header
    assert header.axes == axes
    assert images.not_kept(header, target) is None
    found = copied(source, target)
    assert type(found) is kind
    assert header.metadata.get("compression") == ("deflate" if suffix == ".nii.gz" else None)
    np.testing.assert_array_equal(np.asanyarray(found.dataobj), np.asanyarray(expected.dataobj))
    np.testing.assert_array_equal(found.affine, expected.affine)
    for name, value in expected.header.items():
        if name not in ("scl_slope", "scl_inter"):
            np.testing.assert_array_equal(found.header[name], value, err_msg=name)
    assert [(each.get_code(), each.get_content()) for each in found.header.extensions] == [(6, b"stained by A. Person")]


def test_the_sizes_times_and_words_of_a_nifti(tmp_path: Path) -> None:
    saved(tmp_path / "in.nii", (7, 5, 3, 4))
    with images.open_image(tmp_path / "in.nii") as reader:
        header = reader.header
    sizes = np.linalg.norm(OBLIQUE[:3, :3], axis=0)
    for letter, size in zip("XYZ", sizes, strict=True):
        assert header.calibration.steps[letter].unit == "millimeter"
        assert header.calibration.steps[letter].size == pytest.approx(size, rel=1e-6)
    assert header.calibration.steps["T"] == Step(2500, "millisecond")
    assert header.notes.description == "BOLD, run 2"
    assert header.notes.display == ((10, 90),)
    lost = "orientation in space (affine), intent, slice timing, auxiliary file, NIfTI extensions"
    assert images.not_kept(header, tmp_path / "out.ome.tif") == f"position, display settings, {lost}"
    assert images.not_kept(header, tmp_path / "out.zarr") == f"description, {lost}"


def test_axes_along_x_y_and_z_become_the_position(tmp_path: Path) -> None:
    affine = np.array([[2, 0, 0, -6], [0, 3, 0, 9], [0, 0, 4, 1], [0, 0, 0, 1]])
    made = nibabel.Nifti1Image(np.ones((7, 5, 3), np.uint8), affine)
    made.header.set_xyzt_units("micron", "sec")
    nibabel.save(made, tmp_path / "in.nii")
    with images.open_image(tmp_path / "in.nii") as reader:
        known = reader.header.calibration
    assert known.origin == {"X": -6, "Y": 9, "Z": 1}
    assert images.not_kept(reader.header, tmp_path / "out.zarr") is None
    samples = read_image(tmp_path / "in.nii")
    write_image(tmp_path / "out.zarr", samples, "ZYX", calibration=known)
    with images.open_image(tmp_path / "out.zarr") as reader:
        write_image(tmp_path / "back.nii", samples, "ZYX", calibration=reader.header.calibration)
    found = nibabel.load(tmp_path / "back.nii")
    np.testing.assert_array_equal(found.affine, affine)
    assert found.header.get_xyzt_units() == ("micron", "unknown")


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_a_part_lies_where_it_lay_in_the_whole(suffix: str, tmp_path: Path) -> None:
    source = tmp_path / f"in{suffix}"
    whole = saved(source, (7, 5, 6, 4))
    found = copied(source, tmp_path / f"out{suffix}", "X=2:7,Z=1:5,T=1:4:2")
    part = whole.slicer[2:7, :, 1:5]
    np.testing.assert_allclose(found.affine, part.affine, rtol=1e-6)
    np.testing.assert_allclose(found.get_qform(), found.get_sform(), atol=1e-5)
    np.testing.assert_array_equal(np.asanyarray(found.dataobj), np.asanyarray(part.dataobj)[..., 1:4:2])
    assert found.header["toffset"] == 500 + 2500
    assert found.header["pixdim"][4] == 5000
    assert found.header["slice_duration"] == 0
    with images.open_image(source) as reader, RegionParameters(crop="Z=1:5").part(reader, source) as cropped:
        assert images.not_kept(cropped.header, tmp_path / "out.nii") == "slice timing"


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"])
def test_scaled_values_are_those_that_they_stand_for(order: str, dtype: str, tmp_path: Path) -> None:
    head = nibabel.Nifti1Header(endianness=order)
    stored = RANDOM.integers(0, 99, (7, 5, 3)).astype(order + dtype)
    head.set_data_shape(stored.shape)
    head.set_data_dtype(stored.dtype)
    head.set_slope_inter(0.25, -1024)
    head["magic"], head["vox_offset"] = b"n+1", 352
    (tmp_path / "a.nii").write_bytes(head.binaryblock + bytes(4) + stored.tobytes(order="F"))
    found = read_image(tmp_path / "a.nii")
    assert found.dtype == (np.float32 if dtype in ("u1", "i1", "i2", "u2", "f4") else np.float64)
    np.testing.assert_array_equal(found, nibabel.load(tmp_path / "a.nii").get_fdata().T)
    head.set_slope_inter(1, 0)
    (tmp_path / "a.nii").write_bytes(head.binaryblock + bytes(4) + stored.tobytes(order="F"))
    assert_same_bits(read_image(tmp_path / "a.nii"), np.ascontiguousarray(stored.T.astype(dtype)))


def test_colours(tmp_path: Path) -> None:
    samples = RANDOM.integers(0, 255, (3, 5, 7, 3)).astype(np.uint8)
    write_image(tmp_path / "a.nii", samples, "ZYXS")
    found = np.asanyarray(nibabel.load(tmp_path / "a.nii").dataobj)
    assert found.dtype.names == ("R", "G", "B")
    np.testing.assert_array_equal(np.stack([found[name] for name in "RGB"], -1), samples.transpose(2, 1, 0, 3))
    assert_same_bits(read_image(tmp_path / "a.nii"), samples)


def test_what_is_known_of_a_microscopes_image(tmp_path: Path) -> None:
    steps = {
        "X": Step(250, "nanometer"),
        "Y": Step(0.3, "micrometer"),
        "Z": Step(1, "micrometer"),
        "T": Step(2, "minute"),
    }
    samples = RANDOM.integers(0, 255, (2, 3, 4, 5, 7)).astype(np.uint16)
    known = {"calibration": Calibration(steps), "notes": Notes(description="Leaf, 63×")}
    write_image(tmp_path / "a.nii.gz", samples, "TCZYX", **known)
    found = nibabel.load(tmp_path / "a.nii.gz")
    assert found.shape == (7, 5, 4, 2, 3)
    np.testing.assert_array_equal(np.asanyarray(found.dataobj), samples.transpose(4, 3, 2, 0, 1))
    np.testing.assert_allclose(found.header.get_zooms()[:4], (0.25, 0.3, 1, 120), rtol=1e-6)
    assert found.header.get_xyzt_units() == ("micron", "sec")
    assert bytes(found.header["descrip"].item()).decode() == "Leaf, 63×"


def test_long_axes_are_written_as_nifti_2(tmp_path: Path) -> None:
    samples = RANDOM.integers(0, 255, (2, 40_000)).astype(np.uint8)
    write_image(tmp_path / "a.nii", samples, "YX")
    found = nibabel.load(tmp_path / "a.nii")
    assert isinstance(found, nibabel.Nifti2Image)
    np.testing.assert_array_equal(np.asanyarray(found.dataobj), samples.T)


def test_labels_are_reduced_to_the_nearest(tmp_path: Path) -> None:
    made = nibabel.Nifti1Image(np.array([[1, 9], [9, 9]], np.uint8).repeat(600, 0).repeat(600, 1), None)
    made.header.set_intent("label")
    nibabel.save(made, tmp_path / "a.nii")
    with images.open_image(tmp_path / "a.nii") as reader:
        header = reader.header
    write_image(tmp_path / "b.zarr", read_image(tmp_path / "a.nii"), "YX", metadata=header.metadata)
    write_image(tmp_path / "c.nii", read_image(tmp_path / "b.zarr"), "YX", metadata={"image-label": {}})
    assert nibabel.load(tmp_path / "c.nii").header.get_intent()[0] == "label"


def changed(path: Path, **fields: Any) -> Path:
    nibabel.save(nibabel.Nifti1Image(np.zeros((7, 5, 3), np.uint8), None), path)
    head = nibabel.load(path).header
    for name, value in ({"vox_offset": 352} | fields).items():
        head[name] = value
    path.write_bytes(head.binaryblock + path.read_bytes()[348:])
    return path


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"datatype": 32}, "complex samples are not filtered: save the magnitude"),
        ({"datatype": 1536}, "float128 samples: save it as float64"),
        ({"datatype": 1}, "save it as uint8"),
        ({"datatype": 3}, "data of type 3"),
        ({"dim": [6, 7, 5, 3, 1, 1, 2, 1]}, "x, y, z, time and channels are read: save a part of it"),
        ({"dim": [3, 7, 0, 3, 1, 1, 1, 1]}, "lengths [7, 0, 3]"),
        ({"dim": [3, 7, 5, 4, 1, 1, 1, 1]}, "truncated: its header promises 140 bytes of samples, the file holds 105"),
        ({"vox_offset": 1}, "places the samples at byte 1"),
        ({"magic": b"ni1"}, "save both as one .nii first"),
        ({"magic": b""}, "is an Analyze file"),
    ],
)
def test_what_cannot_be_read_is_one_line(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = changed(tmp_path / "a.nii", **fields)
    with input_error(path, words):
        images.open_image(path)
    packed = tmp_path / "a.nii.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    with input_error(packed, words.partition(":")[0]):
        read_image(packed)


def test_what_cannot_be_written_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"NIfTI holds no float16 samples; choose \.tif or \.zarr"):
        write_image(tmp_path / "a.nii", np.ones((5, 7), np.float16), "YX")
