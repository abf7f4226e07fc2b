"""`millrace verify`: what is as it was made passes, what was changed is named, and nothing is written."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import tifffile

from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.run import RunOptions
from pipeline.engine.verify import JUDGED, Verification, recorded_job
from pipeline.workloads import workload_named
from pipeline.workloads.smoothing import SmoothingJob
from tests.images import names_in, read_image, version, write_image
from tests.pipeline.workloads.coulomb.coulomb_jobs import molecule, write_pqr, write_trajectory
from tests.pipeline.workloads.mri.mri_jobs import volume, write_h5

CPU = ("--device", "cpu", "--threads", "2")
SHAPE = (307, 211, 3)
DIFFERS = re.compile(
    r"millrace: (\S+): 1 of (\d+) chunks? computed again on cpu differs; the first: samples \((.*?)\) to \((.*?)\) "
    r"\((\w+)\): \((.*?)\) holds (\S+), computed again (\S+?)[ ;].*make the result again, or restore it\n"
)


@pytest.fixture
def folder(tmp_path, monkeypatch, own_settings):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def image(path, dtype=np.uint16, shape=SHAPE):
    rng = np.random.default_rng(3)
    samples = rng.integers(0, 256 if dtype == np.uint8 else 65536, shape) if np.dtype(dtype).kind == "u" else None
    return write_image(path, (rng.normal(size=shape) if samples is None else samples).astype(dtype))


def made(millrace, *arguments):
    assert millrace("run", *arguments, *CPU, "--quiet") == (0, "", "")


def verified(millrace, output, *options):
    """Every chunk, in JSON; the folder is as it was."""
    before = names_in(output.parent), version(output), version(output.with_name(f"{output.name}.receipt.json"))
    code, out, err = millrace("verify", output, "--chunks", "all", "--json", *CPU, *options)
    after = names_in(output.parent), version(output), version(output.with_name(f"{output.name}.receipt.json"))
    assert after == before
    assert code in (0, 6)
    assert bool(err) == (code == 6)
    found = json.loads(out)
    assert bool(found["differences"]) == (code == 6)
    return found, err


def place_in(err):
    """The region that a message names and the sample in it, and what the file holds there."""
    _, _, start, stop, _, place, held, computed = DIFFERS.fullmatch(err).groups()
    start, stop, place = (tuple(int(n) for n in text.split(",") if n) for text in (start, stop, place))
    assert all(low <= index < high for low, index, high in zip(start, place, stop, strict=True))
    return place, held, computed


# Images


@pytest.mark.parametrize("name", ["out.tif", "out.npy", "out.zarr", "out.png", "out.ppm"])
def test_integers_are_identical_however_they_were_cut_and_computed(folder, millrace, name):
    image(folder / "in.tif")
    made(millrace, "smooth", "in.tif", name, "--size", "5", "--chunk-bytes", "200KB")
    for options in (("--memory", "2MiB"), ("--chunk-bytes", "50KB"), ()):
        found, _ = verified(millrace, folder / name, *options)
        assert (found["identical"], found["worst_error"], found["differences"]) == (True, 0, [])
        assert len(found["verified"]) == found["chunks"]
    assert found["chunks"] == 1


@pytest.mark.slow
def test_a_result_of_several_workers_is_identical(folder, millrace):
    image(folder / "in.tif")
    run = ("run", "smooth", "in.tif", "out.tif", "--filter", "gaussian", "--sigma", "2", "--chunk-bytes", "100KB")
    assert millrace(*run, "--workers", "2", "--device", "cpu", "--quiet") == (0, "", "")
    found, _ = verified(millrace, folder / "out.tif")
    assert found["identical"]


def test_as_many_chunks_as_asked_for_and_a_line(folder, millrace):
    image(folder / "in.tif")
    made(millrace, "smooth", "in.tif", "out.tif")
    code, out, err = millrace("verify", "out.tif", "--chunk-bytes", "50KB", *CPU)
    assert (code, err) == (0, "")
    assert re.fullmatch(r"out.tif: 8 of \d\d chunks computed again on cpu, identical bits\n", out)
    code, out, _ = millrace("verify", "out.tif", "--chunk-bytes", "50KB", "--chunks", "3", "--json", *CPU)
    assert len(json.loads(out)["verified"]) == 3
    assert millrace("verify", "out.tif", "--quiet", *CPU) == (0, "", "")
    assert names_in(folder) == ["in.tif", "out.tif", "out.tif.receipt.json"]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32, np.float64])
def test_one_changed_sample_is_found_and_named(folder, millrace, dtype):
    image(folder / "in.tif", dtype)
    made(millrace, "smooth", "in.tif", "out.tif", "--size", "3")
    samples, place = read_image(folder / "out.tif"), (201, 17, 1)
    right = samples[place]
    samples[place] = right + 1
    write_image(folder / "out.tif", samples)
    found, err = verified(millrace, folder / "out.tif", "--chunk-bytes", "50KB")
    assert len(found["differences"]) == 1 < found["chunks"]
    at, held, computed = place_in(err)
    assert at == place
    assert (float(held), float(computed)) == (pytest.approx(float(right + 1)), pytest.approx(float(right)))


def test_every_region_that_differs_is_in_json(folder, millrace):
    image(folder / "in.tif")
    made(millrace, "smooth", "in.tif", "out.npy")
    samples = np.load(folder / "out.npy", mmap_mode="r+")
    samples[::100, 0, 0] ^= 1
    samples.flush()
    found, err = verified(millrace, folder / "out.npy", "--chunk-bytes", "20KB")
    starts = [tuple(each["start"]) for each in found["differences"]]
    assert starts == sorted(starts)
    assert len(starts) == 4
    assert f"4 of {found['chunks']} chunks computed again on cpu differ; the first: samples {starts[0]} to" in err


def test_floats_are_judged_by_the_definition(folder, millrace, monkeypatch):
    """As far as another device's rounding goes they pass; one sample that is off by more does not."""
    image(folder / "in.tif", np.float32)
    made(millrace, "smooth", "in.tif", "out.tif", "--filter", "gaussian", "--sigma", "1.5")
    right = read_image(folder / "out.tif")
    samples = (right * (1 + 3e-7 * np.random.default_rng(1).choice((-1, 1), right.shape))).astype(np.float32)
    samples[4, 5, 1] = -0.0 if samples[4, 5, 1] == 0 else samples[4, 5, 1]
    write_image(folder / "out.tif", samples)
    found, _ = verified(millrace, folder / "out.tif", "--chunk-bytes", "50KB")
    assert not found["identical"]
    assert 0 < found["worst_error"] < 1e-6
    code, out, _ = millrace("verify", "out.tif", *CPU)
    assert code == 0
    assert "1 of 1 chunk computed again on cpu, equal within the tolerance: worst difference" in out
    for wrong in (right[200, 100, 2] + np.float32(1e-3), np.float32(np.nan), np.float32(np.inf)):
        samples[200, 100, 2] = wrong
        write_image(folder / "out.tif", samples)
        found, err = verified(millrace, folder / "out.tif", "--chunk-bytes", "50KB")
        assert place_in(err)[0] == (200, 100, 2)
    assert samples.size > 100 * JUDGED
    # Of a job whose reference knows its own places alone, what counts is the largest value of the chunk.
    monkeypatch.setattr(SmoothingJob, "reference", lambda job: SimpleNamespace(places=np.empty((0, 3), np.int64)))
    found, err = verified(millrace, folder / "out.tif", "--chunk-bytes", "50KB")
    assert place_in(err)[0] == (200, 100, 2)
    assert "tolerated" in err
    samples[200, 100, 2] = right[200, 100, 2]
    write_image(folder / "out.tif", samples)
    assert verified(millrace, folder / "out.tif")[0]["differences"] == []


