"""Potential maps of boxes of water, on the CPU or, with --device cuda, on a GPU: every variant, side by side.

Reports times, useful pairs per second (a point and an atom within the cutoff), and their fraction of the device's rate
of inverse square roots, measured in the same rounds.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.options import Options
from benchmarks.rounds import Rival, host_seconds, measure, print_row, queued_seconds, row
from kernels.coulomb import Grid, Scheme, potential
from kernels.coulomb.cases import useful_pairs, water_box
from kernels.ewald import DEFAULT_FREE_CUTOFF_ANGSTROM, FarField, Method, box_of, mesh_of, near
from kernels.ewald import potential as full_potential

SAMPLE = 4000  # atoms or tiles sampled to estimate the number of pairs (to about 0.3 %)
RATE = "inverse roots"
FULL = "all atoms, by a mesh"  # whose pairs within the cutoff are counted like the others'


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One row of the table: a box of water, 0.0937 atoms/Å3, points every 0.5 Å."""

    side_angstrom: float
    atoms: int
    shape: tuple[int, int, int]
    scheme: Scheme
    devices: tuple[str, ...] = ("cpu", "cuda")

    @property
    def name(self) -> str:
        return f"{self.scheme.name}, {self.atoms} atoms in {self.side_angstrom:g} Å"

    @property
    def grid(self) -> Grid:
        return Grid(origin=(0, 0, 0), spacing=(0.5, 0.5, 0.5), shape=self.shape)

    def pairs(self, atoms: Any) -> float:
        """Useful pairs."""
        if self.scheme.name == "direct" or len(atoms) <= SAMPLE:
            return float(useful_pairs(atoms, self.grid, self.scheme))
        some = np.random.default_rng(1).choice(atoms, SAMPLE, replace=False)
        return useful_pairs(some, self.grid, self.scheme) * len(atoms) / SAMPLE


def _cutoff(side: float, atoms: int, shape: tuple[int, int, int], scheme: str, *devices: str) -> Workload:
    return Workload(side_angstrom=side, atoms=atoms, shape=shape, scheme=Scheme(name=scheme), devices=devices)


WORKLOADS = [
    _cutoff(40, 5943, (80, 80, 80), "shift", "cpu"),
    _cutoff(20, 750, (40, 40, 40), "direct", "cpu"),
    _cutoff(101, 96_603, (192, 204, 204), "shift", "cuda"),
    _cutoff(101, 96_603, (192, 204, 204), "taylor2", "cuda"),
    _cutoff(101, 96_603, (192, 204, 204), "truncate", "cpu", "cuda"),
    _cutoff(202, 772_824, (393, 406, 406), "shift", "cuda"),
    _cutoff(101, 20_000, (192, 208, 208), "direct", "cuda"),
]


def cpu_rivals(work: Workload, atoms: Any, workers: int) -> Iterator[Rival]:
    out = np.ones(work.shape, np.float32)
    for count in dict.fromkeys((workers, 1)):

        def run(count: int = count) -> object:
            return potential(atoms, work.grid, work.scheme, out=out, workers=count)

        yield Rival(name=f"{count} threads", device="cpu", run=run)
    if work.scheme.name != "direct":
        method = Method(cutoff_angstrom=DEFAULT_FREE_CUTOFF_ANGSTROM, free=True)
        full = partial(full_potential, atoms, work.grid, method, out=out, workers=workers)
        yield Rival(name=FULL, device="cpu", run=full)


def cuda_rivals(work: Workload, host_atoms: Any) -> Iterator[Rival]:
    """The variants, fastest first; then a run from and to host memory, and the device's rate of inverse roots."""
    import cupy

    from kernels.coulomb.cuda import potential as on_cuda
    from kernels.coulomb.cuda import variants_of

    atoms, out = cupy.asarray(host_atoms), cupy.ones(work.shape, cupy.float32)
    for name in reversed(variants_of(work.scheme)):
        if name == "scatter":
            continue  # atomics only: takes minutes

        def run(name: str = name) -> object:
            return on_cuda(atoms, work.grid, work.scheme, None, out, variant=name)

        yield Rival(name=name, device="cuda", run=run, clock=host_seconds if name == "classic" else queued_seconds)
    if work.scheme.name == "shift":
        yield Rival(name=FULL, device="cuda", run=_full_on_device(work, host_atoms, atoms, out), clock=queued_seconds)
    yield Rival(name="host to host", device="cuda", run=_host_to_host(work, host_atoms))
    yield Rival(name=RATE, device="cuda", run=inverse_roots()[1], clock=queued_seconds)


def _full_on_device(work: Workload, host_atoms: Any, atoms: Any, out: Any) -> Callable[[], object]:
    """All steps of a full map without a cell, with the mesh's influence function computed beforehand."""
    method = Method(cutoff_angstrom=DEFAULT_FREE_CUTOFF_ANGSTROM, free=True)
    mesh = mesh_of(method, None, *box_of(host_atoms, work.grid))
    field = FarField(mesh, float(np.abs(host_atoms[:, 3]).sum()))

    def run() -> None:
        near(atoms, work.grid, method, None, out)
        field.add(field.solve(field.spread(atoms)), work.grid, out)

    return run


