"""`millrace run mri` as its user meets it: results, plans, and one clear line for every mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from pipeline.workloads.mri.parameters import MriParameters
from tests.images import names_in, read_image
from tests.kernels.sense.phantom import coil_maps
from tests.pipeline.formats.kspace.raw_mri import acquisition, readouts, write_cfl, write_ismrmrd, xml
from tests.pipeline.workloads.mri.mri_jobs import COILS, SPOKES, N, scan, write_h5, write_npz

UNITS = ("--traj-units", "cycles/pixel")
UNITS_TOLD = (
    "<trajectoryDescription><identifier>radial</identifier><userParameterString><name>units</name><value>{}</value>"
    "</userParameterString></trajectoryDescription>"
)


@pytest.fixture
def folder(tmp_path, monkeypatch, own_settings):
    monkeypatch.chdir(tmp_path)
    write_h5(tmp_path / "in.h5", slices=2)
    return tmp_path


@pytest.fixture
def mri(millrace):
    """`millrace run mri` with these arguments; returns exit code, stdout and stderr."""
    return lambda *arguments: millrace("run", "mri", *arguments)


@pytest.mark.parametrize("name", ["out.nii", "out.nii.gz", "out.cfl", "out.npy", "out.zarr"])
def test_images_a_receipt_and_a_preview(folder, mri, name):
    code, out, err = mri("in.h5", name, *UNITS, "--preview", "small.png", "--device", "cpu")
    assert (code, err) == (0, "")
    assert f"{name}: 2 chunks on cpu" in out
    assert re.search(r"; \d+ k-space samples verified, worst error \S+ of the sum of the pixels' magnitudes \(tol", out)
    receipt = json.loads((folder / f"{name}.receipt.json").read_text())
    assert receipt["parameters"]["traj_units"] == "cycles/pixel"
    assert receipt["image"]["voxel_mm"] == [5, 5, 6]
    assert len(receipt["image"]["convergence"]) > 5
    assert set(receipt["stages"]) == {"read", "upload", "compute", "download", "write"}
    enlarged = read_image(folder / "small.png")
    assert enlarged.shape == (12 * N, 12 * N)
    pixels = enlarged[6::12, 6::12]
    assert pixels[N // 2, N // 4] > 20 > pixels[0, 0]
    pair = ["out.hdr"] if name == "out.cfl" else []
    assert names_in(folder) == sorted(["in.h5", name, *pair, f"{name}.receipt.json", "small.png"])


@pytest.mark.parametrize(
    ("name", "strength", "is_warned"),
    [("tv", "0.01", False), ("tv", "10", True), ("l1-wavelet", "0.5", False)],  # wavelets never rest: they are shifted
)
def test_iterations_that_have_not_converged_are_named(folder, mri, name, strength, is_warned):
    penalty = ("--regularizer", name, "--strength", strength, "--device", "cpu", "--quiet")
    code, out, err = mri("in.h5", "out.npy", *UNITS, *penalty)
    said = json.loads((folder / "out.npy.receipt.json").read_text())["image"].get("not_converged")
    assert (code, out, said is not None) == (0, "", is_warned)
    assert err == (f"millrace: warning: {said}\n" if is_warned else "")
    assert said is None or re.fullmatch(
        r"the last iteration still changed an image by \S+ %: raise --iterations, or lower --strength", said
    )


def test_units_that_the_header_tells_need_no_option(folder, mri):
    write_ismrmrd(
        folder / "in.h5",
        xml((N, N, 1), (160.0, 160.0, 5.0)).replace("</encoding>", UNITS_TOLD.format("cycles/pixel") + "</encoding>"),
        readouts(scan()[0], scan()[1] / N),
    )
    assert mri("in.h5", "out.npy", "--method", "gridding", "--quiet") == (0, "", "")
    receipt = json.loads((folder / "out.npy.receipt.json").read_text())
    assert receipt["image"]["traj_units"] == "cycles/pixel"


@pytest.mark.parametrize("factor", [1.0, 1 + 2e-8])
def test_a_range_of_exactly_a_half_is_cycles_per_pixel_with_a_warning(folder, mri, factor):
    write_npz(folder / "in.npz", scan()[0], scan()[1] / N * factor, units=None)
    code, out, err = mri("in.npz", "out.npy", "--quiet", "--device", "cpu")
    assert (code, out) == (0, "")
    warning = "in.npz states no units for its trajectory; its range of exactly ±0.5 is taken as cycles/pixel"
    assert err == f"millrace: warning: {warning}: if it is not, pass --traj-units\n"
    found = json.loads((folder / "out.npy.receipt.json").read_text())["image"]
    assert (found["traj_units"], found["warning"][: len(warning)]) == ("cycles/pixel", warning)
    assert mri("in.npz", "told.npy", "--quiet", *UNITS, "--device", "cpu") == (0, "", "")
    np.testing.assert_array_equal(np.load("out.npy"), np.load("told.npy"))
    assert "warning" not in json.loads((folder / "told.npy.receipt.json").read_text())["image"]


def test_a_range_of_a_half_still_asks_for_the_matrix(folder, mri):
    write_npz(folder / "in.npz", scan()[0], scan()[1] / N, units=None, matrix=None)
    code, _, err = mri("in.npz", "out.npy")
    assert code == 2
    assert "--matrix: in.npz states no matrix, and its trajectory in cycles/pixel implies none: give the pixels" in err


def test_complex_values(folder, mri):
    for values, kind in (("complex", np.complex64), ("magnitude", np.float32)):
        assert mri("in.h5", f"{values}.npy", *UNITS, "--output-values", values, "--quiet") == (0, "", "")
        assert np.load(f"{values}.npy").dtype == kind
    np.testing.assert_allclose(np.abs(np.load("complex.npy")), np.load("magnitude.npy"), rtol=1e-6)


def test_either_spelling_of_lambda_is_lambda_in_the_receipt(folder, mri):
    for option in ("--lambda", "--lamda"):
        name = f"{option[2:]}.npy"
        assert mri("in.h5", name, *UNITS, option, "0.5", "--iterations", "1", "--quiet") == (0, "", "")
        found = json.loads((folder / f"{name}.receipt.json").read_text())["parameters"]
        assert found["lambda"] == 0.5
        assert not {"lamda", "damping"} & found.keys()


def test_dry_run(folder, mri):
    code, out, _ = mri("in.h5", "out.nii", *UNITS, "--dry-run", "--device", "cpu", "--frames", "10")
    assert code == 0
    for words in ("method cg-sense", "4 × 2 × 32 × 32 (TZYX), float32", "coils 4", "frames 4", "readouts 10"):
        assert words in out
    assert names_in(folder) == ["in.h5"]


def test_help_names_every_option(folder, mri):
    code, out, _ = mri("--help")
    assert code == 0
    for name, field in MriParameters.model_fields.items():
        assert f"--{(field.alias or name).replace('_', '-')} " in out.replace(",", " ")
    assert "--traj-units [cycles/pixel|cycles/fov|radians/pixel]" in out


MISTAKES = [
    (("none.h5", "out.nii"), "none.h5: no such file"),
    (
        ("plain.npz", "out.nii", "--matrix", "32"),
        "--traj-units: plain.npz states no units for its trajectory, which reaches 0.45: that suggests cycles/pixel",
    ),
    (("fov.npz", "out.nii"), "which reaches 16: that suggests cycles/fov"),
    (("radians.npz", "out.nii"), "which reaches 3.142: that suggests radians/pixel"),
    (("in.h5", "out.nii", "--traj-units", "1/m"), "'1/m' is not one of 'cycles/pixel', 'cycles/fov',"),
    (("in.h5", "out.nii", "--traj-units", "cycles/fov"), "suggests --traj-units cycles/pixel"),
    (("in.h5", "out.nii", "--traj-units", "radians/pixel"), "suggests --traj-units cycles/pixel"),
    (("fov.npz", "out.nii", *UNITS), "suggests --traj-units cycles/fov"),
    (("told.h5", "out.nii", "--traj-units", "cycles/fov"), "told.h5 defines its own, cycles/pixel: leave it out"),
    (("odd.h5", "out.nii"), "odd.h5: its XML header has '1/m' as the trajectory's units; cycles/pixel, cycles/fov,"),
    (("k.cfl", "out.nii", "--trajectory", "t.cfl", *UNITS), "defines its own, cycles/fov: leave it out"),
    (
        ("in.h5", "out.nii", *UNITS, "--matrix", "16"),
        "--matrix 16: the trajectory of in.h5 reaches 16 cycles per field",
    ),
    (("in.h5", "out.nii", *UNITS, "--matrix", "400"), "for which 32 pixels are right"),
    (("in.h5", "out.nii", *UNITS, "--matrix", "32,32,32"), "has 2 axes: give 1 or 2 numbers"),
    (("in.h5", "out.nii", *UNITS, "--matrix", "0"), "--matrix: one to three numbers of pixels"),
    (("in.h5", "out.nii", *UNITS, "--matrix", "wide"), "--matrix"),
    (("small.npz", "out.nii"), "where its matrix 8 × 8 resolves 4; give --matrix 32"),
    (("beyond.npz", "out.nii"), "along x, where its matrix 32 × 32 resolves 16; give --matrix 48,32"),
    (("beyond.npz", "out.nii", "--matrix", "40"), "along x, for which 48,40 pixels are right"),
    (
        ("plain.npz", "out.nii"),
        "--traj-units and --matrix: plain.npz states no units nor pixels; its trajectory reaches 0.45, with 64 samples "
        "a readout: give all of them, such as --traj-units cycles/pixel --matrix 64",
    ),
    (
        ("plain.npz", "out.nii", "--field-map", "plane.npy"),
        "--traj-units, --matrix and --dwell: plain.npz states no units nor pixels nor time between samples",
    ),
    (("plain.npz", "out.nii", *UNITS), "--matrix: plain.npz states no matrix, and its trajectory in cycles/pixel"),
    (("in.h5", "out.nii", *UNITS, "--slices", "2"), "--slices 2: chooses none; in.h5 has 2, numbered 0 to 1"),
    (("in.h5", "out.nii", *UNITS, "--slices", "1-2"), "--slices: '1-2' is no range: write start:stop:step"),
    (("in.h5", "out.nii", *UNITS, "--slices", "1:3"), "--slices 1:3: chooses more than there are; in.h5 has 2"),
    (("in.h5", "out.nii", *UNITS, "--frames", "41"), "--frames 41: an image of in.h5 has 40 readouts"),
    (("in.h5", "out.nii", *UNITS, "--frames", "0"), "--frames"),
    (("in.h5", "out.nii", *UNITS, "--gradient-delay", "late"), "--gradient-delay: auto, or 2 or 3 numbers of samples"),
    (("in.h5", "out.nii", *UNITS, "--gradient-delay", "1,nan"), "--gradient-delay: auto, or 2 or 3 numbers"),
    (("in.h5", "out.nii", *UNITS, "--gradient-delay", "1,2,3"), "in.h5 has delays along 2 axes: give 2 numbers"),
    (
        ("spiral.npz", "out.nii", "--gradient-delay", "auto"),
        "spiral.npz: gradient delays take straight, evenly sampled",
    ),
    (("spiral.npz", "out.nii", "--gradient-delay", "1,1"), "--gradient-delay: spiral.npz, slice 0, time 0: gradient"),
    (("in.h5", "out.nii", *UNITS, "--frame-step", "5"), "--frame-step is the way from frame to frame"),
    (
        ("in.h5", "out.nii", *UNITS, "--method", "gridding", "--iterations", "5"),
        "--iterations belongs to --method cg-sense",
    ),
    (
        ("in.h5", "out.nii", *UNITS, "--method", "gridding", "--tolerance", "0"),
        "--tolerance belongs to --method cg-sense",
    ),
    (("in.h5", "out.nii", *UNITS, "--method", "gridding", "--lambda", "1"), "--lambda belongs to --method cg-sense"),
    (("in.h5", "out.nii", *UNITS, "--method", "fft"), "'fft' is not one of"),
    (("in.h5", "out.nii", *UNITS, "--iterations", "0"), "--iterations"),
    (("in.h5", "out.nii", *UNITS, "--lambda", "-1"), "--lambda: "),
    (("in.h5", "out.nii", *UNITS, "--lamda", "nan"), "--lambda: "),
    (("in.h5", "out.nii", *UNITS, "--tolerance", "1"), "--tolerance"),
    (("in.h5", "out.nii", *UNITS, "--eps", "1"), "--eps"),
    (("in.h5", "out.nii", *UNITS, "--transform", "fast"), "'fast' is not one of"),
    (("in.h5", "out.nii", *UNITS, "--compress", "5"), "--compress 5: in.h5 has 4 coils"),
    (("in.h5", "out.nii", *UNITS, "--density", "hann"), "--density: pipe-menon, ramp, none, or a file"),
    (("in.h5", "out.nii", *UNITS, "--density", "none.npy"), "none.npy: no such file"),
    (("in.h5", "out.nii", *UNITS, "--density", "maps.npy"), "has the shape (4, 32, 32); (readout, sample) = (40, 64)"),
    (("in.h5", "out.nii", *UNITS, "--density", "negative.npy"), "negative.npy: weights must be finite and at least 0"),
    (("in.h5", "out.nii", *UNITS, "--density", "file"), "--density file: in.h5 holds no density weights"),
    (("spiral.npz", "out.nii", "--density", "ramp"), "--density ramp: spiral.npz: ramp weights take straight spokes"),
    (("in.h5", "out.nii", *UNITS, "--sensitivities", "body"), "--sensitivities: walsh, espirit, or a file"),
    (("one.npz", "out.nii", "--sensitivities", "three.npy"), "three.npy: has the shape (3, 32, 32); (slice, coil,"),
    (("one.npz", "out.nii", "--sensitivities", "nan.npy"), "nan.npy: slice 0 holds values that are not finite"),
    (("one.npz", "out.nii", "--sensitivities", "loud.npy"), "loud.npy: slice 0 holds values that are not finite"),
    (("one.npz", "out.nii", "--density", "heavy.npy"), "heavy.npy: weights must be finite and at least 0"),
    (
        ("weighted.npz", "out.nii", "--density", "file", "--frames", "10"),
        "--density file: weighted.npz: weights must be finite and at least 0, and some above 0, which those of slice "
        "0, time 0, readouts 10 to 19 are not; correct them",
    ),
    (
        ("weighted.h5", "out.nii", *UNITS, "--density", "file", "--frames", "10"),
        "--density file: weighted.h5 holds no density weights for slice 0, time 0, readouts 10 to 19;",
    ),
    (("faint.npz", "out.nii"), "faint.npz: its noise is so faint that whitened samples may reach"),
    (("silent.npz", "out.nii"), "silent.npz: its noise is so faint that whitened samples may reach"),
    (("one.npz", "out.nii", "--sensitivities", "text.npy"), "text.npy: not an .npy file of plain numbers"),
    (("one.npz", "out.nii", "--calibration", "3"), "--calibration"),
    (
        ("one.npz", "out.nii", "--sensitivities", "maps.npy", "--calibration", "16"),
        "--calibration belongs to --sensitivities walsh or espirit",
    ),
    (("outer.npz", "out.nii", "--calibration", "16"), "--calibration 16: outer.npz: no sample lies within 8 cycles"),
    (("one.npz", "out.nii", "--field-map", "maps.npy"), "maps.npy: has the shape (4, 32, 32); (slice, [z,] y, x)"),
    (("one.npz", "out.nii", "--field-map", "plane.npy"), "--dwell: one.npz does not state the time between samples"),
    (("one.npz", "out.nii", "--field-map", "plane.npy", "--dwell", "0"), "--dwell"),
    (("one.npz", "out.nii", "--field-map", "steep.npy", "--dwell", "100"), "turns spins apart 6.29e+03 times"),
    (
        ("one.npz", "out.nii", "--field-map", "wavy.npy", "--dwell", "400", "--segments", "2"),
        "--segments 2: so few leave an error of 0.9",
    ),
    (("one.npz", "out.nii", "--field-map", "far.npy", "--dwell", "5"), "far.npy: reaches 1e+300 Hz; it must be in"),
    (("one.npz", "out.nii", "--dwell", "5"), "--dwell belongs to --field-map"),
    (("one.npz", "out.nii", "--segments", "5"), "--segments belongs to --field-map"),
    (("k.cfl", "out.nii"), "k.cfl: BART keeps the trajectory in a file of its own: name it with --trajectory"),
    (("in.h5", "out.nii", "--trajectory", "t.cfl"), "--trajectory"),
    (("k.cfl", "out.nii", "--trajectory", "none.cfl"), "none.hdr: no such file"),
    (("cut.h5", "out.nii", *UNITS), "cut.h5: truncated: the file ends before its HDF5 data does"),
    (("cut.cfl", "out.nii", "--trajectory", "t.cfl"), "cut.cfl: truncated"),
    (("cut.npz", "out.nii"), "cut.npz: not an .npz file"),
    (("untold.h5", "out.nii", *UNITS), "hold no trajectory of 2 or 3 columns"),
    (("coils.h5", "out.nii", *UNITS), "coils.h5: acquisitions differ in their number of coils: 1 has 3, 0 has 4;"),
    (("nan.h5", "out.nii", *UNITS), "nan.h5: acquisition 7, sample 3 of coil 2 is"),
    (("nan.npz", "out.nii"), "nan.npz: spoke 7, sample 3 of coil 2 is"),
    (("still.npz", "out.nii"), "every point of its trajectory is the centre of k-space"),
    (("in.h5", "out"), "out: the name has no suffix; end it with .nii"),
    (("in.h5", "out.dc", *UNITS), "out.dc: unsupported MRI image format .dc"),
    (("in.h5", "out.dcm", *UNITS, "--output-values", "complex"), "out.dcm: DICOM holds magnitudes; choose .nii"),
    (("in.h5", "out.png", *UNITS, "--output-values", "complex"), "out.png: a PNG holds magnitudes; choose .nii"),
    (("in.h5", "out.png", *UNITS, "--window", "3,1"), "--window: auto, or two numbers, low,high, the first smaller"),
    (
        ("in.h5", "out.nii", *UNITS, "--window", "0,1"),
        "--window belongs to .png and .dcm, not to out.nii: leave it out",
    ),
    (("one.npz", "out.dcm"), "out.dcm: DICOM needs the field of view, which the input does not state; choose .nii"),
    (("in.txt", "out.nii"), "in.txt: unsupported raw data format; Millrace reads"),
    (("in.h5", "nowhere/out.nii", *UNITS), "nowhere does not exist"),
    (("k.cfl", "k.cfl", "--trajectory", "t.cfl"), "k.cfl is the input itself"),
    (("k.hdr", "k.cfl", "--trajectory", "t.cfl"), "is the input itself"),
    (("k.cfl", "t.cfl", "--trajectory", "t.hdr"), "is the input itself"),
    (("in.h5", "maps.npy", *UNITS, "--sensitivities", "maps.npy"), "maps.npy is the input itself"),
    (("in.h5", "out.nii", *UNITS, "--memory", "1MiB", "--chunk-bytes", "1GiB"), "--chunk-bytes 1.0 GiB"),
    (("in.h5", "out.nii", *UNITS, "--preview", "out.jpg"), "--preview out.jpg: a preview is a PNG"),
    (("in.h5", "out.nii", "--bogus"), "No such option"),
    (("in.h5",), "Missing argument 'OUTPUT'"),
]


@pytest.fixture(scope="module")
def mistaken_files(tmp_path_factory):
    """Every file that the mistakes name."""
    folder = tmp_path_factory.mktemp("mistakes")
    kspace, points = scan()
    write_h5(folder / "in.h5", slices=2)
    write_npz(folder / "one.npz")
    write_npz(folder / "fov.npz", kspace, points, units=None)
    write_npz(folder / "radians.npz", kspace, points * (2 * np.pi / N), units=None)
    write_npz(folder / "plain.npz", kspace, points * 0.9 / N, units=None, matrix=None)
    write_npz(folder / "still.npz", kspace, points * 0)
    outer = np.linalg.norm(points, axis=2).min(axis=0) > 13
    write_npz(folder / "outer.npz", kspace[..., outer], points[:, outer])
    write_npz(folder / "spiral.npz", kspace, points[:, ::-1] * 0.8 + np.array([3.0, 0]))
    damaged = kspace.copy()
    damaged[2, 7, 3] = np.nan
    write_npz(folder / "nan.npz", damaged, points)
    header = xml((N, N, 1), (160.0, 160.0, 5.0))
    for name, units in (("told", "cycles/pixel"), ("odd", "1/m")):
        told = header.replace("</encoding>", UNITS_TOLD.format(units) + "</encoding>")
        write_ismrmrd(folder / f"{name}.h5", told, readouts(kspace, points / N))
    write_ismrmrd(folder / "nan.h5", header, readouts(damaged, points / N))
    write_ismrmrd(folder / "untold.h5", header, [acquisition(kspace[:, n], None) for n in range(SPOKES)])
    mixed = [acquisition(kspace[: COILS - n % 2, n], points[n] / N) for n in range(SPOKES)]
    write_ismrmrd(folder / "coils.h5", header, mixed)
    (folder / "cut.h5").write_bytes((folder / "in.h5").read_bytes()[:-5000])
    (folder / "cut.npz").write_bytes((folder / "one.npz").read_bytes()[:-100])
    write_cfl(folder / "k", kspace.transpose(2, 1, 0)[None])
    write_cfl(folder / "t", np.concatenate([points, points[..., :1] * 0], axis=2).transpose(2, 1, 0))
    (folder / "cut.hdr").write_bytes((folder / "k.hdr").read_bytes())
    (folder / "cut.cfl").write_bytes((folder / "k.cfl").read_bytes()[:-8])
    maps = coil_maps(COILS, N).astype(np.complex64)
    np.save(folder / "maps.npy", maps)
    np.save(folder / "three.npy", maps[:3])
    np.save(folder / "nan.npy", maps * np.nan)
    np.save(folder / "plane.npy", np.zeros((N, N)))
    np.save(folder / "wavy.npy", np.random.default_rng(0).normal(0, 20, (N, N)))
    np.save(folder / "far.npy", np.full((N, N), 1e300))
    np.save(folder / "loud.npy", maps.astype(complex) * 1e200)
    np.save(folder / "heavy.npy", np.full(points.shape[:2], 1e300))
    weights = np.ones(points.shape[:2]) * ((np.arange(SPOKES) // 10) != 1)[:, None]
    write_npz(folder / "weighted.npz", dcf=weights)
    noise = np.random.default_rng(1).normal(size=(COILS, 100)) * (1 + 1j)
    for name, size in (("faint", 1e-30), ("silent", 1e-43)):
        write_npz(folder / f"{name}.npz", noise=(noise * size).astype(np.complex64))
    columns = np.concatenate([points / N, weights[..., None]], axis=2)
    write_ismrmrd(folder / "weighted.h5", header, readouts(kspace, columns))
    write_npz(folder / "beyond.npz", kspace, points / N * [1.5, 0.9], units="cycles/pixel", matrix=[N, N])
    write_npz(folder / "small.npz", matrix=[8, 8])
    np.save(folder / "steep.npy", np.linspace(-5e5, 5e5, N * N).reshape(N, N))
    np.save(folder / "negative.npy", -np.ones(points.shape[:2]))
    (folder / "text.npy").write_text("no array")
    (folder / "in.txt").write_text("no scan")
    (folder / "out.nii").write_text("an older result")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(case[0])[:70] for case in MISTAKES])
def test_a_mistake_gets_one_line_and_exit_code_2(folder, mistaken_files, mri, arguments, message):
    for name, content in mistaken_files.items():
        Path(name).write_bytes(content)
    code, out, err = mri(*arguments)
    assert err.startswith("millrace: ")
    assert err.count("\n") == 1
    assert message in err
    assert (code, out) == (2, "")
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == mistaken_files
