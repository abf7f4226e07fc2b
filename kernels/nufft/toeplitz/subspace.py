"""The normal operator of a temporal subspace: an iteration costs coefficients, however many frames were measured.

Frame t of a series is Σ_k φ_tk x_k. Summed over frames, the normal operator of the coefficients x is

    (N x)_k = Σ_l Q_kl x_l,      Q_kl = Σ_t conj(φ_tk) φ_tl FᴴW_t F,

and each Q_kl is a Toeplitz matrix: one FFT pair a coefficient, with a matrix product at each cell in between.

Source: Tamir et al., "T2 shuffling: sharp, multicontrast, volumetric fast spin-echo imaging", Magn. Reson. Med. 77
(2017); Mani, Jacob, Magnotta, Zhong, "Fast iterative algorithm for the reconstruction of multishot non-cartesian
diffusion data", Magn. Reson. Med. 74 (2015).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import modules
from typing import Any

from kernels.nufft.checks import checked_array, checked_kind, checked_shape
from kernels.nufft.toeplitz.kernel import MOST_COEFFICIENTS, pairs_of, toeplitz_shape
from kernels.runtime.arrays import check_out, check_workers


def subspace_kernels(kernel_of: Callable[[Any], Any], weights: Any, basis: Any, frames: Any) -> Any:
    """The kernels of Q_kl for k ≤ l, row by row, for `SubspaceToeplitz`.

    kernel_of : the kernel of these weights of all frames' samples, by `toeplitz_kernel` or `cartesian_kernel`
    weights   : real [M], NumPy or CuPy like all arrays here
    basis     : real or complex [T, K]
    frames    : integers [M], the frame of each sample

    Returns [K (K + 1) / 2, *grid] of the kernels' dtype; complex for a complex basis.
    """
    xp = modules[type(weights).__module__.partition(".")[0]]
    found: Any = None
    pairs = pairs_of(basis.shape[1])
    for number, (row, column) in enumerate(pairs):
        product = (basis[:, row].conj() * basis[:, column])[frames] * weights
        kernel = kernel_of(xp.ascontiguousarray(product.real, weights.dtype))
        if xp.iscomplexobj(basis):
            kernel = kernel + 1j * kernel_of(xp.ascontiguousarray(product.imag, weights.dtype))
            kernel = kernel.astype(xp.complex64 if kernel.real.dtype == xp.float32 else xp.complex128, copy=False)
        found = xp.empty((len(pairs), *kernel.shape), kernel.dtype) if found is None else found
        found[number] = kernel
    return found


class SubspaceToeplitz:
    """N of one trajectory, its weights and a basis, applied to coefficients.

    kernels      : from `subspace_kernels`
    coefficients : K, 1 to 12
    shape        : of the image
    workers      : CPU threads; default one per core

    On CUDA as `Toeplitz`: calls follow one another, and a CUDA graph can capture them after the first.
    Raises ValueError or TypeError with one line that names the parameter.
    """

    def __init__(self, kernels: Any, coefficients: int, shape: Sequence[int], *, workers: int | None = None) -> None:
        self.shape = checked_shape(shape)
        check_workers(workers)
        if not 1 <= coefficients <= MOST_COEFFICIENTS:
            raise ValueError(f"coefficients must be 1 to {MOST_COEFFICIENTS}; got {coefficients}")
        self.coefficients = coefficients
        self._host = checked_kind("kernels", kernels)
        supported = ("float32", "complex64") + (("float64", "complex128") if self._host else ())
        grids = (toeplitz_shape(self.shape, host=self._host), self.shape)
        count = len(pairs_of(coefficients))
        if kernels.dtype.name not in supported or kernels.shape not in [(count, *grid) for grid in grids]:
            raise ValueError(
                f"kernels must be {' or '.join(supported)} [{count}, *{grids[0]}], as subspace_kernels makes them; got "
                f"{kernels.dtype} {kernels.shape}"
            )
        if self._host:
            from kernels.nufft.toeplitz import cpu

            self._body: Any = cpu.SubspaceConvolution(kernels, coefficients, self.shape, workers)
        else:
            from kernels.nufft.toeplitz import subspace_cuda

            self._body = subspace_cuda.SubspaceConvolution(kernels, coefficients, self.shape)

    def apply_sense(self, images: Any, maps: Any, out: Any = None, stream: Any = None, *, add: bool = False) -> Any:
        """The sum over coils of conj(map) N (map × images).

        images : coefficients [K, *shape], NumPy or CuPy like the kernels; complex64, on the CPU complex128 too
        maps   : coil sensitivities [coils, *shape] of the images' dtype
        out    : array for the result, C-contiguous, apart from the images
        add    : add to `out`; for a few coils at a time

        Returns an array of the images' shape and dtype.
        Raises ValueError or TypeError with one line that names the parameter.
        """
        images = checked_array("images", images, self._host, self.shape)
        maps = checked_array("maps", maps, self._host, self.shape)
        if images.shape != (self.coefficients, *self.shape) or maps.ndim != len(self.shape) + 1:
            raise ValueError(
                f"images must have shape {(self.coefficients, *self.shape)} and maps [coils, *shape]; got "
                f"{images.shape} and {maps.shape}"
            )
        if maps.dtype != images.dtype:
            raise ValueError(f"images and maps must be of one dtype; got {images.dtype} and {maps.dtype}")
        check_out(out, images.shape, images.dtype, apart_from={"images": images, "maps": maps})
        if add and out is None:
            raise ValueError("add needs an out: what is there is added to")
        if self._host and add:
            out += self._body.apply_sense(images, maps, None, stream)
            return out
        if self._host:
            return self._body.apply_sense(images, maps, out, stream)
        return self._body.apply_sense(images, maps, out, stream, add=add)
