"""MRC against mrcfile: values, cell, place and words of what either wrote."""

from __future__ import annotations

import gzip
import io
import warnings
from pathlib import Path
from typing import Any

import mrcfile
import numpy as np
import pytest

from pipeline.errors import OutputError
from pipeline.formats import image as images
from pipeline.formats.grid import create_map
from pipeline.formats.grid.base import GridHeader
from pipeline.formats.image.base import Region
from pipeline.formats.image.metadata import Calibration, Step
from pipeline.formats.image.metadata.notes import Notes
from pipeline.formats.image.volumes.mrc import Mrc
from pipeline.workloads.common.crop import RegionParameters
from tests.images import read_image, write_image
from tests.pipeline.formats.image.contract import Case, FormatContract, assert_same_bits, input_error

RANDOM = np.random.default_rng(6)


class TestMrcContract(FormatContract):
    format = Mrc()
    cases = (
        Case(suffix=".mrc", axes="ZYX", dtype="float32"),
        Case(suffix=".map", axes="ZYX", dtype="int16"),
        Case(suffix=".ccp4", axes="YX", dtype="uint16"),
    )
    refused = (
        Case(suffix=".mrc", axes="YX", dtype="uint8"),
        Case(suffix=".mrc", axes="YX", dtype="float64"),
        Case(suffix=".mrc", axes="YXS", dtype="int16"),
        Case(suffix=".mrc", axes="CYX", dtype="int16"),
    )
    header_bytes = 224


def saved(path: Path, values: Any, **fields: Any) -> dict[str, Any]:
    """A file that mrcfile made, with a cell, an origin, labels and an extended header; its header's fields."""
    with mrcfile.new(path, overwrite=True) as made:
        made.set_data(values)
        made.voxel_size = (1.5, 2.0, 2.5)
        made.header.origin = (-30.0, 4.0, 5.5)
        made.add_label("Polished by A. Person")
        made.set_extended_header(np.frombuffer(b"one for each section".ljust(160), "V160"))
        made.header.exttyp = b"MRCO"
        for name, value in fields.items():
            made.header[name] = value
        with np.errstate(over="ignore"):
            made.update_header_stats()
    return fields_of(path)


def fields_of(path: Path) -> dict[str, Any]:
    with mrcfile.open(path) as found:
        fields = {name: found.header[name].copy() for name in found.header.dtype.names}
        return fields | {"data": found.data.copy(), "extended": bytes(found.extended_header.tobytes())}


def assert_same_fields(found: dict[str, Any], expected: dict[str, Any], *but: str) -> None:
    for name, value in expected.items():
        if name not in but:
            np.testing.assert_array_equal(found[name], value, err_msg=name)


def copied(source: Path, target: Path, crop: str | None = None) -> dict[str, Any]:
    """What a filter that changes no sample makes of it."""
    with RegionParameters(crop=crop).part(images.open_image(source), source) as part:
        samples = np.empty(part.header.shape, part.header.dtype)
        part.read(Region.whole(samples.shape), samples)
        writer = images.create_image(target, part.header)
    writer.write(Region.whole(samples.shape), samples)
    writer.publish()
    return fields_of(target)


def assert_valid(path: Path) -> None:
    report = io.StringIO()
    with mrcfile.open(path) as found:
        assert found.validate(report), report.getvalue()


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.uint16, np.float16, np.float32])
@pytest.mark.parametrize(("shape", "axes"), [((5, 7), "YX"), ((3, 5, 7), "ZYX"), ((4, 3, 5, 7), "TZYX")])
def test_an_mrc_of_an_mrc_has_every_field(dtype: Any, shape: tuple[int, ...], axes: str, tmp_path: Path) -> None:
    source, target = tmp_path / "in.mrc", tmp_path / "out.mrc"
    expected = saved(source, RANDOM.integers(0, 99, shape).astype(dtype))
    with images.open_image(source) as reader:
        assert (reader.header.axes, reader.header.shape, reader.header.dtype) == (axes, shape, dtype)
        assert images.not_kept(reader.header, target) is None
    np.testing.assert_array_equal(read_image(source), expected["data"])
    found = copied(source, target)
    if dtype != np.float16:  # mrcfile's deviation overflows
        assert_valid(target)
    assert_same_fields(found, expected, "dmean", "rms")
    assert found["dmean"] == pytest.approx(expected["data"].mean(dtype=float), rel=1e-6)
    assert found["rms"] == pytest.approx(expected["data"].std(dtype=float), rel=1e-6)


