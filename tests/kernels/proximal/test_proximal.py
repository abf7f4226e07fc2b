"""Proximal operators: the laws that define them, and their definitions in float64."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.proximal import (
    differences,
    differences_adjoint,
    inner,
    low_rank,
    magnitudes,
    next_shift,
    project,
    rank_scale,
    soft_threshold,
)
from kernels.wavelet import Wavelet
from tests.kernels.sense.phantom import random_complex

SHIFT = np.array([3, 5])


def wavelet(v, threshold):
    transform = Wavelet(v.shape[1:], "db2")
    return transform.inverse(transform.forward(v, shift=SHIFT, threshold=threshold), shift=SHIFT)


def wavelet_norm(v):
    return np.abs(Wavelet(v.shape[1:], "db2").forward(v, shift=SHIFT)).sum()


def nuclear(v, block=(8, 8)):
    """By singular values of each block, of the rotated image."""
    turned = np.roll(v, (-3, -5), (1, 2))
    total = 0.0
    for x in range(0, v.shape[1], block[0]):
        for y in range(0, v.shape[2], block[1]):
            part = turned[:, x : x + block[0], y : y + block[1]].reshape(len(v), -1)
            total += np.linalg.svd(part, compute_uv=False).sum()
    return total


OPERATORS = {
    "soft": (soft_threshold, lambda v: np.abs(v).sum()),
    "vectors": (lambda v, t: soft_threshold(v, t, vectors=True), lambda v: np.linalg.norm(v, axis=0).sum()),
    "wavelet": (wavelet, wavelet_norm),
    "low rank": (lambda v, t: low_rank(v, t, (8, 8), SHIFT)[0], nuclear),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_laws_of_proximal_operators(name):
    """The minimum itself, against many nearby points; and firm non-expansiveness."""
    prox, penalty = OPERATORS[name]
    threshold = 0.8
    v, w = (random_complex((4, 19, 13), seed).astype(complex) for seed in (1, 2))
    found, other = prox(v, threshold), prox(w, threshold)

    def objective(x):
        return 0.5 * np.linalg.norm(x - v) ** 2 + threshold * penalty(x)

    least = objective(found)
    rng = np.random.default_rng(3)
    for size in (1e-4, 1e-2, 1):
        for direction in (rng.normal(size=v.shape) + 1j * rng.normal(size=v.shape), v, -found, v - found):
            assert objective(found + size * direction) >= least * (1 - 1e-12)
    apart = found - other
    assert np.linalg.norm(apart) ** 2 <= np.vdot(apart, v - w).real * (1 + 1e-12)
    np.testing.assert_allclose(prox(v, 0.0), v, atol=1e-10)
    assert not prox(v, 1e3).any()


@pytest.mark.parametrize("vectors", [False, True])
def test_moreau(vectors):
    """prox + projection onto the dual ball is the identity, and the projection lies in the ball."""
    v = random_complex((3, 101), 4).astype(complex)
    inside = project(v, 0.6, vectors=vectors)
    np.testing.assert_allclose(soft_threshold(v, 0.6, vectors=vectors) + inside, v, atol=1e-14)
    size = np.linalg.norm(inside, axis=0) if vectors else np.abs(inside)
    assert size.max() <= 0.6 * (1 + 1e-12)
    np.testing.assert_allclose(project(inside, 0.6, vectors=vectors), inside, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "axes"), [((31, 37), (0, 1)), ((4, 13, 1, 11), (1, 3)), ((7, 5, 3), (0,)), ((1,), (0,))]
)
def test_differences_and_their_adjoint(shape, axes):
    image, fields = random_complex(shape, 1).astype(complex), random_complex((len(axes), *shape), 2).astype(complex)
    found = differences(image, axes)
    for field, axis in zip(found, axes, strict=True):
        last = image.take([-1], axis=axis)
        np.testing.assert_array_equal(field, np.diff(image, axis=axis, append=last))
    assert np.vdot(fields, found) == pytest.approx(np.vdot(differences_adjoint(fields, axes), image), abs=1e-12)


def test_low_rank_is_singular_value_thresholding():
    series = random_complex((5, 16, 24), 6).astype(complex)
    found, size = low_rank(series, 3.0, (8, 8), SHIFT)
    turned, expected = np.roll(series, (-3, -5), (1, 2)), np.empty_like(series)
    kept = 0.0
    for x in range(0, 16, 8):
        for y in range(0, 24, 8):
            u, values, v = np.linalg.svd(turned[:, x : x + 8, y : y + 8].reshape(5, -1), full_matrices=False)
            values = np.maximum(values - 3, 0)
            kept += values.sum()
            expected[:, x : x + 8, y : y + 8] = (u * values @ v).reshape(5, 8, 8)
    np.testing.assert_allclose(found, np.roll(expected, (3, 5), (1, 2)), atol=1e-10)
    assert float(size) == pytest.approx(kept)
    assert rank_scale(25, (8, 8)) == pytest.approx(13)


def test_sums():
    values, other = random_complex((3, 50), 7), random_complex((3, 50), 8)
    assert float(magnitudes(values)) == pytest.approx(np.abs(values.astype(complex)).sum(), rel=1e-6)
    norms = np.linalg.norm(values.astype(complex), axis=0)
    assert float(magnitudes(values, vectors=True)) == pytest.approx(norms.sum(), rel=1e-6)
    assert float(inner(values, other)) == pytest.approx(np.vdot(values.astype(complex), other).real, rel=1e-9)


def test_shifts_begin_again_after_the_last():
    table, row, shift = np.arange(6, dtype=np.int32).reshape(3, 2), np.array([1], np.int32), np.zeros(2, np.int32)
    seen = []
    for _ in range(3):
        next_shift(table, row, shift)
        seen.append((int(row[0]), shift.tolist()))
    assert seen == [(2, [4, 5]), (0, [0, 1]), (1, [2, 3])]


def test_nan_stays_nan():
    values = np.array([complex(np.nan, 0), 1, 2j], np.complex64)
    assert np.isnan(soft_threshold(values, 1.5)).tolist() == [True, False, False]
    assert np.isnan(Wavelet((3,), "haar").forward(values, threshold=0.1)).any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: soft_threshold(np.zeros(3), 1.0), "values must be complex64"),
        (lambda: differences(np.zeros((1, 1, 1, 1, 1), np.complex64), (0,)), "four axes or fewer"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
