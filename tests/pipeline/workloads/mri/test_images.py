"""The images of a file of raw data, and their inputs: readouts, weights, maps, fields and sample times."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kernels.sense import covariance
from pipeline.errors import InputError, ParameterError
from pipeline.formats.kspace.base import Readouts
from pipeline.workloads.mri.parameters import MriParameters
from pipeline.workloads.mri.source.images import Image, ImageSource, LruCache, Trajectory
from tests.kernels.sense.phantom import normalised_error, radial, random_complex
from tests.pipeline.formats.kspace.raw_mri import readouts, write_cfl, write_ismrmrd, xml
from tests.pipeline.workloads.mri.mri_jobs import images, write_npz

N, COILS, SPOKES, SAMPLES = 16, 2, 12, 18
POINTS = radial(SPOKES, SAMPLES, N)


def write(path, *, times=1, slices=1, coils=COILS, points=POINTS, matrix=(N, N), kspace=None, **arrays):
    if kspace is None:
        kspace = random_complex((times, slices, coils, *points.shape[-3:-1]), 0)
    return write_npz(path, kspace, points, matrix=list(matrix), **arrays)


def test_points_are_on_the_grid_if_each_is_of_whole_cycles():
    whole = np.array([[0.0, -8.0], [7.0, 3.0]])
    for points, on_grid in ((whole, True), (whole + 1e-9, False)):
        assert Trajectory(points=points, digest=b"", spokes=(1, 2), given=None, nominal=points).on_grid is on_grid


@pytest.fixture
def opened(tmp_path):
    """Opens the images of a file, by default a small one, with parameters."""
    sources = []

    def opens(path=None, **parameters):
        sources.append(ImageSource(path or write(tmp_path / "scan.npz"), MriParameters(**parameters)))
        return sources[-1]

    yield opens
    for source in sources:
        source.close()


# Images


@pytest.mark.parametrize(
    ("frames", "step", "firsts"),
    [(4, 3, (0, 3, 6)), (4, 4, (0, 4, 8)), (5, None, (0, 5)), (12, None, (0,)), (1, 11, (0, 11))],
)
def test_frames_of_several_times_are_consecutive_in_each_slice(tmp_path, opened, frames, step, firsts):
    path = write(tmp_path / "scan.npz", times=3, slices=4)
    source = opened(path, frames=frames, frame_step=step, slices="1::2")
    assert (source.frames, source.times) == (len(firsts), 3 * len(firsts))
    assert source.images == [
        Image(number, place, Readouts(time, slice_, first, first + frames), SAMPLES)
        for place, slice_ in enumerate((1, 3))
        for number, (time, first) in enumerate((time, first) for time in range(3) for first in firsts)
    ]
    assert source.images[0].points == frames * SAMPLES


def test_images_without_frames_are_all_readouts_of_a_time_and_slice(tmp_path, opened):
    source = opened(write(tmp_path / "scan.npz", times=2, slices=2))
    assert source.images == [
        Image(time, slice_, Readouts(time, slice_, 0, SPOKES), SAMPLES) for slice_ in range(2) for time in range(2)
    ]
    assert (source.frames, source.times) == (1, 2)


@pytest.fixture
def uneven(tmp_path):
    """Slices of 6 readouts of 18 samples and of 4 of 10; the second repetition has one readout fewer of each."""
    records = []
    for repetition in range(2):
        for slice_, (count, length) in enumerate(((6, SAMPLES), (4, 10))):
            points = radial(count - repetition, length, N) / N
            kspace = random_complex((COILS, *points.shape[:2]), slice_)
            records += readouts(kspace, points, idx_slice=slice_, idx_repetition=repetition, sample_time_us=8.0)
    return write_ismrmrd(tmp_path / "uneven.h5", xml((N, N, 1), (160.0, 160.0, 5.0)), records)


def test_images_may_differ_in_readouts_and_samples(uneven, opened):
    source = opened(uneven, traj_units="cycles/pixel")
    assert source.images == [
        Image(0, 0, Readouts(0, 0, 0, 6), SAMPLES),
        Image(1, 0, Readouts(1, 0, 0, 5), SAMPLES),
        Image(0, 1, Readouts(0, 1, 0, 4), 10),
        Image(1, 1, Readouts(1, 1, 0, 3), 10),
    ]
    assert source.samples(source.whole(1, 1)).shape == (COILS, 3, 10)
    assert source.trajectory(source.whole(0, 1)).spokes == (4, 10)


@pytest.mark.parametrize(("slices", "fewest"), [("::", 3), ("0", 5)])
def test_all_images_have_as_many_frames_as_the_one_of_fewest_readouts(uneven, opened, slices, fewest):
    asked = {"traj_units": "cycles/pixel", "slices": slices}
    assert opened(uneven, frames=1, **asked).frames == fewest
    assert opened(uneven, frames=fewest, **asked).frames == 1
    with pytest.raises(ParameterError, match=rf"^--frames {fewest + 1}: an image of .* has {fewest} readouts; choose"):
        opened(uneven, frames=fewest + 1, **asked)


def test_samples_are_those_of_the_readouts(tmp_path, opened):
    path = write(tmp_path / "scan.npz", times=2, slices=2)
    with np.load(path) as arrays:
        kspace = arrays["kspace"]
    found = opened(path).samples(Readouts(1, 0, 3, 7))
    np.testing.assert_array_equal(found, kspace[1, 0, :, 3:7])
    assert found.dtype == np.complex64


# Density weights


WEIGHTS = np.random.default_rng(0).uniform(0.5, 2, (SPOKES, SAMPLES)).astype(np.float32)


@pytest.fixture(params=["w.npy", "w.cfl", "file"])
def weighted(request, tmp_path):
    """A file of raw data whose second slice starts the readouts anew, and --density, each with the same weights."""
    np.save(tmp_path / "w.npy", WEIGHTS)
    write_cfl(tmp_path / "w", (WEIGHTS.T[None] + 5j).astype(np.complex64))
    path = write(tmp_path / "weighted.npz", slices=2, dcf=WEIGHTS)
    return path, request.param if request.param == "file" else str(tmp_path / request.param)


def test_frames_have_the_weights_of_their_readouts(weighted, opened):
    path, density = weighted
    source = opened(path, density=density, frames=4, frame_step=3)
    for image in source.images:
        given = source.trajectory(image.readouts).given
        assert given.dtype == np.float32
        np.testing.assert_array_equal(given, WEIGHTS[image.readouts.first : image.readouts.stop].reshape(-1))
    np.testing.assert_array_equal(source.trajectory(source.whole(0, 1)).given, WEIGHTS.reshape(-1))


def test_one_digest_is_one_trajectory_and_one_set_of_weights(tmp_path, opened):
    """Transforms and weights are cached by it."""
    twice = np.concatenate([POINTS[:6], POINTS[:6]])
    np.save(tmp_path / "w.npy", WEIGHTS)
    path = write(tmp_path / "scan.npz", points=twice, slices=2)
    plain, given = (opened(path, frames=6, density=density) for density in ("none", str(tmp_path / "w.npy")))
    first, second = Readouts(0, 0, 0, 6), Readouts(0, 0, 6, 12)
    assert plain.trajectory(first).digest == plain.trajectory(second).digest
    assert plain.trajectory(first).given is None
    digests = [plain.trajectory(first).digest]
    digests += [source.trajectory(readouts).digest for source, readouts in ((given, first), (given, second))]
    other = opened(write(tmp_path / "other.npz", points=twice[::-1]), frames=6, density="none")
    digests.append(other.trajectory(first).digest)
    split = opened(write(tmp_path / "split.npz", points=twice.reshape(24, 9, 2)), density="none")
    digests.append(split.trajectory(Readouts(0, 0, 0, 12)).digest)  # the same points as spokes of half the length
    assert len(set(digests)) == 5
    assert given.trajectory(first).digest == given.trajectory(Readouts(0, 1, 0, 6)).digest


def test_a_frame_with_weights_of_a_file_is_the_image_of_its_part(tmp_path):
    """Both frames have one trajectory, but not one set of weights."""
    points = np.concatenate([POINTS[:6], POINTS[:6]])
    kspace = random_complex((COILS, 6, SAMPLES), 0)
    whole = write(tmp_path / "whole.npz", points=points, kspace=np.concatenate([kspace, kspace], axis=1))
    np.save(tmp_path / "maps.npy", random_complex((COILS, N, N), 1))
    np.save(tmp_path / "whole.npy", WEIGHTS)
    asked = {"sensitivities": str(tmp_path / "maps.npy"), "iterations": 2}
    found, _ = images(whole, tmp_path / "found.npy", frames=6, density=str(tmp_path / "whole.npy"), **asked)
    part = write(tmp_path / "part.npz", points=points[:6], kspace=kspace)
    for frame, weights in zip(found, (WEIGHTS[:6], WEIGHTS[6:]), strict=True):
        np.save(tmp_path / "part.npy", weights)
        alone, _ = images(part, tmp_path / "alone.npy", density=str(tmp_path / "part.npy"), **asked)
        assert normalised_error(frame, alone[0]) < 1e-5
    assert normalised_error(found[1], found[0]) > 1e-3


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf, 1e300])
def test_one_weight_that_is_none_is_refused(tmp_path, opened, bad):
    """Also among good ones, and in a frame that is read later."""
    weights = WEIGHTS.astype(np.float64)
    weights[7, 3] = bad
    np.save(tmp_path / "w.npy", weights)
    own = write(tmp_path / "scan.npz", dcf=weights)
    for density, what in ((str(tmp_path / "w.npy"), "w.npy: weights must"), ("file", "scan.npz: weights must")):
        with pytest.raises(InputError, match=f"{what} be .* of slice 0, time 0, readouts 0 to 11 are not"):
            opened(own, density=density)
        source = opened(own, density=density, frames=6)
        with pytest.raises(InputError, match="of slice 0, time 0, readouts 6 to 11 are not; correct"):
            source.trajectory(Readouts(0, 0, 6, 12))


def test_some_weights_may_be_0_but_not_all(tmp_path, opened):
    weights = WEIGHTS * (np.arange(SPOKES) % 2)[:, None]
    np.save(tmp_path / "w.npy", weights)
    source = opened(density=str(tmp_path / "w.npy"))
    np.testing.assert_array_equal(source.trajectory(source.whole(0, 0)).given, weights.reshape(-1))
    with pytest.raises(InputError, match="and some above 0, which those of slice 0, time 0, readouts 2 to 2 are not"):
        source.trajectory(Readouts(0, 0, 2, 3))


def test_a_file_without_weights_has_none_to_take(opened):
    with pytest.raises(ParameterError, match=r"^--density file: .* holds no density weights for slice 0, time 0, read"):
        opened(density="file")


# Trajectories


def test_a_trajectory_is_checked_for_each_time_and_slice(tmp_path, opened):
    points = np.stack([POINTS, POINTS * 0.5, POINTS * 2])
    source = opened(write(tmp_path / "scan.npz", times=3, points=points))
    np.testing.assert_allclose(source.trajectory(Readouts(1, 0, 2, 4)).points, POINTS[2:4].reshape(-1, 2) / 2)
    with pytest.raises(InputError, match=r"scan\.npz, slice 0, time 2: its trajectory reaches 16 cycles"):
        source.trajectory(Readouts(2, 0, 0, 4))


def test_the_grid_is_that_of_the_first_slice_asked_for(tmp_path, opened):
    records = []
    for slice_, share in enumerate((1, 1 / 4)):
        kspace = random_complex((COILS, SPOKES, SAMPLES), slice_)
        records += readouts(kspace, POINTS * share, idx_slice=slice_)
    path = write_ismrmrd(tmp_path / "scan.h5", "<ismrmrdHeader/>", records)
    assert [opened(path, traj_units="cycles/fov", slices=each).grid.shape for each in "01"] == [(16, 16), (4, 4)]


# Maps and fields


SHAPE = (16, 12)
# k-space of a plane wider than it is high.
WIDE = POINTS * [1, 0.75]


@pytest.mark.parametrize("suffix", [".npy", ".cfl", ".CFL"])
def test_maps_of_a_file_are_those_of_the_slice(tmp_path, opened, suffix):
    maps = random_complex((3, COILS, *SHAPE), 2)
    if suffix == ".npy":
        np.save(tmp_path / "m.npy", maps.transpose(0, 1, 3, 2).astype(complex))
    else:
        write_cfl(tmp_path / "m", maps.transpose(2, 3, 1, 0))
        for each in (".cfl", ".hdr"):
            (tmp_path / f"m{each}").rename(tmp_path / ("m" + (each.upper() if suffix.isupper() else each)))
    path = write(tmp_path / "scan.npz", slices=3, points=WIDE, matrix=SHAPE)
    source = opened(path, sensitivities=str(tmp_path / f"m{suffix}"))
    for slice_ in range(3):
        found = source.sensitivities(slice_)
        np.testing.assert_array_equal(found, maps[slice_])
        assert (found.dtype, found.flags.c_contiguous) == (np.complex64, True)
    assert opened(path).sensitivities(0) is None


def test_maps_and_fields_of_a_volume_have_x_first(tmp_path, opened):
    rng = np.random.default_rng(0)
    shape = (8, 6, 4)
    points = rng.uniform(-0.5, 0.5, (SPOKES, SAMPLES, 3)) * shape
    maps, field = random_complex((COILS, *shape), 0), rng.normal(size=shape)
    np.save(tmp_path / "m.npy", maps.transpose(0, 3, 2, 1))
    np.save(tmp_path / "f.npy", field.T)
    path = write(tmp_path / "scan.npz", points=points, matrix=shape)
    source = opened(path, sensitivities=str(tmp_path / "m.npy"), field_map=tmp_path / "f.npy", dwell=1)
    np.testing.assert_array_equal(source.sensitivities(0), maps)
    np.testing.assert_array_equal(source.field_map(0), field)


@pytest.mark.parametrize("bad", [0, np.nan, np.inf, 1e300])
def test_maps_that_are_0_or_not_finite_are_refused_with_their_slice(tmp_path, opened, bad):
    maps = random_complex((2, COILS, N, N), 1).astype(complex)
    if bad == 0:
        maps[1] = 0
    else:
        maps[1, 1, 4, 5] = bad
    path = write(tmp_path / "scan.npz", slices=2)
    np.save(tmp_path / "m.npy", maps)
    source = opened(path, sensitivities=str(tmp_path / "m.npy"))
    message = "m.npy: slice 1 holds values that are not finite, or only 0; create it again"
    with pytest.raises(InputError, match=message):
        source.sensitivities(1)
    with pytest.raises(InputError, match=message):
        opened(path, sensitivities=str(tmp_path / "m.npy"), slices="1")
    maps[1] = 0
    maps[1, 0, 0, 0] = 1j  # one pixel is enough
    np.save(tmp_path / "m.npy", maps)
    opened(path, sensitivities=str(tmp_path / "m.npy"), slices="1")


@pytest.mark.parametrize("dtype", [np.float32, np.int16, np.complex64])
def test_a_field_map_is_real_and_of_the_slice(tmp_path, opened, dtype):
    field = np.random.default_rng(0).integers(-300, 300, (3, *SHAPE)).astype(dtype)
    if dtype == np.complex64:
        field += 7j
    np.save(tmp_path / "f.npy", field.transpose(0, 2, 1))
    path = write(tmp_path / "scan.npz", slices=3, points=WIDE, matrix=SHAPE)
    source = opened(path, field_map=tmp_path / "f.npy", dwell=5)
    for slice_ in range(3):
        found = source.field_map(slice_)
        np.testing.assert_array_equal(found, field[slice_].real)
        assert (found.dtype, found.flags.c_contiguous) == (np.float64, True)
    assert opened(path).field_map(0) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.nan, "f.npy: holds values that are not finite; set unknown ones to 0"),
        (-np.inf, "f.npy: holds values that are not finite; set unknown ones to 0"),
        (-1.5e6, r"f.npy: reaches 1.5e\+06 Hz; it must be in hertz: convert it"),
    ],
)
def test_a_field_map_of_other_values_is_refused(tmp_path, opened, value, message):
    field = np.zeros((2, N, N))
    field[1, 3, 4] = value
    np.save(tmp_path / "f.npy", field)
    path = write(tmp_path / "scan.npz", slices=2)
    asked = {"field_map": tmp_path / "f.npy", "dwell": 5}
    source = opened(path, **asked)
    with pytest.raises(InputError, match=message):
        source.field_map(1)
    with pytest.raises(InputError, match=message):
        opened(path, slices="1", **asked)


def test_a_field_map_may_reach_a_megahertz(tmp_path, opened):
    np.save(tmp_path / "f.npy", np.full((N, N), -1e6))
    assert opened(field_map=tmp_path / "f.npy", dwell=5).field_map(0).min() == -1e6


@pytest.mark.parametrize(("option", "header", "used"), [(5, 100.0, 5), (None, 100.0, 100), (5, None, 5)])
def test_the_option_takes_precedence_over_the_files_dwell_time(tmp_path, opened, option, header, used):
    np.save(tmp_path / "f.npy", np.zeros((N, N)))
    source = opened(write(tmp_path / "scan.npz", dwell_us=header), field_map=tmp_path / "f.npy", dwell=option)
    np.testing.assert_allclose(source.sample_times_s(4), np.array([0, 1, 2, 3]) * used * 1e-6, rtol=1e-12)


def test_a_field_map_needs_a_dwell_time(tmp_path, opened):
    np.save(tmp_path / "f.npy", np.zeros((N, N)))
    with pytest.raises(ParameterError, match=r"^--dwell: .*scan.npz does not state the time between samples, or not"):
        opened(field_map=tmp_path / "f.npy")


# Coils


def test_noise_is_whitened_unless_asked_not_to(tmp_path, opened):
    noise = random_complex((COILS, 500), 3) * np.array([[1], [5]])
    path = write(tmp_path / "scan.npz", noise=noise)
    white = opened(path).white
    np.testing.assert_allclose(white @ covariance(noise) @ white.conj().T, np.eye(COILS), atol=1e-6)
    assert opened(path, prewhiten="no").white is None
    assert opened().white is None


def test_noise_of_a_dead_channel_is_refused(tmp_path, opened):
    noise = random_complex((COILS, 500), 3)
    noise[1] = 0
    path = write(tmp_path / "scan.npz", noise=noise)
    with pytest.raises(InputError, match=r"scan.npz: the noise covariance is singular: .*; pass --prewhiten no to sk"):
        opened(path)
    opened(path, prewhiten="no")


@pytest.mark.parametrize("values", [2.0**56, -(2.0**56), 2.0**56 * 1j, -(2.0**56) * 1j])
def test_samples_that_whitening_takes_out_of_range_are_refused(tmp_path, opened, values):
    """Each channel may sum up all coils; real and imaginary parts of either sign count."""
    kspace = np.full((COILS, SPOKES, SAMPLES), values, np.complex64)
    source = opened(write(tmp_path / "scan.npz", kspace=kspace))
    limit = 1e17 / 2.0**56
    source.white = np.array([[limit / 2, limit / 4], [limit / 4, limit / 4 + limit / 2]], complex)
    np.testing.assert_array_equal(source.samples(source.whole(0, 0)), kspace)
    source.white[1, 0] *= -1.01j
    with pytest.raises(InputError, match=r"scan.npz: its noise is so faint that whitened samples may reach 1e\+17"):
        source.samples(source.whole(0, 0))


def test_no_more_virtual_coils_than_coils(tmp_path, opened):
    source = opened(compress=1)
    assert (source.coils, source.channels) == (COILS, 1)
    assert opened(compress=COILS).channels == opened().channels == COILS
    with pytest.raises(ParameterError, match=r"^--compress 3: .* has 2 coils; choose as many or fewer"):
        opened(compress=3)


# Arrays of files


def test_axes_of_length_1_may_be_missing_or_anywhere(tmp_path, opened):
    maps = random_complex((COILS, N, N), 1)
    for shape in ((COILS, N, N), (1, COILS, N, N), (COILS, 1, N, N, 1)):
        np.save(tmp_path / "m.npy", maps.reshape(shape))
        found = opened(sensitivities=str(tmp_path / "m.npy")).sensitivities(0)
        np.testing.assert_array_equal(found, maps.transpose(0, 2, 1))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones((N, COILS, N)), rf"m.npy: has the shape \(16, 2, 16\); .* = \(1, {COILS}, 16, 16\) is needed"),
        (np.ones((COILS, N)), r"m.npy: has the shape \(2, 16\); \(slice, coil, \[z,\] y, x\) = "),
        (np.full((COILS, N, N), "1"), "--sensitivities .*m.npy: holds <U1; numbers are needed"),
        (np.ones((COILS, N, N), bool), "--sensitivities .*m.npy: holds bool; numbers are needed"),
    ],
)
def test_arrays_of_another_shape_or_kind_are_refused(tmp_path, opened, array, message):
    np.save(tmp_path / "m.npy", array)
    with pytest.raises(InputError, match=message):
        opened(sensitivities=str(tmp_path / "m.npy"))


# Identity


@pytest.mark.parametrize("option", ["density", "sensitivities", "field_map"])
def test_a_file_that_changed_is_another_parameter(tmp_path, option):
    path = tmp_path / "array.npy"
    path.write_bytes(b"before")
    parameters = MriParameters(**{option: str(path)})
    before = parameters.in_force()
    assert parameters.in_force() == before
    path.write_bytes(b"and after")
    assert parameters.in_force() != before


# The cache


def test_what_is_kept_is_made_once_and_the_oldest_goes():
    kept, made = LruCache(2), []

    def make(key):
        made.append(key)
        return key

    for key in "aabbacab":
        assert kept.get(key, lambda key=key: make(key)) == key
    assert made == ["a", "b", "c", "b"]
    with pytest.raises(ZeroDivisionError):
        kept.get("x", lambda: 1 // 0)
    assert kept.get("x", lambda: "later") == "later"


def test_threads_wait_only_for_the_value_that_they_need():
    kept = LruCache(2)
    with ThreadPoolExecutor(2) as pool:
        waiting = []

        def make():
            waiting.append(pool.submit(kept.get, "a", lambda: "made twice"))
            return pool.submit(kept.get, "b", lambda: "of b").result(timeout=30)

        assert kept.get("a", make) == "of b"
        assert waiting[0].result(timeout=30) == "of b"
