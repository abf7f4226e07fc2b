"""Iterative MRI reconstruction with the non-uniform Fourier transforms of `kernels.nufft`, for NumPy and CuPy arrays.

The type of the input arrays selects the device, and results are of the same type. Trajectories are in cycles per field
of view, index n // 2 of each image axis is the centre, and the coil axis comes first.
"""

from __future__ import annotations

from kernels.runtime.arrays import namespace
from kernels.sense import density, sensitivities
from kernels.sense.arrays import to_host
from kernels.sense.calibration import CentreImages, centre_images, in_centre
from kernels.sense.captured_cg import CapturedCg
from kernels.sense.channels import compression, covariance, mixed, whitening
from kernels.sense.coil_groups import GroupedMaps
from kernels.sense.conjugate_gradient import conjugate_gradient
from kernels.sense.off_resonance import OffResonance, Segments
from kernels.sense.reconstruction import Transform, cg_sense, gridded, sense_normal, toeplitz_normal

__all__ = [
    "CapturedCg",
    "CentreImages",
    "GroupedMaps",
    "OffResonance",
    "Segments",
    "Transform",
    "centre_images",
    "cg_sense",
]
__all__ += ["compression", "conjugate_gradient", "covariance", "density", "gridded", "in_centre", "mixed", "namespace"]
__all__ += ["sense_normal", "sensitivities", "to_host", "toeplitz_normal", "whitening"]
