"""Which variants production chooses, on devices of other sizes than any that is here."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kernels.runtime import launch
from kernels.smoothing import cuda
from kernels.smoothing.cases import Case, cases
from kernels.smoothing.cuda.boxes import tree
from kernels.smoothing.window import gaussian_windows

# Attributes by CUDA's numbers: multiprocessors, shared memory of a block and of a multiprocessor, and what is reserved.
DEVICES = {
    "H200": {16: 132, 97: 227 << 10, 81: 228 << 10, 111: 1024},
    "T4": {16: 40, 97: 64 << 10, 81: 64 << 10, 111: 0},
}


def _listed() -> Iterator[tuple[tuple[int, ...], Any, tuple[Any, ...]]]:
    for case in (
        *(case for case in cases() if case.windows()),
        *(
            Case(shape=(97, 131), dtype="float32", axes=(0, 1), sizes=(size, size), modes=("mirror",) * 2)
            for size in tree.SIZES
        ),
        Case(shape=(97, 131, 5), dtype="uint16", axes=(0, 1), sigmas=(3.0, 3.0), modes=("mirror",) * 2),
        Case(shape=(97, 131, 5), dtype="uint8", axes=(0, 1), sigmas=(3.0, 3.0), modes=("mirror",) * 2),
        Case(shape=(1 << 31,), dtype="uint8", axes=(0,), sigmas=(3.0,), modes=("mirror",)),
        Case(shape=(1 << 31, 131), dtype="uint16", axes=(0, 1), sigmas=(3.0, 3.0), modes=("mirror",) * 2),
    ):
        yield case.shape, np.dtype(case.dtype), tuple(case.windows())
    windows = gaussian_windows((0,), (99.0,), ("wrap",), np.dtype(np.float32), direct=True)
    yield (1009, 7), np.dtype(np.float32), tuple(windows)


def test_production_runs_every_variant_but_those_of_the_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_runtime", lambda: types.SimpleNamespace(getDevice=lambda: 0))
    chosen: dict[int, set[Any]] = {}
    for attributes in DEVICES.values():
        monkeypatch.setattr(launch, "_attribute", lambda number, device, attributes=attributes: attributes[number])
        for shape, dtype, windows in _listed():
            found = cuda._fastest.__wrapped__(shape, dtype, windows)
            chosen.setdefault(id(found), set()).add(windows[0].taps)
    for name, variant in cuda.VARIANTS.items():
        of_the_ladder = variant.run.__module__.startswith(f"{cuda.__name__}.ladder")
        assert of_the_ladder != (id(variant) in chosen), name
    assert chosen[id(cuda.VARIANTS["tree"])] == set(tree.SIZES)
