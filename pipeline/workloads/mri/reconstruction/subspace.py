"""Coefficients of a temporal basis, from all frames of a slice or volume at once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.nufft import Nufft, SubspaceToeplitz, cartesian_kernel, subspace_kernels, toeplitz_kernel
from kernels.nufft.toeplitz.kernel import MOST_COEFFICIENTS
from kernels.sense import CapturedCg, cg_sense, gridded, mixed, namespace
from kernels.sense.coil_groups import groups_of, streamed
from kernels.sense.resumption import Resumption
from pipeline.errors import InputError, counted
from pipeline.formats.cfl import Cfl
from pipeline.formats.numpy_files import mapped_array
from pipeline.workloads.mri.parameters import MriParameters
from pipeline.workloads.mri.reconstruction.image import Reconstructed, Reconstruction, beside
from pipeline.workloads.mri.reconstruction.regularized import solved
from pipeline.workloads.mri.source.images import Image, LruCache, Trajectory

_ORTHONORMAL = 1e-3  # the largest element of φᴴφ − 1
_CACHED = 2


def read_basis(path: Path, frames: int, where: Path) -> NDArray[Any]:
    """(frames, coefficients), real or complex. InputError unless its columns are orthonormal, with a row a frame.

    path  : .npy, or BART's .cfl with echoes or times, and coefficients
    where : the raw data, for messages
    """
    found = Cfl(path).array.T if path.suffix.lower() == ".cfl" else mapped_array(path)
    sizes = tuple(n for n in found.shape if n > 1) or (1,)
    option = f"--basis {path}"
    if found.dtype.kind not in "iufc" or len(sizes) > 2:
        raise InputError(f"{option}: holds {found.dtype} {found.shape}; numbers (frames, coefficients) are needed")
    basis = np.asarray(found, np.complex128 if found.dtype.kind == "c" else np.float64)
    basis = basis if basis.ndim == 2 else basis.reshape(*sizes, *(1,) * (2 - len(sizes)))
    if len(basis) != frames:
        rows = counted(len(basis), "row") + (" (it may be transposed)" if basis.shape[1] == frames else "")
        raise InputError(
            f"{option}: has {rows}, and {where} has {counted(frames, 'frame')}: one row for each is needed; --frames "
            "chooses how many readouts a frame has"
        )
    if not 1 <= basis.shape[1] <= (most := min(frames, MOST_COEFFICIENTS)):
        raise InputError(f"{option}: has {counted(basis.shape[1], 'column')}; 1 to {most} are possible")
    if not np.isfinite(basis).all():
        raise InputError(f"{option}: holds values that are not finite; create it again")
    apart = float(np.abs(basis.conj().T @ basis - np.eye(basis.shape[1])).max())
    if not apart <= _ORTHONORMAL:
        raise InputError(
            f"{option}: its columns are not orthonormal (off by {apart:.2g}); save numpy.linalg.qr(basis)[0], or the "
            "first left singular vectors of simulated signals"
        )
    # A complex file of real values costs twice as much for nothing.
    return basis if np.iscomplexobj(basis) and basis.imag.any() else np.ascontiguousarray(basis.real)


def pooled(trajectories: Sequence[Trajectory]) -> Trajectory:
    """All frames' samples as one trajectory."""
    digest = hashlib.blake2b(b"".join(each.digest for each in trajectories), digest_size=16).digest()
    given = [each.given for each in trajectories if each.given is not None]
    lengths = {each.spokes[1] for each in trajectories}
    points = np.concatenate([each.points for each in trajectories])
    readouts = sum(each.spokes[0] for each in trajectories)
    return Trajectory(
        points=points,
        digest=digest,
        spokes=(readouts, lengths.pop()) if len(lengths) == 1 else (1, len(points)),
        given=np.concatenate(given) if given else None,
        nominal=np.concatenate([each.nominal for each in trajectories]),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class SubspaceEncoding:
    """The `Encoding` of coefficients: what trajectories and basis determine.

    weights : (m,) float32, adding up to the number of frames, so that the normal operator's diagonal is near 1
    rows    : of the conjugate basis for each sample, complex64 (m, coefficients)
    """

    points: NDArray[np.float64]
    transform: Nufft
    weights: Any
    rows: Any
    toeplitz: SubspaceToeplitz

    @property
    def transforms(self) -> tuple[Nufft, ...]:
        return (self.transform,) * self.toeplitz.coefficients

    def right(self, samples: Any, maps: Any) -> Any:
        """samples: of all coils (coils, m) on the device; or of each group, on the host, for `GroupedMaps`."""

        def mixed_in(k: int) -> Any:
            if hasattr(samples, "shape"):
                return samples * self.rows[:, k]
            return (part * self.rows[:, k] for part in streamed(namespace(self.rows), samples))

        xp, coefficients = namespace(self.rows), range(self.toeplitz.coefficients)
        return xp.stack([gridded(self.transform, mixed_in(k), maps, self.weights) for k in coefficients])

    def normal(self, maps: Any) -> Callable[[Any], Any]:
        product: Any = None  # its memory is used again in each iteration

        def normal(series: Any) -> Any:
            nonlocal product
            for number, (_, group) in enumerate(groups_of(maps)):
                product = self.toeplitz.apply_sense(series, group, product, add=number > 0)
            return product

        return normal


class SubspaceReconstruction:
    """Reconstructs coefficients on one device; may be called from several threads."""

    def __init__(self, reconstruction: Reconstruction, parameters: MriParameters, basis: NDArray[Any]) -> None:
        self._reconstruction = reconstruction
        self._asked = parameters
        self._basis = basis
        self._encodings: LruCache[SubspaceEncoding] = LruCache(_CACHED)

    def coefficients(
        self,
        images: Sequence[Image],
        samples: Sequence[Any],
        trajectories: Sequence[Trajectory],
        *,
        follow: Callable[[int, Any], None] | None,
        follow_status: Callable[[int, NDArray[np.float64]], None],
        seed: int,
        resumption: Resumption | None,
    ) -> tuple[Reconstructed, Trajectory]:
        """Their images (coefficients, *matrix), and the trajectory of all frames' samples.

        samples : of each frame, complex64 (coils, readouts, samples)
        """
        asked, xp = self._asked, namespace(samples[0])
        whole = pooled(trajectories)
        flat = xp.concatenate([each.reshape(len(each), -1) for each in samples], axis=1)
        encoding = self.encoding(trajectories, flat)
        points, weights = beside(whole.points, flat), encoding.weights
        calibration = self._reconstruction.maps_of(images[0].readouts.slice, flat, points, weights / len(self._basis))
        data = flat if calibration.mixing is None else mixed(flat, calibration.mixing)
        right, normal = encoding.right(data, calibration.maps), encoding.normal(calibration.maps)
        notes: dict[str, str] = {}
        if asked.has_penalties:
            energy = float(xp.sum((data.real**2 + data.imag**2) * weights, dtype=np.float64))
            made, told = solved(
                asked,
                normal,
                right,
                energy=energy,
                capture=xp is not np,
                follow=follow_status,
                seed=seed,
                resumption=resumption,
            )
            found, curve = made.image, made.status
            notes |= told
        else:
            limits: dict[str, Any] = {"iterations": asked.most_iterations, "tolerance": asked.tolerance}
            limits |= {"on_iteration": follow, "resumption": resumption}
            damping = asked.penalty_strengths.get("l2") or asked.damping
            if xp is np:
                found, curve = cg_sense(normal, right, damping=damping, **limits)
            else:
                found, curve = CapturedCg(normal, right, damping=damping).solve(right, **limits)
        image = Reconstructed(
            image=found,
            curve=curve,
            transforms=encoding.transforms,
            method=encoding.transform.method,
            segment_error=0.0,
            notes=notes,
        )
        return image, whole

    def encoding(self, trajectories: Sequence[Trajectory], like: Any) -> SubspaceEncoding:
        """The encoding of the frames of these trajectories, on the device of `like`; cached for the next slice."""
        whole = pooled(trajectories)
        return self._encodings.get(whole.digest, lambda: self._make_encoding(whole, trajectories, like))

    def _make_encoding(self, whole: Trajectory, trajectories: Sequence[Trajectory], like: Any) -> SubspaceEncoding:
        asked, reconstruction = self._asked, self._reconstruction
        shape, workers = reconstruction.shape, reconstruction.workers
        points, basis = beside(whole.points, like), beside(self._basis, like)
        frames = beside(np.repeat(np.arange(len(trajectories)), [len(each.points) for each in trajectories]), like)
        weights = reconstruction.weights(whole, points) * np.float32(len(self._basis))

        def kernel_of(own: Any) -> Any:
            if reconstruction.on_grid(whole):
                return cartesian_kernel(points, own, shape)
            return toeplitz_kernel(points, own, shape, asked.eps, workers=workers)

        return SubspaceEncoding(
            points=whole.points,
            transform=Nufft(
                points, shape, eps=asked.eps, method=asked.transform, coils=reconstruction.channels, workers=workers
            ),
            weights=weights,
            rows=basis[frames].conj().astype(np.complex64),
            toeplitz=SubspaceToeplitz(
                subspace_kernels(kernel_of, weights, basis, frames), self._basis.shape[1], shape, workers=workers
            ),
        )
