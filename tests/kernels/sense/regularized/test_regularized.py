"""Regularised reconstruction against slow solvers in float64, its laws, and the images that it must improve."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.nufft import Nufft, Toeplitz, toeplitz_kernel
from kernels.sense import cg_sense, density, gridded, toeplitz_normal
from kernels.sense.iterate import iterate
from kernels.sense.regularized import (
    L1Wavelet,
    LowRank,
    Problem,
    TotalVariation,
    automatic_strength,
    largest_eigenvalue,
    regularized_sense,
)
from kernels.sense.regularized.admm import steps_for
from kernels.sense.regularized.fista import _Vectors
from kernels.wavelet import Wavelet
from tests.kernels.sense.phantom import coil_maps, image, normalised_error, radial, random_complex, samples

SHAPE, FRAMES = (6, 5), 3


def small(penalties, *, frames=FRAMES, damping=0.0, dtype=np.complex64):
    """A random problem of a few pixels with a dense matrix, and the matrix."""
    size = frames * np.prod(SHAPE)
    rows = random_complex((size // 2, size), 1).astype(complex) / np.sqrt(size)
    data = rows @ random_complex((size,), 2)
    matrix, right = rows.conj().T @ rows, rows.conj().T @ data

    def normal(series):
        return (matrix @ series.reshape(-1)).reshape(series.shape).astype(series.dtype)

    problem = Problem(
        normal=normal,
        right=right.reshape(frames, *SHAPE).astype(dtype),
        energy=float(np.linalg.norm(data) ** 2),
        penalties=penalties,
        damping=damping,
    )
    return problem, rows, data


def objective(rows, data, scale, terms, damping, x):
    """By the definition; terms: (strength, function)."""
    whole = 0.5 * np.linalg.norm(rows @ x.reshape(-1) - data) ** 2 + 0.5 * damping * np.linalg.norm(x) ** 2
    return whole + sum(strength * scale * norm(x) for strength, norm in terms)


def variation(axes):
    def norm(x):
        fields = [np.diff(x, axis=axis, append=x.take([-1], axis=axis)) for axis in axes]
        return np.sqrt(sum(np.abs(field) ** 2 for field in fields)).sum()

    return norm


def nuclear(x):
    total = 0.0
    for row in range(0, SHAPE[0], 4):
        for column in range(0, SHAPE[1], 4):
            block = x[:, row : row + 4, column : column + 4].reshape(len(x), -1)
            total += np.linalg.svd(block, compute_uv=False).sum()
    return total * (4 + np.sqrt(FRAMES))


def wavelets(x):
    return np.abs(Wavelet(SHAPE).forward(x)).sum()


CASES = {
    "wavelet": ([L1Wavelet(0.05, SHAPE, xp=np, seed=None)], [(0.05, wavelets)], 0.0),
    "low rank": ([LowRank(0.02, SHAPE, xp=np, frames=FRAMES, block=4, seed=None)], [(0.02, nuclear)], 0.0),
    "tv": ([TotalVariation(0.05, (1, 2))], [(0.05, variation((1, 2)))], 0.1),
    "tv in time": ([TotalVariation(0.1, (0,))], [(0.1, variation((0,)))], 0.0),
    "two": (
        [TotalVariation(0.05, (0,)), L1Wavelet(0.05, SHAPE, xp=np, seed=None)],
        [(0.05, variation((0,))), (0.05, wavelets)],
        0.0,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_no_nearby_image_has_a_smaller_objective(name):
    """The optimality of a convex problem: no step in any direction, large or small, falls below the solution."""
    penalties, terms, damping = CASES[name]
    problem, rows, data = small(penalties, damping=damping, dtype=np.complex128)
    scale = np.abs(problem.right).max()
    found = regularized_sense(problem, iterations=400, tolerance=1e-9)
    least = objective(rows, data, scale, terms, damping, found.image)
    assert found.status[-1, 0] == pytest.approx(least, rel=1e-5)
    rng = np.random.default_rng(3)
    other, _, _ = small([], dtype=np.complex128)
    directions = [found.image, other.right, *(random_complex(found.image.shape, seed) for seed in range(5))]
    directions += [np.where(rng.random(found.image.shape) < 0.1, 1, 0) for _ in range(20)]
    for direction in directions:
        for factor in (1, -1, 1j, -1j):
            for size in (1e-3, 1e-2, 1e-1):
                step = size * factor * direction / np.linalg.norm(direction) * np.linalg.norm(found.image)
                assert objective(rows, data, scale, terms, damping, found.image + step) >= least * (1 - 1e-5)


@pytest.mark.parametrize(("largest", "steps"), [(1.0, 1), (7.9, 1), (8.1, 3), (0.0, 1)])
def test_an_even_operator_takes_one_conjugate_gradient_an_iteration(largest, steps):
    """By the right-hand side's Rayleigh quotient, as rank 0 sees it; and one without a right-hand side."""
    right = random_complex((1, *SHAPE), 1).astype(complex) * (largest > 0)

    def asked(strength):
        penalties = [TotalVariation(0.001, (1,)), TotalVariation(strength, (2,))]
        return Problem(normal=lambda series: largest * series, right=right, energy=1.0, penalties=penalties)

    assert steps_for(asked(0.005)) == steps
    assert steps_for(asked(0.004)) == 3
    if largest > 0:
        assert steps_for(asked(0.005), agreed=lambda _: 9.0) == 3


