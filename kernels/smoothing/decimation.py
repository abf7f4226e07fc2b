"""Wide Gaussians at a cost that does not grow with their width: decimate, smooth a coarse grid, interpolate.

Along an axis, a Gaussian of standard deviation sigma is smooth over several samples, so a coarse grid of every D-th
sample holds it: D = 2**e, with sigma between 3.2 D and 6.4 D, but 3 for sigma below 8, at least 4 from there on, and at
least 8 from 16 on. Coarse samples lie at the multiples of D in absolute coordinates, so results do not depend on how an
image is cut. D is the product of stages of factor d <= 8:
    decimate      c[j] = sum over k of B[k] x[d j + k]
    interpolate   y[i] = sum over j of d B[i - d j] c[j]
where B is m boxes of d samples convolved (a B-spline of order m), whose spectrum has an m-fold zero at every frequency
that folds onto a low one; for m = 4 these zeros are moved apart (`MOVED`). If D leaves less than 3.2 coarse samples, B
has weights of `LEAST_ENERGY`, small as far around these frequencies as the spectrum of 2 coarse samples reaches.
Between decimation and interpolation the coarse samples are smoothed with weights whose spectrum is that of the Gaussian
divided by those of all stages, cut at 5 sigma.

The weights that a sample receives differ from the real Gaussian's by at most `WEIGHT_ERROR` in all (the sum of the
absolute differences, along one axis), measured over sigmas from 5.8 to 400: 0.05 of a step of 16 bits. m is 6, or 4 for
stages after which sigma is still 8 coarse samples or more.

Weights for bytes may differ by more, `BYTE_WEIGHT_ERROR`, which is 0.05 of a step of 8 bits, so their grids are
coarser: sigma is between 1.9 D and 7.6 D. No stage has d = 2, the coarse weights are cut at 4 sigma, and m is 4, or 2
for a first stage after which sigma is still 20 coarse samples.

16-bit volumes, for which the errors of three axes add up, allow `VOLUME_WEIGHT_ERROR` along each: all the limits above
but the first, 5.8, are `VOLUME_SCALE` times as large.

Weights have the same bits on every machine: sums are in a fixed order, or rounded once.

Source: Unser, Aldroubi and Eden, "Fast B-spline transforms for continuous image representation and interpolation",
IEEE PAMI 13 (1991); the correction of the coarse weights is that of gridding in non-uniform FFTs.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.elementary import cosine, exponential

WEIGHT_ERROR, VOLUME_WEIGHT_ERROR, BYTE_WEIGHT_ERROR = 1.4e-6, 0.96e-6, 4e-4
VOLUME_SCALE = 1.0625
COARSE_SIGMA, BYTE_COARSE_SIGMA = 3.2, 1.9  # least standard deviation, in coarse samples
# Weights at distances 0 … 3 D - 1 by D, which allow 2 coarse samples: of all with the sum 1, those of the least energy
# sum over 0 < j < D of the integral of H(f + j / D)**2 G(f)**2 over |f| < 1 / 2 D, where H is their spectrum, and G
# that of a Gaussian of 5.25 (D = 3), 8.1 (D = 4) or 16 samples (D = 8).
LEAST_ENERGY = {
    3: (
        0.159551388, 0.147876776, 0.117570730, 0.0794263903, 0.0449730148, 0.0207320868, 0.00746459186, 0.00189873079,
        0.000281985480,
    ),
    4: (
        0.122556087, 0.117158238, 0.102358045, 0.0814862310, 0.0588137566, 0.0382663943, 0.0221641837, 0.0112622817,
        0.00490820426, 0.00174502896, 0.000477748738, 0.0000818446023,
    ),
    8: (
        0.0612987541, 0.0605919994, 0.0585909821, 0.0553924441, 0.0511822924, 0.0462057367, 0.0407376923, 0.0350524746,
        0.0293919146, 0.0240431335, 0.0191227049, 0.0147760538, 0.0110762427, 0.00803763233, 0.00563010387,
        0.00379432598, 0.0024587037, 0.00150546595, 0.000876163773, 0.000478863891, 0.000241453672, 0.000109252986,
        0.0000423622951, 0.0000126242467,
    ),
}  # fmt: skip
# How far the zeros of splines lie on both sides of the frequencies that fold onto 0, in cycles per coarse sample: of
# order 4 as those of the Hermite polynomial of degree 4, which fit the spectrum of a Gaussian of 8 coarse samples; of
# bytes, by search: order 4 for 2 to 4 coarse samples, order 2 for 20 and more.
MOVED = (0.010438, 0.032841)
BYTE_MOVED, BYTE_SINGLE = (0.047, 0.143), (0.004,)
MOST_FACTOR = 8  # of a stage
CUT, BYTE_CUT = 5.0, 4.0  # the coarse weights end at this many standard deviations
FREQUENCIES = 4096


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One decimation by `factor`, and the interpolation back."""

    factor: int
    order: int
    down: tuple[float, ...]  # weights of samples d j - reach … d j + reach
    up: tuple[tuple[float, ...], ...]  # for each phase i % d: weights of coarse i // d - order / 2 + 1 … + order / 2

    @property
    def reach(self) -> int:
        return len(self.down) // 2

    def coarse(self, first: int, last: int) -> tuple[int, int]:
        """The coarse samples from which samples `first` … `last` are interpolated, both inclusive."""
        return first // self.factor - self.order // 2 + 1, last // self.factor + self.order // 2

    def fine(self, first: int, last: int) -> tuple[int, int]:
        """The samples from which coarse samples `first` … `last` are computed."""
        return first * self.factor - self.reach, last * self.factor + self.reach