def test_a_stack_of_images_has_time_points(tmp_path: Path) -> None:
    values = RANDOM.integers(0, 99, (3, 5, 7)).astype(np.int16)
    expected = saved(tmp_path / "in.mrcs", values, ispg=0, mz=1)
    with images.open_image(tmp_path / "in.mrcs") as reader:
        assert reader.header.axes == "TYX"
    assert_same_fields(copied(tmp_path / "in.mrcs", tmp_path / "out.mrcs"), expected, "dmean", "rms")
    write_image(tmp_path / "made.mrcs", values, "TYX")
    assert fields_of(tmp_path / "made.mrcs")["ispg"] == 0
    assert_same_bits(read_image(tmp_path / "made.mrcs"), values)


def test_sizes_place_and_words(tmp_path: Path) -> None:
    saved(tmp_path / "in.mrc", np.ones((3, 5, 7), np.float32))
    with images.open_image(tmp_path / "in.mrc") as reader:
        header = reader.header
    steps = {"X": 1.5, "Y": 2.0, "Z": 2.5}
    assert header.calibration.steps == {letter: Step(size, "angstrom") for letter, size in steps.items()}
    assert header.calibration.origin == {"X": -30, "Y": 4, "Z": 5.5}
    assert "Polished by A. Person" in header.notes.description
    assert images.not_kept(header, tmp_path / "out.ome.tif") == "position, extended header"
    assert images.not_kept(header, tmp_path / "out.zarr") == "description, extended header"
    write_image(tmp_path / "out.zarr", np.ones((3, 5, 7), np.float32), "ZYX", calibration=header.calibration)
    with images.open_image(tmp_path / "out.zarr") as reader:
        write_image(tmp_path / "b.mrc", np.ones((3, 5, 7), np.float32), "ZYX", calibration=reader.header.calibration)
    found = fields_of(tmp_path / "b.mrc")
    assert found["cella"].tolist() == (10.5, 10.0, 7.5)
    assert [found[name].tolist() for name in ("nxstart", "nystart", "nzstart")] == [0, 0, 0]
    assert found["origin"].tolist() == (-30, 4, 5.5)  # 5.5 Å are no whole number of steps


@pytest.mark.parametrize("start", [(0, 0, 0), (4, -2, 6)])
@pytest.mark.parametrize("origin", [(0, 0, 0), (-30.0, 4.0, 5.5)])
def test_a_part_lies_where_it_lay_in_the_whole(start: Any, origin: Any, tmp_path: Path) -> None:
    values = RANDOM.integers(0, 99, (6, 5, 7)).astype(np.int16)
    names = dict(zip(("nxstart", "nystart", "nzstart"), start, strict=True))
    saved(tmp_path / "in.mrc", values, origin=origin, **names)
    found = copied(tmp_path / "in.mrc", tmp_path / "out.mrc", "Z=2:5,X=3:7")
    np.testing.assert_array_equal(found["data"], values[2:5, :, 3:7])
    assert found["cella"].tolist() == (4 * 1.5, 5 * 2.0, 3 * 2.5)
    assert [found[name].tolist() for name in ("mx", "my", "mz")] == [4, 5, 3]
    moved = [found[name].tolist() for name in names]
    if any(origin):
        assert found["origin"].tolist() == (-30 + 4.5, 4, 5.5 + 5)
    else:
        assert moved == [start[0] + 3, start[1], start[2] + 2]
        assert found["origin"].tolist() == (0, 0, 0)
    assert found["extended"] == b""
    with RegionParameters(crop="Z=2:5").part(images.open_image(tmp_path / "in.mrc"), tmp_path / "in.mrc") as part:
        assert images.not_kept(part.header, tmp_path / "out.mrc") == "extended header"


def test_a_crystals_map_keeps_its_cell(tmp_path: Path) -> None:
    cell = {"mx": 70, "my": 60, "mz": 50, "cella": (105.0, 120.0, 125.0), "cellb": (90, 101.5, 90), "ispg": 4}
    expected = saved(tmp_path / "in.map", np.ones((3, 5, 7), np.float32), origin=(0, 0, 0), nxstart=9, **cell)
    with images.open_image(tmp_path / "in.map") as reader:
        lost = images.not_kept(reader.header, tmp_path / "out.zarr")
    assert lost == "description, extended header, cell angles, space group"
    found = copied(tmp_path / "in.map", tmp_path / "out.map", "X=2:6")
    assert_same_fields(found, expected, "nx", "nxstart", "data")
    assert found["nxstart"] == 11


