"""The subspace's normal operator against its definition: every frame's own transforms, by another method."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.nufft import Nufft, SubspaceToeplitz, cartesian_kernel, subspace_kernels, toeplitz_kernel
from kernels.nufft.cases import random_values

FRAMES, POINTS, COILS = 7, 41, 3


def case(shape: tuple[int, ...], coefficients: int, *, cplx: bool) -> Any:
    """A basis, a trajectory with its frames and weights, maps and images, in double precision."""
    rng = np.random.default_rng(coefficients)
    basis = rng.normal(size=(FRAMES, coefficients)) + cplx * 1j * rng.normal(size=(FRAMES, coefficients))
    basis = np.linalg.qr(basis if cplx else basis.real)[0]
    points = rng.uniform(-0.5, 0.5, (FRAMES * POINTS, len(shape))) * shape
    frames, weights = np.arange(len(points)) % FRAMES, rng.uniform(0, 1, len(points))
    maps = random_values((COILS, *shape), 1).astype(complex)
    return basis, points, frames, weights, maps, random_values((coefficients, *shape), 2).astype(complex)


def definition(basis: Any, points: Any, frames: Any, weights: Any, maps: Any, images: Any) -> Any:
    shape = images.shape[1:]
    found = np.zeros_like(images)
    for frame, row in enumerate(basis):
        transform = Nufft(points[frames == frame], shape, eps=1e-12)
        seen = transform.adjoint(transform.forward(maps * np.tensordot(row, images, 1)), weights[frames == frame])
        found += np.multiply.outer(row.conj(), (maps.conj() * seen).sum(axis=0))
    return found


def relative(found: Any, expected: Any) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("cplx", [False, True])
@pytest.mark.parametrize(("shape", "coefficients"), [((9, 7), 1), ((9, 7), 4), ((8, 5), 7), ((5, 6, 7), 3)])
def test_it_is_the_sum_over_frames(shape: tuple[int, ...], coefficients: int, cplx: bool) -> None:
    basis, points, frames, weights, maps, images = case(shape, coefficients, cplx=cplx)
    expected = definition(basis, points, frames, weights, maps, images)
    kernels = subspace_kernels(lambda own: toeplitz_kernel(points, own, shape, 1e-9), weights, basis, frames)
    assert np.iscomplexobj(kernels) == cplx
    for workers in (1, 2):
        found = SubspaceToeplitz(kernels, coefficients, shape, workers=workers).apply_sense(images, maps)
        assert relative(found, expected) < 1e-8
    single = subspace_kernels(
        lambda own: toeplitz_kernel(points, own, shape, 1e-4), weights.astype(np.float32), basis, frames
    )
    out = np.full(images.shape, np.nan, np.complex64)
    operator = SubspaceToeplitz(single, coefficients, shape)
    assert operator.apply_sense(images.astype(np.complex64), maps.astype(np.complex64), out) is out
    assert relative(out, expected) < 3e-4
    given, single_maps = images.astype(np.complex64), maps.astype(np.complex64)
    first = operator.apply_sense(given, single_maps[:1])
    added = operator.apply_sense(given, single_maps[1:], first, add=True)
    assert added is first
    assert relative(added, out) < 1e-6


@pytest.mark.parametrize("cplx", [False, True])
def test_it_is_hermitian_and_positive(cplx: bool) -> None:
    shape, coefficients = (8, 9), 4
    basis, points, frames, weights, maps, x = case(shape, coefficients, cplx=cplx)
    kernels = subspace_kernels(lambda own: toeplitz_kernel(points, own, shape, 1e-9), weights, basis, frames)
    operator = SubspaceToeplitz(kernels, coefficients, shape)
    y = random_values(x.shape, 5).astype(complex)
    first, second = np.vdot(operator.apply_sense(x, maps), y), np.vdot(x, operator.apply_sense(y, maps))
    assert abs(first - second) < 1e-9 * abs(first)
    assert np.vdot(x, operator.apply_sense(x, maps)).real > 0


def test_samples_of_a_grid_need_no_doubled_one() -> None:
    shape = (8, 9)
    basis, points, frames, weights, maps, images = case(shape, 3, cplx=False)
    points = np.floor(points)
    expected = definition(basis, points, frames, weights, maps, images)
    kernels = subspace_kernels(lambda own: cartesian_kernel(points, own, shape), weights, basis, frames)
    assert kernels.shape == (6, *shape)
    assert relative(SubspaceToeplitz(kernels, 3, shape).apply_sense(images, maps), expected) < 1e-6


def test_wrong_arrays_are_refused() -> None:
    shape = (8, 9)
    basis, points, frames, weights, maps, images = case(shape, 3, cplx=False)
    kernels = subspace_kernels(lambda own: toeplitz_kernel(points, own, shape, 1e-6), weights, basis, frames)
    with pytest.raises(ValueError, match="coefficients must be 1 to 12; got 13"):
        SubspaceToeplitz(kernels, 13, shape)
    with pytest.raises(ValueError, match=r"kernels must be float32 or complex64 .*\[3, "):
        SubspaceToeplitz(kernels, 2, shape)
    operator = SubspaceToeplitz(kernels, 3, shape)
    with pytest.raises(ValueError, match=r"images must have shape \(3, 8, 9\)"):
        operator.apply_sense(images[:2], maps)
    with pytest.raises(ValueError, match="one dtype"):
        operator.apply_sense(images.astype(np.complex64), maps)
    with pytest.raises(ValueError, match="add needs an out"):
        operator.apply_sense(images, maps, add=True)


@pytest.mark.sanitize("nufft")
@pytest.mark.gpu
@pytest.mark.parametrize("cplx", [False, True])
@pytest.mark.parametrize(
    ("shape", "coefficients"), [((31, 37), 1), ((70, 64), 5), ((300, 20), 12), ((9, 12, 7), 3), ((33, 17, 40), 5)]
)
def test_cuda_is_the_definition_too(
    shape: tuple[int, ...], coefficients: int, cplx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    from kernels.nufft.toeplitz import subspace_cuda

    if coefficients > FRAMES:
        monkeypatch.setitem(globals(), "FRAMES", coefficients + 1)
    basis, points, frames, weights, maps, images = case(shape, coefficients, cplx=cplx)
    expected = definition(basis, points, frames, weights, maps, images)
    on_device = [cupy.asarray(each) for each in (basis, points, frames, weights.astype(np.float32))]
    kernels = subspace_kernels(
        lambda own: toeplitz_kernel(on_device[1], own, shape, 1e-5), on_device[3], on_device[0], on_device[2]
    )
    operator = SubspaceToeplitz(kernels, coefficients, shape)
    given = cupy.asarray(images, cupy.complex64), cupy.asarray(maps, cupy.complex64)
    out = cupy.empty(images.shape, cupy.complex64)
    variants = [name for name in subspace_cuda.VARIANTS if name in ("subspace", operator._body.variant)]
    assert len(variants) == (1 if coefficients == 12 else 2)
    for variant in variants:
        out.fill(complex(np.nan, np.nan))
        assert relative(operator._body.apply_sense(*given, out, None, variant).get(), expected) < 3e-5
    # A coil at a time gives the same sum.
    cells = coefficients * int(np.prod(kernels.shape[1:]))
    monkeypatch.setattr(subspace_cuda, "MAX_CELLS_AT_ONCE", cells)
    monkeypatch.setattr(subspace_cuda, "lines_at_once", lambda shape, padded: 1)
    monkeypatch.setattr(subspace_cuda, "FEWEST_COILS", 1)
    for variant in variants:
        operator._body.apply_sense(given[0], given[1][:1], out, None, variant)
        operator._body.apply_sense(given[0], given[1][1:], out, None, variant, add=True)
        assert relative(out.get(), expected) < 3e-5
        assert relative(operator._body.apply_sense(*given, out, None, variant).get(), expected) < 3e-5
