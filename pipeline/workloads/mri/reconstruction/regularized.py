"""Regularised images of a slice or volume: one time, or all times that a penalty joins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.sense import namespace
from kernels.sense.conjugate_gradient import unchanged
from kernels.sense.regularized import (
    L1Wavelet,
    LowRank,
    Penalty,
    Problem,
    Regularized,
    TotalVariation,
    automatic_strength,
    regularized_sense,
)
from kernels.sense.resumption import Resumption
from pipeline.errors import ParameterError
from pipeline.workloads.mri.parameters import AUTO, MriParameters
from pipeline.workloads.mri.reconstruction.image import Encoded, Reconstructed, Reconstruction
from pipeline.workloads.mri.source.images import Image, Trajectory


def regularized(
    reconstruction: Reconstruction,
    parameters: MriParameters,
    images: Sequence[Image],
    samples: Sequence[Any],
    trajectories: Sequence[Trajectory],
    follow: Callable[[int, NDArray[np.float64]], None] | None,
    *,
    seed: int,
    resumption: Resumption | None = None,
) -> Reconstructed:
    """samples: of each image, complex64 (coils, readouts, samples). seed: of random shifts.

    Raises ParameterError if the strengths wipe the image out.
    """
    encoded = [reconstruction.encoded(*each) for each in zip(images, samples, trajectories, strict=True)]
    xp = namespace(encoded[0].right)
    right = xp.stack([each.right for each in encoded])
    product = xp.empty_like(right)  # its memory is used again in each iteration

    def normal(series: Any) -> Any:
        if len(encoded) == 1:
            return encoded[0].normal(series[0])[None]
        for each, picture, into in zip(encoded, series, product, strict=True):
            into[...] = each.normal(picture)
        return product

    found, notes = solved(
        parameters,
        normal,
        right,
        energy=sum(_energy(each) for each in encoded),
        capture=all(each.capture for each in encoded),
        follow=follow,
        seed=seed,
        resumption=resumption,
    )
    return Reconstructed(
        image=found.image if len(encoded) > 1 else found.image[0],
        curve=found.status,
        transforms=tuple(each.transform for each in encoded),
        method=", ".join(sorted({each.geometry.transform.method for each in encoded})),
        segment_error=max(each.segment_error for each in encoded),
        notes=notes,
    )


def solved(
    parameters: MriParameters,
    normal: Callable[[Any], Any],
    right: Any,
    *,
    energy: float,
    capture: bool,
    follow: Callable[[int, NDArray[np.float64]], None] | None,
    seed: int,
    agreed: Callable[[float], float] = unchanged,
    resumption: Resumption | None = None,
) -> tuple[Regularized, Mapping[str, str]]:
    """The images, and for the receipt the solver and the strengths. right: complex64 (times, *matrix).

    Raises ParameterError if a strength wipes the image out, or the iterations diverge.
    """
    penalties = penalties_of(parameters, right, seed)
    problem = Problem(
        normal=normal,
        right=right,
        energy=energy,
        penalties=list(penalties.values()),
        damping=parameters.penalty_strengths.get("l2") or 0.0,
        capture=capture,
    )
    try:
        found = regularized_sense(
            problem,
            iterations=parameters.most_iterations,
            tolerance=parameters.tolerance,
            on_iteration=follow,
            agreed=agreed,
            resumption=resumption,
        )
    except ValueError as error:
        raise ParameterError(f"--strength {parameters.strength}: {error}; choose less, such as 0.005") from error
    if found.status[-1, 0] > found.status[0, 0]:  # NaN: the solver has no objective
        raise ParameterError(
            f"--strength {parameters.strength}: the objective grows with the iterations; choose less, such as 0.005"
        )
    strengths = ", ".join(f"{name} {penalty.strength:.4g}" for name, penalty in penalties.items())
    if parameters.strength == AUTO:
        strengths += ", found by SURE"
    return found, {"solver": found.solver, "strengths": strengths}


def penalties_of(parameters: MriParameters, right: Any, seed: int) -> dict[str, Penalty]:
    """The penalties of series as large as `right`, by name, without l2. Several automatic ones share one strength."""
    xp, shape, asked = namespace(right), right.shape[1:], parameters.penalty_strengths
    automatic = automatic_strength(right, parameters.wavelet) / len(asked) if None in asked.values() else 0.0
    found: dict[str, Penalty] = {}
    for name, given in asked.items():
        strength = automatic if given is None else given
        if name == "l1-wavelet":
            found[name] = L1Wavelet(strength, shape, xp=xp, family=parameters.wavelet, seed=seed)
        elif name == "llr":
            found[name] = LowRank(strength, shape, xp=xp, frames=len(right), block=parameters.block, seed=seed)
        elif name == "tv":
            found[name] = TotalVariation(strength, range(1, right.ndim))
        elif name == "tv-time":
            found[name] = TotalVariation(strength, (0,))
    return found


def _energy(encoded: Encoded) -> float:
    xp = namespace(encoded.data)
    squares = encoded.data.real**2 + encoded.data.imag**2
    return float(xp.sum(squares * encoded.geometry.weights, dtype=np.float64))