def _host_to_host(work: Workload, atoms: Any) -> Callable[[], object]:
    """From pinned atoms to a pinned map, allocated beforehand like the engine's slots."""
    import cupy

    def pinned(like: Any) -> Any:
        memory = cupy.cuda.alloc_pinned_memory(like.nbytes)
        return np.frombuffer(memory, like.dtype, like.size).reshape(like.shape)

    source, target = pinned(atoms), pinned(np.empty(work.shape, np.float32))
    source[...] = atoms
    on_device, out = cupy.empty(atoms.shape, atoms.dtype), cupy.empty(work.shape, cupy.float32)

    def run() -> None:
        on_device.set(source)
        potential(on_device, work.grid, work.scheme, out=out)
        out.get(out=target)
        cupy.cuda.get_current_stream().synchronize()

    return run


def inverse_roots() -> tuple[int, Callable[[], object]]:
    """The number of inverse roots of a run, and the run."""
    import cupy

    from kernels.coulomb.cuda import RATE_ENTRY, RATE_ROOTS_A_ROUND
    from kernels.runtime.launch import kernel, multiprocessors

    blocks, threads, rounds = 32 * multiprocessors(), 256, 1000
    out, stream = cupy.empty(blocks * threads, cupy.float32), cupy.cuda.get_current_stream()
    args = (out, ctypes.c_int(rounds))
    run = lambda: kernel("coulomb", RATE_ENTRY).launch((blocks,), (threads,), args, stream=stream)  # noqa: E731
    return blocks * threads * rounds * RATE_ROOTS_A_ROUND, run


def tested_to_useful(work: Workload, atoms: Any) -> float:
    """Pairs that `tiles` computes per useful one: a 4 × 4 × 4 box takes all pairs with each atom within its cutoff."""
    rng = np.random.default_rng(2)
    cutoff, step, half = work.scheme.cutoff_angstrom, np.array(work.grid.spacing), 1.5 * np.array(work.grid.spacing)
    offsets = np.stack(np.meshgrid(*(np.arange(4) - 1.5,) * 3), -1).reshape(-1, 3) * step
    tested = useful = 0
    for corner in rng.integers(0, np.array(work.shape) // 4, (SAMPLE // 40, 3)) * 4:
        away = atoms[:, :3] - ((corner + 1.5) * step)
        hit = away[(np.maximum(np.abs(away) - half, 0) ** 2).sum(1) <= cutoff**2]
        tested += 64 * len(hit)
        useful += int((((hit[:, None] - offsets) ** 2).sum(2) <= cutoff**2).sum())
    return tested / useful


def main() -> None:
    parser = Options("coulomb/maps", __doc__)
    parser.add_rounds()
    parser.add_rows()
    options = parser.parse_args()
    results = []
    for work in WORKLOADS:
        if options.only not in work.name or options.device not in work.devices:
            continue
        atoms = water_box(work.side_angstrom, work.atoms)
        cuda = options.device == "cuda"
        rivals = list(cuda_rivals(work, atoms) if cuda else cpu_rivals(work, atoms, options.workers))
        result = _result(work, atoms, measure(rivals, options.repeats), cuda)
        _print(result)
        results.append(result)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1, ensure_ascii=False))


def _result(work: Workload, atoms: Any, rivals: list[Rival], cuda: bool) -> dict[str, Any]:
    pairs = work.pairs(atoms)
    alone = next((rival for rival in rivals if rival.name == RATE), None)
    roots_per_s = inverse_roots()[0] / alone.median_s if alone else None
    rows = {}
    for rival in rivals:
        if rival is not alone:
            rate = pairs / rival.median_s
            fraction = rate / roots_per_s if roots_per_s else None
            rows[rival.name] = row(rival, rivals[0], pairs_per_s=rate, fraction_of_roots=fraction)
    tested = tested_to_useful(work, atoms) if cuda and work.scheme.name != "direct" else None
    return {"work": work.name, "pairs": pairs, "roots_per_s": roots_per_s, "tested_to_useful": tested, "rows": rows}


def _print(result: dict[str, Any]) -> None:
    print(f"\n{result['work']}: {result['pairs'] / 1e9:.3g} G useful pairs")
    if result["roots_per_s"]:
        print(f"  {result['roots_per_s'] / 1e12:.2f} T inverse roots/s alone")
    if result["tested_to_useful"]:
        print(f"  {result['tested_to_useful']:.2f} pairs computed by tiles for each useful one")
    for name, figures in result["rows"].items():
        more = [f"{figures['pairs_per_s'] / 1e9:8.3g} G pairs/s"]
        if figures["fraction_of_roots"]:
            more.append(f"{figures['fraction_of_roots']:.3f} of the roots")
        print_row(name, figures, *more)


if __name__ == "__main__":
    main()