def test_a_reference_solver_finds_the_same_objective():
    """Three thousand plain proximal-gradient steps in float64, without momentum."""
    problem, rows, data = small([L1Wavelet(0.05, SHAPE, xp=np, seed=None)], dtype=np.complex128)
    scale, wavelet = np.abs(problem.right).max(), Wavelet(SHAPE)
    bound = np.linalg.norm(rows, 2) ** 2
    x = np.zeros(problem.right.shape, complex)
    for _ in range(3000):
        moved = x - (rows.conj().T @ (rows @ x.reshape(-1) - data)).reshape(x.shape) / bound
        x = wavelet.inverse(wavelet.forward(moved, threshold=0.05 * scale / bound))
    expected = objective(rows, data, scale, [(0.05, wavelets)], 0.0, x)
    found = regularized_sense(problem, iterations=500, tolerance=1e-12)
    assert found.status[-1, 0] == pytest.approx(expected, rel=1e-5)
    assert normalised_error(found.image, x) < 1e-2


def test_two_solvers_agree_on_one_problem():
    """ADMM with a second penalty of strength 0 is FISTA."""
    one, _, _ = small([L1Wavelet(0.05, SHAPE, xp=np, seed=None)], dtype=np.complex128)
    two, _, _ = small([L1Wavelet(0.05, SHAPE, xp=np, seed=None), TotalVariation(0.0, (1,))], dtype=np.complex128)
    found = [regularized_sense(each, iterations=300, tolerance=1e-11) for each in (one, two)]
    assert [each.solver for each in found] == ["fista", "admm"]
    assert found[1].status[-1, 0] == pytest.approx(found[0].status[-1, 0], rel=1e-4)


def test_the_objective_never_rises():
    problem, _, _ = small([L1Wavelet(0.02, SHAPE, xp=np, seed=None)])
    curve = regularized_sense(problem, iterations=300).status[:, 0]
    assert (np.diff(curve) <= 1e-6 * curve[:-1]).all()
    assert curve[-1] < 0.9 * curve[0]


def test_an_eigenvalue_that_is_too_small_corrects_itself():
    problem, _, _ = small([L1Wavelet(0.02, SHAPE, xp=np, seed=None)], dtype=np.complex128)
    expected = regularized_sense(problem, iterations=300)
    found = regularized_sense(problem, iterations=300, largest=0.1)
    assert found.status[-1, 0] == pytest.approx(expected.status[-1, 0], rel=1e-5)


def test_power_iteration():
    values = np.linspace(0, 3, 40)
    right = random_complex((40,), 1)
    assert largest_eigenvalue(lambda x: (values * x).astype(x.dtype), right) == pytest.approx(3, rel=0.1)
    assert largest_eigenvalue(lambda x: x, right * 0) == 1


def test_the_scale_of_the_data_does_not_matter():
    found = []
    for factor in (1e-8, 1.0, 1e8):
        problem, _, _ = small([L1Wavelet(0.02, SHAPE, xp=np)])
        scaled = Problem(
            normal=problem.normal, right=problem.right * np.float32(factor), energy=problem.energy * factor**2,
            penalties=problem.penalties,
        )  # fmt: skip
        found.append(regularized_sense(scaled, iterations=20, largest=3.0).image / factor)
    assert normalised_error(found[0], found[1]) < 1e-4
    assert normalised_error(found[2], found[1]) < 1e-4


