"""ISMRMRD: every acquisition in its place, geometry from the headers, and one clear line for every kind of damage."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from pipeline.errors import InputError
from pipeline.formats.kspace import open_kspace
from pipeline.formats.kspace.base import Readouts
from tests.pipeline.formats.kspace.raw_mri import (
    DUMMY_FLAG,
    NOISE_FLAG,
    acquisition,
    readouts,
    real_scan,
    write_ismrmrd,
    xml,
)

HEADER = xml((32, 24, 1), (320.0, 240.0, 5.0))
COILS, SPOKES, SAMPLES = 3, 4, 10


def scan(seed, coils=COILS, spokes=SPOKES, samples=SAMPLES, columns=2):
    rng = np.random.default_rng(seed)
    kspace = rng.normal(size=(coils, spokes, samples)) + 1j * rng.normal(size=(coils, spokes, samples))
    return kspace.astype(np.complex64), rng.uniform(-0.5, 0.5, (spokes, samples, columns)).astype(np.float32)


def everything(reader, time=0, slice_=0):
    spokes, samples = reader.extent(time, slice_)
    whole = Readouts(time, slice_, 0, spokes)
    out = np.empty((reader.header.coils, spokes, samples), np.complex64)
    reader.read(whole, out)
    return out, reader.trajectory(whole)


def test_slices_contrasts_and_repetitions_come_apart(tmp_path):
    """Interleaved as scanners write them: slices within repetitions within contrasts, noise and dummies between."""
    parts = {(c, r, s): scan(100 * c + 10 * r + s) for c in range(2) for r in range(3) for s in (2, 5)}
    noise = scan(7)[0]
    records = [acquisition(noise[:, n], None, flags=NOISE_FLAG) for n in range(SPOKES)]
    for spoke in range(SPOKES):
        for (contrast, repetition, slice_), (kspace, traj) in parts.items():
            place = {"idx_contrast": contrast, "idx_repetition": repetition, "idx_slice": slice_}
            records.append(acquisition(kspace[:, spoke], traj[spoke], sample_time_us=2.5, **place))
        records.append(acquisition(np.full((COILS, 4), 9.0), None, flags=DUMMY_FLAG))
    with open_kspace(write_ismrmrd(tmp_path / "a.h5", HEADER, records)) as reader:
        header = reader.header
        assert (header.coils, header.dimensions, header.times, header.slices) == (COILS, 2, 6, 2)
        assert (header.matrix, header.fov_mm, header.units) == ((32, 24), (320.0, 240.0, 5.0), None)
        assert header.dwell_us == 2.5
        assert header.time_names[4] == "contrast 1, repetition 1"
        for (contrast, repetition, slice_), (kspace, traj) in parts.items():
            found, points = everything(reader, contrast * 3 + repetition, [2, 5].index(slice_))
            np.testing.assert_array_equal(found, kspace)
            np.testing.assert_array_equal(points, traj.astype(np.float64))
        np.testing.assert_array_equal(reader.noise(), noise.transpose(0, 1, 2).reshape(COILS, -1))


def test_any_readouts(tmp_path):
    kspace, traj = scan(1, spokes=9)
    with open_kspace(write_ismrmrd(tmp_path / "a.mrd", HEADER, readouts(kspace, traj))) as reader:
        for first, stop in ((0, 1), (3, 7), (8, 9)):
            part = Readouts(0, 0, first, stop)
            out = np.empty((COILS, stop - first, SAMPLES), np.complex64)
            reader.read(part, out)
            np.testing.assert_array_equal(out, kspace[:, first:stop])
            np.testing.assert_array_equal(reader.trajectory(part), traj[first:stop].astype(np.float64))
        assert reader.noise() is None


def test_samples_to_discard_are_left_out(tmp_path):
    kspace, traj = scan(2)
    path = write_ismrmrd(tmp_path / "a.h5", HEADER, readouts(kspace, traj, discard_pre=2, discard_post=3))
    with open_kspace(path) as reader:
        found, points = everything(reader)
        np.testing.assert_array_equal(found, kspace[..., 2:7])
        np.testing.assert_array_equal(points, traj[:, 2:7].astype(np.float64))


def test_calibration_alone_is_no_image_and_calibration_that_is_imaging_too_is(tmp_path):
    """Also where a readout that is both has both flags, as Siemens and Pulseq set them."""
    kspace, traj = scan(8, spokes=5)
    flags = [0, 1 << 19, 1 << 20, 1 << 19 | 1 << 20, 1 << 19 | 1 << 21]
    records = [acquisition(kspace[:, spoke], traj[spoke], flags=flag) for spoke, flag in enumerate(flags)]
    with open_kspace(write_ismrmrd(tmp_path / "a.h5", HEADER, records)) as reader:
        np.testing.assert_array_equal(everything(reader)[0], kspace[:, [0, 2, 3]])


def test_samples_to_discard_of_noise_are_left_out(tmp_path):
    noise, other = scan(11, samples=30)[0], scan(12, samples=20)[0]
    records = [acquisition(noise[:, 0], None, flags=NOISE_FLAG, discard_pre=4, discard_post=6)]
    records += [acquisition(other[:, 0], None, flags=NOISE_FLAG, discard_post=20)]
    with open_kspace(write_ismrmrd(tmp_path / "a.h5", HEADER, records + readouts(*scan(0)))) as reader:
        np.testing.assert_array_equal(reader.noise(), noise[:, 0, 4:24])


@pytest.mark.parametrize(("pre", "post"), [(0, 25), (0, 39), (3, 30), (19, 19), (50, 0), (65535, 65535)])
def test_noise_that_discards_more_than_it_holds_does_not_count(tmp_path, pre, post):
    noise, other = scan(11, samples=20)[0], scan(12, samples=30)[0]
    records = [acquisition(noise[:, 0], None, flags=NOISE_FLAG, discard_pre=pre, discard_post=post)]
    records += [acquisition(other[:, 0], None, flags=NOISE_FLAG)]
    with open_kspace(write_ismrmrd(tmp_path / "a.h5", HEADER, records + readouts(*scan(0)))) as reader:
        np.testing.assert_array_equal(reader.noise(), other[:, 0])


def test_readouts_of_unlike_speed_state_no_time_between_samples(tmp_path):
    one, two = scan(9), scan(10)
    for dwells, told in (((4.0, 4.0), 4.0), ((4.0, 40.0), None), ((np.nan, np.nan), None)):
        records = readouts(*one, sample_time_us=dwells[0])
        records += readouts(*two, sample_time_us=dwells[1], idx_contrast=1)
        with open_kspace(write_ismrmrd(tmp_path / "a.h5", HEADER, records)) as reader:
            assert reader.header.dwell_us == told


def test_averages_and_segments_add_to_one_image(tmp_path):
    one, two = scan(3), scan(4)
    records = readouts(*one, idx_average=0, idx_segment=0) + readouts(*two, idx_average=1, idx_segment=3)
    with open_kspace(write_ismrmrd(tmp_path / "a.h5", HEADER, records)) as reader:
        assert reader.header.times == 1
        np.testing.assert_array_equal(everything(reader)[0], np.concatenate([one[0], two[0]], axis=1))


def test_oversampled_readouts_have_a_larger_encoded_space(tmp_path):
    header = xml((32, 24, 1), (320, 240, 5), encoded_matrix=(64, 24, 1), encoded_fov=(640, 240, 5))
    with open_kspace(write_ismrmrd(tmp_path / "a.h5", header, readouts(*scan(5)))) as reader:
        assert reader.header.encoded == (32, 24)  # pixels of the image's size
        assert reader.header.encoded_fov == (0.5, 1)


def test_stacks_of_planes_get_their_third_axis_from_the_steps(tmp_path):
    header = xml((32, 32, 8), (320, 320, 80), centre=3, steps=7)
    records = []
    for step in range(8):
        records += readouts(*scan(step), idx_kspace_encode_step_2=step)
    with open_kspace(write_ismrmrd(tmp_path / "a.h5", header, records)) as reader:
        assert reader.header.dimensions == 3
        assert reader.header.plane_steps
        _, points = everything(reader)
        np.testing.assert_array_equal(points[:, 0, 2], np.repeat(np.arange(8.0) - 3, SPOKES))


def test_a_third_column_of_two_dimensions_is_density(tmp_path):
    kspace, traj = scan(6, columns=3)
    traj[..., 2] = np.abs(traj[..., 2])
    with open_kspace(write_ismrmrd(tmp_path / "a.h5", HEADER, readouts(kspace, traj))) as reader:
        assert reader.header.dimensions == 2
        np.testing.assert_array_equal(reader.density(Readouts(0, 0, 1, 3)), traj[1:3, :, 2])


def test_a_third_column_that_is_a_direction_makes_no_plane(tmp_path):
    kspace, traj = scan(6, columns=3)
    records = readouts(kspace, traj)
    said = "acquisition 0: the third column .* but the header's reconSpace has one plane; write its planes there"
    with (
        open_kspace(write_ismrmrd(tmp_path / "a.h5", HEADER, records)) as reader,
        pytest.raises(InputError, match=said),
    ):
        everything(reader)
    traj[..., 2] *= 1e-5  # rounded turns of a plane
    with open_kspace(write_ismrmrd(tmp_path / "b.h5", HEADER, readouts(kspace, traj))) as reader:
        np.testing.assert_array_equal(everything(reader)[1], traj[..., :2].astype(np.float64))
        assert reader.density(Readouts(0, 0, 0, 1)) is None


def test_noise_of_other_coils_is_no_noise_of_these(tmp_path):
    """Even where its numbers could be cut into as many coils."""
    noise = acquisition(np.ones((COILS - 1, 4 * COILS)), None, flags=NOISE_FLAG)
    path = write_ismrmrd(tmp_path / "a.h5", HEADER, [noise, *readouts(*scan(0))])
    said = "acquisition 0, holds 48 numbers of 2 coils, but the images have 3; --prewhiten no"
    with open_kspace(path) as reader, pytest.raises(InputError, match=said):
        reader.noise()


def test_where_slices_lie(tmp_path):
    records = []
    directions = {"read_dir": (0, 1, 0), "phase_dir": (0, 0, 1), "slice_dir": (1, 0, 0)}
    for slice_ in range(3):
        records += readouts(*scan(slice_), idx_slice=slice_, position=(10 + 6 * slice_, -20, 30), **directions)
    with open_kspace(write_ismrmrd(tmp_path / "a.h5", HEADER, records)) as reader:
        assert [each.position for each in reader.header.placements] == [(10, -20, 30), (16, -20, 30), (22, -20, 30)]
        assert reader.header.placements[0].directions == ((0, 1, 0), (0, 0, 1), (1, 0, 0))
    with open_kspace(write_ismrmrd(tmp_path / "b.h5", HEADER, readouts(*scan(0)))) as reader:
        assert reader.header.placements == ()


def test_directions_of_few_digits_are_directions(tmp_path):
    """A slice turned by 45°, whose cosines were written as 0.71: their squares add up to 1.008."""
    directions = {"read_dir": (0.71, 0.71, 0), "phase_dir": (-0.71, 0.71, 0), "slice_dir": (0, 0, 1)}
    records = readouts(*scan(0), position=(1, 2, 3), **directions)
    with open_kspace(write_ismrmrd(tmp_path / "a.h5", HEADER, records)) as reader:
        (found,) = reader.header.placements
    assert found.position == (1, 2, 3)
    half = np.sqrt(0.5)
    np.testing.assert_allclose(found.directions, [(half, half, 0), (-half, half, 0), (0, 0, 1)], atol=1e-7)


def broken(tmp_path, records, header=HEADER, name="bad.h5"):
    path = write_ismrmrd(tmp_path / name, header, records)
    with open_kspace(path) as reader:
        everything(reader)


def damaged(field, value, spoke=2):
    records = readouts(*scan(0))
    head, traj, data = records[spoke]
    if field == "data":
        data = value(data)
    elif field == "traj":
        traj = value(traj)
    else:
        head[field] = value
    records[spoke] = head, traj, data
    return records


def with_nan(values, place=5):
    values = values.copy()
    values[place] = np.nan
    return values


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (
            [acquisition(np.zeros((2, 5)), None)] * 3,
            "hold no trajectory of 2 or 3 columns but 0 (the header states 'radial')",
        ),
        ([acquisition(np.zeros((2, 5)), None, flags=DUMMY_FLAG)], "none of an image"),
        (damaged("active_channels", 2), "acquisitions differ in their number of coils: 2 has 2, 0 has"),
        (damaged("number_of_samples", 9), "acquisition 2 has 9 samples, acquisition 0 10"),
        (
            readouts(*scan(0), encoding_space_ref=1),
            "refer to encoding 1, counted from 0, but its XML header has 1 encoding;",
        ),
        (damaged("encoding_space_ref", 1), "acquisitions differ in their encoding space: 2 has 1, 0 has 0"),
        (damaged("discard_pre", 10), "acquisition 2 discards all of its samples"),
        (
            damaged("data", lambda values: values[:-4]),
            "acquisition 2 holds 56 numbers where its header promises 3 coils",
        ),
        (damaged("data", lambda values: values[:0]), "acquisition 2 holds 0 numbers"),
        (damaged("traj", lambda values: values[:-1]), "acquisition 2 holds a trajectory of 19 numbers"),
        (damaged("data", lambda values: with_nan(values, 21)), "acquisition 2, sample 0 of coil 1 is"),
        (damaged("data", lambda values: values * np.inf), "acquisition 2, sample 0 of coil 0 is"),
        (damaged("traj", with_nan), "acquisition 2: the trajectory of sample 2 has nan along y"),
        (
            readouts(*scan(0), idx_slice=0, idx_repetition=0) + readouts(*scan(0), idx_slice=1, idx_repetition=1),
            "slice 1 at repetition 0 has no acquisitions",
        ),
    ],
    ids=lambda each: each[:40] if isinstance(each, str) else None,
)
def test_a_damaged_scan_is_one_line(tmp_path, records, message):
    with pytest.raises(InputError) as caught:
        broken(tmp_path, records)
    assert message in str(caught.value)
    assert str(tmp_path / "bad.h5") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("<ismrmrd", "its XML header is damaged"),
        (HEADER.replace("<x>32</x>", "<x>many</x>", 1), "has 'many' as encodedSpace/matrixSize/x"),
        (HEADER.replace("<x>32</x>", "", 1), "has no encodedSpace/matrixSize/x"),
        (HEADER.replace("<x>32</x>", "<x>0</x>", 1), "is out of range"),
        (HEADER.replace("<x>32</x>", "<x>nan</x>", 1), "is out of range"),
        (HEADER.replace("<x>32</x>", "<x>inf</x>", 1), "is out of range"),
        (HEADER.replace('"1.0"', '"1.0" encoding="euc-jp"'), "its XML header is damaged: multi-byte encodings"),
        (HEADER.replace('"1.0"', '"1.0" encoding="none"'), "its XML header is damaged: unknown encoding: none"),
        (HEADER.replace("<x>320.0</x>", "<x>-1</x>", 1), "is out of range"),
        (HEADER.replace("<x>320.0</x>", "<x>1e39</x>", 1), "is out of range"),
    ],
)
def test_a_damaged_header_is_one_line(tmp_path, header, message):
    with pytest.raises(InputError) as caught:
        broken(tmp_path, readouts(*scan(0)), header)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["external", "virtual"])
def test_what_lies_in_other_files_is_not_read(tmp_path, kind):
    """They could be anybody's: whoever writes the file names them."""
    (tmp_path / "secret").write_text(HEADER)
    path = write_ismrmrd(tmp_path / "a.h5", HEADER, [acquisition(*(part[:, 0] for part in scan(1)))])
    with h5py.File(path, "r+") as file:
        del file["dataset/xml"]
        if kind == "external":
            whole = (str(tmp_path / "secret"), 0, len(HEADER))
            file.create_dataset("dataset/xml", (1,), f"S{len(HEADER)}", external=[whole])
        else:
            layout = h5py.VirtualLayout((1,), f"S{len(HEADER)}")
            layout[:] = h5py.VirtualSource("other.h5", "xml", (1,))
            file["dataset"].create_virtual_dataset("xml", layout)
    with pytest.raises(InputError, match=r"a\.h5: keeps dataset in other files; write it as one file"):
        open_kspace(path)