def test_nan_and_infinities_are_values_like_others(folder, millrace):
    samples = np.random.default_rng(5).normal(size=(307, 101)).astype(np.float32)
    samples[samples > 2.5], samples[samples < -3] = np.nan, np.inf
    write_image(folder / "in.npy", samples, "YX")
    made(millrace, "smooth", "in.npy", "out.npy", "--mode", "constant", "--cval", "nan")
    assert np.isnan(np.load("out.npy")).any()
    assert verified(millrace, folder / "out.npy", "--chunk-bytes", "20KB")[0]["differences"] == []


def test_a_page_alone_has_lost_its_axis(folder, millrace):
    write_image(folder / "in.npy", np.random.default_rng(5).integers(0, 255, (1, 40, 50)).astype(np.uint8), "ZYX")
    made(millrace, "smooth", "in.npy", "out.tif")
    assert tifffile.imread(folder / "out.tif").ndim == 2
    assert verified(millrace, folder / "out.tif")[0]["identical"]


def test_a_result_of_another_shape_or_that_does_not_decode_differs(folder, millrace):
    image(folder / "in.tif")
    made(millrace, "smooth", "in.tif", "out.zarr")
    largest = max((path for path in (folder / "out.zarr").rglob("*")), key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(content[: len(content) // 2])
    found, err = verified(millrace, folder / "out.zarr", "--chunk-bytes", "50KB")
    assert "does not decode" in found["differences"][0]["what"]
    assert "does not decode" in err
    made(millrace, "smooth", "in.tif", "out.tif")
    image(folder / "out.tif", shape=(5, 6, 3))
    code, out, err = millrace("verify", "out.tif", *CPU)
    assert (code, out) == (6, "")
    assert "holds 5 × 6 × 3 uint16, and its job makes 307 × 211 × 3 uint16" in err
    (folder / "out.tif").write_bytes(b"II*\0")
    code, _, err = millrace("verify", "out.tif", *CPU)
    assert code == 6
    assert "out.tif" in err


# Maps


@pytest.mark.parametrize("name", ["out.dx", "out.dx.gz", "out.cube", "out.mrc", "out.map", "out.zarr", "out.npy"])
def test_maps_in_every_format(folder, millrace, name):
    write_pqr(folder / "in.pqr", molecule())
    made(millrace, "coulomb", "in.pqr", name, "--spacing", "1", "--cutoff", "5")
    found, _ = verified(millrace, folder / name, "--chunk-bytes", "4KB")
    assert (found["identical"], found["worst_error"], found["differences"]) == (True, 0, [])
    assert found["chunks"] > 3
    _, out, _ = millrace("verify", name, *CPU)
    assert ("identical digits" in out) == (name in ("out.dx", "out.dx.gz", "out.cube"))


@pytest.mark.parametrize("name", ["out.dx", "out.dx.gz", "out.cube", "out.mrc", "out.npy"])
def test_a_changed_byte_of_a_map_is_found(folder, millrace, name):
    write_pqr(folder / "in.pqr", molecule())
    made(millrace, "coulomb", "in.pqr", name, "--spacing", "1")
    path = folder / name
    content = bytearray(gzip.decompress(path.read_bytes()) if name.endswith("gz") else path.read_bytes())
    if name in ("out.mrc", "out.npy"):
        content[-4 * 1000 - 1] ^= 1  # the last bit of the exponent but one: twice or half the value
    else:
        place = re.search(rb"\n(\d)\.\d+[eE]\+01", content).start(1)
        content[place] = ord("1") if content[place] != ord("1") else ord("7")
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else bytes(content))
    found, err = verified(millrace, path, "--chunk-bytes", "4KB")
    assert len(found["differences"]) == 1 < found["chunks"]
    _, held, computed = place_in(err)
    assert held != computed
    assert "as the audit has it" in err


@pytest.mark.slow
def test_frames_of_a_trajectory(folder, millrace):
    write_trajectory(folder, 5)
    for combine in ("avg", "std"):
        made(millrace, "coulomb", "a.pqr", "out.npy", "--trajectory", "a.dcd", "--spacing", "1", "--combine", combine)
        assert verified(millrace, folder / "out.npy", "--chunk-bytes", "4KB")[0]["identical"]
    values = np.load("out.npy", mmap_mode="r+")
    values[3, 4, 5] *= 1.01
    values.flush()
    _, err = verified(millrace, folder / "out.npy", "--chunk-bytes", "4KB")
    assert place_in(err)[0] == (3, 4, 5)


# Series


@pytest.mark.parametrize("name", ["out.nii", "out.nii.gz", "out.cfl", "out.npy", "out.zarr"])
@pytest.mark.parametrize("kept", ["magnitude", "complex"])
def test_series_in_every_format(folder, millrace, name, kept):
    write_h5(folder / "in.h5", slices=2, repetitions=2)
    made(millrace, "mri", "in.h5", name, "--traj-units", "cycles/pixel", "--output-values", kept)
    found, _ = verified(millrace, folder / name)
    assert (found["differences"], found["chunks"]) == ([], 4)
    assert found["worst_error"] < 1e-3


@pytest.mark.parametrize("name", ["out.nii", "out.npy", "out.cfl"])
def test_a_changed_pixel_of_a_series_is_found(folder, millrace, name):
    write_h5(folder / "in.h5", slices=3)
    made(millrace, "mri", "in.h5", name, "--traj-units", "cycles/pixel", "--output-values", "complex")
    path = folder / name
    content = bytearray(path.read_bytes())
    image_bytes = 32 * 32 * 8
    content[-image_bytes - 1] ^= 0x40  # the sign of an exponent, of the second slice's last pixel
    path.write_bytes(content)
    found, err = verified(millrace, path)
    assert len(found["differences"]) == 1
    assert place_in(err)[0] == (0, 1, 31, 31)


def test_a_volume_whose_samples_are_read_in_parts(folder, millrace):
    volume(folder / "in.npz")
    made(millrace, "mri", "in.npz", "out.nii", "--split", "coils", "--traj-units", "cycles/fov")
    assert verified(millrace, folder / "out.nii")[0]["differences"] == []


# Inputs and receipts


def test_a_changed_input_is_refused_and_a_moved_one_is_named(folder, millrace):
    image(folder / "in.tif")
    made(millrace, "smooth", "in.tif", "out.tif")
    (folder / "elsewhere").mkdir()
    (folder / "in.tif").rename(folder / "elsewhere" / "moved.tif")
    code, out, err = millrace("verify", "out.tif", *CPU)
    assert (code, out) == (2, "")
    assert "in.tif: no such file" in err
    moved = ("--input", "elsewhere/moved.tif")
    assert verified(millrace, folder / "out.tif", *moved)[0]["identical"]
    samples = read_image(folder / "elsewhere" / "moved.tif")
    samples[0, 0, 0] ^= 1
    write_image(folder / "elsewhere" / "moved.tif", samples)
    code, out, err = millrace("verify", "out.tif", *moved, *CPU)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "moved.tif: is not the input that the result was made from" in err


@pytest.mark.parametrize("name", ["in.tif", "in.zarr"])
def test_without_a_digest_sizes_and_times_count(folder, millrace, monkeypatch, name):
    monkeypatch.setattr("pipeline.engine.identity.HASHED_UP_TO_BYTES", 0)
    image(folder / name)
    made(millrace, "smooth", name, "out.tif")
    assert verified(millrace, folder / "out.tif")[0]["identical"]
    image(folder / name)
    code, _, err = millrace("verify", "out.tif", *CPU)
    assert code == 2
    assert "is not the input that the result was made from" in err


def test_an_input_that_changes_meanwhile_is_told(folder, millrace, monkeypatch):
    image(folder / "in.tif")
    made(millrace, "smooth", "in.tif", "out.tif")
    read = SmoothingJob.read

    def changing(self, chunk, inputs):
        read(self, chunk, inputs)
        image(folder / "in.tif", np.uint8)

    monkeypatch.setattr(SmoothingJob, "read", changing)
    code, _, err = millrace("verify", "out.tif", *CPU)
    assert code == 2
    assert "in.tif: changed while it was read" in err


def test_a_changed_further_file_is_refused(folder, millrace):
    write_trajectory(folder, 3)
    made(millrace, "coulomb", "a.pqr", "out.npy", "--trajectory", "a.dcd", "--spacing", "1")
    write_trajectory(folder, 4)
    code, _, err = millrace("verify", "out.npy", *CPU)
    assert code == 2
    assert "out.npy: was made with trajectory" in err


def edited(folder, change):
    path = folder / "out.npy.receipt.json"
    receipt = json.loads(path.read_text())
    change(receipt)
    path.write_text(json.dumps(receipt))


def test_older_receipts_do_where_their_parameters_suffice(folder, millrace):
    image(folder / "in.tif")
    options = ("--filter", "gaussian", "--sigma", "1,2", "--radius", "3", "--mode", "constant", "--cval", "7")
    made(millrace, "smooth", "in.tif", "out.npy", *options)
    edited(folder, lambda receipt: receipt.pop("request"))
    assert verified(millrace, folder / "out.npy")[0]["identical"]
    write_trajectory(folder, 3)
    made(millrace, "coulomb", "a.pqr", "out.npy", "--trajectory", "a.dcd", "--spacing", "1")
    edited(folder, lambda receipt: receipt.pop("request"))
    code, _, err = millrace("verify", "out.npy", *CPU)
    assert code == 2
    assert "out.npy.receipt.json: is of an older version" in err


DAMAGE = [
    (lambda receipt: receipt.pop("input"), "is damaged, or not a receipt of Millrace"),
    (lambda receipt: receipt.update(input="in.tif"), "is damaged, or not a receipt of Millrace"),
    (lambda receipt: receipt.pop("audit"), "is damaged, or not a receipt of Millrace"),
    (lambda receipt: receipt.update(request=3), "is damaged, or not a receipt of Millrace"),
    (lambda receipt: receipt.update(request={"sizes": 3}), "do not fit this version of smooth"),
    (lambda receipt: receipt.update(workload="sharpen"), "there is no workload 'sharpen' here"),
]


@pytest.mark.parametrize(("change", "said"), DAMAGE)
def test_damaged_receipts(folder, millrace, change, said):
    image(folder / "in.tif")
    made(millrace, "smooth", "in.tif", "out.npy")
    edited(folder, change)
    code, out, err = millrace("verify", "out.npy", *CPU)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_what_is_missing_and_what_is_no_count(folder, millrace):
    image(folder / "in.tif")
    assert millrace("verify", "in.tif", *CPU) == (
        2, "", "millrace: in.tif: has no receipt (in.tif.receipt.json), so it cannot be verified\n"
    )  # fmt: skip
    for content, said in ((b"{", "is damaged"), (b"\xff", "is damaged"), (b"[]", "is damaged")):
        (folder / "in.tif.receipt.json").write_bytes(content)
        code, out, err = millrace("verify", "in.tif", *CPU)
        assert (code, out) == (2, "")
        assert f"in.tif.receipt.json: {said}" in err
    assert millrace("verify", "none.tif") == (2, "", "millrace: none.tif: no such file; check the path\n")
    for count in ("0", "-1", "some", "1.5"):
        code, _, err = millrace("verify", "in.tif", "--chunks", count)
        assert (code, err) == (2, f"millrace: --chunks {count}: must be a whole number above 0, or all\n")


def test_the_result_may_have_moved_too(folder, millrace):
    image(folder / "in.tif")
    made(millrace, "smooth", "in.tif", "out.tif")
    (folder / "kept").mkdir()
    for name in ("out.tif", "out.tif.receipt.json"):
        shutil.move(name, "kept")
    assert verified(millrace, folder / "kept" / "out.tif")[0]["identical"]


@pytest.mark.parametrize("cut_until", [1, 2])
def test_chunks_that_do_not_fit_the_device_are_halved(folder, millrace, monkeypatch, cut_until):
    from pipeline.errors import OutOfDeviceMemory

    image(folder / "in.tif")
    made(millrace, "smooth", "in.tif", "out.tif")
    process, plans = CpuDevice.process, []

    def short(self, job, chunk, slot, record):
        if len(plans) < cut_until:
            raise OutOfDeviceMemory("no room")
        process(self, job, chunk, slot, record)

    monkeypatch.setattr(CpuDevice, "process", short)
    options = RunOptions(memory_bytes=64 << 20)
    with Verification(recorded_job(folder / "out.tif"), CpuDevice(1), options, 3) as verification:
        found = verification.run(on_recut=plans.append)
    assert found.identical
    assert found.chunks >= 2**cut_until
    assert len(plans) == cut_until


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("smooth", {"size": "3,5", "mode": "constant", "cval": "nan"}),
        ("coulomb", {"trajectory": "a.dcd", "cell": [1, 2, 3], "dielectric": "4r", "spacing": "1,1,2"}),
        ("mri", {"trajectory": "t.cfl", "matrix": "64x64", "density": "d.npy", "slices": "1:3", "tolerance": "0"}),
    ],
)
def test_a_request_makes_the_same_parameters_again(name, given):
    parameters = workload_named(name).Parameters(**given)
    request = json.loads(json.dumps(parameters.request()))
    assert set(request) == set(given)
    again = workload_named(name).Parameters(**request)
    assert json.dumps(again.in_force()) == json.dumps(parameters.in_force())
