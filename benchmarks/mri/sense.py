"""CG-SENSE, step by step, against SigPy and BART if they are installed; with --device cuda on a GPU, against SigPy.

On the CPU: radial scans with given maps (without density weights, which the rivals lack), and whole commands from file
to file. On a GPU: set-up and iterations of a scan of 32 coils, 256², 400 spokes × 512 samples.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import Options
from benchmarks.rounds import Rival, band, measure, ratio
from kernels.nufft import Nufft, Toeplitz, toeplitz_kernel
from kernels.sense import CapturedCg, centre_images, cg_sense, density, gridded, sensitivities, toeplitz_normal
from kernels.sense.regularized import L1Wavelet, Problem, regularized_sense

STRENGTH, WAVELET_ITERATIONS = 0.01, 50  # of l1-wavelet
Scan = tuple[Any, Any, tuple[int, int]]


def coil_images(coils: int, n: int) -> Any:
    """Of an ellipse with a hole, complex (coils, n, n)."""
    r = (np.arange(n) - n // 2) / n
    picture = ((r[:, None] / 0.4) ** 2 + (r / 0.3) ** 2 < 1) - 0.5 * (
        ((r[:, None] - 0.1) / 0.1) ** 2 + (r / 0.1) ** 2 < 1
    )
    turn = 2 * np.pi * np.arange(coils)[:, None, None] / coils
    away = (r[:, None] - 0.45 * np.cos(turn)) ** 2 + (r - 0.45 * np.sin(turn)) ** 2
    return np.exp(-away / 0.25 + 1j * turn) * picture


def synthetic(coils: int, n: int, spokes: int, samples: int) -> Scan:
    """k-space (coils, spokes, samples) of `coil_images`, golden angles in cycles per field of view, and the matrix."""
    angle = np.arange(spokes) * np.pi * (np.sqrt(5) - 1) / 2
    radius = (np.arange(samples) - samples // 2) * (n / samples)
    points = radius[None, :, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)[:, None, :]
    kspace = Nufft(points.reshape(-1, 2), (n, n), eps=1e-4).forward(coil_images(coils, n).astype(np.complex64))
    return kspace.reshape(coils, spokes, samples), points, (n, n)


def loaded(path: Path) -> Scan:
    """An .npz of kspace (coils, spokes, samples) and traj in cycles/pixel, of a square matrix as wide as a readout."""
    with np.load(path) as arrays:
        kspace, traj = arrays["kspace"], arrays["traj"]
    n = kspace.shape[2]
    return kspace, traj.astype(np.float64) * n, (n, n)


# On the CPU


def cpu_rivals(scan: Scan, iterations: int, folder: Path) -> list[Rival]:
    kspace, points, shape = scan
    coils, flat = len(kspace), np.ascontiguousarray(points.reshape(-1, 2))
    data = np.ascontiguousarray(kspace.reshape(coils, -1))
    centre = centre_images(data, flat, density.pipe_menon(flat, shape), shape, width=24, taper=True)
    maps = sensitivities.walsh(centre, shape)
    write_cfl(folder / "k", kspace.transpose(2, 1, 0)[None])
    write_cfl(folder / "t", np.concatenate([points, 0 * points[..., :1]], axis=2).transpose(2, 1, 0))
    write_cfl(folder / "m", maps.transpose(1, 2, 0)[:, :, None])
    even = density.even(len(flat), flat)

    def ours() -> Any:
        transform = Nufft(flat, shape, eps=1e-3)
        normal = toeplitz_normal(Toeplitz(toeplitz_kernel(flat, even, shape, 1e-3), shape), maps)
        return cg_sense(normal, gridded(transform, data, maps, even), iterations=iterations)

    def wavelets() -> Any:
        transform = Nufft(flat, shape, eps=1e-3)
        normal = toeplitz_normal(Toeplitz(toeplitz_kernel(flat, even, shape, 1e-3), shape), maps)
        problem = Problem(
            normal=lambda series: normal(series[0])[None],
            right=gridded(transform, data, maps, even)[None],
            energy=float((np.abs(data) ** 2).sum() / len(flat)),
            penalties=[L1Wavelet(STRENGTH, shape, xp=np)],
        )
        return regularized_sense(problem, iterations=WAVELET_ITERATIONS)

    # Both rivals scale transforms by 1 / √pixels and do not divide by the number of samples.
    largest = float(np.abs(gridded(Nufft(flat, shape, eps=1e-3), data, maps, even)).max())
    strength = STRENGTH * largest * len(flat) / math.sqrt(math.prod(shape))
    return [
        Rival(name="millrace l1-wavelet", device="cpu", run=wavelets),
        Rival(name="sigpy L1WaveletRecon", device="cpu", run=_sigpy_wavelets(data, flat, maps, strength)),
        Rival(name="bart pics -R W (command)", device="cpu", run=_bart_wavelets(folder, strength)),
        Rival(name="millrace, maps given", device="cpu", run=ours),
        Rival(name="sigpy SenseRecon, maps given", device="cpu", run=_sigpy(data, flat, maps, iterations)),
        Rival(name="bart pics, maps given (command)", device="cpu", run=_bart(folder, iterations)),
        Rival(name="millrace run mri, maps given (command)", device="cpu", run=_command(folder, iterations)),
        Rival(name="millrace run mri (command)", device="cpu", run=_command(folder, iterations, maps=False)),
        Rival(name="bart nufft, ecalib, pics (commands)", device="cpu", run=_bart_whole(folder, iterations, shape)),
    ]


def _sigpy(data: Any, points: Any, maps: Any, iterations: int, **how: Any) -> Callable[[], Any] | None:
    if importlib.util.find_spec("sigpy") is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sigpy.mri.app import SenseRecon
    return lambda: SenseRecon(data, maps, coord=points, max_iter=iterations, show_pbar=False, **how).run()


def _sigpy_wavelets(data: Any, points: Any, maps: Any, strength: float, **how: Any) -> Callable[[], Any] | None:
    if importlib.util.find_spec("sigpy") is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sigpy.mri.app import L1WaveletRecon
    how = {"wave_name": "db2", "max_iter": WAVELET_ITERATIONS, "show_pbar": False} | how
    return lambda: L1WaveletRecon(data, maps, strength, coord=points, **how).run()


def _bart_wavelets(folder: Path, strength: float) -> Callable[[], Any] | None:
    if shutil.which("bart") is None:
        return None
    files = [str(folder / name) for name in ("k", "m", "theirs")]
    how = ["-e", "-w", "1", "-R", f"W:3:0:{strength}", f"-i{WAVELET_ITERATIONS}"]
    return runner(["bart", "pics", *how, "-t", str(folder / "t"), *files])


def _command(folder: Path, iterations: int, *, maps: bool = True) -> Callable[[], Any]:
    options = ["--sensitivities", str(folder / "m.cfl"), "--density", "none"] if maps else []
    command = [
        str(Path(sys.executable).parent / "millrace"),
        "run",
        "mri",
        str(folder / "k.cfl"),
        str(folder / "ours.cfl"),
    ]
    command += [
        "--trajectory",
        str(folder / "t.cfl"),
        "--iterations",
        str(iterations),
        "--tolerance",
        "0",
        "--eps",
        "1e-3",
    ]
    return runner([*command, *options, "--quiet", "--device", "cpu"])


def _bart(folder: Path, iterations: int) -> Callable[[], Any] | None:
    if shutil.which("bart") is None:
        return None
    files = [str(folder / name) for name in ("k", "m", "theirs")]
    return runner(["bart", "pics", "-l2", "-r0.001", f"-i{iterations}", "-t", str(folder / "t"), *files])


def _bart_whole(folder: Path, iterations: int, shape: tuple[int, int]) -> Callable[[], Any] | None:
    if shutil.which("bart") is None:
        return None
    t, k, low, spectrum, wide, maps, out = (
        str(folder / name) for name in ("t", "k", "low", "lowk", "wide", "bm", "bo")
    )
    steps = [
        ["bart", "nufft", "-i", "-d24:24:1", t, k, low],
        ["bart", "fft", "-u", "7", low, spectrum],
        ["bart", "resize", "-c", "0", str(shape[0]), "1", str(shape[1]), spectrum, wide],
        ["bart", "ecalib", "-m1", wide, maps],
        ["bart", "pics", "-l2", "-r0.001", f"-i{iterations}", "-t", t, k, maps, out],
    ]
    return runner(*steps)


def runner(*commands: list[str]) -> Callable[[], Any]:
    environment = os.environ | {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}

    def run() -> None:
        for command in commands:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)

    return run


def write_cfl(path: Path, array: Any) -> None:
    dims = [*array.shape, *[1] * (16 - array.ndim)]
    path.with_suffix(".hdr").write_text(f"# Dimensions\n{' '.join(map(str, dims))}\n")
    path.with_suffix(".cfl").write_bytes(np.asarray(array, np.complex64).tobytes(order="F"))


# On a GPU


def gpu_rivals(scan: Scan, iterations: int) -> list[Rival]:
    import cupy

    kspace, points, shape = scan
    flat = cupy.asarray(points.reshape(-1, 2))
    data = cupy.asarray(kspace.reshape(len(kspace), -1))
    weights = density.pipe_menon(flat, shape)
    maps = sensitivities.walsh(centre_images(data, flat, weights, shape, width=24, taper=True), shape)
    transform = Nufft(flat, shape, eps=1e-4, coils=len(kspace))
    toeplitz = Toeplitz(toeplitz_kernel(flat, weights, shape, 1e-4), shape)
    normal = toeplitz_normal(toeplitz, maps)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)  # the default stream cannot be captured
    with stream:
        right = gridded(transform, data, maps, weights)
        solver = CapturedCg(normal, right)
        problem = Problem(
            normal=lambda series: normal(series[0])[None],
            right=right[None].copy(),
            energy=float((weights * cupy.abs(data) ** 2).sum()),
            penalties=[L1Wavelet(STRENGTH, shape, xp=cupy)],
        )
        strength = STRENGTH * float(cupy.abs(right).max()) / math.sqrt(math.prod(shape))

    def set_up() -> None:
        found = density.pipe_menon(flat, shape)
        Toeplitz(toeplitz_kernel(flat, found, shape, 1e-4), shape)
        Nufft(flat, shape, eps=1e-4, coils=len(kspace))
        sensitivities.walsh(centre_images(data, flat, found, shape, width=24, taper=True), shape)

    def synchronised(run: Callable[[], Any]) -> Callable[[], Any]:
        def whole() -> None:
            with stream:
                run()
            cupy.cuda.Device().synchronize()

        return whole

    steps: dict[str, Callable[[], Any]] = {
        "set-up: density, kernel, plan, maps": set_up,
        "  density": lambda: density.pipe_menon(flat, shape),
        "  maps": lambda: sensitivities.walsh(centre_images(data, flat, weights, shape, width=24, taper=True), shape),
        "right-hand side": lambda: gridded(transform, data, maps, weights),
        "one normal operator": lambda: normal(right),
        "right-hand side and iterations": lambda: solver.solve(
            gridded(transform, data, maps, weights), iterations=iterations
        ),
        "l1-wavelet, 100 iterations": lambda: regularized_sense(problem, iterations=100),
    }
    if theirs := _sigpy(data, flat, maps, iterations, weights=weights, device=0):
        steps["sigpy SenseRecon on CuPy"] = theirs
    if theirs := _sigpy_wavelets(data, flat, maps, strength, weights=weights, device=0, max_iter=100):
        steps["sigpy L1WaveletRecon on CuPy"] = theirs
    return [Rival(name=name, device="cuda", run=synchronised(run)) for name, run in steps.items()]


def main() -> None:
    parser = Options("mri/sense", __doc__)
    parser.add_rounds()
    parser.add_argument("--scan", type=Path, help="a radial scan (.npz) instead of the synthetic one")
    parser.add_argument("--iterations", type=int, help="iterations of CG-SENSE [default: 15, on a GPU 10]")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.device == "cuda":
            scan = loaded(options.scan) if options.scan else synthetic(32, 256, 400, 512)
            rivals = measure(gpu_rivals(scan, options.iterations or 10), options.repeats)
        else:
            scan = loaded(options.scan) if options.scan else synthetic(12, 256, 25, 256)
            rivals = measure(cpu_rivals(scan, options.iterations or 15, Path(folder)), options.repeats)
    kspace, _, shape = scan
    print(f"{len(kspace)} coils, {shape[0]} × {shape[1]}, {kspace.shape[1]} readouts × {kspace.shape[2]} samples")
    for rival in rivals:
        low, high = band(rival.seconds)
        print(f"  {rival.name:45} {1e3 * rival.median_s:9.2f} ms  ({1e3 * low:.2f} … {1e3 * high:.2f})")
    by_name = {rival.name: rival for rival in rivals}
    for one, other in (
        ("millrace l1-wavelet", "sigpy L1WaveletRecon"),
        ("millrace l1-wavelet", "bart pics -R W (command)"),
        ("millrace, maps given", "sigpy SenseRecon, maps given"),
        ("right-hand side and iterations", "sigpy SenseRecon on CuPy"),
        ("l1-wavelet, 100 iterations", "sigpy L1WaveletRecon on CuPy"),
        ("millrace run mri, maps given (command)", "bart pics, maps given (command)"),
        ("millrace run mri (command)", "bart nufft, ecalib, pics (commands)"),
    ):
        if one in by_name and other in by_name:
            median, low, high = ratio(by_name[one], by_name[other])
            print(f"  {one} is {median:.2f} ({low:.2f} … {high:.2f}) times as fast as {other}")


if __name__ == "__main__":
    main()
