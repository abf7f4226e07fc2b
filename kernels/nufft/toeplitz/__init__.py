"""The normal operator FᴴWF as a convolution: one FFT pair on a doubled grid and a product, for any number of samples.

FᴴWF is a Toeplitz matrix: its element (r, r') is q(r − r'), where q(d) = sum over m of w_m exp(2πi k_m·d/N) is the
point-spread function for |d| < N. On a periodic grid of 2N − 1 or more it becomes circulant: pad, FFT, multiply by the
transform of q, inverse FFT, crop. Real weights make q Hermitian, and its transform real.

Source: Fessler et al., "Toeplitz-based iterative image reconstruction …", IEEE Trans. Signal Process. 53 (2005).
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import modules
from typing import Any

from kernels.nufft.checks import (
    checked_array,
    checked_eps,
    checked_kind,
    checked_shape,
    checked_trajectory,
    checked_weights,
    on_host,
)
from kernels.nufft.toeplitz.kernel import grid_kernel, toeplitz_shape
from kernels.runtime.arrays import check_out, check_workers

__all__ = ["Toeplitz", "cartesian_kernel", "toeplitz_kernel", "toeplitz_shape"]


def toeplitz_kernel(
    trajectory: Any,
    weights: Any,
    shape: Sequence[int],
    eps: float = 1e-3,
    *,
    workers: int | None = None,
    stream: Any = None,
) -> Any:
    """The transform of a trajectory's point-spread function, for `Toeplitz`.

    trajectory : [M, d] in cycles per field of view of an image of `shape`; see `kernels.nufft`
    weights    : real [M], NumPy or CuPy like the trajectory; None means all one
    shape      : of the image
    eps        : requested relative error of the point-spread function
    workers    : CPU threads; default one per core
    stream     : CUDA stream to launch on; default CuPy's current one

    Returns real [*toeplitz_shape(shape, host=…)], in FFT order, divided by its size: float32, or float64 for eps below
    1e-6. The kernels of parts of a trajectory add up to that of the whole.
    Raises ValueError or TypeError with one line that names the parameter.
    """
    shape = checked_shape(shape)
    checked_trajectory(trajectory, shape)
    checked_eps(eps, trajectory)
    check_workers(workers)
    weights = checked_weights(weights, len(trajectory), on_host(trajectory))
    if on_host(trajectory):
        from kernels.nufft.toeplitz import cpu

        return cpu.toeplitz_kernel(trajectory, weights, shape, eps, workers)
    from kernels.nufft.toeplitz import cuda

    return cuda.toeplitz_kernel(trajectory, weights, shape, eps, stream)


def cartesian_kernel(trajectory: Any, weights: Any, shape: Sequence[int]) -> Any:
    """The transform of the point-spread function of samples on the grid, for `Toeplitz`: no doubled grid is needed.

    trajectory : [M, d], whole cycles per field of view of an image of `shape`
    weights    : real [M], NumPy or CuPy like the trajectory

    Returns float32 [*shape]. Raises ValueError or TypeError with one line that names the parameter.
    """
    shape = checked_shape(shape)
    checked_trajectory(trajectory, shape)
    weights = checked_weights(weights, len(trajectory), on_host(trajectory))
    xp = modules[type(trajectory).__module__.partition(".")[0]]
    if not bool((trajectory == xp.rint(trajectory)).all()):
        raise ValueError("trajectory must hold whole cycles per field of view")
    return grid_kernel(trajectory, xp.ones(len(trajectory)) if weights is None else weights, shape, xp)


class Toeplitz:
    """FᴴWF of one trajectory and its weights, applied to any number of images.

    kernel  : from `toeplitz_kernel` or `cartesian_kernel` for `shape`; NumPy or CuPy, which selects the device
    shape   : of the image
    workers : CPU threads; default one per core
    beside  : another of this shape, on CUDA to share its work space; calls of both follow one another

    On CUDA an object may keep a work space for each number of coils, so its calls must run one after the other, on one
    stream at a time. After the first call with a number of coils, calls do not wait for the device, and allocate from
    CuPy's current pool only, so that a CUDA graph with a pool of its own can capture them.
    Raises ValueError or TypeError with one line that names the parameter.
    """

    def __init__(
        self, kernel: Any, shape: Sequence[int], *, workers: int | None = None, beside: Toeplitz | None = None
    ) -> None:
        self.shape = checked_shape(shape)
        if beside is not None and beside.shape != self.shape:
            raise ValueError(f"beside must be of shape {self.shape}; got {beside.shape}")
        check_workers(workers)
        self._host = checked_kind("kernel", kernel)
        padded = toeplitz_shape(self.shape, host=self._host)
        supported = ("float32", "float64") if self._host else ("float32",)
        if kernel.dtype.name not in supported or kernel.shape not in (padded, self.shape):
            raise ValueError(
                f"kernel must be {' or '.join(supported)} of shape {padded} for an image of shape {self.shape}, as "
                f"toeplitz_kernel makes it; got {kernel.dtype} of shape {kernel.shape}"
            )
        if self._host:
            from kernels.nufft.toeplitz import cpu

            self._body: Any = cpu.Convolution(kernel, self.shape, workers)
        else:
            from kernels.nufft.toeplitz import cuda

            self._body = cuda.Convolution(kernel, self.shape, None if beside is None else beside._body)

    def apply(self, image: Any, out: Any = None, stream: Any = None) -> Any:
        """FᴴWF image, for each index of the leading axes.

        image  : [..., *shape], NumPy or CuPy like the kernel; complex64, on the CPU complex128 too
        out    : array for the result, C-contiguous; may be the image itself

        Returns an array of the image's shape and dtype.
        Raises ValueError or TypeError with one line that names the parameter.
        """
        image = checked_array("image", image, self._host, self.shape)
        check_out(out, image.shape, image.dtype, apart_from={"image": image}, may_be="image")
        return self._body.apply(image, out, stream)

    def apply_sense(self, image: Any, maps: Any, out: Any = None, stream: Any = None, *, add: bool = False) -> Any:
        """The sum over coils of conj(map) FᴴWF (map × image): the operator of CG-SENSE.

        image  : [*shape], NumPy or CuPy like the kernel; complex64, on the CPU complex128 too
        maps   : coil sensitivities [coils, *shape] of the image's dtype
        out    : array for the result, C-contiguous; may be the image itself
        add    : add to `out`, which is then not the image; for a few coils at a time

        Returns an array of the image's shape and dtype.
        Raises ValueError or TypeError with one line that names the parameter.
        """
        image = checked_array("image", image, self._host, self.shape)
        maps = checked_array("maps", maps, self._host, self.shape)
        if image.shape != self.shape or maps.ndim != len(self.shape) + 1 or maps.dtype != image.dtype:
            raise ValueError(
                f"image must have shape {self.shape} and maps [coils, *shape] of one dtype; got {image.shape} "
                f"{image.dtype} and {maps.shape} {maps.dtype}"
            )
        if add and (out is None or out is image):
            raise ValueError("add needs an out that is not the image: what is there is added to")
        read = {"image": image, "maps": maps}
        check_out(out, self.shape, image.dtype, apart_from=read, may_be=None if add else "image")
        if self._host and add:
            out += self._body.apply_sense(image, maps, None, stream)
            return out
        if self._host:
            return self._body.apply_sense(image, maps, out, stream)
        return self._body.apply_sense(image, maps, out, stream, add=add)

    def work_bytes(self, coils: int) -> int:
        """Bytes that `apply_sense` keeps on the device between calls with this number of coils."""
        return 0 if self._host else int(self._body.work_bytes(coils))
