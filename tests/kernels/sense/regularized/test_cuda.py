"""Regularised reconstruction on a CUDA device: the images of the CPU, with and without a CUDA graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.nufft import Nufft, Toeplitz, toeplitz_kernel
from kernels.sense import CapturedCg, cg_sense, density, gridded, to_host, toeplitz_normal
from kernels.sense.regularized import L1Wavelet, LowRank, Problem, TotalVariation, regularized_sense
from kernels.sense.resumption import Resumption
from tests.kernels.sense.phantom import coil_maps, normalised_error, radial, samples

pytestmark = pytest.mark.gpu
N, COILS, FRAMES = 48, 4, 3


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


def problem(xp: Any, frames: int = FRAMES, **how: Any) -> Problem:
    """A phantom's frames, each of its own spokes."""
    maps = xp.asarray(coil_maps(COILS, N) / np.linalg.norm(coil_maps(COILS, N), axis=0), np.complex64)
    points = radial(14 * frames, N, N).reshape(frames, -1, 2)
    normals, rights, energy = [], [], 0.0
    for each in points:
        trajectory, data = xp.asarray(each), xp.asarray(samples(each, COILS, N), np.complex64)
        weights = density.even(len(each), trajectory)
        kernel = toeplitz_kernel(trajectory, weights, (N, N), 1e-4)
        normals.append(toeplitz_normal(Toeplitz(kernel, (N, N)), maps))
        rights.append(gridded(Nufft(trajectory, (N, N), eps=1e-5), data, maps, weights))
        energy += float(xp.sum(xp.abs(data) ** 2)) / len(each)

    right = xp.stack(rights)
    product = xp.empty_like(right)

    def normal(series: Any) -> Any:
        for one, image, into in zip(normals, series, product, strict=True):
            into[...] = one(image)
        return product

    return Problem(normal=normal, right=right, energy=energy, **how)


def penalties(xp: Any, which: str) -> list[Any]:
    found = {
        "wavelet": [L1Wavelet(0.01, (N, N), xp=xp)],
        "low rank": [LowRank(0.01, (N, N), xp=xp, frames=FRAMES)],
        "tv": [TotalVariation(0.01, (1, 2))],
    }
    found["all"] = [TotalVariation(0.01, (0,)), *found["wavelet"], *found["low rank"]]
    return found[which]


@pytest.mark.parametrize("which", ["wavelet", "low rank", "tv", "all"])
def test_images_are_those_of_the_cpu(cupy: Any, which: str) -> None:
    expected = regularized_sense(problem(np, penalties=penalties(np, which)), iterations=12, largest=60.0)
    for capture in (False, True):
        asked = problem(cupy, penalties=penalties(cupy, which), capture=capture)
        found = regularized_sense(asked, iterations=12, largest=60.0)
        assert normalised_error(found.image.get(), expected.image) < 2e-3
        np.testing.assert_allclose(found.status, expected.status, rtol=2e-2)


def test_a_graph_makes_the_same_bits(cupy: Any) -> None:
    """Also if an earlier solution has loaded all kernels, so that the first iteration is a graph already."""
    first, *others = [
        regularized_sense(problem(cupy, penalties=penalties(cupy, "wavelet"), capture=capture), iterations=15)
        for capture in (False, True, True)
    ]
    for each in others:
        np.testing.assert_array_equal(each.image.get(), first.image.get())
        np.testing.assert_array_equal(each.status, first.status)


@pytest.mark.parametrize("which", ["wavelet", "tv"])
def test_the_tolerance_stops_a_graph_where_it_stops_the_cpu(cupy: Any, which: str) -> None:
    how: dict[str, Any] = {"iterations": 60, "tolerance": 2e-2, "largest": 60.0}
    expected = regularized_sense(problem(np, penalties=penalties(np, which)), **how)
    found = regularized_sense(problem(cupy, penalties=penalties(cupy, which)), **how)
    assert 3 < len(found.status) == len(expected.status) < 60
    assert normalised_error(found.image.get(), expected.image) < 2e-3


def test_captured_conjugate_gradients_are_those_of_the_cpu(cupy: Any) -> None:
    """One graph for several right-hand sides; it stops at the tolerance."""
    asked, reference = problem(cupy, 1), problem(np, 1)
    solver = CapturedCg(asked.normal, asked.right, damping=0.01)
    for factor in (1.0, 1e-6, 3.0):
        right = reference.right * np.float32(factor)
        expected, curve = cg_sense(reference.normal, right, iterations=9, damping=0.01)
        told: list[tuple[int, float]] = []
        found, residuals = solver.solve(
            cupy.asarray(right), iterations=9, on_iteration=lambda *each, told=told: told.append(each)
        )
        assert normalised_error(found.get(), expected) < 1e-3
        np.testing.assert_allclose(residuals, curve, rtol=2e-2, atol=1e-4)
        assert told == list(enumerate(residuals[1:].tolist(), 1))
    _, residuals = solver.solve(asked.right, iterations=50, tolerance=float(curve[4]) * 1.05)
    assert len(residuals) == 5
    nothing, residuals = solver.solve(asked.right * 0, iterations=3)
    assert not nothing.get().any()
    assert residuals.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("which", ["wavelet", "low rank", "tv", "all", "cg"])
def test_saved_iterations_go_on_on_either_device(cupy: Any, which: str) -> None:
    """The last state that CUDA saves makes the same image, on CUDA and on the CPU."""
    saved: list[dict[str, Any]] = []

    def keep(state: Any) -> None:
        saved.append({name: np.array(to_host(array)) for name, array in state.items()})

    def solve(xp: Any, resumption: Resumption) -> tuple[Any, int]:
        if which == "cg":
            asked = problem(xp, 1)
            if xp is np:
                pytest.skip("conjugate gradients have a state of their own on each device")
            solver = CapturedCg(asked.normal, asked.right, damping=0.01)
            found, curve = solver.solve(asked.right, iterations=12, resumption=resumption)
            return to_host(found), len(curve) - 1
        asked = problem(xp, penalties=penalties(xp, which))
        made = regularized_sense(asked, iterations=12, largest=60.0, resumption=resumption)
        return to_host(made.image), len(made.status)

    expected, _ = solve(cupy, Resumption(saved=None, due=lambda: len(saved) < 5, save=keep))
    assert len(saved) == 5
    for xp in (cupy, np):
        later: list[Any] = []
        found, count = solve(xp, Resumption(saved=saved[-1], due=lambda: True, save=later.append))
        assert count == 12
        assert len(later) == 6
        assert normalised_error(found, expected) < (1e-6 if xp is cupy else 2e-3)
