"""Coil sensitivities from the centre of k-space.

Maps are complex64 (coils, *shape) with Σ |map|² = 1 over the coils wherever there is signal. Elsewhere they are 0
(ESPIRiT), or arbitrary with the same norm (Walsh). Their phase is relative to a mixture of coils that vanishes nowhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.runtime.arrays import namespace
from kernels.sense.arrays import centred_fft
from kernels.sense.calibration import CentreImages, reference_mixture, refined, with_reference_phase
from kernels.sense.coil_groups import unit_scale

# Steps of power iteration: the local correlation has one dominant eigenvalue; those of ESPIRiT lie close together at
# the object's edge.
_WALSH_STEPS, _ESPIRIT_STEPS = 10, 30
# Values of the pixels' matrices computed at a time: 64 MiB.
_BLOCK_VALUES = 1 << 22


@dataclass(frozen=True, kw_only=True, eq=False)
class CoarseMaps:
    """Sensitivities from the k-space centre on a coarse grid, smooth enough to be interpolated.

    maps  : complex64 (coils, *coarse shape), with the reference mixture's phase
    value : float32 (*coarse shape), the eigenvalues; None if every pixel holds signal
    crop  : maps are 0 where the interpolated eigenvalue is less
    """

    maps: Any
    value: Any = None
    crop: float = 0.0

    def fine(self, coils: Any, shape: Sequence[int]) -> Any:
        """Maps (…, *shape) of the given coils, not yet scaled."""
        return refined(self.maps[coils], shape)

    def mask(self, shape: Sequence[int]) -> Any:
        """Where there is signal, bool (*shape); None means everywhere."""
        return None if self.value is None else refined(self.value, shape) >= self.crop


def walsh(centre: CentreImages, shape: Sequence[int], *, block: int = 7) -> Any:
    """The strongest eigenvector of the coils' local correlation, by power iteration.

    centre : tapered coil images of the k-space centre, see `centre_images`
    shape  : of the maps
    block  : width, in pixels of the coarse grid, of the neighbourhood that the correlation is summed over; odd

    Source: Walsh, Gmitro, Marcellin, "Adaptive reconstruction of phased array MR imagery", Magn. Reson. Med. 43 (2000).
    """
    return _scaled(coarse_walsh(centre, block=block), shape)


def coarse_walsh(centre: CentreImages, *, block: int = 7) -> CoarseMaps:
    """The maps of `walsh` before interpolation and scaling."""
    images = centre.images
    xp = namespace(images)
    coils, coarse = images.shape[0], images.shape[1:]
    maps = xp.empty((coils, *coarse), np.complex64)
    start = _unit(images)
    for rows in _row_blocks(coils, coarse):
        maps[:, rows], _ = _dominant(_local_correlation(images, rows, block), start[:, rows], _WALSH_STEPS)
    maps = _unit(maps) * (xp.sum(xp.abs(images), axis=0) > 0)
    return CoarseMaps(maps=with_reference_phase(maps, reference_mixture(images, maps)))


def espirit(
    centre: CentreImages,
    shape: Sequence[int],
    *,
    kernel: int = 6,
    threshold: float = 0.02,
    crop: float = 0.5,
) -> Any:
    """ESPIRiT: the eigenvectors with eigenvalue 1 of the operator that projects every patch of k-space onto the row
    space of the calibration matrix.

    centre    : coil images of the k-space centre, not tapered, see `centre_images`
    shape     : of the maps
    kernel    : samples of a patch along each axis
    threshold : singular values below this share of the largest count as noise
    crop      : pixels with an eigenvalue below this hold no signal: their maps are 0

    Source: Uecker, Lai, Murphy, Virtue, Elad, Pauly, Vasanawala, Lustig, "ESPIRiT: an eigenvalue approach to
    autocalibrating parallel MRI", Magn. Reson. Med. 71 (2014).
    Raises ValueError if the centre is narrower than two patches.
    """
    return _scaled(coarse_espirit(centre, kernel=kernel, threshold=threshold, crop=crop), shape)


def coarse_espirit(centre: CentreImages, *, kernel: int = 6, threshold: float = 0.02, crop: float = 0.5) -> CoarseMaps:
    """The maps of `espirit` before interpolation, scaling and cropping."""
    images = centre.images
    xp = namespace(images)
    coils, coarse = images.shape[0], images.shape[1:]
    axes = tuple(range(1, images.ndim))
    region = tuple(min(centre.width, n) for n in coarse)
    extents = tuple(min(kernel, n) for n in region)
    if min(region) < 2 * kernel and any(n < 2 * kernel for n, size in zip(region, coarse, strict=True) if size > 1):
        raise ValueError(f"ESPIRiT with patches of {kernel} needs a centre of {2 * kernel} or more; got {region}")
    spectrum = centred_fft(images, axes)
    box = tuple(slice(n // 2 - r // 2, n // 2 - r // 2 + r) for n, r in zip(coarse, region, strict=True))
    projection = _signal_projection(spectrum[(slice(None), *box)], extents, threshold)
    lags = _lag_sums(projection.reshape(coils, *extents, coils, *extents), extents)
    maps = xp.empty((coils, *coarse), np.complex64)
    values = xp.empty(coarse, np.float32)
    start = _unit(images)
    for rows in _row_blocks(coils, coarse):
        maps[:, rows], values[rows] = _dominant(_at_rows(lags, coarse, rows), start[:, rows], _ESPIRIT_STEPS)
    return CoarseMaps(maps=with_reference_phase(maps, reference_mixture(images, maps)), value=values, crop=crop)


def given(maps: Any) -> Any:
    """Maps from elsewhere, scaled to Σ |map|² = 1. Raises ValueError if a value is not finite, or if all are 0."""
    xp = namespace(maps)
    if not bool(xp.isfinite(maps).all()) or not bool((maps != 0).any()):
        raise ValueError("sensitivities must be finite, and not all 0")
    return _unit(maps.astype(np.complex64))


def _scaled(coarse: CoarseMaps, shape: Sequence[int]) -> Any:
    maps, mask = _unit(coarse.fine(slice(None), shape)), coarse.mask(shape)
    return maps if mask is None else maps * mask


def _unit(maps: Any) -> Any:
    """Σ |map|² = 1 over the coils at each pixel; 0 stays 0."""
    squares = namespace(maps).sum(maps.real**2 + maps.imag**2, axis=0)
    return (maps * unit_scale(squares)).astype(np.complex64, copy=False)


def _row_blocks(coils: int, coarse: tuple[int, ...]) -> Iterator[slice]:
    """Batches of rows of the coarse grid whose coils × coils matrices fit in memory together."""
    rows = max(1, _BLOCK_VALUES // (coils * coils * math.prod(coarse[1:])))
    for first in range(0, coarse[0], rows):
        yield slice(first, min(first + rows, coarse[0]))


def _local_correlation(images: Any, rows: slice, block: int) -> Any:
    """Σ x xᴴ over the pixels around each, within the image: complex128 (rows, pixels …, coils, coils)."""
    xp = namespace(images)
    reach = block // 2
    first, last = max(rows.start - reach, 0), min(rows.stop + reach, images.shape[1])
    near = xp.moveaxis(images[:, first:last], 0, -1).astype(np.complex128)
    sums = near[..., :, None] * near[..., None, :].conj()
    for axis, n in enumerate(images.shape[1:]):
        begin, end, origin = (rows.start, rows.stop, first) if axis == 0 else (0, n, 0)
        over = (slice(None),) * axis
        total = xp.zeros((*sums.shape[:axis], end - begin, *sums.shape[axis + 1 :]), np.complex128)
        for offset in range(-reach, reach + 1):
            low, high = max(begin + offset, 0), min(end + offset, n)
            if low < high:
                into = slice(low - offset - begin, high - offset - begin)
                total[(*over, into)] += sums[(*over, slice(low - origin, high - origin))]
        sums = total
    return sums


def _signal_projection(region: Any, extents: tuple[int, ...], threshold: float) -> Any:
    """P = U Uᴴ onto the space of all patches (coils × patch): complex128 (n, n), n = coils × the patch's samples."""
    xp = namespace(region)
    windows = xp.lib.stride_tricks.sliding_window_view(region, extents, axis=tuple(range(1, region.ndim)))
    dimensions = len(extents)
    order = (*range(1, dimensions + 1), 0, *range(dimensions + 1, 2 * dimensions + 1))
    size = region.shape[0] * int(np.prod(extents))
    patches = windows.transpose(order).reshape(-1, size).astype(np.complex128)  # one row per patch
    if len(patches) < size:
        values, vectors = xp.linalg.eigh(xp.matmul(patches.conj(), patches.T))
        strongest = xp.sqrt(xp.maximum(values, 0))
        kept = strongest > threshold * strongest[-1]
        basis = xp.matmul(patches.T, vectors[:, kept]) / strongest[kept]
    else:
        values, vectors = xp.linalg.eigh(xp.matmul(patches.T, patches.conj()))
        strongest = xp.sqrt(xp.maximum(values, 0))
        basis = vectors[:, strongest > threshold * strongest[-1]]
    return xp.matmul(basis, basis.conj().T)