def test_other_files_are_refused(tmp_path):
    whole = write_ismrmrd(tmp_path / "a.h5", HEADER, readouts(*scan(0))).read_bytes()
    (tmp_path / "text.h5").write_text("no HDF5")
    (tmp_path / "empty.h5").write_bytes(b"")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = np.zeros(3)
    with h5py.File(tmp_path / "wrong.h5", "w") as file:
        file["dataset/data"], file["dataset/xml"] = np.zeros(3), b"x"
    for name, message in (
        ("none.h5", "no such file"),
        ("text.h5", "not an HDF5 file.*; copy or export it again"),
        ("empty.h5", "empty.h5: the file is empty; copy or export it again"),
        ("other.h5", "no group with xml and data"),
        ("wrong.h5", "holds no acquisitions"),
    ):
        with pytest.raises(InputError, match=message):
            open_kspace(tmp_path / name)
    # Wherever it is cut, it is refused at the latest when it is read, never a crash and never wrong samples.
    expected = scan(0)[0]
    for length in sorted({0, 7, 100, *range(600, len(whole), 997), len(whole) - 1}):
        cut = tmp_path / "cut.h5"
        cut.write_bytes(whole[:length])
        with pytest.raises(InputError) as caught, open_kspace(cut) as reader:  # noqa: PT012
            np.testing.assert_array_equal(everything(reader)[0], expected)
            raise InputError("read whole")
        assert "\n" not in str(caught.value)


def test_real_scans():
    with open_kspace(real_scan("cardiac_radial.h5")) as reader:
        header = reader.header
        assert (header.coils, header.matrix, reader.extent(0, 0)) == (12, (256, 256), (25, 256))
        found, points = everything(reader)
        with np.load(real_scan("cardiac_radial.npz")) as plain:
            np.testing.assert_array_equal(found, plain["kspace"])
            np.testing.assert_array_equal(points, plain["traj"].astype(np.float64))
    with open_kspace(real_scan("phantom_spiral.h5")) as reader:
        assert (reader.header.coils, reader.header.fov_mm, reader.extent(0, 0)) == (20, (384, 384, 5), (54, 310))
        assert reader.header.dwell_us == 10
