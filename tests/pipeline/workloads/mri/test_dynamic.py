"""Frames of a moving object: motion states by a sorting file, sliding windows, and view sharing."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.engine.devices.device import CudaDevice
from pipeline.errors import InputError, ParameterError
from pipeline.formats.kspace import open_kspace
from pipeline.formats.kspace.base import Readouts
from pipeline.workloads.mri.parameters import MriParameters
from pipeline.workloads.mri.source.images import SharedReadouts
from pipeline.workloads.mri.source.sorting import SortedReader
from tests.kernels.sense.phantom import coil_maps, image, normalised_error
from tests.pipeline.formats.kspace.raw_mri import write_cfl
from tests.pipeline.workloads.mri.mri_jobs import COILS, N, images, job, scan, volume, write_npz

SPOKES, STATES = 60, 3


@pytest.fixture
def breathing(tmp_path):
    """Spokes of an object whose brightness is 1, 2 or 3 by its motion state, in turn at random; and the states."""
    kspace, points = scan(SPOKES)
    states = np.random.default_rng(0).integers(0, STATES, SPOKES)
    write_npz(tmp_path / "in.npz", kspace * (1 + states[:, None]), points)
    np.save(tmp_path / "states.npy", states)
    maps = coil_maps(COILS, N)
    np.save(tmp_path / "maps.npy", maps.transpose(0, 2, 1).astype(np.complex64))
    return tmp_path / "in.npz", states


def truth():
    """[y, x], as files have it."""
    return (image(N) * np.linalg.norm(coil_maps(COILS, N), axis=0)).T


@pytest.mark.parametrize("penalties", ["none", "tv-time", "tv-time,l1-wavelet"])
def test_states_are_frames(tmp_path, breathing, penalties):
    source, states = breathing
    options = {"sensitivities": str(tmp_path / "maps.npy"), "iterations": 25, "tolerance": 0.0}
    if penalties != "none":
        options |= {"regularizer": penalties, "strength": "0.001"}
    found, receipt = images(source, tmp_path / "out.npy", sorting=tmp_path / "states.npy", **options)
    assert found.shape == (STATES, 1, N, N)
    for state, picture in enumerate(found[:, 0]):
        assert normalised_error(picture, (1 + state) * truth()) < 0.2
        brightness = np.vdot(picture, truth()) / np.vdot(truth(), truth())
        assert brightness == pytest.approx(1 + state, rel=0.03)
    assert receipt["image"]["frames"] == STATES
    assert receipt["image"]["readouts"] == np.bincount(states).tolist()
    assert "states.npy (" in receipt["parameters"]["sorting"]


def test_a_state_is_what_its_readouts_alone_make(tmp_path, breathing):
    """With readouts left out, and weights from a file in the file's own order."""
    source, states = breathing
    states = np.where(np.arange(SPOKES) % 7 == 0, -1, states)
    np.save(tmp_path / "states.npy", states)
    weights = np.random.default_rng(1).uniform(0.5, 1, (SPOKES, 2 * N))
    np.save(tmp_path / "weights.npy", weights)
    options = {"sensitivities": str(tmp_path / "maps.npy"), "iterations": 6, "tolerance": 0.0}
    more = {"sorting": tmp_path / "states.npy", "density": str(tmp_path / "weights.npy")}
    found, _ = images(source, tmp_path / "out.npy", **options, **more)
    with np.load(source) as given:
        kspace, points = given["kspace"], given["traj"]
    for state in range(STATES):
        own = states == state
        np.save(tmp_path / "own.npy", weights[own])
        alone = write_npz(tmp_path / "own.npz", kspace[:, own], points[own])
        expected, _ = images(alone, tmp_path / "own_out.npy", density=str(tmp_path / "own.npy"), **options)
        np.testing.assert_array_equal(found[state], expected[0])