def _lag_sums(projection: Any, extents: tuple[int, ...]) -> Any:
    """(coils, coils, lags …): the sum of P[(i, a), (j, b)] over all a − b = lag, from 1 − n to n − 1 on each axis."""
    xp = namespace(projection)
    coils, dimensions = projection.shape[0], len(extents)
    lags = xp.zeros((coils, coils, *(2 * n - 1 for n in extents)), np.complex128)
    for a in itertools.product(*map(range, extents)):
        block = projection[(slice(None), *a)]  # (i, j, b …); reversed, a − b runs upwards from a − (n − 1)
        reversed_block = block[(slice(None), slice(None), *([slice(None, None, -1)] * dimensions))]
        place = tuple(slice(at, at + n) for at, n in zip(a, extents, strict=True))
        lags[(slice(None), slice(None), *place)] += reversed_block
    return lags


def _at_rows(lags: Any, coarse: tuple[int, ...], rows: slice) -> Any:
    """The operator (rows, pixels …, coils, coils): Σ over lags of the lag sums × e^{2πi lag·r/n} / patch size."""
    xp = namespace(lags)
    found = lags
    for axis, n in enumerate(coarse):
        count = lags.shape[2 + axis]
        places = np.arange(n)[rows] if axis == 0 else np.arange(n)
        turns = np.outer(np.arange(count) - count // 2, places - n // 2) / n
        found = xp.tensordot(found, xp.asarray(np.exp(2j * np.pi * turns)), axes=(2, 0))
    patch = math.prod((count + 1) // 2 for count in lags.shape[2:])
    return xp.ascontiguousarray(xp.moveaxis(found, (0, 1), (-2, -1))) / patch


def _dominant(operator: Any, start: Any, steps: int) -> tuple[Any, Any]:
    """Dominant eigenvectors (coils, …) and eigenvalues of Hermitian matrices (…, coils, coils) by power iteration."""
    xp = namespace(operator)
    # The offset helps if the image's own values are orthogonal to the eigenvector.
    vectors = xp.moveaxis(start, 0, -1)[..., None].astype(np.complex128) + 1e-3
    values = None
    for _ in range(steps):
        vectors = xp.matmul(operator, vectors)
        values = xp.sqrt(xp.sum(vectors.real**2 + vectors.imag**2, axis=(-2, -1), keepdims=True))
        vectors = vectors / xp.maximum(values, 1e-300)
    assert values is not None
    return xp.moveaxis(vectors[..., 0], -1, 0), values[..., 0, 0]


__all__ = ["CoarseMaps", "coarse_espirit", "coarse_walsh", "espirit", "given", "walsh"]
