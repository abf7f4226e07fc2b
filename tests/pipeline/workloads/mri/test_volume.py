"""Coils a few at a time and split over ranks: the image of one device, whatever their number, whoever dies."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from pipeline.cluster.communicators.nccl import NcclCommunicator
from pipeline.cluster.gang import gang_stream
from pipeline.errors import InputError, OutOfDeviceMemory, ParameterError, RankLost
from pipeline.formats.kspace.npz import NpzKSpace
from pipeline.workloads import mri
from pipeline.workloads.mri.reconstruction import volume as mri_volume
from tests.images import read_image
from tests.kernels.sense.phantom import normalised_error
from tests.pipeline.cluster.dask.thread_workers import ThreadWorkers
from tests.pipeline.cluster.processes import run
from tests.pipeline.formats.kspace.raw_mri import NOISE_FLAG, acquisition
from tests.pipeline.workloads.mri.mri_jobs import COILS, images, job, shared_images, volume, write_h5, write_npz

# Additions in another order, in float32, through the iterations of the image.
TOLERANCE = 2e-4
EIGHT = {"iterations": 8, "tolerance": 0.0, "output_values": "complex"}
KINDS = {
    "plain": {},
    "compressed": {"compress": 3},
    "gridding": {"method": "gridding", "density": "none", "iterations": 10, "tolerance": 1e-4},
    "espirit": {"sensitivities": "espirit", "calibration": 12},
    "maps of a file": {"sensitivities": "maps.npy"},
    "off resonance": {"field_map": "field.npy", "dwell": 20.0, "sensitivities": "maps.npy"},
}


def options_of(kind, folder, n=10):
    r = (np.arange(n) - n // 2) / n
    np.save(folder / "maps.npy", np.random.default_rng(0).normal(size=(5, n, n, n)) + 2)
    np.save(folder / "field.npy", 100 * np.exp(-(r[:, None, None] ** 2 + r[:, None] ** 2 + r**2) / 0.05))
    options = EIGHT | KINDS[kind]
    return {name: str(folder / value) if str(value).endswith(".npy") else value for name, value in options.items()}


@pytest.mark.parametrize(
    ("ranks", "kind"), [(1, "plain"), (3, "plain"), *((2, kind) for kind in KINDS if kind != "plain")]
)
def test_any_number_of_ranks_makes_the_image_of_one(tmp_path, ranks, kind):
    options = options_of(kind, tmp_path)
    source = volume(tmp_path / "a.npz")
    if kind == "espirit":
        source = write_npz(tmp_path / "b.npz")
    expected, alone = images(source, tmp_path / "one.npy", **options)
    found, receipt = shared_images(source, tmp_path / "out.npy", ThreadWorkers(ranks), ranks, **options)
    assert normalised_error(found, expected) < TOLERANCE
    assert receipt["audit"]["samples"] == alone["audit"]["samples"]
    image = receipt["image"]
    assert image.get("split") == (f"{image['channels']} channels over {ranks} ranks" if ranks > 1 else None)
    assert image["coil_maps"] == "on the device"
    # Each rank reads the coils of all; to find what is worth keeping of them, they share one more reading.
    assert receipt["stages"]["read"]["bytes"] == (ranks + ("compress" in options)) * receipt["read_bytes"]
    if "convergence" in alone["image"]:
        np.testing.assert_allclose(image["convergence"], alone["image"]["convergence"], rtol=0.02, atol=1e-6)


def test_several_images_and_whitened_coils(tmp_path):
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(COILS, 512)) + 1j * rng.normal(size=(COILS, 512))
    source = write_h5(tmp_path / "a.h5", slices=2, noise=[acquisition(noise, None, flags=NOISE_FLAG)])
    options = {"traj_units": "cycles/pixel", "iterations": 4, "tolerance": 0.0}
    expected, _ = images(source, tmp_path / "one.npy", **options)
    found, receipt = shared_images(source, tmp_path / "out.npy", ThreadWorkers(2), 2, **options)
    assert receipt["chunks"] == 2
    assert normalised_error(found, expected) < TOLERANCE


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["llr", "tv-time", "basis", "basis, llr"])
def test_times_and_coefficients_that_are_one_problem_share_coils_too(tmp_path, kind, ranks):
    """In parts, and on several ranks, the images are those of one device that holds all."""
    rng, source = np.random.default_rng(2), volume(tmp_path / "a.npz")
    np.save(tmp_path / "maps.npy", rng.normal(size=(5, 10, 10, 10)) + 2)
    np.save(tmp_path / "basis.npy", np.linalg.qr(rng.normal(size=(4, 2)))[0])
    options = EIGHT | {"sensitivities": str(tmp_path / "maps.npy"), "frames": 10}
    if "basis" in kind:
        options["basis"] = str(tmp_path / "basis.npy")
    if penalty := kind.removeprefix("basis").removeprefix(", "):
        options |= {"regularizer": penalty, "strength": "0.01"}
    expected, alone = images(source, tmp_path / "one.npy", **options)
    if ranks == 1:
        found, receipt = images(source, tmp_path / "parts.npy", split="coils", **options)
    else:
        found, receipt = shared_images(source, tmp_path / "parts.npy", ThreadWorkers(ranks), ranks, **options)
    assert len(found) == (2 if "basis" in kind else 4)
    assert normalised_error(found, expected) < TOLERANCE
    assert receipt["image"]["coil_maps"] == "on the device"
    assert receipt["audit"]["samples"] == alone["audit"]["samples"]
    if ranks > 1:
        assert receipt["stages"]["read"]["bytes"] == ranks * 5 * 2400 * 8


def test_one_device_takes_coils_a_few_at_a_time_too(tmp_path):
    source = volume(tmp_path / "a.npz", coils=9)
    expected, _ = images(source, tmp_path / "one.npy", **EIGHT)
    found, receipt = images(source, tmp_path / "parts.npy", split="coils", **EIGHT)
    assert normalised_error(found, expected) < TOLERANCE
    assert receipt["read_bytes"] == 9 * 2400 * 8
    assert "split" not in receipt["image"]


# A rank is lost


@pytest.mark.parametrize("kind", ["plain", "maps of a file"])
def test_a_rank_lost_on_the_way_costs_an_iteration(tmp_path, monkeypatch, kind):
    """The survivors go on with the iteration that any of them has come to."""
    options = options_of(kind, tmp_path) | {"tolerance": 1e-6}
    source = volume(tmp_path / "a.npz")
    expected, alone = images(source, tmp_path / "one.npy", **options)
    workers = ThreadWorkers(3)
    victim, started, killed = sorted(workers.last_heard())[1], [], []
    original = mri_volume.cg_sense

    def watched(normal, right, *, progress, on_iteration, **how):
        started.append(progress.number)

        def told(number, residual):
            if number == 4 and not killed:
                killed.append(victim)
                workers.kill(victim)
            on_iteration(number, residual)

        return original(normal, right, progress=progress, on_iteration=told, **how)

    monkeypatch.setattr(mri_volume, "cg_sense", watched)
    found, receipt = shared_images(source, tmp_path / "out.npy", workers, 3, **options)
    assert started[:3] == [0, 0, 0]
    assert set(started[3:]) <= {4, 5}
    assert len(started) == 5
    assert normalised_error(found, expected) < TOLERANCE
    assert receipt["image"]["split"] == "5 channels over 2 ranks"
    np.testing.assert_allclose(receipt["image"]["convergence"], alone["image"]["convergence"], rtol=0.02, atol=1e-6)


def test_half_of_anothers_progress_counts_for_none(tmp_path, monkeypatch):
    """Who follows a leader that is lost meanwhile begins anew, and does not lead the rest with what it has got."""
    source = volume(tmp_path / "a.npz")
    expected, _ = images(source, tmp_path / "one.npy", **EIGHT)
    workers, sent = ThreadWorkers(3), []
    leader, _, victim = sorted(workers.last_heard())
    broadcast = NcclCommunicator.broadcast

    def confirm(communicator):
        if (communicator.epoch, communicator.rank) == (1, 1):
            workers.kill(victim)
            raise RankLost("rank 2 is gone")

    def broadcasts(communicator, array, *, root):
        if (communicator.epoch, communicator.rank) == (2, 0):
            sent.append(array.shape)
            if len(sent) == 2:
                workers.kill(leader)
        return broadcast(communicator, array, root=root)

    monkeypatch.setattr(NcclCommunicator, "confirm", confirm)
    monkeypatch.setattr(NcclCommunicator, "broadcast", broadcasts)
    found, _ = shared_images(source, tmp_path / "out.npy", workers, 3, **EIGHT)
    assert len(sent) == 2
    assert normalised_error(found, expected) < TOLERANCE


def test_a_rank_lost_at_the_start_costs_another_try(tmp_path, monkeypatch):
    source = write_npz(tmp_path / "a.npz")
    expected, _ = images(source, tmp_path / "one.npy", iterations=3)
    workers, epochs = ThreadWorkers(3), []
    victim, original = sorted(workers.last_heard())[0], gang_stream.compute_jointly

    def dies(member, *arguments):
        epochs.append(member.epoch)
        if member.epoch == 1 and member.rank == 0:
            workers.kill(victim)
        return original(member, *arguments)

    monkeypatch.setattr(gang_stream, "compute_jointly", dies)
    found, _ = shared_images(source, tmp_path / "out.npy", workers, 3, iterations=3)
    assert max(epochs) == 2
    assert normalised_error(found, expected) < TOLERANCE


def test_what_is_wrong_with_the_data_is_said_once(tmp_path, monkeypatch):
    source = volume(tmp_path / "a.npz")

    def damaged(*_):
        raise InputError("a.npz: spoke 3 is damaged")

    monkeypatch.setattr(NpzKSpace, "read", damaged)
    with pytest.raises(InputError, match="spoke 3 is damaged"):
        shared_images(source, tmp_path / "out.npy", ThreadWorkers(2), 2)
    assert not (tmp_path / "out.npy").exists()


# When


def test_coils_are_split_where_volumes_are_large_and_fewer_than_ranks(tmp_path, monkeypatch):
    three, two = volume(tmp_path / "a.npz"), write_npz(tmp_path / "b.npz")

    def parts(ranks, chunks=1, large=1, source=three, **parameters):
        monkeypatch.setattr(mri, "LARGE_BYTES", large)
        planned, _ = job(source, tmp_path / "out.npy", **parameters)
        found = planned.job.joint_parts(planned.plan.chunks * chunks, ranks)
        planned.output.discard()
        return found

    assert parts(4) == 5
    assert parts(4, compress=4) == 0  # not more channels than ranks
    assert parts(5) == 0
    assert parts(1) == 0
    assert parts(4, chunks=3) == 5
    assert parts(4, chunks=4) == 0  # each has a volume of its own
    assert parts(4, large=1 << 30) == 0
    assert parts(4, split="images") == 0
    assert parts(8, large=1 << 30, split="coils") == 5
    assert parts(2, source=two) == 0  # no volume


def test_samples_of_a_large_volume_go_through_no_slot(tmp_path, monkeypatch):
    source = volume(tmp_path / "a.npz")
    size = 5 * 2400 * 8
    small, _ = job(source, tmp_path / "out.npy")
    monkeypatch.setattr(mri, "LARGE_BYTES", size)
    large, _ = job(source, tmp_path / "out.npy")
    assert [bool(each.plan.chunks[0].inputs) for each in (small, large)] == [True, False]
    assert small.plan.input_bytes == large.plan.input_bytes == size
    for budget, maps in ((1 << 30, 5 * 1000 * 8), (1 << 10, 0)):
        assert large.job.hold_at_most(budget) == small.job.hold_at_most(budget) + size + maps
    for each in (small, large):
        each.output.discard()


# Coils beyond the device's memory


@pytest.fixture
def cramped(monkeypatch):
    """A device with so many bytes left for the maps."""

    original = mri_volume.plan_residency

    def room(left):
        monkeypatch.setattr(mri_volume, "device_room", lambda xp: 1 << 40)
        monkeypatch.setattr(mri_volume, "plan_residency", lambda coils, shape, _: original(coils, shape, left))

    return room


@pytest.mark.parametrize(("memory", "how"), [(64 << 20, "streamed from the host"), (1100 << 10, "made again")])
def test_coils_that_do_not_fit_come_in_turn_to_the_same_bits(tmp_path, cramped, memory, how):
    """From the host, where --memory has room for them; else they are made again of the coarse images."""
    source = volume(tmp_path / "a.npz", coils=13)
    options = EIGHT | {"iterations": 3, "density": "none", "split": "coils", "memory": memory}
    expected, _ = images(source, tmp_path / "one.npy", **options)
    a_coil = 1000 * 8
    for left, streamed in ((13 * a_coil, 0), (12 * a_coil, 3), (8 * a_coil, 4)):
        cramped(left)
        found, receipt = images(source, tmp_path / "out.npy", **options)
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
        told = receipt["image"]["coil_maps"]
        assert told.startswith(f"{streamed} of 4 groups {how} in each iteration" if streamed else "on the device"), told


def test_room_that_is_missing_is_said(tmp_path, cramped, monkeypatch):
    """What a GPU must hold in any case, before a sample is read."""
    source = volume(tmp_path / "a.npz", coils=9)
    cramped(7 * 8000)
    needed = (
        r"at least \S+ MiB of GPU memory are needed, \S+ KiB of them for the images of the iterations, and .* free: "
    )
    with monkeypatch.context() as patch:
        patch.setattr(NpzKSpace, "read", lambda *_: pytest.fail("samples are read"))
        with pytest.raises(OutOfDeviceMemory, match=needed + "use a GPU with more memory, or --device cpu"):
            images(source, tmp_path / "out.npy", split="coils", density="none")
        options = {"frames": 10, "regularizer": "tv-time", "split": "coils", "density": "none"}
        with pytest.raises(OutOfDeviceMemory, match="choose fewer than 4 frames or coefficients, use a GPU"):
            images(source, tmp_path / "out.npy", **options)
    cramped(8 * 8000)
    np.save(tmp_path / "maps.npy", np.ones((9, 10, 10, 10)))
    options = {"sensitivities": str(tmp_path / "maps.npy"), "density": "none", "memory": 850 << 10}
    with pytest.raises(ParameterError, match=r"--memory: the GPU has room for .* must stay on the host"):
        images(source, tmp_path / "out.npy", split="coils", **options)


# The command


def test_the_command_splits_coils_over_processes(tmp_path):
    source = volume(tmp_path / "a.npz")
    expected, _ = images(source, tmp_path / "one.npy", **EIGHT)
    options = ("--iterations", 8, "--tolerance", 0, "--output-values", "complex", "--workers", 2, "--split", "coils")
    more = ("--device", "cpu", "--json", "--preview", "two.png")
    code, out, err = run("run", "mri", source, "two.npy", *options, *more, cwd=tmp_path)
    assert (code, err) == (0, "")
    plane = np.abs(np.load(tmp_path / "two.npy")[5])
    shown = np.clip(plane / np.percentile(plane, 99.7), 0, 1) * 255
    centres = read_image(tmp_path / "two.png")[19::38, 19::38]  # enlarged 38 times; the last row has labels
    assert np.abs(centres[:-1] - shown[:-1]).max() <= 0.51
    receipt = json.loads(out)
    assert receipt["image"]["split"] == "5 channels over 2 ranks"
    assert len(receipt["image"]["convergence"]) == 9
    assert receipt["device"]["name"] == "2 × cpu"
    assert normalised_error(np.load(tmp_path / "two.npy"), expected[0]) < TOLERANCE


def test_a_rank_is_asked_how_far_it_is(tmp_path, monkeypatch):
    heard, original, note = threading.Event(), gang_stream.compute_jointly, "iteration 2, residual 0.5, image 1"

    def waits(member, *arguments):
        assert heard.wait(60)
        return original(member, *arguments)

    def take(self, told):
        assert told == note
        heard.set()

    monkeypatch.setattr(gang_stream, "ASK_SECONDS", 0.2)
    monkeypatch.setattr(gang_stream, "progress_of", lambda name: note)
    monkeypatch.setattr(gang_stream, "compute_jointly", waits)
    monkeypatch.setattr(mri.MriJob, "take_progress", take)
    options = {"iterations": 1, "density": "none"}
    _, receipt = shared_images(write_npz(tmp_path / "a.npz"), tmp_path / "out.npy", ThreadWorkers(2), 2, **options)
    assert receipt["chunks"] == 1


def test_progress_comes_from_the_ranks(tmp_path):
    planned, _ = job(write_npz(tmp_path / "a.npz"), tmp_path / "out.npy", split="coils")
    opened = planned.job
    opened.take_progress("iteration 3, residual 0.1, image 1")
    opened.take_progress("")
    assert opened.progress_note() == "iteration 3, residual 0.1, image 1"
    opened.add_note(0, {"iterations": 7, "residual": 0.01})  # as another process tells
    assert opened.progress_note() == "7 iterations, residual 0.01, image 1"
    planned.output.discard()
    assert gang_stream.progress_of("no such job") == ""