def test_columns_along_z_as_in_potential_maps(tmp_path: Path) -> None:
    values = RANDOM.normal(size=(7, 5, 3)).astype(np.float32)  # [x, y, z]
    header = GridHeader.orthogonal((7, 5, 3), (1.0, 2.0, 3.0), (0.5, 1.0, 1.5), units="kT/e")
    writer = create_map(tmp_path / "in.mrc", header)
    writer.write(Region.whole(values.shape), values)
    writer.publish()
    assert_same_bits(read_image(tmp_path / "in.mrc"), np.ascontiguousarray(values.T))
    with images.open_image(tmp_path / "in.mrc") as reader:
        assert reader.header.calibration.origin == {"X": 1, "Y": 2, "Z": 3}
        part = np.empty((2, 3, 4), np.float32)
        reader.read(Region((1, 2, 3), (3, 5, 7)), part)
    assert_same_bits(part, np.ascontiguousarray(values.T[1:3, 2:5, 3:7]))
    expected = fields_of(tmp_path / "in.mrc")
    assert_same_fields(copied(tmp_path / "in.mrc", tmp_path / "out.mrc"), expected)
    assert_valid(tmp_path / "out.mrc")


@pytest.mark.parametrize("stamp", [True, False])
def test_bytes_of_imod_have_no_sign(stamp: bool, tmp_path: Path) -> None:
    values = RANDOM.integers(0, 255, (3, 5, 7)).astype(np.uint8)
    saved(tmp_path / "in.mrc", values.view(np.int8))
    data = bytearray((tmp_path / "in.mrc").read_bytes())
    if stamp:
        data[152:156] = b"IMOD"
    (tmp_path / "in.mrc").write_bytes(data)
    found = read_image(tmp_path / "in.mrc")
    assert_same_bits(found, values if stamp else values.view(np.int8))
    copied(tmp_path / "in.mrc", tmp_path / "out.mrc")
    assert_same_bits(read_image(tmp_path / "out.mrc"), found)


def test_other_byte_orders_and_compressed_maps(tmp_path: Path) -> None:
    values = RANDOM.integers(-99, 99, (3, 5, 7)).astype(np.int16)
    with mrcfile.new(tmp_path / "in.mrc") as made:
        made.set_data(values.astype(">i2"))
        made.voxel_size = 2.0
        made.set_extended_header(np.frombuffer(b"turned".ljust(80), "V80"))
    assert_same_bits(read_image(tmp_path / "in.mrc"), values)
    with images.open_image(tmp_path / "in.mrc") as reader:
        assert reader.header.calibration.steps["Z"] == Step(2, "angstrom")
        assert images.not_kept(reader.header, tmp_path / "out.mrc") == "extended header"
    np.testing.assert_array_equal(copied(tmp_path / "in.mrc", tmp_path / "out.mrc")["data"], values)
    (tmp_path / "emd_1.map.gz").write_bytes(gzip.compress((tmp_path / "in.mrc").read_bytes()))
    assert_same_bits(read_image(tmp_path / "emd_1.map.gz"), values)


def test_what_is_known_of_a_microscopes_image(tmp_path: Path) -> None:
    steps = {"X": Step(0.25, "nanometer"), "Y": Step(0.25, "nanometer"), "Z": Step(1, "nanometer")}
    known = {"calibration": Calibration(steps, {"X": 5}), "notes": Notes(description="Lamella 7\nat 300 kV")}
    write_image(tmp_path / "a.mrc", np.ones((3, 5, 7), np.uint16), "ZYX", **known)
    found = fields_of(tmp_path / "a.mrc")
    assert found["cella"].tolist() == (17.5, 12.5, 30)
    assert found["nxstart"] == 20
    assert found["label"][:2].tolist() == [b"Lamella 7".ljust(80), b"at 300 kV".ljust(80)]
    with images.open_image(tmp_path / "a.mrc") as reader:
        assert reader.header.notes.description == "Lamella 7\nat 300 kV"


@pytest.mark.parametrize(
    ("mode", "words"), [(4, "complex samples are not filtered"), (101, "samples of 4 bits"), (7, "is of mode 7")]
)
def test_what_cannot_be_read_is_one_line(mode: int, words: str, tmp_path: Path) -> None:
    saved(tmp_path / "a.mrc", np.ones((3, 5, 7), np.float32))
    data = bytearray((tmp_path / "a.mrc").read_bytes())
    data[12:16] = mode.to_bytes(4, "little")
    (tmp_path / "a.mrc").write_bytes(data)
    with warnings.catch_warnings(), input_error(tmp_path / "a.mrc", words):
        images.open_image(tmp_path / "a.mrc")


def test_what_cannot_be_written_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"not uint8; choose .tif, .nii or .zarr"):
        write_image(tmp_path / "a.mrc", np.ones((5, 7), np.uint8), "YX")
