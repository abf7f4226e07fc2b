"""How a map is cut, halved, resumed and checked: never to be seen in its bits."""

from __future__ import annotations

import math
import shutil
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.coulomb import Cell, Scheme
from pipeline.engine import checkpoints
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.run import RunEvents, run_job
from pipeline.errors import AuditError, DeviceError, OutOfDeviceMemory, ParameterError, StorageError
from pipeline.workloads.common.index_range import IndexRange
from pipeline.workloads.coulomb import Coulomb, CoulombJob
from pipeline.workloads.coulomb import definition as coulomb_definition
from pipeline.workloads.coulomb import lazy_definition as coulomb_definition_compiled
from pipeline.workloads.coulomb.audit import CoulombAudit, relative_errors
from pipeline.workloads.coulomb.combine import combine, scratch_bytes
from pipeline.workloads.coulomb.definition import expectation
from pipeline.workloads.coulomb.frames import ChosenFrames
from pipeline.workloads.coulomb.grid import cut_extents, regions
from tests.images import names_in
from tests.pipeline.workloads.coulomb.coulomb_jobs import (
    BOX,
    KINDS,
    definition,
    job,
    make_map,
    molecule,
    write_npz,
    write_trajectory,
)

GRID = {"origin": "-9.3,1.1,17.7", "shape": "47,31,37", "spacing": "0.35,0.5,0.45"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_npz(tmp_path / "a.npz", molecule(), BOX)
    monkeypatch.setattr(checkpoints, "INTERVAL_SECONDS", 0.05)
    return tmp_path


@pytest.mark.parametrize(
    "options",
    [
        {"scheme": "shift", "cutoff": 5, "exclude_radius": 0.8},
        {"scheme": "taylor2", "cutoff": 6, "dielectric": "4r"},
        {"scheme": "truncate", "cutoff": 4.1, "cell": "none"},
        {"scheme": "direct", "exclude_radius": 0.8},
    ],
    ids=lambda options: options["scheme"],
)
@pytest.mark.parametrize("chunk_bytes", [100_000, 20_000, 9000, 2300])
def test_a_map_in_chunks_has_the_bits_of_the_whole(folder, options, chunk_bytes):
    whole, receipt = make_map(folder, **options, **GRID)
    assert receipt["chunks"] == 1
    parts, receipt = make_map(folder, output="parts.npy", chunk_bytes=chunk_bytes, **options, **GRID)
    assert receipt["chunks"] >= 2
    np.testing.assert_array_equal(whole.view(np.uint32), parts.view(np.uint32))


@pytest.mark.parametrize("how", ["avg", "min", "max", "std"])
def test_combined_frames_in_chunks_and_in_little_memory(tmp_path, how):
    write_trajectory(tmp_path, 5)
    options = {"trajectory": str(tmp_path / "a.dcd"), "cell": "none", "combine": how, **GRID}
    whole, _ = make_map(tmp_path, "a.pqr", **options)
    parts, receipt = make_map(tmp_path, "a.pqr", "parts.npy", chunk_bytes=40_000, memory=1 << 20, **options)
    assert receipt["chunks"] >= 3
    np.testing.assert_array_equal(whole.view(np.uint32), parts.view(np.uint32))


def test_each_frame_goes_where_the_one_before_was(tmp_path):
    """What a GPU does: one array, like the output, that is filled from the host, on a stream."""

    class Settable(np.ndarray):
        def set(self, atoms, stream):
            self[...] = atoms
            stream.calls += ("set",)

    class Stream:
        calls = ()

        def synchronize(self):
            self.calls += ("synchronize",)

    write_trajectory(tmp_path, 4)
    options = {"trajectory": str(tmp_path / "a.dcd"), "cell": "none", **GRID}
    whole, _ = make_map(tmp_path, "a.pqr", **options)
    planned, _ = job(tmp_path, "a.pqr", "again.npy", **options)
    (chunk,), stream = planned.plan.chunks, Stream()
    assert not chunk.inputs
    assert planned.plan.input_bytes == 4 * 60 * 32
    out = np.empty(whole.shape, np.float32).view(Settable)
    planned.job.read(chunk, [])
    planned.job.compute(chunk, [], [out], stream)
    planned.output.discard()
    np.testing.assert_array_equal(out, whole)
    assert stream.calls == ("set", "synchronize") * 4


@pytest.mark.parametrize("kept", [0, 2, 99])
def test_frames_are_the_same_from_memory_and_from_the_file(tmp_path, kept):
    frames = write_trajectory(tmp_path, 5)
    planned, _ = job(tmp_path, "a.pqr", "out.npy", trajectory=str(tmp_path / "a.dcd"), units="e/A", cell="none")
    chosen = planned.job._frames
    held = chosen.cache_at_most((2 + kept) * chosen.nbytes)
    assert held == (2 + min(kept, 5)) * chosen.nbytes
    for _ in range(2):
        for number, expected in enumerate(frames):
            np.testing.assert_array_equal(chosen.atoms(number)[:, :3], expected[:, :3])
            np.testing.assert_allclose(chosen.atoms(number)[:, 3], expected[:, 3], rtol=1e-7)  # float32 on the way
    assert len(chosen._cache) <= kept
    planned.output.discard()


SIZES = st.integers(1, 400)


@settings(max_examples=200, deadline=None)
@given(st.tuples(SIZES, SIZES, SIZES), st.integers(1, 10**6), st.integers(1, 10**6), st.floats(1, 1e6))
def test_chunks_cover_the_grid_once_and_fit(shape, most, wanted, pairs):
    extents = cut_extents(shape, most=most, wanted=wanted, pairs_per_point=pairs)
    assert math.prod(extents) <= most
    counts = [-(-n // extent) for n, extent in zip(shape, extents, strict=True)]
    assert all(1 <= extent <= n for n, extent in zip(shape, extents, strict=True))
    if math.prod(counts) > 5000:
        return
    boxes = list(regions(shape, extents))
    assert sum(math.prod(box.shape) for box in boxes) == math.prod(shape)
    assert len({box.start for box in boxes}) == len(boxes) == math.prod(counts)


def test_slabs_are_of_whole_grains_where_there_is_a_choice():
    wide = {"most": 10**9, "pairs_per_point": 1.0}
    assert cut_extents((300, 200, 250), wanted=10**9, **wide) == (300, 200, 250)
    assert cut_extents((300, 200, 250), wanted=2_000_000, **wide) == (32, 200, 250)
    # One plane is too much.
    assert cut_extents((3000, 2000, 2500), wanted=2_000_000, **wide) == (16, 128, 768)
    # Much work a point: thinner, but a whole grain.
    assert cut_extents((300, 200, 250), wanted=10**9, most=10**9, pairs_per_point=1e5) == (16, 200, 250)


def test_memory_is_bounded_and_grids_larger_than_it_work(folder):
    got, receipt = make_map(
        folder, memory=1 << 20, origin="-30,-30,0", shape="150,160,170", spacing=0.4, cutoff=3, cell="none"
    )
    assert receipt["ring_bytes"] <= 1 << 20 < got.nbytes
    assert receipt["chunks"] > 16


def test_halved_where_the_device_is_short(folder):
    class SmallDevice(CpuDevice):
        def process(self, workload, chunk, slot, record):
            if chunk.output_bytes > 30_000:
                raise OutOfDeviceMemory("no room; lower --chunk-bytes")
            super().process(workload, chunk, slot, record)

    whole, _ = make_map(folder, **GRID, cutoff=5)
    parts, receipt = make_map(folder, output="parts.npy", device=SmallDevice(2), **GRID, cutoff=5)
    assert receipt["halvings"] >= 1
    np.testing.assert_array_equal(whole, parts)


@pytest.mark.parametrize("suffix", [".npy", ".dx", ".dx.gz", ".mrc", ".cube", ".zarr"])
def test_an_interrupted_map_goes_on_where_it_stopped(folder, suffix):
    output, options = f"out{suffix}", {"chunk_bytes": 20_000, "cutoff": 5, **GRID}
    run_job(*job(folder, "a.npz", f"whole{suffix}", **options))
    written, kept = [], []

    def fail_later(chunk):
        written.append(chunk.index)
        if len(written) == 3:
            end = time.monotonic() + 30
            while not list(folder.glob("*.ledger/chunks-*")) and time.monotonic() < end:
                time.sleep(0.005)
            raise DeviceError("the GPU fell off the bus")

    events = RunEvents(on_written=fail_later, on_kept=lambda *counts: kept.append(counts))
    planned = job(folder, "a.npz", output, **options)
    with pytest.raises(DeviceError):
        run_job(*planned, events=events)
    receipt = run_job(*job(folder, "a.npz", output, resume=True, **options))
    assert kept == [(receipt["resumed_chunks"], receipt["chunks"])]
    assert receipt["resumed_chunks"] > 0
    assert receipt["audit"]["samples"] > 290
    if suffix != ".zarr":
        assert (folder / output).read_bytes() == (folder / f"whole{suffix}").read_bytes()
    expected = {"a.npz", output, f"{output}.receipt.json", f"whole{suffix}", f"whole{suffix}.receipt.json"}
    assert names_in(folder) == sorted(expected)


def test_another_trajectory_is_not_resumed(tmp_path):
    write_trajectory(tmp_path, 3)
    options = {"trajectory": str(tmp_path / "a.dcd"), "cell": "none"}
    first, _ = job(tmp_path, "a.pqr", "out.npy", **options)
    before = first.spec.parameters.in_force()
    first.output.discard()
    write_trajectory(tmp_path, 3, seed=9)
    assert first.spec.parameters.in_force() != before


@pytest.mark.parametrize("how", ["avg", "min", "max", "std"])
@pytest.mark.parametrize("frames", [2, 3, 50])
def test_combining_is_exact_in_float64(how, frames):
    maps = np.random.default_rng(frames).normal(1e4, 1, (frames, 3, 4, 5)).astype(np.float32)
    out = np.empty((3, 4, 5), np.float32)
    combine(how, frames, lambda number, room: np.copyto(room, maps[number]), out)
    expected = {"avg": np.mean, "min": np.min, "max": np.max, "std": np.std}[how](maps.astype(np.float64), axis=0)
    np.testing.assert_allclose(out, expected, rtol=1.2e-7)
    assert scratch_bytes(how, frames) >= 4


WRONG = [
    ("one point in five is off", lambda chunk, values: values.ravel().__setitem__(slice(None, None, 5), 7.0), True),
    ("NaN", lambda chunk, values: values.fill(np.nan), True),
    ("mirrored", lambda chunk, values: np.copyto(values, values[::-1].copy()), True),
    ("a ten-thousandth too large", lambda chunk, values: np.multiply(values, np.float32(1.0001), out=values), True),
    ("nothing", lambda chunk, values: None, False),
]


@pytest.mark.parametrize(("change", "is_found"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
@pytest.mark.parametrize("options", [{"cutoff": 5}, {"scheme": "direct"}], ids=["shift", "direct"])
def test_a_wrong_map_is_never_published(folder, monkeypatch, change, is_found, options):
    right = CoulombJob.compute

    def compute(self, chunk, inputs, outputs, stream):
        right(self, chunk, inputs, outputs, stream)
        change(chunk, outputs[0])

    monkeypatch.setattr(CoulombJob, "compute", compute)
    if not is_found:
        make_map(folder, **options, **GRID)
        return
    with pytest.raises(AuditError, match="audit failed at grid point") as caught:
        make_map(folder, **options, **GRID)
    assert not caught.value.worst_error <= caught.value.tolerance < 1e-3
    assert names_in(folder) == ["a.npz"]


# Of one frame, and of many.
def test_one_map_is_audited_by_what_was_worked_out_while_it_was_computed(folder, monkeypatch):
    prepared, prepare = [], CoulombAudit.prepare

    def counted(audit, number, coordinates):
        prepared.append(number)
        prepare(audit, number, coordinates)

    def read_again(_frames, number):
        raise AssertionError(f"frame {number} was read again for the audit")

    monkeypatch.setattr(CoulombAudit, "prepare", counted)
    monkeypatch.setattr(ChosenFrames, "atoms", read_again)
    _got, receipt = make_map(folder, **GRID, cutoff=5)
    assert prepared == [0]
    assert receipt["audit"]["samples"] > 290


BOTH_AUDITS = (expectation, coulomb_definition_compiled.expectation)
both_audits = pytest.mark.parametrize("expectation", BOTH_AUDITS)


@pytest.mark.parametrize("by_distance", [False, True])
@pytest.mark.parametrize(("scheme", "cell"), KINDS)
def test_both_audits_know_the_definition(scheme, by_distance, cell):
    atoms, points = molecule(), np.random.default_rng(1).uniform((-10, 0, 15), (10, 15, 40), (80, 3))
    points[:3] = atoms[:3, :3]
    asked = Scheme(
        name=scheme, cutoff_angstrom=5.7, dielectric=3, distance_dependent=by_distance, exclude_radius_angstrom=0.5
    )
    values, sizes = definition(
        atoms, points, scheme, 5.7, dielectric=3, by_distance=by_distance, exclude=0.5, cell=cell
    )
    for expected in BOTH_AUDITS:
        found = expected(atoms, points, asked, None if cell is None else Cell(vectors=cell.tolist()))
        np.testing.assert_allclose(found.values, values, rtol=1e-9, atol=1e-12, err_msg=expected.__module__)
        np.testing.assert_allclose(found.sizes, sizes, rtol=1e-9)
        assert not found.doubtful.any()
        errors = relative_errors(np.append(values[:-1] + 1e-6 * sizes[:-1], np.nan), found)
        np.testing.assert_allclose(errors[:-1][sizes[:-1] > 0], 1e-6, rtol=1e-3)
        assert errors[-1] == np.inf


@pytest.mark.parametrize(("scheme", "cell"), [("truncate", None), ("shift", BOX), ("direct", None)])
def test_the_audit_takes_atoms_a_few_at_a_time(monkeypatch, scheme, cell):
    """However many threads there are: the sums do not depend on them. The cutoff is half the cell's shortest width."""
    atoms, points = molecule(301), np.random.default_rng(2).uniform((-10, 0, 15), (10, 15, 40), (17, 3))
    asked = Scheme(name=scheme, cutoff_angstrom=6.5, exclude_radius_angstrom=0.5)
    monkeypatch.setattr(coulomb_definition, "_TOGETHER", 200)
    monkeypatch.setattr(coulomb_definition, "_ALL_TOGETHER", 200)
    found = []
    for a_thread in (1 << 30, 1):
        monkeypatch.setattr(coulomb_definition, "_A_THREAD", a_thread)
        monkeypatch.setattr(coulomb_definition, "_ALL_A_THREAD", a_thread)
        found.append(expectation(atoms, points, asked, None if cell is None else Cell(vectors=cell.tolist())))
    values, sizes = definition(atoms, points, scheme, 6.5, exclude=0.5, cell=cell)
    np.testing.assert_allclose(found[0].values, values, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found[0].sizes, sizes, rtol=1e-9)
    for one, other in zip(vars(found[0]).values(), vars(found[1]).values(), strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


@both_audits
def test_what_rounding_decides_is_in_doubt(expectation):
    """A charge at the cutoff, one at the edge of what is excluded, and one on either side of each."""
    atoms = np.array([[5.0, 0, 0, 2.0], [0, 100, 0, 3.0], [0, 101, 0, 1.0]])
    points = np.array([[0.0, 0, 0], [1e-4, 0, 0], [-1e-4, 0, 0], [0.5, 100, 0], [0.4999, 100, 0], [0.5001, 100, 0]])
    asked = Scheme(name="truncate", cutoff_angstrom=5, exclude_radius_angstrom=0.5, dielectric=4)
    found = expectation(atoms, points, asked, None)
    near, far = 3 / 0.5 / 4, 1 / math.hypot(0.5, 1) / 4
    np.testing.assert_allclose(found.doubtful, [2 / 5 / 4, 0, 0, near + far, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(found.values[[0, 1, 2, 4]], [2 / 5 / 4, 2 / 4.9999 / 4, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(found.values[[3, 5]], near + far, rtol=1e-3)
    assert found.counted.tolist() == [1, 1, 0, 2, 2, 2]
    # Two of its images are as near as each other, at half the cell's width: one of them counts.
    found = expectation(
        np.array([[7.0, 0, 0, 2.0]]), np.zeros((1, 3)), Scheme(cutoff_angstrom=7), Cell.from_lengths(14, 15, 16)
    )
    assert found.counted.tolist() == [1]


def test_points_far_from_every_atom_are_zero_and_audited(folder):
    got, receipt = make_map(folder, origin="100,100,100", shape="9,9,9", cutoff=5, cell="none")
    assert not got.any()
    assert receipt["audit"]["worst_error"] == 0


def test_a_compressed_map_needs_room_for_its_samples_alone(folder, monkeypatch):
    disk = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=220_000))
    job(folder, "a.npz", "out.dx.gz", cutoff=5, **GRID)[0].output.discard()
    with pytest.raises(StorageError, match=r"takes [67]\d\d,\d+ bytes .* as OpenDX"):
        job(folder, "a.npz", "out.dx", cutoff=5, **GRID)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=1000))
    with pytest.raises(StorageError, match=r"takes 215,\d+ bytes .* even before it is compressed"):
        job(folder, "a.npz", "out.dx.gz", cutoff=5, **GRID)


def test_space_that_the_job_itself_has_taken_counts_as_free(folder, monkeypatch):
    disk = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=1000))
    with pytest.raises(StorageError, match=r"takes 215,\d+ bytes .* as NPY, and 1,000 bytes are free"):
        job(folder, "a.npz", "out.npy", cutoff=5, **GRID)
    (folder / "out.npy.partial").write_bytes(bytes(215_000))
    planned, _ = job(folder, "a.npz", "out.npy", cutoff=5, **GRID)
    planned.output.discard()
    (folder / "out.zarr.partial").mkdir()
    (folder / "out.zarr.partial" / "c").write_bytes(bytes(215_000))
    planned, _ = job(folder, "a.npz", "out.zarr", cutoff=5, **GRID)
    planned.output.discard()


def test_a_map_that_an_empty_disk_would_not_take_is_a_mistake(folder, monkeypatch):
    disk = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(total=10_000, free=1000))
    with pytest.raises(ParameterError, match=r"takes 215,\d+ bytes .* as NPY, and 1,000 bytes are free"):
        job(folder, "a.npz", "out.npy", cutoff=5, **GRID)


def test_too_many_atoms_for_the_memory(folder):
    write_npz(folder / "many.npz", molecule(9000))
    with pytest.raises(ParameterError, match=r"--memory is too small: a single point .* for the atoms that reach it"):
        job(folder, "many.npz", "out.npy", memory=3 << 20, device=CpuDevice(16), **GRID)


@pytest.mark.parametrize("cell", [None, np.diag([200.0, 60.0, 60.0])], ids=["free", "box"])
def test_a_slot_holds_the_atoms_that_reach_its_slab(folder, cell):
    """All of them would not fit."""
    atoms = molecule(20_000, extent=(70, 8, 8))
    write_npz(folder / "long.npz", atoms, cell)
    grid = {"origin": "-7,3,20", "shape": "101,5,6", "spacing": "1,2,2", "cutoff": 4, "units": "e/A"}
    planned, _ = job(folder, "long.npz", "out.npy", memory=7 << 20, device=CpuDevice(16), chunk_bytes=200_000, **grid)
    assert len(planned.plan.chunks) > 3
    assert planned.plan.input_bytes == 20_000 * 32 > planned.budget.budget_bytes
    assert all(chunk.input_bytes + chunk.output_bytes <= planned.budget.budget_bytes for chunk in planned.plan.chunks)
    planned.output.discard()
    whole, _ = make_map(folder, "long.npz", "whole.npy", **grid)
    parts, receipt = make_map(
        folder, "long.npz", "parts.npy", memory=7 << 20, device=CpuDevice(16), chunk_bytes=200_000, **grid
    )
    assert receipt["read_bytes"] == 20_000 * 32
    np.testing.assert_array_equal(whole.view(np.uint32), parts.view(np.uint32))


def test_frames_are_named_one_way():
    asked = Coulomb.Parameters(frames="::")
    assert asked.in_force()["frames"] == Coulomb.Parameters().in_force()["frames"] == str(IndexRange())
