"""The method that "auto" takes on CUDA, without a GPU: the faster one by measurements on an H200."""

from __future__ import annotations

import pytest

from kernels.nufft.cuda import chosen


@pytest.mark.parametrize(
    ("points", "shape", "eps", "coils", "method"),
    [
        (65_536, (256, 256), 1e-3, 1, "gridding"),  # adjoint and forward 0.028 and 0.013 ms; exact 0.127 and 0.096
        (65_536, (256, 256), 1e-3, 12, "gridding"),  # 0.128 and 0.107; 0.787 and 0.583
        (6_800_384, (256, 256, 176), 1e-3, 1, "gridding"),  # 1.86 and 1.41; minutes
        (1_000, (256, 256, 256), 1e-3, 1, "exact"),  # 1.7e10 pairs, 0.3 ms; the finer grid alone has 43 M cells
        (65_536, (256, 256), 1e-6, 1, "gridding"),  # beyond the exact product's precision
        (0, (256, 256), 1e-3, 1, "gridding"),
    ],
)
def test_the_faster_method(points: int, shape: tuple[int, ...], eps: float, coils: int, method: str) -> None:
    assert chosen(points, shape, eps, coils) == method


def test_more_samples_never_turn_from_gridding_to_the_exact_sum() -> None:
    for shape in ((32, 32), (256, 256), (64, 64, 64)):
        for coils in (1, 32):
            found = [chosen(4**power, shape, 1e-3, coils) for power in range(12)]
            assert found == sorted(found)  # "exact" before "gridding"
            assert found[-1] == "gridding"
