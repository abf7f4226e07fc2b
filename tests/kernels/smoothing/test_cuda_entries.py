"""Every kernel of every variant, launched on images just larger than its tiles: what scripts/sanitize runs under
compute-sanitizer. Arrays are allocated one by one and at their exact size, so that it knows where each of them ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from itertools import count, product
from typing import Any

import numpy as np
import pytest

from kernels.launch import Kernel
from kernels.smoothing import DTYPES, MODES
from kernels.smoothing.cases import Case
from kernels.smoothing.cuda import VARIANTS, smooth

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled_kernels")]

ROWS = 67
COLUMNS = {1: (1031, 1024), 2: (521, 512), 3: (347, 352), 4: (263, 256)}  # for so many channels: a prime, whole vectors
SIZES = ((2, 2), (3, 3), (5, 5), (7, 7), (9, 9), (8, 9), (31, 30), (64, 127), (255, 5))
SQUARES = (11, 15, 21, 25, 31, 51, 63, 127)  # of floats: kernels are compiled for some sizes
REACHES = (*((reach, reach) for reach in range(1, 9)), (12, 12), (20, 32), (40, 33))
VOLUMES = (
    {"shape": (7, 11, 13), "axes": (0, 1, 2), "sizes": (3, 4, 5)},
    {"shape": (3, 2, 5), "axes": (0, 1, 2), "sizes": (41, 42, 43)},  # sums of 64 bits
    {"shape": (5, 4, 7, 6), "axes": (0, 1, 2, 3), "sizes": (2, 3, 4, 5)},
    {"shape": (3, 2, 5, 2), "axes": (0, 1, 2, 3), "sizes": (63, 64, 65, 66)},
    {"shape": (7, 11, 13), "axes": (0, 1, 2), "sigmas": (0.5, 1.0, 1.5)},
    {"shape": (89, 11), "axes": (0,), "sizes": (5,)},
    {"shape": (11, 2043), "axes": (1,), "sizes": (5,)},
    {"shape": (11, 2903), "axes": (1,), "sizes": (5,)},
    {"shape": (11, 4091), "axes": (1,), "sizes": (5,)},
    {"shape": (89, 11), "axes": (0,), "sigmas": (1.0,)},
)
# In the environment: as few launches as reach every kernel. Looking for races makes each a thousand times as long.
FEWEST = "MILLRACE_TEST_FEWEST_LAUNCHES"
SLOW_TAPS = 1200  # what a thread of the variants that read every tap from memory may be asked for


@cache
def _cases() -> tuple[Case, ...]:
    return tuple(_listed())


def _listed() -> Iterator[Case]:
    number = count()

    def case(dtype: str, mode: int, **what: Any) -> Case:
        first, second = MODES[mode % 6], MODES[mode // 6 % 6]
        others = ("reflect",) * (len(what["axes"]) - 2)
        modes = (first, second, *others)[: len(what["axes"])]
        if min(what["shape"][:2]) < 20:
            modes = tuple("wrap" if each == "valid" else each for each in modes)
        return Case(dtype=dtype, modes=modes, cval=6, **what)

    for dtype, channels in product(DTYPES, COLUMNS):
        filters = [{"sizes": sizes} for sizes in SIZES]
        filters += [{"sizes": (size, size)} for size in SQUARES if dtype == "float32"]
        filters += [{"sigmas": tuple(reach / 4 for reach in reaches)} for reaches in REACHES]
        for what in filters:
            mode = next(number)
            rows = ROWS + 256 * (mode % 6 == 5 or mode // 6 % 6 == 5)  # "valid" must leave something
            shape = (rows, COLUMNS[channels][mode % 2], channels)[: 2 + (channels > 1)]
            yield case(dtype, mode, shape=shape, axes=(0, 1), **what)
    for dtype, what in product(DTYPES, VOLUMES):
        yield case(dtype, next(number), **what)


@cache
def _expected(place: int) -> Any:
    case = _cases()[place]
    return case.apply(case.image())


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kernel_is_launched_and_right(cupy: Any, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: set[str] = set()
    launch = Kernel.launch

    def recorded(self: Kernel, *args: Any, **options: Any) -> None:
        launched.add(self.expression)
        launch(self, *args, **options)

    places = [place for place, case in enumerate(_cases()) if _applies(variant, case)]
    if os.environ.get(FEWEST):
        places = _fewest(cupy, variant, places, monkeypatch)
    monkeypatch.setattr(Kernel, "launch", recorded)
    with cupy.cuda.using_allocator():  # cudaMalloc
        for place in places:
            case = _cases()[place]
            result = smooth(_on_device(cupy, place, case.image()), case.windows(), case.cval, None, variant=variant)
            np.testing.assert_array_equal(cupy.asnumpy(result), _expected(place), err_msg=case.name, strict=True)
    missing = set(VARIANTS[variant].entries) - launched
    assert not missing, "no case launches them: give one, or do not compile them"


def _applies(variant: str, case: Case) -> bool:
    fits = VARIANTS[variant].applies(case.shape, np.dtype(case.dtype), case.windows())
    return fits and not _is_too_slow(variant, case)


def _fewest(cupy: Any, variant: str, places: list[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of these cases, hardly more than reach every kernel: found by asking for launches without making them."""
    asked: list[str] = []
    monkeypatch.setattr(Kernel, "launch", lambda self, *args, **options: asked.append(self.expression))
    kernels: dict[int, set[str]] = {}
    for place in places:
        asked.clear()
        case = _cases()[place]
        smooth(_on_device(cupy, place, case.image()), case.windows(), case.cval, None, variant=variant)
        kernels[place] = set(asked)
    chosen, left = [], set().union(*kernels.values())
    while left:
        best = max(kernels, key=lambda place: len(kernels[place] & left))
        chosen.append(best)
        left -= kernels[best]
    return chosen


def _on_device(cupy: Any, place: int, values: Any) -> Any:
    """A copy that ends with its memory, and for some cases begins a sample behind that: aligned or not."""
    offset = place // 2 % 2
    copy = cupy.empty(offset + values.size, values.dtype)[offset:].reshape(values.shape)
    copy[...] = cupy.asarray(values)
    return copy


def _is_too_slow(variant: str, case: Case) -> bool:
    taps = int(np.prod([window.taps for window in case.windows()]))
    return variant in ("naive", "padded", "pitched") and taps > SLOW_TAPS and int(np.prod(case.shape)) > 1000
