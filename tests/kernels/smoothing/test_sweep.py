"""How boxes past 255 samples are cut into blocks, and their division, without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.smoothing.cuda.boxes import sweep
from kernels.smoothing.cuda.fused import view_of
from kernels.smoothing.window import box_window


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "multiprocessors", lambda: 132)
    monkeypatch.setattr(sweep, "shared_bytes_a_block", lambda: 232448)


def planned(shape: tuple[int, ...], sizes: tuple[int, int], dtype: str) -> tuple[sweep.Sweep, sweep.Cut]:
    view = view_of(shape, [box_window(axis, size, "reflect") for axis, size in enumerate(sizes)])
    assert view is not None
    cut = min(sweep._cuts(view, np.dtype(dtype)), key=lambda cut: cut.cost)
    return sweep._sweep(view, np.dtype(dtype), 0, cut), cut


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16"])
@pytest.mark.parametrize(
    "sizes",
    [(1023, 1023), (256, 2), (2, 256), (255, 257), (512, 1024), (1, 4001), (4001, 2), (4096, 4096), (4099, 4099)],
)
def test_the_division_is_exact_for_every_sum_that_occurs(sizes: tuple[int, int], dtype: str) -> None:
    found, cut = planned((5000, 6000), sizes, dtype)
    n = sizes[0] * sizes[1]
    assert found.samples == n
    if cut.shape.whole:
        assert dtype == "uint8"
        sums = {k * n + d for k in range(1, 256) for d in (-1, 0)} | {0, 255 * n + n // 2}
        assert all(u < 2**32 and (u * found.multiplier >> 32) >> found.shift == u // n for u in sums)
        return
    # Between two rows a window changes by at most its width times the largest sample.
    largest = (2 ** (8 * np.dtype(dtype).itemsize) - 1) * sizes[1]
    assert found.extra * n >= largest
    sums = {k * n + d for k in range(2 * found.extra + 2) for d in (-1, 0, 1)}
    sums |= {int(u) for u in np.random.default_rng(1).integers(0, (2 * found.extra + 1) * n, 2000)}
    for u in sums:
        if 0 <= u < (2 * found.extra + 1) * n:
            assert u < 2**32
            assert (u * found.multiplier >> 32) >> found.shift == u // n


@pytest.mark.parametrize(
    ("dtype", "sizes", "rows", "whole"),
    [
        ("uint8", (257, 257), 2, True),
        ("uint8", (4001, 4001), 2, True),
        ("uint8", (4099, 4099), 1, False),  # sums do not fit 32 bits
        ("uint8", (3, 30_001), 1, False),  # nor do two rows a step fit shared memory
        ("uint16", (1023, 1023), 2, False),
        ("uint16", (3, 20_001), 1, False),
    ],
)
def test_the_shape_depends_on_the_window(dtype: str, sizes: tuple[int, int], rows: int, whole: bool) -> None:
    _, cut = planned((5000, 6000), sizes, dtype)
    assert (cut.shape.rows, cut.shape.whole) == (rows, whole)


def test_sums_of_32_bits_need_an_exact_division() -> None:
    shape = sweep.SHAPES[1, 1][0]
    missing = [n for n in range((1 << 24) - 999, (1 << 24) + 1) if shape.division(n, np.dtype("uint8")) is None]
    assert missing
    assert shape.division((1 << 24) + 1, np.dtype("uint8")) is None
    assert all(shape.division(n, np.dtype("uint8")) for n in range(1 << 22, (1 << 22) + 999))


@pytest.mark.parametrize("shape", [(8192, 8192, 3), (8192, 8192), (701, 97, 4), (3, 20000, 2), (50000, 40)])
@pytest.mark.parametrize("sizes", [(1023, 1023), (300, 7), (3, 1025), (255, 255)])
def test_bands_and_tiles_cover_the_result(shape: tuple[int, ...], sizes: tuple[int, int]) -> None:
    found, cut = planned(shape, sizes, "uint16")
    channels: Any = shape[2] if len(shape) == 3 else 1
    assert (found.bands - 1) * found.span // found.parts < shape[0] <= found.bands * found.span // found.parts
    assert (found.tiles - 1) * found.outputs < shape[1] * channels <= found.tiles * found.outputs
    assert found.outputs % channels == 0
    assert (found.outputs + sizes[1] * channels) * 2 < cut.pitch
    assert found.outputs <= cut.threads * 2 * cut.shape.words
    assert 4 * cut.shape.rows * cut.pitch < cut.shared_bytes < 232448
    # The sums of the first window are those of whole bands, or of one that is higher.
    assert found.span == sizes[0] if found.parts > 1 else found.span >= sizes[0]
