"""Coils split over ranks: the image of one rank, whatever their number, and whoever dies on the way."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.cluster.gang import run_alone, run_gang
from pipeline.errors import InputError, ParameterError
from pipeline.workloads import JobSpec, workloads
from pipeline.workloads.mri_gang import reconstruct_shared, shards_of
from tests.kernels.sense.phantom import definition, normalised_error
from tests.pipeline.cluster.thread_workers import ThreadWorkers
from tests.pipeline.formats.raw_mri import NOISE_FLAG, acquisition
from tests.pipeline.workloads.mri_jobs import COILS, N, images, write_h5, write_npz

# Additions in another order, in float32, through ten iterations of the weights and eight of the image.
TOLERANCE = 2e-4


def spec_of(source, output, **parameters):
    return JobSpec(workload="mri", input=source, output=output, parameters=workloads()["mri"].Parameters(**parameters))


def volume(path, n=10, coils=5):
    rng = np.random.default_rng(1)
    points = rng.uniform(-n / 2, n / 2, (40, 60, 3))
    r = (np.arange(n) - n // 2) / n
    blob = np.exp(-((r[:, None, None] / 0.2) ** 2) - (r[:, None] / 0.3) ** 2 - ((r - 0.1) / 0.25) ** 2)
    maps = np.stack([np.exp(1j * c * r)[:, None, None] * (1 + r * c / 4)[:, None] + 0 * blob for c in range(coils)])
    kspace = definition(maps * blob, points.reshape(-1, 3)).reshape(coils, 40, 60)
    return write_npz(path, kspace.astype(np.complex64), points, matrix=[n, n, n])


KINDS = {
    "plain": {},
    "compressed": {"compress": 3},
    "gridding": {"method": "gridding", "density": "none"},
    "espirit": {"sensitivities": "espirit", "calibration": 16},
    "maps of a file": {"sensitivities": "maps.npy"},
}


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [*((ranks, kind) for ranks in (1, 2, 3) for kind in KINDS if kind != "espirit"), (2, "espirit")],
)
def test_any_number_of_ranks_makes_the_image_of_one(tmp_path, ranks, kind):
    options = KINDS[kind]
    common = {"iterations": 8, "tolerance": 0.0, "output_values": "complex"} | options
    source = (write_npz if "calibration" in options else volume)(tmp_path / "a.npz")
    if options.get("sensitivities") == "maps.npy":
        maps = np.random.default_rng(0).normal(size=(5, 10, 10, 10)) + 2
        np.save(tmp_path / "maps.npy", maps)
        common["sensitivities"] = str(tmp_path / "maps.npy")
    expected, alone = images(source, tmp_path / "one.npy", **common)
    spec = spec_of(source, tmp_path / "out.npy", **common)
    result = run_gang(ThreadWorkers(ranks), reconstruct_shared, shards_of(spec), spec)
    assert len(result.ranks) == ranks
    assert (
        normalised_error(np.load(tmp_path / "out.npy"), expected.reshape(np.load(tmp_path / "out.npy").shape))
        < TOLERANCE
    )
    told, *others = result.values
    assert others == [None] * (ranks - 1)
    assert told["audit"]["worst_error"] < told["audit"]["tolerance"]
    if "convergence" in alone["image"]:
        np.testing.assert_allclose(told["image"]["convergence"], alone["image"]["convergence"], rtol=0.02, atol=1e-6)


def test_several_images_and_whitened_coils(tmp_path):
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(COILS, 512)) + 1j * rng.normal(size=(COILS, 512))
    source = write_h5(tmp_path / "a.h5", slices=2, noise=[acquisition(noise, None, flags=NOISE_FLAG)])
    options = {"traj_units": "cycles/pixel", "iterations": 4, "tolerance": 0.0}
    expected, _ = images(source, tmp_path / "one.npy", **options)
    spec = spec_of(source, tmp_path / "out.npy", **options)
    run_gang(ThreadWorkers(2), reconstruct_shared, shards_of(spec), spec)
    assert normalised_error(np.load(tmp_path / "out.npy"), expected[0]) < TOLERANCE


def test_a_rank_alone(tmp_path):
    source = write_npz(tmp_path / "a.npz")
    expected, _ = images(source, tmp_path / "one.npy", iterations=3)
    spec = spec_of(source, tmp_path / "out.npy", iterations=3)
    assert run_alone(reconstruct_shared, shards_of(spec), spec).values[0]["image"]["coils"] == COILS
    assert normalised_error(np.load(tmp_path / "out.npy"), expected[0, 0]) < TOLERANCE


def test_a_lost_rank_costs_another_try(tmp_path):
    source = write_npz(tmp_path / "a.npz")
    expected, _ = images(source, tmp_path / "one.npy", iterations=3)
    spec = spec_of(source, tmp_path / "out.npy", iterations=3)
    workers = ThreadWorkers(3)
    killed = []

    def place(array):
        if not killed:
            killed.append(list(workers.last_heard())[1])
            workers.kill(killed[0])
        return array

    result = run_gang(workers, reconstruct_shared, shards_of(spec), spec, place)
    assert result.lost == tuple(killed)
    assert result.epoch == 2
    assert normalised_error(np.load(tmp_path / "out.npy"), expected[0, 0]) < TOLERANCE


def test_what_a_gang_cannot_do_is_said_before(tmp_path):
    source = write_npz(tmp_path / "a.npz", dwell_us=5.0)
    np.save(tmp_path / "field.npy", np.zeros((N, N)))
    with pytest.raises(ParameterError, match="has no off-resonance correction"):
        shards_of(spec_of(source, tmp_path / "out.npy", field_map=tmp_path / "field.npy"))
    with pytest.raises(InputError, match="no such file"):
        shards_of(spec_of(tmp_path / "none.npz", tmp_path / "out.npy"))
