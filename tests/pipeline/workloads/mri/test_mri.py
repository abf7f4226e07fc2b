"""MRI reconstruction as jobs: the right images in the right places, however the job is cut, stopped or asked for."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from kernels.nufft import Nufft
from kernels.sense import centre_images, density, sensitivities
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.run import run_job
from pipeline.errors import AuditError, InputError, ParameterError, StorageError
from pipeline.workloads.mri import audit as mri_audit
from pipeline.workloads.mri.parameters import MriParameters
from pipeline.workloads.mri.series.header import affine_of
from tests.images import read_image
from tests.kernels.sense.phantom import coil_maps, definition, image, normalised_error
from tests.pipeline.formats.kspace.raw_mri import (
    NOISE_FLAG,
    acquisition,
    read_cfl,
    readouts,
    real_scan,
    write_cfl,
    write_ismrmrd,
    xml,
)
from tests.pipeline.workloads.mri.mri_jobs import COILS, SPOKES, N, images, job, scan, write_h5, write_npz

EXACT = {"tolerance": 0.0, "iterations": 8}


def truth(n=N, coils=COILS):
    """[y, x], as files have it."""
    return (image(n) * np.linalg.norm(coil_maps(coils, n), axis=0)).T


@pytest.mark.parametrize("method", ["cg-sense", "gridding"])
def test_the_phantom(tmp_path, method):
    found, receipt = images(write_npz(tmp_path / "a.npz"), tmp_path / "out.npy", method=method)
    assert found.dtype == np.float32
    best = 1 if method == "cg-sense" else np.vdot(found[0, 0], truth()) / np.vdot(found[0, 0], found[0, 0])
    assert normalised_error(best * found[0, 0], truth()) < (0.2 if method == "cg-sense" else 0.3)
    image_ = receipt["image"]
    assert (image_["shape"], image_["axes"], image_["coils"]) == ([1, 1, N, N], "TZYX", COILS)
    assert receipt["audit"]["samples"] == mri_audit.SAMPLES
    assert 0 < receipt["audit"]["worst_error"] < receipt["audit"]["tolerance"] == pytest.approx(4e-4)
    if method == "cg-sense":
        curve = image_["convergence"]
        assert curve[0] == 1
        assert len(curve) == image_["iterations"] + 1
        assert curve[-1] == pytest.approx(image_["residual"], rel=1e-3)
        assert curve[-1] < 0.05
    else:
        assert "convergence" not in image_
    assert image_["transform"] in ("gridding", "exact")
    json.dumps(receipt)


def test_x_and_y_are_where_they_belong(tmp_path):
    """A point beside the middle comes out there: column x, row y, as NIfTI and BART have them."""
    points = scan()[1]
    spot = np.zeros((N, N))
    spot[N // 2 + 5, N // 2 - 3] = 1  # [x, y]
    kspace = definition(spot, points.reshape(-1, 2)).reshape(1, SPOKES, -1)
    source = write_npz(tmp_path / "a.npz", kspace.astype(np.complex64), points, units="cycles/fov")
    found, _ = images(source, tmp_path / "out.npy")
    assert np.unravel_index(found[0, 0].argmax(), (N, N)) == (N // 2 - 3, N // 2 + 5)
    assert found[0, 0].max() > 0.5


def test_slices_and_repetitions(tmp_path):
    source = write_h5(tmp_path / "a.h5", slices=3, repetitions=2)
    options = {"traj_units": "cycles/pixel", **EXACT}
    found, receipt = images(source, tmp_path / "out.npy", **options)
    assert found.shape == (2, 3, N, N)
    assert receipt["chunks"] == 6
    assert receipt["image"]["times"] == ["repetition 0", "repetition 1"]
    for repetition in range(2):
        for slice_ in range(3):
            factor = 1 + slice_ + 10 * repetition
            assert normalised_error(found[repetition, slice_], factor * found[0, 0]) < 1e-4
    for asked, first in (("1:", 1), ("-1", 2)):
        chosen, _ = images(source, tmp_path / "some.npy", slices=asked, **options)
        np.testing.assert_array_equal(chosen, found[:, first:])


def test_all_units_are_one_image(tmp_path):
    kspace, points = scan()
    found = []
    for number, (units, factor) in enumerate(
        (("cycles/fov", 1), ("cycles/pixel", 1 / N), ("radians/pixel", 2 * np.pi / N))
    ):
        source = write_npz(tmp_path / f"{number}.npz", kspace, points * factor, units=None)
        found.append(images(source, tmp_path / "out.npy", traj_units=units, **EXACT)[0])
    assert normalised_error(found[1], found[0]) < 1e-5
    assert normalised_error(found[2], found[0]) < 1e-5


def test_a_finer_matrix_is_the_same_field_of_view(tmp_path):
    source = write_npz(tmp_path / "a.npz")
    coarse, _ = images(source, tmp_path / "a.npy", **EXACT)
    fine, receipt = images(source, tmp_path / "b.npy", matrix="64", **EXACT)
    assert receipt["image"]["shape"][2:] == [64, 64]
    middle = [each[0, 0] / np.linalg.norm(each) for each in (coarse, fine[:, :, ::2, ::2])]
    assert normalised_error(middle[1], middle[0]) < 0.15


@pytest.mark.parametrize(("units", "factor"), [("cycles/pixel", 1 / N), ("radians/pixel", 2 * np.pi / N)])
def test_pixels_of_a_trajectory_are_those_of_the_matrix_in_the_file(tmp_path, units, factor):
    kspace, points = scan()
    images_ = [
        images(
            write_npz(tmp_path / "a.npz", kspace, points * scale, units=each), tmp_path / "a.npy", matrix="64", **EXACT
        )
        for each, scale in (("cycles/fov", 1), (units, factor))
    ]
    assert normalised_error(images_[1][0], images_[0][0]) < 1e-5


def test_bits_do_not_depend_on_threads(tmp_path):
    source = write_h5(tmp_path / "a.h5", slices=4)
    found = [
        images(source, tmp_path / "out.npy", device=CpuDevice(threads), traj_units="cycles/pixel")[0]
        for threads in (1, 3)
    ]
    np.testing.assert_array_equal(found[0], found[1])


# Frames


def test_frames_are_their_readouts_alone(tmp_path):
    """A frame equals the image of a file that holds only its readouts, where the maps are the same."""
    kspace, points = scan(60)
    maps = coil_maps(COILS, N).transpose(0, 2, 1)
    np.save(tmp_path / "maps.npy", maps.astype(np.complex64))
    options = {"sensitivities": str(tmp_path / "maps.npy"), **EXACT}
    whole = write_npz(tmp_path / "a.npz", kspace, points)
    found, receipt = images(whole, tmp_path / "out.npy", frames=20, frame_step=15, **options)
    assert found.shape == (3, 1, N, N)
    assert receipt["image"]["frames"] == 3
    for frame in range(3):
        part = slice(15 * frame, 15 * frame + 20)
        alone = write_npz(tmp_path / "b.npz", kspace[:, part], points[part])
        np.testing.assert_allclose(found[frame], images(alone, tmp_path / "b.npy", **options)[0][0], atol=2e-3)


@pytest.mark.parametrize(("frames", "frame"), [(12, 2), (31, 0)])
def test_frames_share_maps_of_all_readouts(tmp_path, frames, frame):
    """Twelve spokes are reconstructed with the maps that all sixty tell; so are 31, of which there is one frame."""
    kspace, points = scan(60)
    flat, data = points.reshape(-1, 2), kspace.reshape(COILS, -1)
    weights = density.pipe_menon(flat, (N, N))
    centre = centre_images(data, flat, weights, (N, N), width=24, taper=True)
    np.save(tmp_path / "maps.npy", sensitivities.walsh(centre, (N, N)).transpose(0, 2, 1))
    found, _ = images(write_npz(tmp_path / "a.npz", kspace, points), tmp_path / "a.npy", frames=frames, **EXACT)
    part = slice(frames * frame, frames * (frame + 1))
    alone = write_npz(tmp_path / "b.npz", kspace[:, part], points[part])
    expected, _ = images(alone, tmp_path / "b.npy", sensitivities=str(tmp_path / "maps.npy"), **EXACT)
    assert normalised_error(found[frame], expected[0]) < 1e-3


# Coils


def test_noise_is_whitened_and_coils_are_compressed(tmp_path):
    """Channels mixed by any invertible matrix, noise with them, make the same image once they are whitened."""
    kspace, points = scan()
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(COILS, 4000)) + 1j * rng.normal(size=(COILS, 4000))
    mixing = np.eye(COILS) + 0.5 * (rng.normal(size=(COILS, COILS)) + 1j * rng.normal(size=(COILS, COILS)))
    found = []
    for number, matrix in enumerate((np.eye(COILS), mixing)):
        source = write_npz(tmp_path / f"{number}.npz", np.tensordot(matrix, kspace, 1), points, noise=matrix @ noise)
        image_, receipt = images(source, tmp_path / "out.npy", **EXACT)
        assert receipt["image"]["prewhitened"]
        found.append(image_ / np.linalg.norm(image_))
        plain, receipt = images(source, tmp_path / "out.npy", prewhiten="no", **EXACT)
        assert not receipt["image"]["prewhitened"]
        found.append(plain / np.linalg.norm(plain))
    assert normalised_error(found[2], found[0]) < 2e-3
    assert normalised_error(found[3], found[1]) > 2e-2


def test_noise_scans_of_ismrmrd(tmp_path):
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(COILS, 512)) + 1j * rng.normal(size=(COILS, 512))
    source = write_h5(tmp_path / "a.h5", noise=[acquisition(noise, None, flags=NOISE_FLAG)])
    _, receipt = images(source, tmp_path / "out.npy", traj_units="cycles/pixel")
    assert receipt["image"]["prewhitened"]


def test_as_many_virtual_coils_lose_nothing(tmp_path):
    source = write_npz(tmp_path / "a.npz")
    whole, _ = images(source, tmp_path / "a.npy", **EXACT)
    same, receipt = images(source, tmp_path / "b.npy", compress=COILS, **EXACT)
    fewer, receipt = images(source, tmp_path / "c.npy", compress=2, **EXACT)
    assert receipt["image"]["channels"] == 2
    assert normalised_error(same, whole) < 5e-3
    assert 1e-3 < normalised_error(fewer, whole) < 0.5


@pytest.mark.parametrize(("weights", "maps"), [("pipe-menon", "espirit"), ("ramp", "walsh"), ("none", "walsh")])
def test_every_way_to_weights_and_maps(tmp_path, weights, maps):
    found, _ = images(
        write_npz(tmp_path / "a.npz"), tmp_path / "out.npy", density=weights, sensitivities=maps, iterations=20
    )
    inside = truth() > 0.2
    assert normalised_error(found[0, 0][inside], truth()[inside]) < 0.25


def test_weights_of_files(tmp_path):
    kspace, points = scan()
    radius = np.maximum(np.linalg.norm(points, axis=2), 0.125).astype(np.float32)
    np.save(tmp_path / "w.npy", radius)
    write_cfl(tmp_path / "w.cfl", radius.T[None].astype(np.complex64))
    plain = write_npz(tmp_path / "a.npz")
    own = write_npz(tmp_path / "b.npz", kspace, points, dcf=radius)
    expected, _ = images(plain, tmp_path / "x.npy", density="ramp", **EXACT)
    for source, given in ((plain, tmp_path / "w.npy"), (plain, tmp_path / "w.cfl"), (own, "file")):
        found, _ = images(source, tmp_path / "out.npy", density=str(given), **EXACT)
        assert normalised_error(found, expected) < 1e-3


def test_bart_in_and_out_is_npz_in_and_npy_out(tmp_path):
    kspace, points = scan()
    traj = np.concatenate([points, np.zeros((*points.shape[:2], 1))], axis=2)
    write_cfl(tmp_path / "k", kspace.transpose(2, 1, 0)[None])
    write_cfl(tmp_path / "t", traj.transpose(2, 1, 0))
    write_cfl(tmp_path / "m", coil_maps(COILS, N).transpose(1, 2, 0)[:, :, None])
    np.save(tmp_path / "m.npy", coil_maps(COILS, N).transpose(0, 2, 1))
    expected, _ = images(
        write_npz(tmp_path / "a.npz"),
        tmp_path / "a.npy",
        sensitivities=str(tmp_path / "m.npy"),
        output_values="complex",
        **EXACT,
    )
    asked = {"trajectory": tmp_path / "t", "sensitivities": str(tmp_path / "m.cfl"), "output_values": "complex"}
    run_job(*job(tmp_path / "k", tmp_path / "out.cfl", **asked, **EXACT))
    found = read_cfl(tmp_path / "out.cfl")
    assert found.shape[:3] == (N, N, 1)
    assert normalised_error(found.reshape(N, N).T, expected[0, 0]) < 1e-5


@pytest.mark.parametrize("named", ["t", "t.cfl", "t.hdr"])
@pytest.mark.parametrize("changed", ["t.cfl", "t.hdr"])
def test_a_pair_that_changed_is_another_parameter_however_it_is_named(tmp_path, named, changed):
    write_cfl(tmp_path / "t", scan()[1])
    parameters = MriParameters(trajectory=tmp_path / named)
    before = parameters.in_force()
    assert parameters.in_force() == before
    os.utime(tmp_path / changed, (1, 1))
    assert parameters.in_force() != before


@pytest.mark.parametrize("named", ["k.cfl", "k.hdr", "k"])
def test_samples_that_changed_are_another_input_however_their_pair_is_named(tmp_path, monkeypatch, named):
    from pipeline.engine import checkpoints

    monkeypatch.setattr(checkpoints, "INTERVAL_SECONDS", 0.0)
    kspace, points = scan()
    slices = np.stack([kspace, 2 * kspace, 3 * kspace], axis=-1).transpose(2, 1, 0, 3)
    write_cfl(tmp_path / "k", slices[None].reshape(1, *slices.shape[:3], *[1] * 9, 3))
    write_cfl(tmp_path / "t", np.concatenate([points, 0 * points[..., :1]], axis=2).transpose(2, 1, 0))
    options = {"trajectory": tmp_path / "t.cfl", "iterations": 2, "density": "none"}
    with pytest.raises(StorageError, match="stopped here"):
        images(tmp_path / named, tmp_path / "out.npy", device=Stopping(2), **options)
    samples = tmp_path / "k.cfl"
    samples.write_bytes((100 * np.fromfile(samples, np.complex64)).tobytes())
    planned, run_options = job(tmp_path / named, tmp_path / "out.npy", resume=True, device=CpuDevice(1), **options)
    with pytest.raises(ParameterError, match=r"k\.cfl has changed since"):
        run_job(planned, run_options)
    assert planned.spec.input == samples


def test_three_dimensions(tmp_path):
    """A volume with a trajectory of its own, against the float64 definition of what was measured."""
    n = 12
    rng = np.random.default_rng(1)
    points = rng.uniform(-n / 2, n / 2, (60, 120, 3))
    r = (np.arange(n) - n // 2) / n
    blob = np.exp(-((r[:, None, None] / 0.2) ** 2) - (r[:, None] / 0.3) ** 2 - ((r - 0.1) / 0.25) ** 2)
    coils = np.stack([1 + r[:, None, None] + 0 * blob, np.exp(2j * r)[:, None] + 0 * blob])
    kspace = definition(coils * blob, points.reshape(-1, 3)).reshape(2, 60, 120)
    source = write_npz(
        tmp_path / "a.npz", kspace.astype(np.complex64), points, matrix=[n, n, n], fov_mm=[120.0, 120, 60]
    )
    np.save(tmp_path / "m.npy", coils.transpose(0, 3, 2, 1))
    found, receipt = images(
        source, tmp_path / "out.npy", sensitivities=str(tmp_path / "m.npy"), density="none", iterations=40, lamda=0
    )
    expected = (blob * np.linalg.norm(coils, axis=0)).transpose(2, 1, 0)
    assert normalised_error(found[0], expected) < 2e-2
    assert receipt["image"]["voxel_mm"] == [10, 10, 5]


# Off resonance


def test_off_resonance_is_corrected(tmp_path):
    kspace, points = scan()
    r = (np.arange(N) - N // 2) / N
    field = 200 * np.exp(-(r[:, None] ** 2 + (r - 0.2) ** 2) / 0.05)  # [x, y], hertz
    maps = coil_maps(COILS, N)
    times = np.arange(points.shape[1]) * 100e-6
    phantom = image(N) * maps
    off = np.empty_like(kspace)
    for sample, time in enumerate(times):
        turned = phantom * np.exp(-2j * np.pi * field * time)
        off[:, :, sample] = definition(turned, points[:, sample])
    np.save(tmp_path / "maps.npy", maps.transpose(0, 2, 1))
    np.save(tmp_path / "field.npy", field.T)
    source = write_npz(tmp_path / "a.npz", off, points, dwell_us=100.0)
    common = {"sensitivities": str(tmp_path / "maps.npy"), "iterations": 15}
    blurred, _ = images(source, tmp_path / "a.npy", **common)
    sharp, receipt = images(source, tmp_path / "b.npy", field_map=tmp_path / "field.npy", **common)
    expected = (image(N) * np.linalg.norm(maps, axis=0)).T
    assert normalised_error(sharp[0, 0], expected) < 0.1
    assert normalised_error(blurred[0, 0], expected) > 0.13
    assert receipt["audit"]["worst_error"] < receipt["audit"]["tolerance"]


# Where it is


def test_nifti_lies_where_the_scan_says(tmp_path):
    import struct

    source = write_h5(tmp_path / "a.h5", slices=3)
    run_job(*job(source, tmp_path / "out.nii", traj_units="cycles/pixel", iterations=2))
    raw = (tmp_path / "out.nii").read_bytes()
    sform = np.array(struct.unpack_from("<12f", raw, 280)).reshape(3, 4)
    # Pixel (n/2, n/2) of slice 1 is its middle: 16 mm left, 20 mm in front, 30 mm up; x runs to the back, y upwards.
    np.testing.assert_allclose(sform @ [N // 2, N // 2, 1, 1], [-16, 20, 30], atol=1e-4)
    np.testing.assert_allclose(sform[:, :3], [[0, 0, -6], [-5, 0, 0], [0, 5, 0]], atol=1e-5)
    assert struct.unpack_from("<4f", raw, 80)[:3] == (5, 5, 6)


def test_an_affine_without_placements_is_around_the_middle():
    affine = affine_of([], (8, 6), (2.0, 3.0, 5.0))
    np.testing.assert_allclose(affine @ [4, 3, 0, 1], [0, 0, 0, 1])
    np.testing.assert_allclose(np.diag(affine), [-2, -3, 5, 1])


@pytest.mark.parametrize(
    ("places", "said", "step"),
    [
        ([0, 0, 0], "all in one place by the header: the affine puts them a thickness apart", 5),
        ([0, 7, 0], "not evenly apart: the affine is a mean one", 5),  # ends where it began
        ([0, 2, 8], "not evenly apart: the affine is a mean one", 4),
        ([0, 3, 6], None, 3),
    ],
)
def test_an_affine_has_three_directions_wherever_slices_lie(tmp_path, places, said, step):
    kspace, points = scan()
    axes = {"read_dir": (0, 1, 0), "phase_dir": (0, 0, 1), "slice_dir": (1, 0, 0)}
    records = []
    for number, place in enumerate(places):
        records += readouts(kspace, points / N, idx_slice=number, position=(place, 0, 0), **axes)
    source = write_ismrmrd(tmp_path / "a.h5", xml((N, N, 1), (160.0, 160.0, 5.0)), records)
    planned, _ = job(source, tmp_path / "out.nii", traj_units="cycles/pixel")
    planned.output.discard()
    assert planned.job.summary.describe().get("slices") == said
    header = planned.job.header
    assert header.voxel_mm == pytest.approx((5, 5, step))
    np.testing.assert_allclose(header.affine[:3, 2], [-step, 0, 0], atol=1e-6)


def test_slices_side_by_side_have_an_affine_of_three_directions(tmp_path):
    """Their positions run along y, which is the read direction: no third one."""
    kspace, points = scan()
    axes = {"read_dir": (0, 1, 0), "phase_dir": (0, 0, 1), "slice_dir": (1, 0, 0)}
    records = []
    for number in range(3):
        records += readouts(kspace, points / N, idx_slice=number, position=(0, 7 * number, 0), **axes)
    source = write_ismrmrd(tmp_path / "a.h5", xml((N, N, 1), (160.0, 160.0, 5.0)), records)
    planned, _ = job(source, tmp_path / "out.nii", traj_units="cycles/pixel")
    planned.output.discard()
    said = "all in one plane by the header: the affine puts them a thickness apart"
    assert planned.job.summary.describe()["slices"] == said
    header = planned.job.header
    np.testing.assert_allclose(header.affine[:3, :3], [[0, 0, -5], [-5, 0, 0], [0, 5, 0]], atol=1e-6)
    assert header.voxel_mm == pytest.approx((5, 5, 5))


# What goes wrong on the way


class Stopping(CpuDevice):
    """A device that fails at one chunk, once the first ones are in the ledger."""

    def __init__(self, at):
        super().__init__(1)
        self._at = at

    def process(self, workload, chunk, slot, record):
        if chunk.index == self._at:
            raise StorageError("stopped here")
        super().process(workload, chunk, slot, record)


def test_an_interrupted_job_goes_on(tmp_path, monkeypatch):
    from pipeline.engine import checkpoints

    monkeypatch.setattr(checkpoints, "INTERVAL_SECONDS", 0.0)
    source = write_h5(tmp_path / "a.h5", slices=3)
    options = {"traj_units": "cycles/pixel", "iterations": 2, "density": "none"}
    expected, _ = images(source, tmp_path / "whole.npy", **options)
    with pytest.raises(StorageError, match="stopped here"):
        images(source, tmp_path / "out.npy", device=Stopping(2), **options)
    assert not (tmp_path / "out.npy").exists()
    planned, run_options = job(source, tmp_path / "out.npy", resume=True, device=CpuDevice(1), **options)
    receipt = run_job(planned, run_options)
    found = np.load(tmp_path / "out.npy")
    assert receipt["resumed_chunks"] >= 1
    assert receipt["audit"]["samples"] == 3 * mri_audit.SAMPLES
    np.testing.assert_array_equal(found, expected[0])
    # The middle slice was written by the earlier run: the preview makes it again.
    planned.job.write_preview(tmp_path / "small.png")
    shown = np.clip(found[1] / np.percentile(found[1], 99.7), 0, 1) * 255
    picture = read_image(tmp_path / "small.png")
    factor = picture.shape[0] // N
    assert picture.shape == (factor * N, factor * N)
    inside = np.s_[N // 4 : N // 3, N // 4 : N // 3]  # without the labels
    assert np.abs(picture[::factor, ::factor][inside] - shown[inside]).max() < 3


def test_a_wrong_transform_is_found_out(tmp_path, monkeypatch):
    right = Nufft.forward

    def wrong(self, images, out=None, stream=None):
        return right(self, images, out, stream) * np.complex64(1.01)

    source = write_npz(tmp_path / "a.npz")
    planned, options = job(source, tmp_path / "out.npy")
    monkeypatch.setattr(Nufft, "forward", wrong)
    with pytest.raises(AuditError, match="audit failed: a k-space sample of image 0") as caught:
        run_job(planned, options)
    assert caught.value.worst_error > caught.value.tolerance
    assert caught.value.tolerance < 1e-2
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_an_image_that_does_not_fit_the_memory_says_so(tmp_path):
    source = write_h5(tmp_path / "a.h5")
    with pytest.raises(ParameterError, match="--memory is too small: an image of"):
        job(source, tmp_path / "out.npy", traj_units="cycles/pixel", memory=1 << 18)


def test_files_beside_the_input_must_not_change(tmp_path):
    maps = tmp_path / "maps.npy"
    np.save(maps, np.ones((COILS, N, N), np.complex64))
    planned, options = job(write_npz(tmp_path / "a.npz"), tmp_path / "out.npy", sensitivities=str(maps))
    np.save(maps, np.ones((COILS, N, N), np.complex128))
    with pytest.raises(InputError, match="changed while it was read"):
        run_job(planned, options)
    assert not (tmp_path / "out.npy").exists()


def test_the_audit_looks_at_the_centre_and_around_it():
    points = scan()[1].reshape(-1, 2)
    for number in range(5):
        chosen = np.linalg.norm(points[mri_audit.MriAudit.chosen(number, points, (N, N))], axis=1)
        assert len(chosen) == mri_audit.SAMPLES
        assert chosen[0] == 0
        assert (chosen[1 : 1 + mri_audit.SAMPLES // 2] <= np.sqrt(2) * N / 16).all()


def test_progress_tells_how_far_the_iterations_have_come(tmp_path):
    planned, options = job(write_npz(tmp_path / "a.npz"), tmp_path / "out.npy", **EXACT)
    assert planned.job.progress_note() == ""
    receipt = run_job(planned, options)
    assert planned.job.progress_note().startswith("8 iterations, residual 0.")
    assert f"{receipt['image']['residual']:.2g}" in planned.job.progress_note()


def test_the_audit_is_the_definition():
    rng = np.random.default_rng(0)
    for shape in ((7, 5), (4, 5, 6)):
        picture = rng.normal(size=shape) + 1j * rng.normal(size=shape)
        points = rng.uniform(-3, 3, (4, len(shape)))
        np.testing.assert_allclose(mri_audit.definition(picture, points), definition(picture, points), rtol=1e-10)


# Real scans


@pytest.mark.parametrize(("name", "residual"), [("cardiac_radial.h5", 0.03), ("phantom_spiral.h5", 0.02)])
def test_real_scans(tmp_path, name, residual):
    found, receipt = images(real_scan(name), tmp_path / "out.npy", traj_units="cycles/pixel")
    assert receipt["image"]["residual"] < residual
    # Beside the object there is air.
    n = found.shape[2]
    corner = (0, 0, slice(0, n // 8), slice(0, n // 8))
    assert np.median(found[corner]) / np.percentile(found, 99.5) < 0.1
    if name == "cardiac_radial.h5":
        gridded, _ = images(real_scan(name), tmp_path / "grid.npy", traj_units="cycles/pixel", method="gridding")
        assert np.corrcoef(found.ravel(), gridded.ravel())[0, 1] > 0.8
