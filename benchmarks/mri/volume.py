"""An iteration of CG-SENSE on a large volume: coils on the device, from the host, recomputed, or split over devices.

--device all: one rank per GPU; --workers: number of ranks on the CPU. The kernel belongs to random points and the maps
are smooth; neither affects the time.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.options import Options
from benchmarks.rounds import Rival, band, measure, ratio
from kernels.nufft import Toeplitz, toeplitz_kernel
from kernels.sense import GroupedMaps, cg_sense, namespace, toeplitz_normal
from kernels.sense.coil_groups import group_parts, plan_residency
from kernels.sense.sensitivities import CoarseMaps

POINTS, COARSE = 200_000, 48
# Device memory traffic of one application of the operator, in multiples of a coil's image, for our FFTs of lines in
# three dimensions; and the bytes of maps that cross the bus if all of them are streamed.
MOVED, CROSSING = 26, 1


def coarse_maps(like: Any, coils: Any, n: int) -> CoarseMaps:
    """Synthetic coil sensitivities on n³ pixels, smooth like those from the centre of k-space."""
    xp = namespace(like)
    r = (xp.arange(n, dtype=np.float32) - n // 2) / np.float32(n)
    turn = xp.asarray(coils, np.float32)[:, None] * np.float32(0.3)
    x, y, z = (xp.exp(1j * (turn + axis) * r - (r - xp.sin(turn + axis) / 2) ** 2) for axis in range(3))
    return CoarseMaps(maps=(x[:, :, None, None] * y[:, None, :, None] * z[:, None, None, :]).astype(np.complex64))


def operator(like: Any, n: int) -> Toeplitz:
    points = namespace(like).asarray(np.random.default_rng(0).uniform(-n / 2, n / 2, (POINTS, 3)))
    return Toeplitz(toeplitz_kernel(points, None, (n, n, n), 1e-3), (n, n, n))


class Iteration:
    """The normal operator of some coils of a volume."""

    def __init__(
        self,
        like: Any,
        toeplitz: Toeplitz,
        coils: Any,
        add: Callable[[Any], Any],
        room: int | None = None,
        made_again: bool = False,
    ) -> None:
        xp, shape = namespace(like), toeplitz.shape
        residency = plan_residency(len(coils), shape, room)
        self._maps = GroupedMaps(like, len(coils), shape, residency, made_again=made_again)
        coarse = coarse_maps(like, coils, min(COARSE, shape[0]))
        self._maps.make(lambda part: coarse.fine(part, shape), add)
        self._add = add
        self._inner = toeplitz_normal(toeplitz, self._maps)
        self.right = xp.ones(shape, np.complex64)

    def solve(self, iterations: int) -> Any:
        normal = lambda picture: self._add(self._inner(picture))  # noqa: E731
        return cg_sense(normal, self.right, iterations=iterations, damping=0.01, tolerance=1e-12)

    def close(self) -> None:
        self._maps.close()


def rank_seconds(member: Any, n: int, coils: int, iterations: int, repeats: int) -> list[float]:
    """For `run_gang`: seconds of an iteration on this rank, repeated."""
    from pipeline.engine.run import open_device

    device = open_device("auto", 1)
    like: Any = np.zeros(1, np.float32)
    if device.name != "cpu":
        device.enter()
        import cupy

        like = cupy.zeros(1, np.float32)
    own = Iteration(like, operator(like, n), np.array(member.shards), member.communicator.allreduce)
    found = []
    for _ in range(repeats + 1):
        member.control.barrier()
        began = time.perf_counter()
        own.solve(iterations)
        _wait(like)
        found.append((time.perf_counter() - began) / iterations)
    own.close()
    return found[1:]


def _wait(like: Any) -> None:
    if namespace(like) is not np:
        namespace(like).cuda.Device().synchronize()


def one_device(like: Any, options: argparse.Namespace) -> None:
    n, coils = options.size, options.coils
    a_coil = n**3 * 8
    group = group_parts(coils, n**3)[0].stop * a_coil
    half = min(coils * a_coil - 1, coils * a_coil // 2 + 2 * group)
    rooms: dict[str, tuple[int | None, bool]] = {
        "resident": (None, False),
        "half streamed": (half, False),
        "streamed": (2 * group, False),
        "made again": (2 * group, True),
    }
    toeplitz = operator(like, n)
    settings = {
        name: Iteration(like, toeplitz, np.arange(coils), lambda squares: squares, room, again)
        for name, (room, again) in rooms.items()
    }

    def run(of: Iteration) -> Callable[[], None]:
        def whole() -> None:
            of.solve(options.iterations)
            _wait(like)

        return whole

    device = "cpu" if namespace(like) is np else "cuda"
    rivals = measure([Rival(name=name, device=device, run=run(of)) for name, of in settings.items()], options.repeats)
    expected = settings["resident"].solve(2)[0]
    for rival in rivals:
        low, high = band(rival.seconds)
        same = bool((settings[rival.name].solve(2)[0] == expected).all())
        times = [1e3 * each / options.iterations for each in (rival.median_s, low, high)]
        print(f"  {rival.name:15} {times[0]:9.2f} ms an iteration ({times[1]:.2f} … {times[2]:.2f}); same bits: {same}")
    for rival in rivals[1:]:
        median, low, high = ratio(rivals[0], rival)
        print(f"  {rival.name} takes {median:.3f} ({low:.3f} … {high:.3f}) times as long as resident")
    moved, crossing = (times * coils * a_coil / 1e9 for times in (MOVED, CROSSING))
    print(f"  moved on the device {moved:.1f} GB, over the bus {crossing:.1f} GB")
    for each in settings.values():
        each.close()


def several_devices(options: argparse.Namespace) -> None:
    from pipeline.cluster.dask.worker_processes import local_workers
    from pipeline.cluster.dask.worker_start import cpu_workers, gpu_workers
    from pipeline.cluster.gang.gang import run_gang
    from pipeline.engine.devices.discovery import usable_gpus

    specs = cpu_workers(options.workers, 1) if options.workers else gpu_workers(usable_gpus())
    with local_workers(specs) as workers:
        found = run_gang(
            workers, rank_seconds, options.coils, options.size, options.coils, options.iterations, options.repeats
        )
    slowest = sorted(map(max, zip(*found.values, strict=True)))
    middle = 1e3 * slowest[len(slowest) // 2]
    print(
        f"  {len(found.ranks)} ranks: {middle:.2f} ms an iteration ({1e3 * slowest[0]:.2f} … {1e3 * slowest[-1]:.2f})"
    )


def main() -> None:
    parser = Options("mri/volume", __doc__)
    parser.add_argument("--device", choices=["cpu", "cuda", "all"], default="cpu")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--coils", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=5)
    options = parser.parse_args()
    maps_mib = math.ceil(options.coils * options.size**3 * 8 / 2**20)
    print(f"{options.coils} coils, {options.size}³, {maps_mib:,} MiB of maps")
    if options.device == "all" or options.workers:
        several_devices(options)
        return
    like: Any = np.zeros(1, np.float32)
    if options.device == "cuda":
        import cupy

        like = cupy.zeros(1, np.float32)
    one_device(like, options)


if __name__ == "__main__":
    main()
