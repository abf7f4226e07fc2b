"""Conjugate gradients: laws, the curve of residuals, where they stop, and how they continue."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kernels.runtime.threads import Interrupted, interruptible
from kernels.sense import conjugate_gradient
from kernels.sense.conjugate_gradient import initial_progress
from tests.kernels.sense.phantom import normalised_error, random_complex


def operator(matrix):
    """The matrix as an operator that reuses its result's memory."""
    result = np.empty(len(matrix), np.complex64)

    def normal(x):
        result[:] = matrix @ x
        return result

    return normal


def positive(size, seed):
    values = random_complex((size, size), seed).astype(np.complex128)
    return values @ values.conj().T / size + 0.3 * np.eye(size)


@pytest.mark.parametrize("damping", [0.0, 0.7])
def test_as_many_iterations_as_unknowns_solve(damping):
    matrix, right = positive(24, 0), random_complex(24, 1)
    found, curve = conjugate_gradient(operator(matrix), right, iterations=40, damping=damping, tolerance=1e-6)
    expected = np.linalg.solve(matrix + damping * np.eye(24), right)
    assert normalised_error(found, expected) < 1e-5
    assert curve[0] == 1
    assert curve[-1] <= 1e-6
    assert len(curve) < 41


def test_the_curve_is_that_of_the_residuals():
    matrix, right = positive(50, 2), random_complex(50, 3)
    for iterations in (1, 4, 9):
        found, curve = conjugate_gradient(operator(matrix), right, iterations=iterations, damping=0.1)
        left = right - (matrix + 0.1 * np.eye(50)) @ found
        assert len(curve) == iterations + 1
        assert curve[-1] == pytest.approx(np.linalg.norm(left) / np.linalg.norm(right), rel=1e-3)


def test_each_step_is_the_best_of_its_krylov_space():
    """The defining law: least error in the operator's norm over span(b, Ab, …)."""
    matrix, right = positive(30, 4), random_complex(30, 5)
    exact = np.linalg.solve(matrix, right)
    basis = [right.astype(np.complex128)]
    for iterations in range(1, 6):
        found, _ = conjugate_gradient(operator(matrix), right, iterations=iterations)
        space = np.linalg.qr(np.stack(basis, axis=1))[0]
        best = space @ np.linalg.solve(space.conj().T @ matrix @ space, space.conj().T @ right)
        norms = [float(np.sqrt((e.conj() @ matrix @ e).real)) for e in (found - exact, best - exact)]
        assert norms[0] <= norms[1] * (1 + 1e-3) + 1e-6
        basis.append(matrix @ basis[-1])


def test_separate_problems_do_not_know_of_each_other():
    matrix, right = positive(20, 4), random_complex((3, 20), 5)
    right[1] *= 100

    def normal(x):
        return (x @ matrix.T).astype(np.complex64)

    together, curve = conjugate_gradient(normal, right, iterations=6, separate=True)
    for each, found in zip(right, together, strict=True):
        alone, _ = conjugate_gradient(normal, each, iterations=6)
        np.testing.assert_allclose(found, alone, rtol=1e-3, atol=1e-4 * np.abs(alone).max())
    left = right - together @ matrix.T
    assert curve[-1] == pytest.approx(np.linalg.norm(left) / np.linalg.norm(right), rel=1e-2)


@pytest.mark.parametrize("factor", [1e-30, 1e-20, 1e20, 1e30])
def test_the_scale_of_the_data_does_not_matter(factor):
    matrix, right = positive(12, 2), random_complex(12, 3)
    found = [
        conjugate_gradient(operator(matrix), each.astype(np.complex64), iterations=12)
        for each in (right, right.astype(np.complex128) * factor)
    ]
    assert normalised_error(found[1][0].astype(np.complex128) / factor, found[0][0]) < 1e-4
    np.testing.assert_allclose(found[1][1][:6], found[0][1][:6], rtol=1e-3)


def test_nothing_gives_nothing():
    found, curve = conjugate_gradient(lambda x: x, np.zeros((3, 4), np.complex64), iterations=5)
    assert (found == 0).all()
    assert (curve == 0).all()


# Where they stop


MATRIX, RIGHT = positive(24, 0), random_complex(24, 1)


def solved(**how):
    """The solution, the curve, and what `on_iteration` was called with."""
    told = []
    normal = how.pop("normal", operator(MATRIX))
    found = conjugate_gradient(
        normal, RIGHT, damping=0.2, on_iteration=lambda *each: told.append(each), **({"iterations": 12} | how)
    )
    return *found, told


