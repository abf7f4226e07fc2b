"""Regularised images from a part of a scan's readouts, against BART's: errors at each one's best strength.

The reference is CG-SENSE of all readouts; coil maps, kept readouts and number of iterations are the same for both.
Errors are relative, after one complex factor; structural similarity is of magnitudes, windows of 1.5 pixels.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.ndimage import gaussian_filter

from benchmarks.mri.sense import runner, synthetic, write_cfl
from benchmarks.options import Options
from kernels.nufft import Nufft, Toeplitz, toeplitz_kernel
from kernels.sense import centre_images, cg_sense, density, gridded, sensitivities, toeplitz_normal
from kernels.sense.regularized import L1Wavelet, Penalty, Problem, TotalVariation, regularized_sense
from pipeline.formats.kspace import open_kspace
from pipeline.formats.kspace.base import Readouts

EPS, COILS, ITERATIONS = 1e-4, 8, 100
TV_ITERATIONS = 150  # of three normal operators; BART's are of up to ten
STRENGTHS = tuple(0.001 * 2**i for i in range(9))
THEIRS = {"l1-wavelet": "W:3:0:{}", "tv": "T:3:0:{}", "l2": "Q:{}"}  # of `bart pics -R`


@dataclass(frozen=True, kw_only=True)
class Scan:
    """k-space [coils, readouts, samples], trajectory in cycles per field of view, and the readouts that are kept."""

    name: str
    kspace: Any
    points: Any
    shape: tuple[int, int]
    kept: slice
    noise: float = 0.0  # standard deviation added to kept samples, relative to their root mean square


def phantom() -> Scan:
    kspace, points, shape = synthetic(6, 96, 240, 192)
    return Scan(name="phantom", kspace=kspace, points=points, shape=shape, kept=slice(0, 24), noise=0.05)


def spirals(path: Path) -> Scan:
    """An ISMRMRD scan in cycles/pixel, its coils compressed; every third readout."""
    with open_kspace(path) as reader:
        count, samples = reader.extent(0, 0)
        every = Readouts(0, 0, 0, count)
        n = reader.header.matrix[0] if reader.header.matrix else 0
        kspace = np.empty((reader.header.coils, count, samples), np.complex64)
        reader.read(every, kspace)
        points = np.asarray(reader.trajectory(every), np.float64) * n
    flat = kspace.reshape(len(kspace), -1)
    vectors = np.linalg.eigh(flat @ flat.conj().T)[1][:, -COILS:]
    kspace = np.tensordot(vectors.conj().T, kspace, 1).astype(np.complex64)
    return Scan(name=path.stem, kspace=kspace, points=points, shape=(n, n), kept=slice(0, None, 3))


@dataclass(frozen=True, kw_only=True)
class Part:
    """The kept readouts: what both programs solve."""

    data: Any
    flat: Any
    shape: tuple[int, int]
    maps: Any
    reference: Any

    def normal_and_right(self) -> tuple[Callable[[Any], Any], Any]:
        even = density.even(len(self.flat), self.flat)
        normal = toeplitz_normal(Toeplitz(toeplitz_kernel(self.flat, even, self.shape, EPS), self.shape), self.maps)
        return normal, gridded(Nufft(self.flat, self.shape, eps=EPS), self.data, self.maps, even)


def part_of(scan: Scan) -> Part:
    flat = np.ascontiguousarray(scan.points.reshape(-1, 2))
    data = np.ascontiguousarray(scan.kspace.reshape(len(scan.kspace), -1))
    weights = density.pipe_menon(flat, scan.shape)
    centre = centre_images(data, flat, weights, scan.shape, width=24, taper=True)
    maps = sensitivities.walsh(centre, scan.shape)
    normal = toeplitz_normal(Toeplitz(toeplitz_kernel(flat, weights, scan.shape, EPS), scan.shape), maps)
    right = gridded(Nufft(flat, scan.shape, eps=EPS), data, maps, weights)
    reference = cg_sense(normal, right, iterations=15)
    reference = reference[0] if isinstance(reference, tuple) else reference
    kept = np.ascontiguousarray(scan.kspace[:, scan.kept].reshape(len(scan.kspace), -1))
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(kept.shape) + 1j * rng.standard_normal(kept.shape)
    kept = kept + scan.noise * math.sqrt(float(np.mean(np.abs(kept) ** 2)) / 2) * noise
    points = np.ascontiguousarray(scan.points[scan.kept].reshape(-1, 2))
    return Part(data=kept.astype(np.complex64), flat=points, shape=scan.shape, maps=maps, reference=reference)


def penalty(name: str, strength: float, shape: tuple[int, int]) -> Sequence[Penalty]:
    if name == "l2":
        return []
    return [L1Wavelet(strength, shape, xp=np) if name == "l1-wavelet" else TotalVariation(strength, (1, 2))]


def ours(part: Part) -> Callable[[str, float], Any]:
    normal, right = part.normal_and_right()
    energy = float((np.abs(part.data) ** 2).sum() / len(part.flat))

    def run(name: str, strength: float) -> Any:
        problem = Problem(
            normal=lambda series: normal(series[0])[None],
            right=right[None],
            energy=energy,
            penalties=penalty(name, strength, part.shape),
            damping=strength if name == "l2" else 0.0,
        )
        return regularized_sense(problem, iterations=TV_ITERATIONS if name == "tv" else ITERATIONS).image[0]

    return run


def by_bart(part: Part, samples: int, folder: Path) -> Callable[[str, float], Any]:
    readouts = len(part.flat) // samples
    write_cfl(folder / "k", part.data.reshape(-1, readouts, samples).transpose(2, 1, 0)[None])
    points = np.concatenate([part.flat, 0 * part.flat[:, :1]], axis=1).reshape(readouts, samples, 3)
    write_cfl(folder / "t", points.transpose(2, 1, 0))
    write_cfl(folder / "m", part.maps.transpose(1, 2, 0)[:, :, None])
    largest = float(np.abs(part.normal_and_right()[1]).max())
    # BART scales transforms by 1 / √pixels and does not divide by the number of samples.
    unit = len(part.flat) / math.sqrt(math.prod(part.shape))

    def run(name: str, strength: float) -> Any:
        weight = strength * unit * (largest if name != "l2" else 1 / math.sqrt(math.prod(part.shape)))
        files = [str(folder / each) for each in ("k", "m", "out")]
        how = ["-w", "1", "-R", THEIRS[name].format(weight), f"-i{ITERATIONS}", "-t", str(folder / "t")]
        runner(["bart", "pics", *(["-e"] if name == "l1-wavelet" else []), *how, *files])()
        return np.fromfile(folder / "out.cfl", np.complex64).reshape(part.shape, order="F")

    return run


def errors(image: Any, reference: Any) -> tuple[float, float]:
    """The relative error after one complex factor, and the structural similarity."""
    image = image * (np.vdot(image, reference) / max(float(np.vdot(image, image).real), 1e-30))
    relative = float(np.linalg.norm(image - reference) / np.linalg.norm(reference))
    one, other = np.abs(image).astype(np.float64), np.abs(reference).astype(np.float64)
    span = other.max()

    def mean(values: Any) -> Any:
        return gaussian_filter(values, 1.5)

    means = mean(one), mean(other)
    spread = mean(one**2) - means[0] ** 2 + mean(other**2) - means[1] ** 2
    together = mean(one * other) - means[0] * means[1]
    first, second = (0.01 * span) ** 2, (0.03 * span) ** 2
    similar = (2 * means[0] * means[1] + first) * (2 * together + second)
    return relative, float(np.mean(similar / ((means[0] ** 2 + means[1] ** 2 + first) * (spread + second))))


def main() -> None:
    parser = Options("mri/quality", __doc__)
    parser.add_argument("--scan", type=Path, help="an ISMRMRD scan besides the phantom")
    options = parser.parse_args()
    scans = [phantom(), *([spirals(options.scan)] if options.scan else [])]
    for scan in scans:
        part = part_of(scan)
        with tempfile.TemporaryDirectory() as folder:
            programs = {"Millrace": ours(part), "BART": by_bart(part, scan.points.shape[1], Path(folder))}
            for name in THEIRS:
                for program, run in programs.items():
                    found = [(*errors(run(name, each), part.reference), each) for each in STRENGTHS]
                    (error, similar, strength), similar_best = min(found), max(each[1] for each in found)
                    row = f"{scan.name:16} {name:11} {program:9} NRMSE {error:.4f} SSIM {similar:.4f} at {strength:g}"
                    print(f"{row}; best SSIM {similar_best:.4f}", flush=True)


if __name__ == "__main__":
    main()
