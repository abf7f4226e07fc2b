"""`--basis`: images as coefficients of a temporal basis, from frames of which none suffices alone."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.run import run_job
from pipeline.errors import InputError, ParameterError
from pipeline.workloads.mri.parameters import MriParameters
from tests.kernels.sense.phantom import coil_maps, definition, image, normalised_error, radial
from tests.pipeline.formats.kspace.raw_mri import write_cfl
from tests.pipeline.workloads.mri.mri_jobs import COILS, N, images, job, scan, write_npz

FRAMES, SPOKES = 12, 5


def decays(cplx=False):
    """(frames, 2): the basis of two exponential decays, and the signals of three tissues in it."""
    t = np.arange(FRAMES)[:, None]
    signals = np.exp(-t / np.array([3.0, 12.0])) * (np.exp(1j * t * np.array([0.2, 0.1])) if cplx else 1)
    return np.linalg.qr(signals)[0], signals


def truth(cplx=False):
    """Coefficients (2, n, n) of an object whose halves decay differently."""
    basis, signals = decays(cplx)
    halves = np.stack([image(N) * (np.arange(N) < N // 2)[:, None], image(N) * (np.arange(N) >= N // 2)[:, None]])
    return np.tensordot(basis.conj().T @ signals, halves, 1)


@pytest.fixture(scope="module", params=[False, True], ids=["real", "complex"])
def decaying(request, tmp_path_factory):
    """A folder with scan.npz, basis.npy and maps.npy; and the coefficients."""
    folder, (basis, _) = tmp_path_factory.mktemp("decaying"), decays(request.param)
    points, coefficients = radial(FRAMES * SPOKES, 2 * N, N), truth(request.param)
    kspace = np.concatenate(
        [
            definition(coil_maps(COILS, N) * np.tensordot(row, coefficients, 1), part.reshape(-1, 2)).reshape(
                COILS, SPOKES, -1
            )
            for row, part in zip(basis, points.reshape(FRAMES, SPOKES, 2 * N, 2), strict=True)
        ],
        axis=1,
    )
    write_npz(folder / "scan.npz", kspace.astype(np.complex64), points)
    np.save(folder / "basis.npy", basis)
    maps = coil_maps(COILS, N)
    np.save(folder / "maps.npy", maps.transpose(0, 2, 1).astype(np.complex64))
    return folder, coefficients * np.linalg.norm(maps, axis=0)


OPTIONS = {"frames": SPOKES, "output_values": "complex", "tolerance": 0.0}


@pytest.mark.parametrize(
    "more",
    [
        {"iterations": 40, "lamda": 1e-4},
        {"iterations": 40, "regularizer": "llr", "strength": "2e-4"},
        {"iterations": 30, "regularizer": "l1-wavelet,tv", "strength": "2e-4"},
    ],
    ids=["cg", "llr", "two"],
)
def test_coefficients_are_found(tmp_path, decaying, more):
    folder, expected = decaying
    files = {"basis": folder / "basis.npy", "sensitivities": str(folder / "maps.npy")}
    found, receipt = images(folder / "scan.npz", tmp_path / "out.npy", **OPTIONS, **files, **more)
    assert found.shape == (2, 1, N, N)
    assert normalised_error(found[:, 0].transpose(0, 2, 1), expected) < 0.05
    assert receipt["chunks"] == 1
    assert receipt["image"]["coefficients"] == 2
    assert receipt["image"]["frames"] == FRAMES
    assert receipt["audit"]["samples"] == 2 * 6
    assert 0 < receipt["audit"]["worst_error"] < receipt["audit"]["tolerance"]
    assert "basis.npy (" in receipt["parameters"]["basis"]
    assert receipt["image"]["iterations"] == more["iterations"]


def test_frames_alone_would_not_do(tmp_path, decaying):
    """Their maps are estimated here, from all frames."""
    folder, expected = decaying
    alone, _ = images(folder / "scan.npz", tmp_path / "a.npy", iterations=20, **OPTIONS)
    basis = np.load(folder / "basis.npy")
    projected = np.tensordot(basis.conj().T, alone[:, 0].transpose(0, 2, 1), 1)
    more = {"regularizer": "llr", "strength": "5e-4", "iterations": 40, "basis": folder / "basis.npy"}
    found, _ = images(folder / "scan.npz", tmp_path / "b.npy", **OPTIONS, **more)
    sizes = [np.abs(each) for each in (expected, projected, found[:, 0].transpose(0, 2, 1))]
    assert normalised_error(sizes[2], sizes[0]) < 0.5 * normalised_error(sizes[1], sizes[0])


def test_times_slices_and_threads(tmp_path, decaying):
    """Times of the file are frames too, slices are chunks, and bits do not depend on threads."""
    folder, _ = decaying
    with np.load(folder / "scan.npz") as given:
        kspace, points = given["kspace"], given["traj"]
    split = kspace.reshape(COILS, FRAMES, SPOKES, -1).transpose(1, 0, 2, 3)
    several = np.stack([split, 2 * split], axis=1)
    source = write_npz(tmp_path / "times.npz", several, points.reshape(FRAMES, SPOKES, -1, 2))
    asked = {"basis": folder / "basis.npy", "iterations": 5, "sensitivities": str(folder / "maps.npy")}
    whole, _ = images(folder / "scan.npz", tmp_path / "a.npy", **(OPTIONS | asked))
    asked = OPTIONS | asked | {"frames": None, "sensitivities": "walsh"}
    plans = [run_job(*job(source, tmp_path / f"{n}.npy", device=CpuDevice(n), **asked)) for n in (1, 2)]
    found = [np.load(tmp_path / f"{n}.npy") for n in (1, 2)]
    np.testing.assert_array_equal(found[0], found[1])
    assert found[0].shape == (2, 2, N, N)
    assert plans[0]["chunks"] == 2
    np.testing.assert_allclose(found[0][:, 1], 2 * found[0][:, 0], atol=1e-3 * np.abs(found[0]).max())
    assert normalised_error(np.abs(found[0][:, :1]), np.abs(whole)) < 0.1


def test_a_basis_of_bart_and_cartesian_samples(tmp_path):
    basis, coefficients, rng = decays()[0], truth(), np.random.default_rng(0)
    kspace = np.zeros((N, N, 1, COILS, 1, FRAMES), np.complex64)
    for frame, row in enumerate(basis):
        seen = coil_maps(COILS, N) * np.tensordot(row, coefficients, 1)
        full = np.fft.fftshift(np.fft.fftn(np.fft.ifftshift(seen, axes=(1, 2)), axes=(1, 2)), axes=(1, 2))
        lines = rng.permutation(N)[: N // 2]
        kspace[:, :, 0, :, 0, frame] = full.transpose(1, 2, 0) * np.isin(np.arange(N), lines)[:, None]
    write_cfl(tmp_path / "k", kspace)
    write_cfl(tmp_path / "basis", basis.reshape(1, 1, 1, 1, 1, FRAMES, 2).astype(np.complex64))
    maps = coil_maps(COILS, N)
    write_cfl(tmp_path / "maps", maps.transpose(1, 2, 0)[:, :, None].astype(np.complex64))
    found, _ = images(
        tmp_path / "k.cfl", tmp_path / "out.npy", basis=tmp_path / "basis.cfl", iterations=40, lamda=1e-4,
        tolerance=0.0, output_values="complex", sensitivities=str(tmp_path / "maps.cfl"),
    )  # fmt: skip
    expected = coefficients * np.linalg.norm(maps, axis=0)
    assert normalised_error(found[:, 0].transpose(0, 2, 1), expected) < 0.02


def test_bad_bases_get_one_line(tmp_path):
    source = write_npz(tmp_path / "scan.npz", *scan(40))
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(8, 3)))[0]
    bad = {
        "has 9 rows, and .*scan.npz has 8 frames: one row for each is needed; --frames": np.eye(9)[:, :3],
        r"has 3 rows \(it may be transposed\), and .* has 8 frames": basis.T,
        "has 9 columns; 1 to 8 are possible": np.zeros((8, 9)),
        "holds values that are not finite": basis * np.nan,
        r"columns are not orthonormal \(off by 3\); save numpy.linalg.qr\(basis\)\[0\]": 2 * basis,
        "holds <U1": np.full((8, 3), "a"),
        r"numbers \(frames, coefficients\) are needed": np.ones((8, 3, 2)),
    }
    for message, array in bad.items():
        np.save(tmp_path / "bad.npy", array)
        with pytest.raises(InputError, match=message):
            job(source, tmp_path / "out.npy", frames=5, basis=tmp_path / "bad.npy")
    with pytest.raises(InputError, match=r"missing\.npy: no such file"):
        job(source, tmp_path / "out.npy", frames=5, basis=tmp_path / "missing.npy")
    np.save(tmp_path / "basis.npy", basis)
    with pytest.raises(ParameterError, match="--memory is too small"):
        job(source, tmp_path / "out.npy", frames=5, basis=tmp_path / "basis.npy", memory=1 << 18)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "gridding"}, "--basis belongs to --method cg-sense"),
        ({"field_map": "f.npy"}, "--basis and --field-map cannot be combined"),
        ({"regularizer": "tv-time"}, "tv-time belongs to frames, and --basis makes coefficients"),
        ({"frames": 5, "frame_step": 3}, "each readout belongs to one frame"),
        ({"frames": 5, "view_sharing": 3}, "each readout belongs to one frame"),
    ],
)
def test_options_that_contradict_a_basis_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MriParameters(basis="b.npy", **options)
    with pytest.raises(ValueError, match=r"--basis|ends with \.npy or \.cfl"):
        MriParameters(basis="b.txt")
