"""Cartesian data by the same command: masks, partial Fourier, oversampled readouts, two and three dimensions."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.nufft import Nufft, Toeplitz, cartesian_kernel, toeplitz_kernel
from pipeline.engine.run import run_job
from pipeline.errors import InputError, ParameterError
from tests.kernels.sense.phantom import coil_maps, definition, image, normalised_error, random_complex
from tests.pipeline.formats.kspace.raw_mri import acquisition, read_cfl, write_cfl, write_ismrmrd, xml
from tests.pipeline.workloads.mri.mri_jobs import COILS, N, images, job

CARTESIAN = ("<trajectory>radial", "<trajectory>cartesian")


def grid(*shape):
    """(places, axes): whole cycles, x fastest."""
    axes = [np.arange(n) - n // 2 for n in shape]
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)


@pytest.fixture(scope="module")
def kspace():
    """complex64 (x, y, coils) of the phantom, by the definition."""
    values = definition(image(N) * coil_maps(COILS, N), grid(N, N).reshape(-1, 2))
    return values.reshape(COILS, N, N).transpose(1, 2, 0).astype(np.complex64)


def truth():
    """[y, x], as files have it."""
    return (image(N) * np.linalg.norm(coil_maps(COILS, N), axis=0)).T


def masked(kspace, mask):
    return kspace * mask[..., None]


def lines(every):
    """Every second, third … line along y, and twelve in the centre."""
    mask = np.zeros((N, N), bool)
    mask[:, ::every] = True
    mask[:, N // 2 - 6 : N // 2 + 6] = True
    return mask


@pytest.mark.parametrize("shape", [(8, 9), (5, 6, 7), (7, 9)])
def test_the_normal_operator_of_a_grid_is_that_of_the_definition(shape):
    rng = np.random.default_rng(0)
    points = grid(*shape).reshape(-1, len(shape)).astype(float)
    points = points[rng.random(len(points)) < 0.4]
    points = np.concatenate([points, points[:3]])  # averages
    weights = rng.uniform(0.5, 1, len(points)).astype(np.float32)
    picture = random_complex(shape, 1)
    factors = np.exp(-2j * np.pi * (points / shape) @ grid(*shape).reshape(-1, len(shape)).T)
    expected = (factors.conj().T @ (weights * (factors @ picture.reshape(-1)))).reshape(shape)
    found = Toeplitz(cartesian_kernel(points, weights, shape), shape).apply(picture)
    assert normalised_error(found, expected) < 1e-5
    doubled = Toeplitz(toeplitz_kernel(points, weights, shape, 1e-6), shape).apply(picture)
    assert normalised_error(found, doubled) < 1e-5
    right = Nufft(points, shape, eps=1e-6)
    assert normalised_error(right.adjoint(right.forward(picture), weights), expected) < 1e-5
    with pytest.raises(ValueError, match="whole cycles per field of view"):
        cartesian_kernel(points + 0.25, weights, shape)


@pytest.mark.parametrize("pattern", ["full", "lines", "partial Fourier", "partial echo", "random", "elliptical"])
def test_masks_of_bart(tmp_path, kspace, pattern):
    x, y = np.moveaxis(grid(N, N), -1, 0)
    random = np.random.default_rng(0).random((N, N)) < np.exp(-(x**2 + y**2) / 200)
    mask = {
        "full": np.ones((N, N), bool),
        "lines": lines(2),
        "partial Fourier": y >= -N // 8,
        "partial echo": x >= -N // 4,
        "random": random | (np.hypot(x, y) < 6),
        "elliptical": np.hypot(x, y) <= N / 2,
    }[pattern]
    source = write_cfl(tmp_path / "k", masked(kspace, mask)[:, :, None])
    np.save(tmp_path / "m.npy", coil_maps(COILS, N).transpose(0, 2, 1))
    found, receipt = images(
        source, tmp_path / "o.npy", sensitivities=str(tmp_path / "m.npy"), iterations=30, lamda=1e-4
    )
    assert receipt["image"]["sampling"] == f"Cartesian, {mask.mean():.3g} of the grid"
    limit = {"full": 1e-3, "lines": 0.02, "random": 0.1, "elliptical": 0.06}.get(pattern, 0.1)
    assert normalised_error(found[0, 0], truth()) < limit
    if pattern == "random":
        better, told = images(
            source, tmp_path / "p.npy", sensitivities=str(tmp_path / "m.npy"), regularizer="tv", strength="1e-3"
        )
        assert told["image"]["solver"] == "admm"
        assert normalised_error(better[0, 0], truth()) < 0.8 * normalised_error(found[0, 0], truth())


def test_maps_come_from_the_centre_and_methods_are_the_same(tmp_path, kspace):
    source = write_cfl(tmp_path / "k", masked(kspace, lines(2))[:, :, None])
    for options in ({"iterations": 20}, {"sensitivities": "espirit", "calibration": 12}, {"compress": COILS}):
        found, _ = images(source, tmp_path / "o.npy", **options)
        inside = truth() > 0.2
        assert normalised_error(found[0, 0][inside], truth()[inside]) < 0.1
    gridded, _ = images(source, tmp_path / "g.npy", method="gridding")
    assert normalised_error(gridded[0, 0], truth()) > 0.1


def test_times_and_slices_of_bart(tmp_path, kspace):
    several = np.zeros((N, N, 1, COILS, 1, 1, 1, 1, 1, 1, 2, 1, 1, 3), np.complex64)
    for time in range(2):
        for slice_ in range(3):
            scaled = (1 + slice_ + 10 * time) * masked(kspace, lines(2 + time))
            several[:, :, 0, :, 0, 0, 0, 0, 0, 0, time, 0, 0, slice_] = scaled
    source = write_cfl(tmp_path / "k", several)
    run_job(*job(source, tmp_path / "o.cfl", iterations=20))
    found = read_cfl(tmp_path / "o.cfl").reshape(N, N, 2, 3, order="F")
    for time in range(2):
        for slice_ in range(3):
            assert normalised_error(found[:, :, time, slice_].T, (1 + slice_ + 10 * time) * truth()) < 0.15


def test_volumes_of_bart(tmp_path):
    n = (12, 10, 8)
    r = [(np.arange(each) - each // 2) / each for each in n]
    blob = np.exp(-((r[0][:, None, None] / 0.2) ** 2) - (r[1][:, None] / 0.3) ** 2 - ((r[2] - 0.1) / 0.25) ** 2)
    maps = np.stack([np.exp(1j * c * r[0])[:, None, None] * (1 + r[2] * c) + 0 * blob for c in range(3)])
    values = definition(maps * blob, grid(*n).reshape(-1, 3)).reshape(3, *n)
    mask = (np.random.default_rng(0).random(n[1:]) < 0.7) | (np.hypot(*np.moveaxis(grid(*n[1:]), -1, 0)) < 3)
    source = write_cfl(tmp_path / "k", (values * mask).transpose(1, 2, 3, 0))
    np.save(tmp_path / "m.npy", maps.transpose(0, 3, 2, 1))
    found, receipt = images(
        source, tmp_path / "o.npy", sensitivities=str(tmp_path / "m.npy"), iterations=40, lamda=1e-4
    )
    assert receipt["image"]["readouts"] == mask.sum()
    expected = (blob * np.linalg.norm(maps, axis=0)).transpose(2, 1, 0)
    assert normalised_error(found[0], expected) < 0.05


def ismrmrd(path, kspace, mask_lines, *, oversampling=2, shift=0, centre=N // 2, first=0):
    """The phantom with a readout twice as wide as the image; k-space of the wide field of view by the definition."""
    wide = oversampling * N
    padded = np.zeros((wide, N))
    padded[wide // 2 - N // 2 : wide // 2 + N // 2] = image(N)
    maps = np.zeros((COILS, wide, N), complex)
    maps[:, wide // 2 - N // 2 : wide // 2 + N // 2] = coil_maps(COILS, N)
    values = definition(padded * maps, grid(wide, N).reshape(-1, 2)).reshape(COILS, wide, N)
    records = [
        acquisition(
            values[:, first:, line], None, idx_kspace_encode_step_1=line + shift, center_sample=wide // 2 - first
        )
        for line in mask_lines
    ]
    header = xml(
        (N, N, 1), (160.0, 160.0, 5.0), encoded_matrix=(wide, N, 1), encoded_fov=(160.0 * oversampling, 160, 5)
    )
    limits = (
        f"<kspace_encoding_step_1><minimum>0</minimum><maximum>{N - 1}</maximum><center>{centre}</center>"
        "</kspace_encoding_step_1><kspace_encoding_step_2>"
    )
    return write_ismrmrd(path, header.replace(*CARTESIAN).replace("<kspace_encoding_step_2>", limits), records)


@pytest.mark.parametrize("first", [0, 8])
def test_ismrmrd_with_oversampled_readouts(tmp_path, kspace, first):
    """Whole readouts lose their oversampling; partial echoes keep it, and give the same image."""
    chosen = np.flatnonzero(lines(2)[0])
    source = ismrmrd(tmp_path / "a.h5", kspace, chosen, first=first)
    found, receipt = images(source, tmp_path / "o.npy", iterations=25)
    assert receipt["image"]["samples"] == (N if first == 0 else 2 * N - first)
    assert receipt["image"]["readouts"] == len(chosen)
    assert receipt["image"]["voxel_mm"] == [5, 5, 5]
    inside = truth() > 0.2
    assert normalised_error(found[0, 0][inside], truth()[inside]) < 0.1


def test_masks_that_contradict_the_header_are_refused(tmp_path, kspace):
    with pytest.raises(
        InputError, match=r"acquisition 0 has step 35 of phase encoding 1, beyond the encoded matrix of 32"
    ):
        job(ismrmrd(tmp_path / "a.h5", kspace, [0, 1], shift=35), tmp_path / "o.npy")
    nothing = write_cfl(tmp_path / "k", 0 * kspace[:, :, None])
    with pytest.raises(InputError, match="slice 0, time 0 holds only zeros"):
        job(nothing, tmp_path / "o.npy")
    source = write_cfl(tmp_path / "k", kspace[:, :, None])
    with pytest.raises(ParameterError, match="defines its own, cycles/fov: leave it out"):
        job(source, tmp_path / "o.npy", traj_units="cycles/pixel")
