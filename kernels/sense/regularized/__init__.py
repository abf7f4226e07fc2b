"""Regularised reconstruction: images from few samples.

    minimise over x:   ½ ‖W^½ (E x − s)‖²  +  ½ λ₂ ‖x‖²  +  Σ_j λ_j R_j(x)

E is the forward model of all coils, W the density weights, E^H W E = `normal` with a diagonal near 1, and
b = E^H W s = `right`. Penalties R: the 1-norm of wavelet coefficients, isotropic total variation in space or time, and
local low rank over frames. A strength is λ in units of max |b|, so that one value suits scans of any scale.

One penalty whose proximal operator is known is solved by FISTA with restart; several, or total variation, by ADMM.
"""

from __future__ import annotations

from kernels.sense.regularized.admm import Admm
from kernels.sense.regularized.fista import Fista, largest_eigenvalue
from kernels.sense.regularized.penalties import L1Wavelet, LowRank, Penalty, TotalVariation
from kernels.sense.regularized.problem import Problem
from kernels.sense.regularized.solve import Regularized, regularized_sense
from kernels.sense.regularized.strength import automatic_strength

__all__ = ["Admm", "Fista", "L1Wavelet", "LowRank", "Penalty", "Problem", "Regularized", "TotalVariation"]
__all__ += ["automatic_strength", "largest_eigenvalue", "regularized_sense"]
