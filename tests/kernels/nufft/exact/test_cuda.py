"""The exact transforms on a CUDA device: every step of the ladder, and both precisions, against the definition."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import pytest

from kernels.nufft.exact import PRECISIONS, exact_adjoint, exact_forward, exact_point_spread
from kernels.nufft.exact import cases as exact_cases
from kernels.nufft.exact import cuda as exact_cuda
from kernels.nufft.exact.cases import ExactCase, check
from kernels.nufft.exact.cuda import VARIANTS, ExactTask, Plan
from kernels.nufft.exact.pairs import VARIANTS as LADDER

pytestmark = pytest.mark.gpu

# The ladder sums in float32 with sines and cosines from the special-function unit: as accurate as three terms.
LADDER_EPS = PRECISIONS[3]


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


def on_device(cupy: Any, values: Any) -> Any:
    return None if values is None else cupy.asarray(values)


def poisoned(cupy: Any, *shape: int) -> Any:
    return cupy.full(shape, cupy.nan, cupy.complex64)


@pytest.mark.parametrize("case", list(exact_cases.exact_cases()), ids=lambda case: case.name)
def test_both_precisions_give_the_definition(cupy: Any, case: ExactCase) -> None:
    trajectory, weights, samples, images = case.trajectory(), case.weights(), case.samples(), case.images()
    weighted = samples if weights is None else samples * weights
    random, stream = case.content == "random", cupy.cuda.get_current_stream()
    image = exact_cases.adjoint(samples, trajectory, case.shape, weights)
    lines = exact_cases.forward(images, trajectory)
    for terms, eps in PRECISIONS.items():
        plan = Plan(cupy.asarray(trajectory), case.shape, terms)
        out = poisoned(cupy, case.coils, *case.shape)
        plan.adjoint(cupy.asarray(samples), on_device(cupy, weights), out, stream)
        check(out.get(), image, weighted, eps, f"adjoint of {terms} terms, {case.name}", random=random)
        out = poisoned(cupy, case.coils, case.points)
        plan.forward(cupy.asarray(images), out, stream)
        check(out.get(), lines, images, eps, f"forward of {terms} terms, {case.name}", random=random)


def task_of(cupy: Any, case: ExactCase, *, spread: bool = False) -> ExactTask:
    return ExactTask(
        plan=Plan(cupy.asarray(case.trajectory()), case.shape, 3),
        samples=None if spread else cupy.asarray(case.samples()),
        images=poisoned(cupy, 1 if spread else case.coils, *case.shape),
        weights=on_device(cupy, case.weights()),
        stream=cupy.cuda.get_current_stream(),
    )


LADDER_CASES = [
    *(
        ExactCase(shape=shape, points=997, coils=coils)
        for shape in ((31, 37), (64, 50), (9, 7, 20))
        for coils in (1, 3)
    ),
    *(ExactCase(shape=(13, 22), points=points) for points in (1, 31, 192, 193)),
    ExactCase(shape=(1, 1)),
    ExactCase(shape=(16, 24), content="edges"),
    ExactCase(shape=(16, 24), content="beyond"),
]


@pytest.mark.sanitize("nufft")
@pytest.mark.parametrize("case", LADDER_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", [*LADDER, "exact_tensor"])
def test_every_step_gives_the_weighted_image(cupy: Any, name: str, case: ExactCase) -> None:
    task, weights = task_of(cupy, case), case.weights()
    VARIANTS[name].run(task)
    expected = exact_cases.adjoint(case.samples(), case.trajectory(), case.shape, weights)
    random = case.content == "random"
    check(task.images.get(), expected, case.samples() * weights, LADDER_EPS, f"{name} {case.name}", random=random)


@pytest.mark.sanitize("nufft")
@pytest.mark.parametrize("case", LADDER_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", [*LADDER, "exact_tensor"])
def test_every_step_gives_the_point_spread(cupy: Any, name: str, case: ExactCase) -> None:
    task, weights = task_of(cupy, case, spread=True), case.weights()
    assert weights is not None
    VARIANTS[name].run(task)
    ones = np.ones((1, case.points), np.complex64)
    expected = exact_cases.adjoint(ones, case.trajectory(), case.shape, weights)
    check(task.images.get(), expected, weights[None], LADDER_EPS, f"{name} {case.name}", random=False)


@pytest.mark.sanitize("nufft")
@pytest.mark.parametrize("case", LADDER_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["exact_forward_staged", "exact_forward_tensor"])
def test_every_forward_step_gives_the_samples(cupy: Any, name: str, case: ExactCase) -> None:
    images, samples = case.images(), poisoned(cupy, case.coils, case.points)
    plan = Plan(cupy.asarray(case.trajectory()), case.shape, 3)
    stream = cupy.cuda.get_current_stream()
    VARIANTS[name].run(ExactTask(plan=plan, samples=samples, images=cupy.asarray(images), weights=None, stream=stream))
    expected = exact_cases.forward(images, case.trajectory())
    random = case.content == "random"
    check(samples.get(), expected, images, LADDER_EPS, f"{name} {case.name}", random=random)


def separable(cupy: Any, trajectory: Any, shape: tuple[int, int], sign: int) -> list[Any]:
    """exp(sign 2πi k r/N) of each axis, complex128, for sizes at which the definition itself would take too long."""
    return [
        cupy.exp(sign * 2j * np.pi * ((k.astype(cupy.float64) / n)[:, None] * (cupy.arange(n) - n // 2)))
        for k, n in zip(trajectory.T, shape, strict=True)
    ]


@pytest.mark.parametrize("shape", [(256, 256), (320, 700), (96, 1500)])
@pytest.mark.parametrize("points", [4099, 65_536, 150_001])
def test_large_transforms_keep_their_precision(cupy: Any, shape: tuple[int, int], points: int) -> None:
    rng = np.random.default_rng(points)
    trajectory = cupy.asarray(rng.uniform(-np.array(shape) / 2, np.array(shape) / 2, (points, 2)))
    samples = cupy.asarray(rng.standard_normal((2, points, 2)).astype(np.float32).view(np.complex64)[..., 0])
    images = cupy.asarray(rng.standard_normal((2, *shape, 2)).astype(np.float32).view(np.complex64)[..., 0])
    x, y = separable(cupy, trajectory, shape, 1)
    expected = cupy.stack([(values.astype(cupy.complex128)[:, None] * x).T @ y for values in samples])
    lines = cupy.stack([((x.conj() @ image.astype(cupy.complex128)) * y.conj()).sum(1) for image in images])
    for terms, eps in PRECISIONS.items():
        for result, wanted in (
            (exact_adjoint(samples, trajectory, shape, terms=terms), expected),
            (exact_forward(images, trajectory, terms=terms), lines),
        ):
            for coil in range(2):
                error = float(cupy.linalg.norm(result[coil] - wanted[coil]) / cupy.linalg.norm(wanted[coil]))
                assert error <= eps, f"{terms} terms: {error:.2e}"


@pytest.mark.parametrize("terms", PRECISIONS)
@pytest.mark.parametrize("shape", [(64, 96), (33, 47), (12, 20, 18)])
def test_the_adjoint_is_the_conjugate_transpose(cupy: Any, shape: tuple[int, ...], terms: Any) -> None:
    case = ExactCase(shape=shape, points=3001, coils=1)
    trajectory, x, y = (cupy.asarray(values) for values in (case.trajectory(), case.images(), case.samples()))
    forward = exact_forward(x, trajectory, terms=terms).astype(cupy.complex128)
    back = exact_adjoint(y, trajectory, shape, terms=terms).astype(cupy.complex128)
    left, right = complex(cupy.vdot(y, forward)), complex(cupy.vdot(back, x))
    scale = float(cupy.linalg.norm(forward) * cupy.linalg.norm(y))
    assert abs(left - right) <= PRECISIONS[terms] * scale


def test_the_point_spread_is_the_host_s(cupy: Any) -> None:
    case = ExactCase(shape=(21, 16), points=500)
    trajectory, weights = case.trajectory(), case.weights()
    expected = exact_point_spread(trajectory, case.shape, weights=weights.astype(np.float64))
    result = exact_point_spread(cupy.asarray(trajectory), case.shape, weights=cupy.asarray(weights)).get()
    assert np.linalg.norm(result - expected) <= 5e-6 * np.linalg.norm(expected)


@pytest.mark.parametrize("terms", PRECISIONS)
def test_every_run_gives_the_same_bits(cupy: Any, terms: Any) -> None:
    case = ExactCase(shape=(120, 200), points=20_011, coils=5)
    trajectory, samples, images = (
        cupy.asarray(values) for values in (case.trajectory(), case.samples(), case.images())
    )
    first = exact_adjoint(samples, trajectory, case.shape, terms=terms).get()
    lines = exact_forward(images, trajectory, terms=terms).get()
    for _ in range(3):
        result = exact_adjoint(samples, trajectory, case.shape, terms=terms)
        np.testing.assert_array_equal(result.get(), first, strict=True)
        np.testing.assert_array_equal(exact_forward(images, trajectory, terms=terms).get(), lines, strict=True)


@pytest.mark.parametrize("part", [("TABLE_BYTES", 1 << 14), ("SLOT_BYTES", 1 << 16)])
def test_parts_of_samples_and_of_rows_add_up(cupy: Any, monkeypatch: Any, part: tuple[str, int]) -> None:
    case = ExactCase(shape=(50, 37), points=1999, coils=3)
    trajectory, samples = cupy.asarray(case.trajectory()), cupy.asarray(case.samples())
    expected = exact_cases.adjoint(case.samples(), case.trajectory(), case.shape, None)
    monkeypatch.setattr(exact_cuda, *part)
    for terms, eps in PRECISIONS.items():
        result = exact_adjoint(samples, trajectory, case.shape, terms=terms).get()
        check(result, expected, case.samples(), eps, f"{part}, {terms} terms", random=True)


def test_columns_in_parts_add_up(cupy: Any, monkeypatch: Any) -> None:
    """Like on a device with little shared memory."""
    monkeypatch.setattr(exact_cuda, "shared_bytes_a_block", lambda: 99 << 10)
    case = ExactCase(shape=(20, 490), points=700, coils=2)
    trajectory, samples, images = (
        cupy.asarray(values) for values in (case.trajectory(), case.samples(), case.images())
    )
    for terms, eps in PRECISIONS.items():
        lines = exact_forward(images, trajectory, terms=terms).get()
        check(lines, exact_cases.forward(case.images(), case.trajectory()), case.images(), eps, "forward", random=True)
        result = exact_adjoint(samples, trajectory, case.shape, terms=terms).get()
        expected = exact_cases.adjoint(case.samples(), case.trajectory(), case.shape, None)
        check(result, expected, case.samples(), eps, "adjoint", random=True)


def test_without_tensor_cores_the_sums_are_float32(cupy: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(exact_cuda, "TENSOR_CAPABILITY", 1000)
    case = ExactCase(shape=(30, 41), points=1500)
    trajectory, samples, images = (
        cupy.asarray(values) for values in (case.trajectory(), case.samples(), case.images())
    )
    result = exact_adjoint(samples, trajectory, case.shape).get()
    expected = exact_cases.adjoint(case.samples(), case.trajectory(), case.shape, None)
    check(result, expected, case.samples(), PRECISIONS[3], "adjoint", random=True)
    lines = exact_forward(images, trajectory).get()
    check(lines, exact_cases.forward(case.images(), case.trajectory()), case.images(), PRECISIONS[3], "", random=True)


def test_work_is_ordered_on_the_stream_given(cupy: Any) -> None:
    """Samples arrive just before and are overwritten just after, on the same stream: only the right order passes."""
    case = ExactCase(shape=(128, 128), points=30_000, coils=4)
    values, trajectory = case.samples(), cupy.asarray(case.trajectory())
    stream = cupy.cuda.Stream(non_blocking=True)
    pinned = cupy.cuda.alloc_pinned_memory(values.nbytes)
    host = np.frombuffer(pinned, values.dtype, values.size).reshape(values.shape)
    host[...] = values
    samples = cupy.zeros(values.shape, values.dtype)
    expected = exact_adjoint(cupy.asarray(values), trajectory, case.shape).get()
    cupy.cuda.Device().synchronize()
    for _ in range(5):
        samples.set(host, stream=stream)
        result = exact_adjoint(samples, trajectory, case.shape, stream=stream)
        with stream:
            samples.fill(0)
    np.testing.assert_array_equal(result.get(stream=stream), expected, strict=True)


def test_many_threads_share_a_plan(cupy: Any) -> None:
    case = ExactCase(shape=(61, 64), points=3000, coils=2)
    plan, ready = Plan(cupy.asarray(case.trajectory()), case.shape, 3), threading.Barrier(6)
    sets = [case.samples() * (n + 1) for n in range(6)]
    expected = [exact_cases.adjoint(samples, case.trajectory(), case.shape, None) for samples in sets]

    def worker(samples: Any) -> Any:
        ready.wait(60)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            given, out = cupy.asarray(samples), poisoned(cupy, 2, *case.shape)
            for _ in range(10):
                plan.adjoint(given, None, out, stream)
            return out.get()

    with ThreadPoolExecutor(6) as pool:
        for right, samples, result in zip(expected, sets, pool.map(worker, sets), strict=True):
            check(result, right, samples, PRECISIONS[3], "in threads", random=True)


@pytest.mark.parametrize(("coils", "terms"), [*product((40_000,), (1, 3))])
def test_more_coils_than_a_grid_has_rows(cupy: Any, coils: int, terms: Any) -> None:
    case = ExactCase(shape=(3, 4), points=5, coils=coils)
    trajectory, samples = cupy.asarray(case.trajectory()), cupy.asarray(case.samples())
    result = exact_adjoint(samples, trajectory, case.shape, terms=terms).get()
    expected = exact_cases.adjoint(case.samples(), case.trajectory(), case.shape, None)
    check(result, expected, case.samples(), PRECISIONS[terms], "many coils", random=False)
    lines = exact_forward(cupy.asarray(case.images()), trajectory, terms=terms).get()
    expected = exact_cases.forward(case.images(), case.trajectory())
    check(lines, expected, case.images(), PRECISIONS[terms], "many coils", random=False)
