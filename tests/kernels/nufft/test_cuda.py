"""The transforms on a CUDA device: every step of the gridding ladder against the definition, and the public class."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kernels.nufft import Nufft
from kernels.nufft.cases import Case, cases, made_trajectory, random_values
from kernels.nufft.gridding.cuda import SHARED_WIDTHS, VARIANTS
from kernels.nufft.gridding.cuda import Plan as Gridding
from kernels.nufft.gridding.spreading import grid_shape, kernel_for

pytestmark = pytest.mark.gpu

ADJOINT = [name for name in VARIANTS if name.startswith("spread")]
FORWARD = [name for name in VARIANTS if name not in ADJOINT]


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


def poisoned(cupy: Any, *shape: int) -> Any:
    return cupy.full(shape, complex(np.nan, np.nan), cupy.complex64)


def relative(result: Any, expected: Any) -> float:
    return float(np.linalg.norm(result - expected) / np.linalg.norm(expected))


@pytest.mark.sanitize("nufft")
@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_every_variant_gives_the_definition(cupy: Any, case: Case) -> None:
    ahead, back = case.exact_forward(), case.exact_adjoint()
    stream, weights = cupy.cuda.get_current_stream(), case.weights()
    images, samples = cupy.asarray(case.images()), cupy.asarray(case.samples())
    weights = None if weights is None else cupy.asarray(weights)
    plan = Gridding(cupy.asarray(case.trajectory()), case.shape, case.eps)
    for name in FORWARD:
        out = poisoned(cupy, case.coils, case.points)
        plan.forward(images, out, stream, name)
        case.check_forward(out.get(), ahead)
    for name in ADJOINT:
        if name == "spread_shared" and plan.spreading.width != SHARED_WIDTHS[plan.axes]:
            continue
        image = poisoned(cupy, case.coils, *case.shape)
        plan.adjoint(samples, weights, image, stream, name)
        case.check_adjoint(image.get(), back)


@pytest.mark.parametrize("method", ["auto", "gridding", "exact"])
@pytest.mark.parametrize("case", [*cases()][:24:5], ids=lambda case: case.name)
def test_the_public_class(cupy: Any, case: Case, method: str) -> None:
    plan = case.plan(cupy.asarray(case.trajectory()), method=method)
    assert method in (plan.method, "auto")
    case.check_forward(plan.forward(cupy.asarray(case.images())).get())
    weights = None if case.weights() is None else cupy.asarray(case.weights())
    case.check_adjoint(plan.adjoint(cupy.asarray(case.samples()), weights).get())


def test_what_the_exact_method_cannot_reach_is_refused(cupy: Any) -> None:
    k = cupy.zeros((5, 2))
    with pytest.raises(ValueError, match='method "exact" is good to 5e-06 on CUDA: eps is 1e-06'):
        Nufft(k, (8, 8), eps=1e-6, method="exact")
    assert Nufft(k, (8, 8), eps=1e-6).method == "gridding"
    with pytest.raises(ValueError, match=r"eps must be from 1e-06 to 0\.1"):
        Nufft(k, (8, 8), eps=1e-7)
    with pytest.raises(TypeError, match="must be a CuPy array, as the plan is"):
        Nufft(k, (8, 8)).forward(np.zeros((8, 8), np.complex64))


@pytest.mark.parametrize("eps", [1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
@pytest.mark.parametrize("content", ["radial", "spiral", "clustered", "random"])
@pytest.mark.parametrize("shape", [(256, 192), (64, 61, 40)])
def test_many_points_against_the_cpu_in_float64(cupy: Any, shape: tuple[int, ...], content: str, eps: float) -> None:
    """Thousands of points in a cell, split tiles, several regions of a coil chunk."""
    k, coils = made_trajectory(content, 60_013, shape), 5
    images, samples = random_values((coils, *shape), 1), random_values((coils, len(k)), 2)
    weights = np.random.default_rng(3).uniform(0, 1, len(k)).astype(np.float32)
    right = Nufft(k, shape, eps=1e-9)
    ahead, back = right.forward(images.astype(complex)), right.adjoint(samples.astype(complex), weights)
    plan = Nufft(cupy.asarray(k), shape, eps=eps, method="gridding")
    assert relative(plan.forward(cupy.asarray(images)).get(), ahead) <= eps
    # 60,000 float32 terms in one cell's sum lose some digits.
    allowed = eps + 1e-6 * (content == "clustered")
    assert relative(plan.adjoint(cupy.asarray(samples), cupy.asarray(weights)).get(), back) <= allowed


@pytest.mark.parametrize("shape", [(31, 37), (9, 12, 7)])
@pytest.mark.parametrize("eps", [1e-3, 1e-6])
def test_the_adjoint_is_the_adjoint(cupy: Any, shape: tuple[int, ...], eps: float) -> None:
    plan = Nufft(cupy.asarray(made_trajectory("radial", 3000, shape)), shape, eps=eps, method="gridding")
    x, y = cupy.asarray(random_values((3, *shape), 5)), cupy.asarray(random_values((3, 3000), 6))
    ahead, back = plan.forward(x), plan.adjoint(y)
    left, right = complex(cupy.vdot(y, ahead)), complex(cupy.vdot(back, x))
    assert abs(left - right) <= 1e-5 * float(cupy.linalg.norm(y) * cupy.linalg.norm(ahead))


@pytest.mark.parametrize("shape", [(64, 48), (21, 16, 37)])
def test_every_run_gives_the_same_bits(cupy: Any, shape: tuple[int, ...]) -> None:
    k, samples = cupy.asarray(made_trajectory("radial", 50_000, shape)), cupy.asarray(random_values((7, 50_000), 1))
    first = Nufft(k, shape, method="gridding").adjoint(samples).get()
    for _ in range(3):
        plan = Nufft(k, shape, method="gridding")
        np.testing.assert_array_equal(plan.adjoint(samples).get(), first, strict=True)
        np.testing.assert_array_equal(plan.adjoint(samples).get(), first, strict=True)


@pytest.mark.parametrize("coils", [1, 3])
@pytest.mark.parametrize("shape", [(64, 48), (48, 40, 37)])
def test_repeated_calls_read_the_arrays_anew(cupy: Any, shape: tuple[int, ...], coils: int) -> None:
    """Graphs of earlier calls: the same bits as other arrays give, on two streams and inside a capture."""
    plan = Nufft(cupy.asarray(made_trajectory("radial", 20_011, shape)), shape, method="gridding")
    samples, images = cupy.zeros((coils, 20_011), cupy.complex64), cupy.zeros((coils, *shape), cupy.complex64)
    other, aside = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    back, ahead = cupy.empty_like(images), cupy.empty_like(samples)

    def both(stream: Any = None) -> None:
        plan.adjoint(samples, out=back, stream=stream)
        plan.forward(images, out=ahead, stream=stream)

    for run in range(4):
        samples[...], images[...] = (cupy.asarray(random_values(a.shape, run)) for a in (samples, images))
        right = plan.adjoint(samples.copy()).get(), plan.forward(images.copy()).get()
        for stream in (None, other):
            cupy.cuda.Device().synchronize()
            back.fill(np.nan)
            ahead.fill(np.nan)
            cupy.cuda.Device().synchronize()
            both(stream)
            cupy.cuda.Device().synchronize()
            np.testing.assert_array_equal(back.get(), right[0], strict=True)
            np.testing.assert_array_equal(ahead.get(), right[1], strict=True)
    with aside:
        aside.begin_capture()
        both(aside)
        graph = aside.end_capture()
    for array in (back, ahead):
        array.fill(np.nan)
    cupy.cuda.Device().synchronize()
    graph.launch(other)
    other.synchronize()
    np.testing.assert_array_equal(back.get(), right[0], strict=True)
    np.testing.assert_array_equal(ahead.get(), right[1], strict=True)


def test_work_is_ordered_on_the_stream_given(cupy: Any) -> None:
    """Samples arrive just before and are overwritten just after, on the same stream: only the right order passes."""
    shape, values = (256, 256), random_values((16, 100_000), 1)
    plan = Nufft(cupy.asarray(made_trajectory("radial", 100_000, shape)), shape, method="gridding")
    expected = plan.adjoint(cupy.asarray(values)).get()
    stream = cupy.cuda.Stream(non_blocking=True)
    pinned = cupy.cuda.alloc_pinned_memory(values.nbytes)
    host = np.frombuffer(pinned, values.dtype, values.size).reshape(values.shape)
    host[...] = values
    samples, out = cupy.zeros(values.shape, values.dtype), poisoned(cupy, 16, *shape)
    cupy.cuda.get_current_stream().synchronize()
    for _ in range(5):
        samples.set(host, stream=stream)
        plan.adjoint(samples, out=out, stream=stream)
        with stream:
            samples.fill(0)
    stream.synchronize()
    np.testing.assert_array_equal(out.get(), expected, strict=True)


def test_one_plan_on_many_streams(cupy: Any) -> None:
    shape = (96, 80)
    plan = Nufft(cupy.asarray(made_trajectory("radial", 20_000, shape)), shape, method="gridding")
    images = [random_values((4, *shape), n) for n in range(6)]
    expected = [plan.forward(cupy.asarray(image)).get() for image in images]
    ready = threading.Barrier(6)

    def worker(image: Any) -> Any:
        ready.wait(60)
        with cupy.cuda.Stream(non_blocking=True):
            on_device = cupy.asarray(image)
            return [plan.forward(on_device).get() for _ in range(8)]

    with ThreadPoolExecutor(6) as pool:
        for right, results in zip(expected, pool.map(worker, images), strict=True):
            for result in results:
                np.testing.assert_array_equal(result, right, strict=True)


@pytest.mark.large
def test_more_cells_than_two_to_the_31(cupy: Any) -> None:
    """Indices beyond 2³¹ must not wrap around to the first coils: equal images give equal samples."""
    shape, coils = (512, 512, 300), 14
    cells = np.prod(grid_shape(shape, kernel_for(1e-2, 3).oversampling)) * coils
    assert cells > 1 << 31
    free, _total = cupy.cuda.runtime.memGetInfo()
    assert free > 50 << 30, "this test needs 50 GB of device memory"
    plan = Nufft(cupy.asarray(made_trajectory("random", 5003, shape)), shape, eps=1e-2, method="gridding")
    one = cupy.asarray(random_values(shape, 1))
    samples = plan.forward(cupy.broadcast_to(one, (coils, *shape)))
    assert relative(samples[-1].get(), samples[0].get()) <= 1e-5
    image = plan.adjoint(samples)
    assert relative(image[-1].get(), image[0].get()) <= 1e-5
    left, right = complex(cupy.vdot(samples[-1], samples[-1])), complex(cupy.vdot(one, image[-1]))
    assert abs(left - right) <= 1e-3 * abs(left)
    del image, samples
    cupy.get_default_memory_pool().free_all_blocks()
