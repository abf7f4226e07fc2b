"""The ladders of smoothing, on inputs of realistic size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from kernels.runtime.ladder import Ladder
from kernels.runtime.limits.cuda import random_values
from kernels.smoothing.cases import Case
from kernels.smoothing.cuda import smooth

SHAPE = (8192, 8192, 3)
CLASSIC_BOX = ("naive", "tiled", "padded", "pitched", "pitched_tiled", "separable", "running")
CLASSIC_GAUSSIAN = ("naive", "tiled", "pitched_tiled", "separable")


@dataclass(frozen=True, kw_only=True)
class _Filter:
    name: str
    case: Case
    variants: tuple[str, ...]  # those that apply, on every device


def _case(dtype: str = "uint16", shape: tuple[int, ...] = SHAPE, **what: Any) -> Case:
    return Case(shape=shape, dtype=dtype, axes=(0, 1), modes=("mirror",) * 2, **what)


_FILTERS = (
    _Filter(name="box 3×3", case=_case(sizes=(3, 3)), variants=(*CLASSIC_BOX, "fused")),
    _Filter(name="box 31×31", case=_case(sizes=(31, 31)), variants=CLASSIC_BOX),
    *(
        _Filter(
            name=f"box {size}×{size}",
            case=_case("float32", SHAPE[:2], sizes=(size, size)),
            variants=("naive", "separable", "streamed", "tree"),
        )
        for size in (11, 31, 63)
    ),
    _Filter(
        name="Gaussian σ=2",
        case=_case(sigmas=(2.0, 2.0)),
        variants=(*CLASSIC_GAUSSIAN, "wide", "fused"),
    ),
    _Filter(name="Gaussian σ=2", case=_case("uint8", sigmas=(2.0, 2.0)), variants=("byte_sums", "tensor")),
)


def ladders() -> tuple[Ladder, ...]:
    """Images of 8192 × 8192 pixels, border mode "mirror", with all variants that apply."""
    return tuple(_ladder(each) for each in _FILTERS)


def _ladder(each: _Filter) -> Ladder:
    windows = each.case.windows()

    @cache
    def arrays() -> tuple[Any, Any]:
        image = random_values(math.prod(each.case.shape), each.case.dtype).reshape(each.case.shape)
        return image, image.copy()

    def prepare(variant: str) -> Callable[[], Any]:
        image, out = arrays()
        return lambda: smooth(image, windows, 0, out, variant=variant)

    kind = "RGB" if len(each.case.shape) == 3 else "gray"
    return Ladder(
        name=f"{each.name}, {each.case.dtype} {kind}, 8192 × 8192", variants=each.variants, bytes=each.case.bytes(),
        flops=each.case.flops(), limit="copy", prepare=prepare, libraries=dict,
    )  # fmt: skip
