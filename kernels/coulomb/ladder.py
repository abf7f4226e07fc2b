"""The ladders of potential maps: the direct sum and the sum within a cutoff, for boxes of water."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from kernels.coulomb.cases import useful_pairs, water_box
from kernels.coulomb.cuda import potential, variants_of
from kernels.coulomb.geometry import Grid, Scheme
from kernels.runtime.ladder import Ladder
from kernels.runtime.limits.cuda import random_values

# Small enough that the atomics of the first step finish in reasonable time.
DIRECT_ATOMS, DIRECT_SIDE, DIRECT_SHAPE = 4096, 48.0, (96, 96, 96)
CUTOFF_ATOMS, CUTOFF_SIDE, CUTOFF_SHAPE = 96_603, 101.0, (192, 204, 204)
FLOPS_A_PAIR = {"direct": 11, "shift": 15}  # see cases.Case.flops


def ladders() -> tuple[Ladder, ...]:
    """At 0.5 Å, float32 atoms; "shift" at 12 Å."""
    return (
        _ladder(Scheme(name="direct"), DIRECT_ATOMS, DIRECT_SIDE, DIRECT_SHAPE),
        _ladder(Scheme(), CUTOFF_ATOMS, CUTOFF_SIDE, CUTOFF_SHAPE),
    )


def _ladder(scheme: Scheme, count: int, side: float, shape: tuple[int, int, int]) -> Ladder:
    grid = Grid(origin=(0, 0, 0), spacing=(0.5, 0.5, 0.5), shape=shape)
    host = water_box(side, count)
    # Estimated from a sample of the atoms, to 0.3 %.
    some = host if scheme.name == "direct" else host[:: count // 4000]
    pairs = useful_pairs(some, grid, scheme) * count // len(some)

    @cache
    def arrays() -> tuple[Any, Any]:
        atoms = random_values(host.size, "float32").reshape(host.shape)
        atoms.set(host)
        return atoms, random_values(grid.size, "float32").reshape(shape)

    def prepare(variant: str) -> Callable[[], Any]:
        atoms, out = arrays()
        return lambda: potential(atoms, grid, scheme, None, out, variant=variant)

    return Ladder(
        name=f"{scheme.name}, {count:,} atoms, {' × '.join(map(str, shape))} points",
        variants=tuple(variants_of(scheme)), bytes=host.nbytes + 4 * grid.size,
        flops=FLOPS_A_PAIR[scheme.name] * pairs, limit="roots", prepare=prepare, libraries=dict, roots=pairs,
    )  # fmt: skip
