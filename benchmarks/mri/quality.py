"""Regularised images from a part of a scan's readouts, against BART's: errors at each one's best strength.

The reference is a phantom's true image, combined with the same coil maps, or CG-SENSE of all of a scan's readouts. Both
programs get the same maps, readouts and strengths, √2 apart. Errors are relative, after one complex factor; structural
similarity is of magnitudes, windows of 1.5 pixels, in all of the image and in the object, where the reference is more
than a twentieth of its largest value.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.ndimage import gaussian_filter

from benchmarks.mri.sense import coil_images, runner, synthetic, write_cfl
from benchmarks.options import Options
from kernels.nufft import Nufft, Toeplitz, toeplitz_kernel
from kernels.sense import centre_images, cg_sense, density, gridded, sensitivities, toeplitz_normal
from kernels.sense.regularized import L1Wavelet, LowRank, Penalty, Problem, TotalVariation, regularized_sense
from pipeline.formats.kspace import open_kspace
from pipeline.formats.kspace.base import Readouts

EPS, COILS, ITERATIONS = 1e-4, 8, 100
TV_ITERATIONS = 150  # of three normal operators; BART's are of up to ten
TV_TIME_ITERATIONS = (20, 50, 100, 200)  # no penalty holds back the noise that all frames have in common
WAVELETS_LESS = 4  # the strength of total variation in time over that of wavelets beside it
THEIRS = {"l1-wavelet": "W:3:0:{}", "tv": "T:3:0:{}", "l2": "Q:{}"}  # of `bart pics -R`


def strengths(name: str) -> Sequence[float]:
    """√2 apart; those of l2 are relative to the normal operator, not to the image."""
    return [(0.032 if name == "l2" else 0.001) * 2 ** (i / 2) for i in range(14)]


@dataclass(frozen=True, kw_only=True)
class Scan:
    """k-space [coils, readouts, samples], trajectory in cycles per field of view, and the readouts that are kept."""

    name: str
    kspace: Any
    points: Any
    shape: tuple[int, int]
    kept: slice
    noise: float = 0.0  # standard deviation added to kept samples, relative to their root mean square
    truth: Any = None  # [coils, *shape], if they are known


def phantom() -> Scan:
    kspace, points, shape = synthetic(6, 96, 240, 192)
    truth = coil_images(6, 96)
    return Scan(name="phantom", kspace=kspace, points=points, shape=shape, kept=slice(0, 24), noise=0.05, truth=truth)


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
    if scan.truth is None:
        normal = toeplitz_normal(Toeplitz(toeplitz_kernel(flat, weights, scan.shape, EPS), scan.shape), maps)
        right = gridded(Nufft(flat, scan.shape, eps=EPS), data, maps, weights)
        reference, _ = cg_sense(normal, right, iterations=15)
    else:
        reference = np.sum(maps.conj() * scan.truth, axis=0)
    kept = np.ascontiguousarray(scan.kspace[:, scan.kept].reshape(len(scan.kspace), -1))
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(kept.shape) + 1j * rng.standard_normal(kept.shape)
    kept = kept + scan.noise * math.sqrt(float(np.mean(np.abs(kept) ** 2)) / 2) * noise
    points = np.ascontiguousarray(scan.points[scan.kept].reshape(-1, 2))
    return Part(data=kept.astype(np.complex64), flat=points, shape=scan.shape, maps=maps, reference=reference)


def penalty(name: str, strength: float, shape: tuple[int, int]) -> Sequence[Penalty]:
    return [L1Wavelet(strength, shape, xp=np) if name == "l1-wavelet" else TotalVariation(strength, (1, 2))]


def ours(part: Part) -> Callable[[str, float], Any]:
    normal, right = part.normal_and_right()
    energy = float((np.abs(part.data) ** 2).sum() / len(part.flat))

    def run(name: str, strength: float) -> Any:
        if name == "l2":
            return cg_sense(normal, right, iterations=ITERATIONS, damping=strength)[0]
        problem = Problem(
            normal=lambda series: normal(series[0])[None],
            right=right[None],
            energy=energy,
            penalties=penalty(name, strength, part.shape),
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


def by_sigpy(part: Part) -> Callable[[str, float], Any]:
    from sigpy.mri import app

    largest = float(np.abs(part.normal_and_right()[1]).max())
    unit = largest * len(part.flat) / math.sqrt(math.prod(part.shape))  # it scales as BART does
    how: dict[str, Any] = {"coord": part.flat, "max_iter": ITERATIONS, "show_pbar": False}

    def run(name: str, strength: float) -> Any:
        if name == "tv":
            return app.TotalVariationRecon(part.data, part.maps, strength * unit, **how).run()
        return app.L1WaveletRecon(part.data, part.maps, strength * unit, wave_name="db2", **how).run()

    return run


@dataclass(frozen=True, kw_only=True)
class Series:
    """A moving phantom and noisy golden-angle spokes of each frame: images [frames, n, n], maps [coils, n, n], points
    [frames, spokes, samples, 2] and kspace [frames, coils, spokes × samples]."""

    images: Any
    maps: Any
    points: Any
    kspace: Any


def moving(n: int = 64, coils: int = 6, frames: int = 10, spokes: int = 9) -> Series:
    rng, grid = np.random.default_rng(0), (np.arange(n) - n // 2) / n
    y, x = np.meshgrid(grid, grid)
    turn = 2 * np.pi * np.arange(frames)[:, None, None] / frames
    disc = 0.5 * np.sin(turn) * (np.hypot(x - 0.1, y) < 0.1 + 0.03 * np.cos(turn))
    fading = -0.4 * np.exp(-turn * frames / (8 * np.pi)) * (np.hypot(x + 0.15, y + 0.1) < 0.08)
    images = (np.hypot(x / 0.42, y / 0.38) < 1) + disc + fading
    images = images * (1 + 0.05 * np.cos(20 * x) * np.cos(17 * y)) * np.exp(1j * (x + 0.3 * y))
    around = 2 * np.pi * np.arange(coils)[:, None, None] / coils
    maps = np.exp(-((x - 0.5 * np.cos(around)) ** 2 + (y - 0.5 * np.sin(around)) ** 2) / 0.4 + 1j * around)
    maps = (maps / np.linalg.norm(maps, axis=0)).astype(np.complex64)
    angle = np.arange(frames * spokes).reshape(frames, spokes, 1, 1) * np.pi * (math.sqrt(5) - 1) / 2
    points = (np.arange(2 * n) - n)[:, None] / 2 * np.concatenate([np.cos(angle), np.sin(angle)], axis=-1)
    transforms = [Nufft(each.reshape(-1, 2), (n, n), eps=1e-6) for each in points]
    kspace = np.stack(
        [run.forward((maps * one).astype(np.complex64)) for run, one in zip(transforms, images, strict=True)]
    )
    noise = rng.standard_normal(kspace.shape) + 1j * rng.standard_normal(kspace.shape)
    kspace = kspace + 0.03 * math.sqrt(float(np.mean(np.abs(kspace) ** 2)) / 2) * noise
    return Series(images=images, maps=maps, points=points, kspace=kspace.astype(np.complex64))


def compare_series(series: Series, folder: Path) -> None:
    """Local low rank over frames, blocks of 8 × 8, and total variation in time, alone and with wavelets; means of the
    frames' errors."""
    frames, coils, shape = len(series.images), len(series.maps), series.maps.shape[1:]
    normals, rights, energy = [], [], 0.0
    for points, kspace in zip(series.points, series.kspace, strict=True):
        flat = np.ascontiguousarray(points.reshape(-1, 2))
        part = Part(data=kspace, flat=flat, shape=shape, maps=series.maps, reference=None)
        one, right = part.normal_and_right()
        normals.append(one), rights.append(right)
        energy += float((np.abs(kspace) ** 2).sum() / len(flat))
    right = np.stack(rights)
    spokes, samples = series.points.shape[1:3]
    by_time = (1,) * 6 + (frames,)
    kspace = series.kspace.reshape(frames, coils, spokes, samples).transpose(3, 2, 1, 0)
    write_cfl(folder / "k", kspace.reshape(1, samples, spokes, coils, *by_time, order="F"))
    points = np.concatenate([series.points, 0 * series.points[..., :1]], axis=-1).transpose(3, 2, 1, 0)
    write_cfl(folder / "t", points.reshape(3, samples, spokes, 1, *by_time, order="F"))
    write_cfl(folder / "m", series.maps.transpose(1, 2, 0)[:, :, None])
    unit = spokes * samples / math.sqrt(math.prod(shape)) * float(np.abs(right).max())

    def our(name: str, strength: float, iterations: int) -> Any:
        def normal(images: Any) -> Any:
            return np.stack([one(image) for one, image in zip(normals, images, strict=True)])

        makers: dict[str, Callable[[], Penalty]] = {
            "llr": lambda: LowRank(strength, shape, xp=np, frames=frames),
            "tv-time": lambda: TotalVariation(strength, (0,)),
            "l1-wavelet": lambda: L1Wavelet(strength / WAVELETS_LESS, shape, xp=np),
        }
        penalties = [makers[each]() for each in name.split(",")]
        problem = Problem(normal=normal, right=right, energy=energy, penalties=penalties)
        return regularized_sense(problem, iterations=iterations).image

    def their(name: str, strength: float, iterations: int) -> Any:
        files = [str(folder / each) for each in ("k", "m", "out")]
        weight = strength * unit
        penalties = {
            "llr": ["-e", "-b", "8", "-R", f"L:3:3:{weight}"],  # eigenvalues (-e) do not concern ADMM
            "tv-time": ["-R", f"T:1024:0:{weight}"],
            "l1-wavelet": ["-R", f"W:3:0:{weight / WAVELETS_LESS}"],
        }
        how = [*itertools.chain(*(penalties[each] for each in name.split(","))), f"-i{iterations}"]
        runner(["bart", "pics", "-w", "1", *how, "-t", str(folder / "t"), *files])()
        return np.fromfile(folder / "out.cfl", np.complex64).reshape(*shape, frames, order="F").transpose(2, 0, 1)

    counts_of = {"llr": (ITERATIONS,), "tv-time": TV_TIME_ITERATIONS, "tv-time,l1-wavelet": (ITERATIONS,)}
    for name, counts in counts_of.items():
        for program, run in {"Millrace": our, "BART": their}.items():
            found = []
            for strength, count in itertools.product(strengths(name), counts):
                pairs = zip(run(name, strength, count), series.images, strict=True)
                found.append((*np.mean([errors(*pair) for pair in pairs], axis=0), strength, count))
            report("moving phantom", name, program, found)


def report(scan: str, name: str, program: str, found: Sequence[tuple[float, ...]]) -> None:
    (error, similar, in_object, strength, *iterations), best = min(found), np.max(found, axis=0)
    row = f"{scan:16} {name:11} {program:9} NRMSE {error:.4f} SSIM {similar:.4f}, {in_object:.4f} in the object"
    at = "".join(f", {count} iterations" for count in iterations)
    print(f"{row} at {strength:g}{at}; best SSIM {best[1]:.4f}, {best[2]:.4f}", flush=True)


def errors(image: Any, reference: Any) -> tuple[float, float, float]:
    """The relative error after one complex factor; the structural similarity in all of the image and in the object."""
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
    similar /= (means[0] ** 2 + means[1] ** 2 + first) * (spread + second)
    return relative, float(similar.mean()), float(similar[means[1] > span / 20].mean())


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
                    found = [(*errors(run(name, each), part.reference), each) for each in strengths(name)]
                    report(scan.name, name, program, found)
    with tempfile.TemporaryDirectory() as folder:
        compare_series(moving(), Path(folder))


if __name__ == "__main__":
    main()
