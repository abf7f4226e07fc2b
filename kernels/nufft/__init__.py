"""Non-uniform Fourier transforms between images and k-space samples, on NumPy arrays (CPU) and CuPy arrays (CUDA).

    forward   s_m    = sum over r of image(r) exp(−2πi k_m·r/N)
    adjoint   img(r) = sum over m of w_m s_m exp(+2πi k_m·r/N)      the conjugate transpose, unscaled
    normal    img(r) = sum over m of w_m exp(+2πi k_m·r/N) s_m of the forward transform       (`Toeplitz`)

Image     : complex64 (on the CPU complex128 too) [..., *shape], 2 or 3 axes; r = index − N // 2 on each. Leading axes
            are coils or batches.
Trajectory: float32 or float64 [M, d] in cycles per field of view; column 0 belongs to the image's axis 0. A matrix of
            size N resolves |k| ≤ N/2; the exponential has period N in k, so samples beyond are folded back exactly.
Samples   : the image's dtype [..., M]; M may be 0.
Weights   : real [M], the density compensation w.
Precision : `eps` bounds ‖result − definition‖ / ‖definition‖ for random data. A single element is then within 10 eps ×
            the input's 2-norm, and for any data within 6 eps × the input's 1-norm: aliasing by gridding is worst at the
            image's corners. complex64 results are good to 1e-6, complex128 results to 1e-12.
Bits      : reproducible on a CUDA device, even a shared one, and on a CPU with at least as many coils as threads. With
            fewer coils, FINUFFT's threads share a coil and sum it in the order in which they finish.

`Nufft` plans a trajectory once: sorting, kernel constants, FFTs. Of its two methods "gridding" spreads samples to a
finer grid and uses the FFT; "exact" evaluates the sum as matrix products, which is fastest for small images. On the CPU
gridding is FINUFFT's.

Sources: Greengard, Lee, "Accelerating the nonuniform FFT", SIAM Rev. 46 (2004); Barnett, Magland, af Klinteberg, "A
parallel nonuniform FFT library based on an exponential of semicircle kernel", SIAM J. Sci. Comput. 41 (2019); Fessler
et al., "Toeplitz-based iterative image reconstruction for MRI with correction for magnetic field inhomogeneity", IEEE
Trans. Signal Process. 53 (2005).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.nufft.checks import (
    DTYPES,
    METHODS,
    checked_array,
    checked_eps,
    checked_shape,
    checked_trajectory,
    checked_weights,
    on_host,
)
from kernels.nufft.toeplitz import Toeplitz, cartesian_kernel, toeplitz_kernel, toeplitz_shape
from kernels.nufft.toeplitz.subspace import SubspaceToeplitz, subspace_kernels
from kernels.runtime.arrays import check_out, check_workers

__all__ = ["DTYPES", "METHODS", "Nufft", "Toeplitz", "adjoint", "cartesian_kernel", "forward", "toeplitz_kernel"]
__all__ += ["SubspaceToeplitz", "subspace_kernels", "toeplitz_shape"]


class Nufft:
    """The transforms of one trajectory, planned once and run on any number of images.

    trajectory : NumPy or CuPy array [M, d] in cycles per field of view, float32 or float64, d = 2 or 3. Its type
                 selects the device. NumPy arrays are checked for non-finite values; CuPy arrays are not.
    shape      : of the image, d sizes of 1 or more
    eps        : requested relative error, 1e-12 (on CUDA 1e-6) … 0.1
    method     : "gridding", "exact", or "auto": the faster one for `coils` coils by a cost model
    coils      : images transformed in one call, for the cost model; any number works
    workers    : CPU threads; default one per core

    Attributes `shape`, `points`, `eps` and `method` hold the plan; `method` is "gridding" or "exact".
    Thread-safe, on any stream. Raises ValueError or TypeError with one line that names the parameter.
    """

    def __init__(
        self,
        trajectory: Any,
        shape: Sequence[int],
        *,
        eps: float = 1e-3,
        method: str = "auto",
        coils: int = 8,
        workers: int | None = None,
    ) -> None:
        self.shape = checked_shape(shape)
        checked_trajectory(trajectory, self.shape)
        self.points = len(trajectory)
        self.eps = checked_eps(eps, trajectory)
        check_workers(workers)
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
        self._host = on_host(trajectory)
        if self._host:
            from kernels.nufft import cpu

            self._plan: Any = cpu.Plan(trajectory, self.shape, self.eps, method, workers)
        else:
            from kernels.nufft import cuda

            self._plan = cuda.Plan(trajectory, self.shape, self.eps, method, coils)
        self.method: str = self._plan.method

    def forward(self, images: Any, out: Any = None, stream: Any = None) -> Any:
        """Samples of images.

        images : [..., *shape], NumPy or CuPy like the trajectory; complex64, on the CPU complex128 too
        out    : array for the result, C-contiguous, sharing no memory with the images
        stream : CUDA stream to launch on; default CuPy's current one. The call does not wait for the device.

        Returns samples [..., M] of the images' dtype.
        Raises ValueError or TypeError with one line that names the parameter.
        """
        images = checked_array("images", images, self._host, self.shape)
        leading = images.shape[: -len(self.shape)]
        check_out(out, (*leading, self.points), images.dtype, apart_from={"images": images})
        return self._plan.forward(images, out, stream)

    def adjoint(self, samples: Any, weights: Any = None, out: Any = None, stream: Any = None) -> Any:
        """Images of samples: the conjugate transpose of `forward`, applied to weights × samples.

        samples : [..., M], NumPy or CuPy like the trajectory; complex64, on the CPU complex128 too
        weights : real [M]; default all one
        out     : array for the result, C-contiguous, sharing no memory with the samples or weights
        stream  : CUDA stream to launch on; default CuPy's current one. The call does not wait for the device.

        Returns images [..., *shape] of the samples' dtype.
        Raises ValueError or TypeError with one line that names the parameter.
        """
        samples = checked_array("samples", samples, self._host, (self.points,))
        weights = checked_weights(weights, self.points, self._host)
        shape = (*samples.shape[:-1], *self.shape)
        check_out(out, shape, samples.dtype, apart_from={"samples": samples, "weights": weights})
        return self._plan.adjoint(samples, weights, out, stream)


def forward(
    images: Any,
    trajectory: Any,
    *,
    eps: float = 1e-3,
    method: str = "auto",
    out: Any = None,
    workers: int | None = None,
    stream: Any = None,
) -> Any:
    """Samples [..., M] of images [..., *shape] along a trajectory [M, d], without keeping the plan; see `Nufft`."""
    if np.ndim(trajectory) != 2:
        raise ValueError(f"trajectory must be an array [M, 2] or [M, 3]; got shape {np.shape(trajectory)}")
    if np.ndim(images) < trajectory.shape[1]:
        raise ValueError(f"images must have {trajectory.shape[1]} axes or more; got shape {np.shape(images)}")
    shape = images.shape[-trajectory.shape[1] :]
    return Nufft(trajectory, shape, eps=eps, method=method, workers=workers).forward(images, out, stream)


def adjoint(
    samples: Any,
    trajectory: Any,
    shape: Sequence[int],
    *,
    weights: Any = None,
    eps: float = 1e-3,
    method: str = "auto",
    out: Any = None,
    workers: int | None = None,
    stream: Any = None,
) -> Any:
    """Images [..., *shape] of samples [..., M] along a trajectory [M, d], without keeping the plan; see `Nufft`."""
    return Nufft(trajectory, shape, eps=eps, method=method, workers=workers).adjoint(samples, weights, out, stream)