def test_the_sorted_reader_gives_the_files_readouts(tmp_path):
    rng = np.random.default_rng(0)
    kspace = (rng.normal(size=(2, 3, COILS, 11, 5)) + 0j).astype(np.complex64)
    points = rng.uniform(-10, 10, (2, 11, 5, 2))
    source = write_npz(tmp_path / "in.npz", kspace, points, dcf=rng.uniform(1, 2, (11, 5)))
    states = np.stack([rng.permutation(np.arange(11) % 4) - 1 for _ in range(3)])
    np.save(tmp_path / "states.npy", states)
    with open_kspace(source) as plain, SortedReader(open_kspace(source), tmp_path / "states.npy", source) as reader:
        for time in range(2):
            for slice_ in range(3):
                kept, length = reader.extent(time, slice_)
                assert (kept, length) == (int((states[slice_] >= 0).sum()), 5)
                whole = plain.trajectory(Readouts(time, slice_, 0, 11))
                weights = plain.density(Readouts(time, slice_, 0, 11))
                for state in range(3):
                    own, which = reader.range_of(state, time, slice_), np.flatnonzero(states[slice_] == state)
                    np.testing.assert_array_equal(reader.places(own), which)
                    np.testing.assert_array_equal(reader.trajectory(own), whole[which])
                    np.testing.assert_array_equal(reader.density(own), weights[which])
                    out = np.full((COILS, len(which), 5), np.nan, np.complex64)
                    reader.read(own, out)
                    np.testing.assert_array_equal(out, kspace[time, slice_][:, which])
        assert reader.noise() is None


def test_sliding_windows_of_golden_angles_with_tv_in_time(tmp_path):
    kspace, points = scan(40)
    options = {"frames": 12, "frame_step": 4, "regularizer": "tv-time", "strength": "0.01", "iterations": 20}
    found, receipt = images(write_npz(tmp_path / "in.npz", kspace, points), tmp_path / "out.npy", **options)
    assert found.shape == (8, 1, N, N)
    assert receipt["chunks"] == 1
    best, _ = images(tmp_path / "in.npz", tmp_path / "best.npy", iterations=20)
    assert max(normalised_error(frame, best[0]) for frame in found) < 0.15


def test_what_a_frame_borrows():
    """Its own readouts as far as they suffice, then the nearest neighbours, as many as the distance needs."""
    frame = SharedReadouts(0, 0, 2, 12, 5, 3)
    used = frame.used(np.broadcast_to(np.array([0.0, 0.9, 1.2, 1.8, 9.0]), (10, 5)))
    assert used[:, 0].tolist() == used[:, 1].tolist() == [False] * 3 + [True] * 3 + [False] * 4
    assert used[:, 2].tolist() == [False] * 2 + [True] * 5 + [False] * 3
    assert used[:, 3].tolist() == [False] + [True] * 7 + [False] * 2
    assert used[:, 4].all()


@pytest.mark.parametrize("density", ["pipe-menon", "ramp", "none"])
def test_view_sharing_fills_the_outer_k_space(tmp_path, density):
    """A still phantom: neighbours add nothing but samples. A changing one: the contrast is the frame's own."""
    kspace, points = scan(40)
    changing = kspace * np.where(np.arange(40) < 20, 1, 2)[:, None]
    options = {"frames": 8, "iterations": 12, "density": density}
    errors = {}
    for name, data in (("still", kspace), ("changing", changing)):
        source = write_npz(tmp_path / f"{name}.npz", data, points)
        for sharing in (None, 8):
            found, receipt = images(source, tmp_path / "out.npy", view_sharing=sharing, **options)
            assert found.shape == (5, 1, N, N)
            errors[name, sharing] = found[:, 0]
            assert receipt["parameters"].get("view_sharing") == sharing
    best = images(write_npz(tmp_path / "b.npz", kspace, points), tmp_path / "best.npy", iterations=15)[0][0, 0]
    alone, shared = (np.mean([normalised_error(p, best) for p in errors["still", n]]) for n in (None, 8))
    assert shared < 0.75 * alone
    sums = errors["changing", 8].sum(axis=(1, 2)) / errors["still", 8].sum(axis=(1, 2))
    np.testing.assert_allclose(sums[[0, 1, 3, 4]], [1, 1, 2, 2], rtol=0.08)


