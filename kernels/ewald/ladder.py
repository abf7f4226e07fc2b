"""The far field of a box of water, atoms to map, as `millrace kernels` measures it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from kernels.coulomb import Cell, Grid
from kernels.coulomb.cases import water_box
from kernels.ewald import FarField, Method, mesh_of
from kernels.ewald.cuda import VARIANTS, Task
from kernels.runtime.ladder import Ladder
from kernels.runtime.limits.cuda import random_values

ATOMS, SIDE, SHAPE = 96_603, 101.0, (202, 202, 202)


def ladders() -> tuple[Ladder, ...]:
    """In a periodic cell, at 0.5 Å, float32 atoms, accuracy 1e-4."""
    grid = Grid(origin=(0, 0, 0), spacing=(0.5, 0.5, 0.5), shape=SHAPE)
    host = water_box(SIDE, ATOMS)
    method = Method()
    field = FarField(mesh_of(method, Cell.from_lengths(SIDE, SIDE, SIDE)), float(np.abs(host[:, 3]).sum()))

    @cache
    def arrays() -> tuple[Any, Any]:
        atoms = random_values(host.size, "float32").reshape(host.shape)
        atoms.set(host)
        return atoms, random_values(grid.size, "float32").reshape(SHAPE)

    def prepare(variant: str) -> Callable[[], Any]:
        atoms, out = arrays()
        return lambda: VARIANTS[variant].run(Task(field=field, atoms=atoms, grid=grid, out=out))

    taps = method.level.taps
    return (
        Ladder(
            name=f"far field, {ATOMS:,} atoms, {' × '.join(map(str, SHAPE))} points", variants=tuple(VARIANTS),
            bytes=host.nbytes + 8 * grid.size, flops=2 * (ATOMS * taps**3 + grid.size * taps), limit="copy",
            prepare=prepare, libraries=dict,
        ),
    )  # fmt: skip