@dataclass(frozen=True, kw_only=True)
class Decimation:
    """How a Gaussian along one axis is computed; the first stage is the finest."""

    stages: tuple[Stage, ...]
    half_weights: tuple[
        float, ...
    ]  # of coarse samples at distance 0 … radius; of a derivative, only their number counts
    derivative: tuple[float, ...] | None = None  # weights of coarse samples -radius … radius

    @functools.cached_property
    def factor(self) -> int:
        return math.prod(stage.factor for stage in self.stages)

    def interpolated(self, first: int, last: int) -> list[tuple[int, int]]:
        """The samples first … last, and of each coarser grid those needed to interpolate them."""
        spans = [(first, last)]
        for stage in self.stages:
            spans.append(stage.coarse(*spans[-1]))
        return spans

    def decimated(self, first: int, last: int, *, multiple: int = 1) -> list[tuple[int, int]]:
        """The image's samples, and those of each coarser grid, from which samples first … last are computed; of the
        coarsest grid at least these, and a multiple of `multiple`."""
        low, high = self.interpolated(first, last)[-1]
        radius = len(self.half_weights) - 1
        count = -(-(high - low + 1 + 2 * radius) // multiple) * multiple
        spans = [(low - radius, low - radius + count - 1)]
        for stage in reversed(self.stages):
            spans.insert(0, stage.fine(*spans[0]))
        return spans

    @functools.cached_property
    def extent(self) -> tuple[int, int]:
        """Samples that any output may need before and after itself."""
        needed = [(at, *self.decimated(at, at)[0]) for at in range(self.factor)]
        return max(at - low for at, low, _ in needed), max(high - at for at, _, high in needed)


@functools.lru_cache(maxsize=64)
def decimation(
    sigma: float, dtype: np.dtype, order: int = 0, *, bytewise: bool = False, volume: bool = False
) -> Decimation:
    """For a standard deviation of at least 5.8 samples, or 7.6 of bytes and derivatives.

    dtype    : float32 or float64, to which weights are rounded
    order    : of the derivative, 0 for the Gaussian itself
    bytewise : whether results are rounded to bytes
    volume   : whether three axes or more of 16-bit samples are decimated
    """
    stages: list[Stage] = []
    factor = 1
    limited = sigma / VOLUME_SCALE if volume else sigma
    exponent = math.frexp(limited / (BYTE_COARSE_SIGMA if bytewise else COARSE_SIGMA))[1] - 1  # floor of log2
    if bytewise and exponent % 3 == 1:
        exponent -= 1  # a stage of 2 would take longer than it spares the coarse weights
    elif order == 0 and limited >= 8:
        exponent = max(exponent, 3 if limited >= 16 else 2)
    whole = 3 if limited < 8 and order == 0 and not bytewise else 1 << exponent
    while factor < whole:
        step = min(MOST_FACTOR, whole // factor)
        factor *= step
        if bytewise:
            simple = not stages and sigma >= 20 * factor
            zeros: tuple[float, ...] = BYTE_SINGLE if simple else MOVED if sigma >= 3.8 * factor else BYTE_MOVED
        else:
            zeros = MOVED if limited >= 8 * factor else (0.0,) * 3
        stages.append(_stage(step, zeros, dtype, least=not bytewise and limited < COARSE_SIGMA * factor))
    spectrum = _coarse_spectrum(sigma / whole, stages)
    if order:
        # A cut at the same place leaves out more of a derivative, which falls later.
        radius = math.ceil((CUT + 0.25 * order) * sigma / whole)
        for _ in range(order):
            spectrum = spectrum * (2 * math.pi / FREQUENCIES / whole * np.arange(FREQUENCIES // 2 + 1))
        taps = _inverse_transform(spectrum, -np.arange(-radius, radius + 1), order).astype(dtype)
        return Decimation(stages=tuple(stages), half_weights=(0.0,) * (radius + 1), derivative=tuple(map(float, taps)))
    half = _inverse_transform(spectrum, np.arange(math.ceil((BYTE_CUT if bytewise else CUT) * sigma / whole) + 1))
    half = (half / (half[0] + 2 * math.fsum(half[1:]))).astype(dtype)
    return Decimation(stages=tuple(stages), half_weights=tuple(map(float, half)))


@functools.cache
def _stage(factor: int, zeros: tuple[float, ...], dtype: np.dtype, *, least: bool) -> Stage:
    order = 2 * len(zeros)
    down = np.array((*LEAST_ENERGY[factor][:0:-1], *LEAST_ENERGY[factor])) if least else _spline(factor, zeros)
    reach = len(down) // 2
    up = np.zeros((factor, order))
    for phase in range(factor):
        for tap in range(order):
            distance = phase + (order // 2 - 1 - tap) * factor
            if abs(distance) <= reach:
                up[phase, tap] = down[reach + distance] * factor
    rounded = (tuple(map(float, weights.astype(dtype))) for weights in (down, *up))
    return Stage(factor=factor, order=order, down=next(rounded), up=tuple(rounded))


def _spline(factor: int, zeros: tuple[float, ...]) -> NDArray[np.float64]:
    """B of the module's docstring, from its first sample to its last."""
    spline = np.ones(1)
    for zero in zeros:
        # A box with its zeros moved to one side, convolved with one with its zeros moved to the other side.
        cosines = cosine(zero / factor * np.arange(factor))
        counts = [*range(factor), *range(factor - 2, -1, -1)]
        pair = [math.fsum(cosines[abs(np.arange(-count, count + 1, 2))]) for count in counts]
        longer = np.zeros(spline.size + len(pair) - 1)
        for place, weight in enumerate(pair):
            longer[place : place + spline.size] += weight * spline
        spline = longer
    return np.asarray(spline / math.fsum(spline))


def _coarse_spectrum(sigma: float, stages: list[Stage]) -> NDArray[np.float64]:
    """That of the coarse weights: the Gaussian's over those of the stages, twice each."""
    frequency = np.arange(FREQUENCIES // 2 + 1) / FREQUENCIES  # cycles per coarse sample
    wave = math.pi * sigma * frequency
    spectrum = exponential(-2 * (wave * wave))
    step = math.prod(stage.factor for stage in stages)
    for stage in stages:
        # The sum of down[reach + n] cos(n x) by Clenshaw's recurrence.
        twice = 2 * cosine(frequency / step)
        one = two = np.zeros_like(frequency)
        for weight in stage.down[: stage.reach]:
            one, two = 2 * weight + twice * one - two, one
        response = stage.down[stage.reach] + twice / 2 * one - two
        spectrum = spectrum / (response * response)
        step //= stage.factor
    return spectrum


def _inverse_transform(spectrum: NDArray[np.float64], places: NDArray[np.int64], order: int = 0) -> NDArray[np.float64]:
    """Samples at `places` of the real sequence whose spectrum this is times 1j**order; halves are added to halves."""
    cosines = cosine(np.arange(FREQUENCIES) / FREQUENCIES)
    turns = np.arange(FREQUENCIES // 2 + 1)[:, None] * places + order * FREQUENCIES // 4
    terms = spectrum[:, None] * cosines[turns % FREQUENCIES]
    terms[0] /= 2
    last, terms = terms[-1] / 2, terms[:-1]
    while len(terms) > 1:
        terms = terms[: len(terms) // 2] + terms[len(terms) // 2 :]
    return np.asarray((terms[0] + last) * 2 / FREQUENCIES)