def test_iterations_stop_by_the_change():
    problem, _, _ = small([L1Wavelet(0.05, SHAPE, xp=np, seed=None)])
    told = []
    found = regularized_sense(
        problem, iterations=500, tolerance=1e-3, on_iteration=lambda n, row: told.append((n, row[2]))
    )
    assert 3 < len(found.status) < 400
    assert found.status[-1, 2] <= 1e-3 < found.status[:-1, 2].min()
    assert told == list(enumerate(found.status[:, 2], 1))


def test_nothing_gives_nothing():
    problem, _, _ = small([L1Wavelet(0.05, SHAPE, xp=np)])
    nothing = Problem(normal=problem.normal, right=problem.right * 0, energy=0.0, penalties=problem.penalties)
    found = regularized_sense(nothing, iterations=3)
    assert not found.image.any()
    assert np.isfinite(found.status).all()


def test_a_strength_that_leaves_nothing_is_refused():
    problem, _, _ = small([L1Wavelet(50.0, SHAPE, xp=np)])
    with pytest.raises(ValueError, match="a strength of 50 leaves nothing of the image"):
        regularized_sense(problem, iterations=3)
    with pytest.raises(ValueError, match="a number of 0 or more; got nan"):
        TotalVariation(np.nan, (1,))


def test_each_penalty_halves_the_error_of_few_spokes():
    """A phantom from 16 spokes with noise: the automatic strength, against conjugate gradients at their best."""
    n, coils = 64, 5
    maps = coil_maps(coils, n)
    size = np.linalg.norm(maps, axis=0)
    truth, maps = image(n) * size, (maps / size).astype(np.complex64)
    points = radial(16, n, n).reshape(-1, 2)
    data = samples(points, coils, n)
    data = (data + 1.5 * random_complex(data.shape, 1)).astype(np.complex64)
    weights = density.pipe_menon(points, (n, n))
    one = toeplitz_normal(Toeplitz(toeplitz_kernel(points, weights, (n, n), 1e-4), (n, n)), maps)
    right = gridded(Nufft(points, (n, n), eps=1e-5), data, maps, weights)[None]
    strength = automatic_strength(right)
    assert 1e-3 < strength < 3e-2
    best = min(normalised_error(cg_sense(one, right[0], iterations=k, damping=0.01)[0], truth) for k in (5, 10, 20))
    for penalty in (L1Wavelet(strength, (n, n), xp=np), TotalVariation(strength, (1, 2))):
        problem = Problem(
            normal=lambda series: one(series[0])[None],
            right=right,
            energy=float((np.abs(data) ** 2 @ weights).sum()),
            penalties=[penalty],
        )
        found = regularized_sense(problem, iterations=30)
        assert normalised_error(found.image[0], truth) < 0.7 * best


def test_automatic_strength_is_that_of_the_least_risk():
    """Of a sparse image in noise of known size, the strength minimises the true error to a few per cent."""
    wavelet = Wavelet((64, 64))
    clean = wavelet.inverse(np.where(np.random.default_rng(0).random((1, 64, 64)) < 0.03, 20, 0) + 0j)
    noisy = clean + random_complex((1, 64, 64), 3)
    largest = np.abs(noisy).max()

    def error(strength):
        made = wavelet.inverse(wavelet.forward(noisy, threshold=strength * largest))
        return np.linalg.norm(made - clean)

    strength = automatic_strength(noisy.astype(np.complex64))
    assert error(strength) <= 1.05 * min(error(each) for each in np.geomspace(1e-3, 0.5, 100))
    assert automatic_strength(noisy.astype(np.complex64) * np.float32(1e-9)) == pytest.approx(strength, rel=1e-3)
    assert automatic_strength(np.zeros((1, 8, 8), np.complex64)) > 0


def test_status_of_a_solver():
    class Counting:
        status = np.zeros(3)
        captured, rests = None, False

        def step(self):
            self.status += 1

    rows = iterate(Counting(), 4)
    np.testing.assert_array_equal(rows, np.arange(1, 5)[:, None] * np.ones(3))


@pytest.mark.parametrize("monotone", [True, False])
def test_momentum_that_points_uphill_ends_unless_shifts_are_random(monotone: bool) -> None:
    """A third image back where the first was: against the extrapolated direction."""
    right, status = np.array([4.0 + 0j, 2.0, 1.0]), np.full(3, np.inf)
    vectors = _Vectors(right, 1.0, status, strength=0.0, damping=0.0, energy=100.0, monotone=monotone, tolerance=0.0)
    for picture in (0.5 * right, right, 0.98 * right):
        vectors.gradient()
        vectors.accept(picture, 0.0, picture)
    assert (vectors.state()["numbers"][2] == 0) == monotone