@pytest.mark.gpu
@pytest.mark.parametrize("penalties", ["none", "tv-time", "tv-time,l1-wavelet"])
def test_a_gpu_makes_the_same_states(tmp_path, breathing, penalties):
    source, _ = breathing
    options = {"sensitivities": str(tmp_path / "maps.npy"), "iterations": 15, "tolerance": 0.0}
    if penalties != "none":
        options |= {"regularizer": penalties, "strength": "0.003"}
    assert_a_gpu_gives_the_same(source, tmp_path, sorting=tmp_path / "states.npy", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("density", ["pipe-menon", "ramp", "none"])
def test_a_gpu_shares_the_same_views(tmp_path, density):
    kspace, points = scan(40)
    source = write_npz(tmp_path / "in.npz", kspace * (1 + np.arange(40) % 3)[:, None], points)
    # More iterations magnify the transforms' errors: after ten without weights, 3 % of the image depends on `eps`.
    assert_a_gpu_gives_the_same(source, tmp_path, frames=8, view_sharing=4, iterations=4, density=density)


def assert_a_gpu_gives_the_same(source, folder, **options):
    expected, host = images(source, folder / "host.npy", **options)
    found, receipt = images(source, folder / "gpu.npy", device=CudaDevice(0), **options)
    assert found.shape == expected.shape
    assert receipt["image"]["readouts"] == host["image"]["readouts"]
    for frame, right in zip(found, expected, strict=True):
        assert normalised_error(frame, right) < 2e-3


def test_bad_sorting_files_get_one_line(tmp_path, breathing):
    source, states = breathing
    bad = {
        "state 1 of 3 has no readouts in slice 0; number the states from 0 without gaps": np.where(
            states == 1, 0, states
        ),
        "leaves every readout out": np.full(SPOKES, -1),
        "has 59 numbers, and slice 0, time 0 of .*in.npz has 60 readouts: one number": states[:-1],
        "holds float64": states * 1.0,
        "holds -2; states count from 0": states - 2,
        "has 2 rows; give one, or one for each of the 1 slice of .*in.npz": np.stack([states, states]),
        r"holds int64 \(1, 1, 60\); whole numbers": states[None, None],
    }
    for message, array in bad.items():
        np.save(tmp_path / "bad.npy", array)
        with pytest.raises(InputError, match=message):
            job(source, tmp_path / "out.npy", sorting=tmp_path / "bad.npy")
    with pytest.raises(InputError, match=r"nowhere\.npy: no such file"):
        job(source, tmp_path / "out.npy", sorting=tmp_path / "nowhere.npy")


def test_where_nothing_can_be_shared_the_option_is_refused(tmp_path, breathing):
    with pytest.raises(ParameterError, match=r"in\.npz has one frame, without neighbours: give --frames"):
        job(breathing[0], tmp_path / "out.npy", frames=SPOKES, view_sharing=2)
    with pytest.raises(ParameterError, match="is not of two-dimensional, non-Cartesian readouts: leave it out"):
        job(volume(tmp_path / "v.npz"), tmp_path / "out.npy", frames=10, view_sharing=2)
    write_cfl(tmp_path / "grid", np.ones((8, 8, 1, 2), np.complex64))
    with pytest.raises(ParameterError, match="is not of two-dimensional, non-Cartesian readouts: leave it out"):
        job(tmp_path / "grid.cfl", tmp_path / "out.npy", frames=4, view_sharing=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sorting": "s.npy", "frames": 5}, "--frames belongs to frames in time, and --sorting makes frames of motion"),
        ({"sorting": "s.txt"}, r"a file that ends with \.npy"),
        ({"view_sharing": 3}, "--view-sharing belongs to --frames or --sorting"),
    ],
)
def test_options_that_contradict_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MriParameters(**options)
