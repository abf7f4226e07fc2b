"""BART's pairs of files and .npz: dimensions in their places, and one clear line for every kind of damage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import InputError
from pipeline.formats.cfl import Cfl
from pipeline.formats.kspace import open_kspace
from pipeline.formats.kspace.base import Readouts
from tests.pipeline.formats.kspace.raw_mri import write_cfl

COILS, SPOKES, SAMPLES = 3, 4, 5


def random_complex(shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(np.complex64)


def trajectory(shape=(SAMPLES, SPOKES), rows=3, seed=1):
    points = np.random.default_rng(seed).uniform(-8, 8, (3, *shape))
    points[rows:] = 0
    return points.astype(np.complex64)


def read(reader, readouts):
    _, samples = reader.extent(readouts.time, readouts.slice)
    out = np.empty((reader.header.coils, readouts.count, samples), np.complex64)
    reader.read(readouts, out)
    return out


def test_k_space_and_trajectory(tmp_path):
    kspace, traj = random_complex((1, SAMPLES, SPOKES, COILS)), trajectory(rows=2)
    write_cfl(tmp_path / "k", kspace)
    write_cfl(tmp_path / "t", traj)
    for name in ("k.cfl", "k.hdr"):
        with open_kspace(tmp_path / name, trajectory=tmp_path / "t.hdr") as reader:
            header = reader.header
            assert (header.coils, header.dimensions, header.times, header.slices) == (COILS, 2, 1, 1)
            assert (header.units, header.matrix) == ("cycles/fov", None)
            part = Readouts(0, 0, 1, 3)
            np.testing.assert_array_equal(read(reader, part), kspace[0, :, 1:3].transpose(2, 1, 0))
            np.testing.assert_array_equal(reader.trajectory(part), traj[:2, :, 1:3].real.transpose(2, 1, 0))


@pytest.mark.parametrize(
    ("cfl", "hdr", "named"),
    [
        (".CFL", ".HDR", ".CFL"), (".CFL", ".HDR", ".HDR"), (".CFL", ".HDR", ""), (".Cfl", ".Hdr", ".Cfl"),
        (".cfl", ".HDR", ".cfl"), (".CFL", ".hdr", ".CFL"),
    ],
)  # fmt: skip
def test_a_pair_in_capitals(tmp_path, cfl, hdr, named):
    kspace, traj = random_complex((1, SAMPLES, SPOKES, COILS)), trajectory(rows=2)
    for name, array in (("k", kspace), ("t", traj)):
        write_cfl(tmp_path / name, array)
        (tmp_path / f"{name}.cfl").rename(tmp_path / f"{name}{cfl}")
        (tmp_path / f"{name}.hdr").rename(tmp_path / f"{name}{hdr}")
    with open_kspace(tmp_path / f"k{named or cfl}", trajectory=tmp_path / f"t{named}") as reader:
        part = Readouts(0, 0, 1, 3)
        np.testing.assert_array_equal(read(reader, part), kspace[0, :, 1:3].transpose(2, 1, 0))
        np.testing.assert_array_equal(reader.trajectory(part), traj[:2, :, 1:3].real.transpose(2, 1, 0))


def test_the_pair_in_the_same_letters_comes_first(tmp_path):
    small, large = random_complex((2, 3)), random_complex((4, 5))
    write_cfl(tmp_path / "a", large)
    for suffix in (".cfl", ".hdr"):
        (tmp_path / "a").with_suffix(suffix).rename((tmp_path / "a").with_suffix(suffix.upper()))
    write_cfl(tmp_path / "a", small)
    assert Cfl(tmp_path / "a.cfl").dims[:2] == Cfl(tmp_path / "a.hdr").dims[:2] == (2, 3)
    assert Cfl(tmp_path / "a.CFL").dims[:2] == Cfl(tmp_path / "a.HDR").dims[:2] == (4, 5)


def test_times_echoes_and_slices(tmp_path):
    """Echoes (5) and times (10) follow one another, the later dimension slowest; slices (13) lie side by side."""
    shape = [1, SAMPLES, SPOKES, COILS, 1, 2, 1, 1, 1, 1, 3, 1, 1, 2]
    kspace = random_complex(shape)
    write_cfl(tmp_path / "k", kspace)
    points = trajectory(rows=2)
    by_time = np.stack([points * (0.5 + 0.1 * time) for time in range(3)], axis=-1)
    write_cfl(tmp_path / "t", by_time.reshape(3, SAMPLES, SPOKES, 1, 1, 1, 1, 1, 1, 1, 3))
    with open_kspace(tmp_path / "k.cfl", trajectory=tmp_path / "t.cfl") as reader:
        assert (reader.header.times, reader.header.slices) == (6, 2)
        for time in range(3):
            for echo in range(2):
                for slice_ in range(2):
                    whole = Readouts(2 * time + echo, slice_, 0, SPOKES)
                    expected = kspace[0, :, :, :, 0, echo, 0, 0, 0, 0, time, 0, 0, slice_]
                    np.testing.assert_array_equal(read(reader, whole), expected.transpose(2, 1, 0))
                    np.testing.assert_array_equal(
                        reader.trajectory(whole), by_time[:2, :, :, time].real.transpose(2, 1, 0)
                    )


def test_three_dimensions(tmp_path):
    write_cfl(tmp_path / "k", random_complex((1, SAMPLES, SPOKES, COILS)))
    write_cfl(tmp_path / "t", trajectory())
    with open_kspace(tmp_path / "k.cfl", trajectory=tmp_path / "t.cfl") as reader:
        assert reader.header.dimensions == 3
        assert reader.trajectory(Readouts(0, 0, 0, SPOKES)).shape == (SPOKES, SAMPLES, 3)


def bart_files(folder):
    write_cfl(folder / "k", random_complex((1, SAMPLES, SPOKES, COILS)))
    write_cfl(folder / "t", trajectory())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("k.cfl", b"x" * 479, "truncated: its .hdr promises 480 bytes, the file holds 479"),
        ("t.cfl", b"", "truncated"),
        ("k.cfl", b"x" * 488, "holds 488 bytes, but its .hdr declares 480: the two do not belong together"),
        ("k.hdr", b"# Dimensions\n1 5 4 2\n", "holds 480 bytes, but its .hdr declares 320"),
        ("k.hdr", b"", "the file is empty"),
        ("k.hdr", b"# Dimensions\n", "has no line of whole numbers"),
        ("k.hdr", b"# Dimensions\n1 5 four 3\n", "has no line of whole numbers"),
        ("k.hdr", b"# Dimensions\n1 5 -4 3\n", "numbers above 0 are needed"),
        ("k.hdr", b"# Dimensions\n" + b"1 " * 9_000, "1 …; 1 to 16 numbers"),
        ("k.hdr", b"# Dimensions\n5 4 1 3\n", "not those of non-Cartesian k-space"),
        ("k.hdr", b"# Dimensions\n1 4 5 3\n", "not those of a trajectory for the k-space (1, 4, 5, 3)"),
        ("t.hdr", b"# Dimensions\n1 5 4 3\n", "not those of a trajectory for the k-space"),
    ],
)
def test_damaged_pairs_are_one_line(tmp_path, name, content, message):
    bart_files(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught, open_kspace(tmp_path / "k.cfl", trajectory=tmp_path / "t.cfl"):
        pass
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["k.cfl", "k.hdr", "t.cfl", "t.hdr"])
def test_half_a_pair_is_refused(tmp_path, missing):
    bart_files(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(InputError, match=f"{missing}: no such file"):
        open_kspace(tmp_path / "k.cfl", trajectory=tmp_path / "t.cfl")


def test_values_that_are_not_finite_are_named(tmp_path):
    kspace, traj = random_complex((1, SAMPLES, SPOKES, COILS)), trajectory()
    kspace[0, 3, 2, 1] = np.nan
    traj[1, 4, 3] = np.inf
    write_cfl(tmp_path / "k", kspace)
    write_cfl(tmp_path / "t", traj)
    with open_kspace(tmp_path / "k.cfl", trajectory=tmp_path / "t.cfl") as reader:
        with pytest.raises(InputError, match="readout 2, sample 3 of coil 1 is"):
            read(reader, Readouts(0, 0, 1, 4))
        with pytest.raises(InputError, match="readout 3: the trajectory of sample 4 has inf along y"):
            reader.trajectory(Readouts(0, 0, 2, 4))


def test_samples_without_squares_in_single_precision_are_named(tmp_path):
    kspace = random_complex((1, SAMPLES, SPOKES, COILS))
    write_cfl(tmp_path / "t", trajectory())
    for part, fits in ((1e17, True), (-2e17j, False)):
        kspace[0, 3, 2, 1] = part
        write_cfl(tmp_path / "k", kspace)
        with open_kspace(tmp_path / "k.cfl", trajectory=tmp_path / "t.cfl") as reader:
            if fits:
                np.testing.assert_array_equal(read(reader, Readouts(0, 0, 2, 3))[1, 0, 3], np.complex64(part))
                continue
            with pytest.raises(InputError, match=r"readout 2, sample 3 of coil 1 is .*beyond 1e\+17.*; divide all"):
                read(reader, Readouts(0, 0, 1, 4))


def test_a_large_file_is_mapped_not_read(tmp_path):
    write_cfl(tmp_path / "a", random_complex((7, 2)))
    assert isinstance(Cfl(tmp_path / "a.cfl").array.base, np.memmap | type(Cfl(tmp_path / "a.cfl").array.base))
    assert Cfl(tmp_path / "a.cfl").dims == (7, 2) + (1,) * 14


# .npz


def npz(path, **arrays):
    given = {"kspace": random_complex((COILS, SPOKES, SAMPLES)), "traj": np.zeros((SPOKES, SAMPLES, 2)) + 0.1}
    given |= arrays
    np.savez(path, **{name: value for name, value in given.items() if value is not None})
    return Path(path)


def test_npz_of_every_depth(tmp_path):
    for leading, times, slices in (((), 1, 1), ((4,), 1, 4), ((2, 4), 2, 4)):
        kspace = random_complex((*leading, COILS, SPOKES, SAMPLES))
        extra = {"matrix": [16, 12, 1], "fov_mm": [160.0, 120, 5], "units": "radians/pixel", "dwell_us": 4.0}
        with open_kspace(npz(tmp_path / "a.npz", kspace=kspace, **extra)) as reader:
            header = reader.header
            assert (header.coils, header.times, header.slices) == (COILS, times, slices)
            assert (header.units, header.matrix, header.fov_mm) == ("radians/pixel", (16, 12), (160, 120, 5))
            assert header.dwell_us == 4
            whole = kspace.reshape(times, slices, COILS, SPOKES, SAMPLES)
            part = Readouts(times - 1, slices - 1, 1, 3)
            np.testing.assert_array_equal(read(reader, part), whole[-1, -1, :, 1:3])
            assert reader.hold_at_most(0) >= kspace.nbytes


def test_npz_with_a_trajectory_a_time(tmp_path):
    kspace, traj = (
        random_complex((3, 1, COILS, SPOKES, SAMPLES)),
        np.random.default_rng(0).normal(size=(3, SPOKES, SAMPLES, 2)),
    )
    noise, weights = random_complex((COILS, 50)), np.ones((SPOKES, SAMPLES))
    with open_kspace(npz(tmp_path / "a.npz", kspace=kspace, traj=traj, noise=noise, dcf=weights)) as reader:
        np.testing.assert_array_equal(reader.trajectory(Readouts(2, 0, 1, 2)), traj[2, 1:2])
        np.testing.assert_array_equal(reader.noise(), noise)
        assert reader.density(Readouts(0, 0, 0, 2)).shape == (2, SAMPLES)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"kspace": None}, "holds traj; raw data needs the arrays kspace and traj"),
        ({"traj": None}, "holds kspace; raw data needs"),
        ({"kspace": np.ones((COILS, SPOKES, SAMPLES))}, "kspace is float64"),
        ({"kspace": random_complex((SPOKES, SAMPLES))}, "kspace is complex64 (4, 5)"),
        ({"kspace": random_complex((0, SPOKES, SAMPLES))}, "kspace (0, 4, 5) is empty; it needs"),
        ({"traj": np.zeros((SPOKES, SAMPLES, 4))}, "traj is float64 (4, 5, 4)"),
        ({"traj": np.zeros((SPOKES + 1, SAMPLES, 2))}, "4 spokes of 5 samples is needed"),
        ({"traj": np.zeros((SPOKES, SAMPLES, 2), complex)}, "traj is complex128"),
        ({"matrix": [16]}, "matrix is [16]; 2 whole numbers"),
        ({"matrix": [16, 0]}, "matrix is [16, 0]"),
        ({"matrix": [16.5, 1]}, "matrix is [16.5, 1.0]"),
        ({"fov_mm": [1.0, 2]}, "fov_mm is [1.0, 2.0]"),
        ({"fov_mm": [1.0, 2, 1e39]}, "fov_mm is [1.0, 2.0, 1e+39]; three lengths from 1e-06 to 1e+09 mm"),
        ({"fov_mm": [1.0, 2, np.nan]}, "fov_mm is [1.0, 2.0, nan]"),
        ({"units": "1/m"}, "units is '1/m'; known are cycles/pixel"),
        ({"dwell_us": -1.0}, "dwell_us is -1.0"),
        ({"noise": random_complex((COILS + 1, 50))}, "noise is complex64 (4, 50); complex (3 coils, n)"),
        ({"dcf": np.ones(7)}, "dcf is float64 (7,)"),
        ({"dcf": np.ones((SPOKES, SAMPLES), complex)}, "dcf is complex128 (4, 5); real (spoke, sample) = (4, 5)"),
        ({"dcf": np.full((SPOKES, SAMPLES), "1")}, "dcf is <U1"),
        ({"kspace": np.array([{}], object)}, "not an .npz file of plain numbers"),
    ],
)
def test_npz_of_something_else_is_one_line(tmp_path, arrays, message):
    with pytest.raises(InputError) as caught:
        open_kspace(npz(tmp_path / "a.npz", **arrays))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_npz_with_numbers_beyond_single_precision(tmp_path):
    """Infinite, and without a warning; whoever needs them finite says which are not."""
    shape = (COILS, SPOKES, SAMPLES)
    arrays = {"kspace": np.full(shape, 1e300 + 0j), "noise": np.full((COILS, 9), 1e300 + 0j)}
    with open_kspace(npz(tmp_path / "a.npz", dcf=np.full((SPOKES, SAMPLES), 1e300), **arrays)) as reader:
        assert np.isinf(reader.noise()).all()
        assert np.isinf(reader.density(Readouts(0, 0, 0, SPOKES))).all()
        with pytest.raises(InputError, match=r"spoke 0, sample 0 of coil 0 is \(inf"):
            read(reader, Readouts(0, 0, 0, SPOKES))


def test_npz_that_is_damaged(tmp_path):
    whole = npz(tmp_path / "a.npz").read_bytes()
    for length in (0, 1, 50, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.npz").write_bytes(whole[:length])
        with pytest.raises(InputError):
            open_kspace(tmp_path / "cut.npz")
    np.save(tmp_path / "plain.npy", np.zeros(3))
    (tmp_path / "plain.npz").write_bytes((tmp_path / "plain.npy").read_bytes())
    with pytest.raises(InputError, match=r"not an \.npz file of plain numbers"):
        open_kspace(tmp_path / "plain.npz")


def test_which_files_are_raw_data(tmp_path):
    bart_files(tmp_path)
    for path, extra, message in (
        ("a.dcm", {}, "unsupported raw data format; Millrace reads"),
        ("k.cfl", {}, "name it with --trajectory"),
        ("a.npz", {"trajectory": tmp_path / "t.cfl"}, "holds its own"),
        ("k", {"trajectory": tmp_path / "t.cfl"}, "k: unsupported raw data format"),
        ("k.cfl", {"trajectory": tmp_path / "t.npy"}, r"--trajectory \S*t.npy: \S*k.cfl needs a .cfl with its .hdr"),
    ):
        with pytest.raises(InputError, match=message):
            open_kspace(tmp_path / path, **extra)
