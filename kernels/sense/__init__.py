"""What iterative MRI reconstruction needs around the non-uniform Fourier transform, on NumPy and CuPy arrays alike.

Everything here is array code: the type of the arrays decides where it runs, and a result lies where its input lies.
Trajectories are in cycles per field of view, images have pixel index n // 2 of each axis in the middle, coils come
first; see `kernels.nufft` for the transform itself.
"""

from __future__ import annotations

from kernels.sense import density, sensitivities
from kernels.sense.arrays import namespace, to_host
from kernels.sense.calibration import CentreImages, centre_images, in_centre
from kernels.sense.channels import compression, covariance, mixed, whitening
from kernels.sense.coil_groups import GroupedMaps
from kernels.sense.conjugate_gradient import conjugate_gradient
from kernels.sense.off_resonance import OffResonance, Segments
from kernels.sense.reconstruction import Transform, cg_sense, gridded, sense_normal, toeplitz_normal

__all__ = ["CentreImages", "GroupedMaps", "OffResonance", "Segments", "Transform", "centre_images", "cg_sense"]
__all__ += ["compression", "conjugate_gradient", "covariance", "density", "gridded", "in_centre", "mixed", "namespace"]
__all__ += ["sense_normal", "sensitivities", "to_host", "toeplitz_normal", "whitening"]