def test_iterations_stop_at_the_tolerance_itself():
    whole, curve, told = solved()
    assert [number for number, _ in told] == list(range(1, 13))
    np.testing.assert_array_equal([residual for _, residual in told], curve[1:])
    for tolerance, last in ((curve[5], 5), (np.nextafter(curve[5], 0), 6), (np.nextafter(curve[12], 0), 12)):
        found, reached, told = solved(tolerance=tolerance)
        np.testing.assert_array_equal(reached, curve[: last + 1])
        assert told == list(enumerate(curve[1 : last + 1].tolist(), 1))
        np.testing.assert_array_equal(found, solved(iterations=last)[0])
    assert (found.dtype, curve.dtype) == (np.complex64, np.float64)
    np.testing.assert_array_equal(found, whole)


def test_all_processes_stop_by_the_residual_agreed_on():
    """What is told is the residual agreed on, the curve this process's own."""
    _, curve, _ = solved()
    asked = []

    def agreed(residual):
        asked.append(residual)
        return residual / 4

    last = int(np.argmax(curve / 4 <= curve[8]))
    assert last < 8
    _, reached, told = solved(tolerance=curve[8], agreed=agreed)
    np.testing.assert_array_equal(reached, curve[: last + 1])
    assert asked == curve[1 : last + 1].tolist()
    assert told == [(number, residual / 4) for number, residual in enumerate(asked, 1)]


def test_zeros_reach_any_tolerance_at_once():
    found, curve = conjugate_gradient(lambda x: x, np.zeros(5, np.complex64), iterations=5, tolerance=1e-9)
    assert not found.any()
    assert curve.tolist() == [0, 0]


def test_separate_problems_stop_by_the_residual_of_all():
    """One of them is solved at once, one is 0, and one takes all iterations."""
    right = np.stack([RIGHT, 0 * RIGHT, RIGHT])
    told = []

    def normal(x):
        return np.stack([x[0], x[1], operator(MATRIX)(x[2])])

    _, curve = conjugate_gradient(normal, right, iterations=9, separate=True)
    found, reached = conjugate_gradient(
        normal, right, iterations=9, tolerance=curve[6], separate=True, on_iteration=lambda *each: told.append(each)
    )
    np.testing.assert_array_equal(reached, curve[:7])
    assert told == list(enumerate(curve[1:7].tolist(), 1))
    assert curve[0] == 1
    np.testing.assert_allclose(found[0], RIGHT, rtol=1e-6)
    assert not found[1].any()
    left = np.linalg.norm(RIGHT - MATRIX @ found[2])
    assert reached[-1] == pytest.approx(left / np.linalg.norm(right), rel=1e-3)


class OnDevice(np.ndarray):
    """Stands for a GPU's array, whose elements can be read only by waiting for them."""

    def __getitem__(self, index):
        return super().__getitem__((index, ...) if isinstance(index, int) else index)

    def __float__(self):
        raise AssertionError("waits for the device")

    __bool__ = __int__ = __float__


@pytest.mark.parametrize("tolerance", [0.0, 0.5])
def test_only_a_tolerance_waits_for_the_device(tolerance):
    progress = initial_progress(RIGHT, 12)
    progress.squares = progress.squares.view(OnDevice)
    if tolerance:
        with pytest.raises(AssertionError, match="waits for the device"):
            solved(progress=progress, tolerance=tolerance)
    else:
        _, curve, told = solved(progress=progress)
        np.testing.assert_array_equal(np.asarray(curve), solved()[1])
        assert len(told) == 12


# How they continue


class RankLost(Exception):
    pass


def failing(at):
    """The operator; its call number `at` raises."""
    calls, working = [], operator(MATRIX)

    def normal(x):
        calls.append(x)
        if len(calls) == at:
            raise RankLost
        return working(x)

    return normal


@pytest.mark.parametrize("tolerance", [0.0, 1e-2])
def test_progress_is_continued_after_an_error_to_the_same_bits(tolerance):
    expected, curve, told = solved(tolerance=tolerance)
    progress = initial_progress(RIGHT, 12)
    with pytest.raises(RankLost):
        solved(normal=failing(4), progress=progress, tolerance=tolerance)
    assert progress.number == 3
    found, continued, later = solved(progress=progress, tolerance=tolerance)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(continued, curve)
    assert later == told[3:]


def test_progress_that_has_reached_the_tolerance_is_the_result():
    """One process may have taken the last step when another was lost."""
    expected, curve, _ = solved(iterations=5)
    progress = initial_progress(RIGHT, 12)
    with pytest.raises(RankLost):
        solved(normal=failing(6), progress=progress)
    found, reached, told = solved(normal=failing(1), progress=progress, tolerance=curve[5])
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(reached, curve)
    assert told == []


def test_a_cancelled_computation_ends_before_its_next_iteration():
    given_up = threading.Event()
    told = []

    def follow(number, _):
        told.append(number)
        if number == 2:
            given_up.set()

    with interruptible(given_up), pytest.raises(Interrupted):
        conjugate_gradient(operator(MATRIX), RIGHT, iterations=5, on_iteration=follow)
    assert told == [1, 2]
