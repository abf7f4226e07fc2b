"""Every kernel of every variant, launched on images just larger than its tiles, for scripts/sanitize to run under
compute-sanitizer. Arrays are allocated one by one at their exact size, so that it knows their ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from itertools import count, product
from typing import Any

import numpy as np
import pytest

from kernels.runtime.launch import Kernel
from kernels.smoothing import DTYPES, MODES, cuda
from kernels.smoothing.cases import Case
from kernels.smoothing.cuda import VARIANTS, smooth

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled_kernels")]

ROWS = 67
COLUMNS = {1: (1031, 1024), 2: (521, 512), 3: (347, 352), 4: (263, 256)}  # by channels: a prime, and whole vectors
# Unaligned rows of an even number of samples, in arrays that start at an aligned address or one sample after.
EVEN_COLUMNS = {1: (1030, 1022), 2: (523, 519), 3: (346, 342), 4: (265, 261)}
WORD_REACHES = ((8, 8), (12, 12), (24, 17), (20, 30))
SIZES = ((2, 2), (3, 3), (5, 5), (7, 7), (9, 9), (8, 9), (31, 30), (64, 127), (255, 5), (5, 255))
SQUARES = (11, 15, 21, 25, 31, 51, 63, 67, 90, 101, 119, 127)  # of floats: kernels are compiled for some sizes
REACHES = (*((reach, reach) for reach in range(1, 9)), (12, 12), (3, 12), (24, 17), (20, 30), (30, 2), (2, 8), (40, 33))
VOLUMES = (
    {"shape": (7, 11, 13), "axes": (0, 1, 2), "sizes": (3, 4, 5)},
    {"shape": (3, 2, 5), "axes": (0, 1, 2), "sizes": (41, 42, 43)},  # sums of 64 bits
    {"shape": (5, 4, 7, 6), "axes": (0, 1, 2, 3), "sizes": (2, 3, 4, 5)},
    {"shape": (3, 2, 5, 2), "axes": (0, 1, 2, 3), "sizes": (63, 64, 65, 66)},
    {"shape": (7, 11, 13), "axes": (0, 1, 2), "sigmas": (0.5, 1.0, 1.5)},
    {"shape": (89, 11), "axes": (0,), "sizes": (5,)},
    {"shape": (17, 67), "axes": (0,), "sizes": (500,)},
    {"shape": (17, 67), "axes": (0,), "sizes": (1300,)},
    {"shape": (17, 67), "axes": (0,), "sizes": (5001,)},
    {"shape": (17, 67), "axes": (0,), "sizes": (20_011,)},
    {"shape": (11, 2043), "axes": (1,), "sizes": (5,)},
    {"shape": (11, 2903), "axes": (1,), "sizes": (5,)},
    {"shape": (11, 4091), "axes": (1,), "sizes": (5,)},
    {"shape": (89, 11), "axes": (0,), "sigmas": (1.0,)},
    {"shape": (89, 11), "axes": (0,), "sigmas": (0.25,)},  # of bytes, too, in float32
    {"shape": (19, 211), "axes": (1,), "sigmas": (10.0,)},
    # Every stage along both axes, and both orders of splines down the columns.
    *(
        {"shape": (17, 131), "axes": (0, 1), "sigmas": (down, across)}
        for down, across in (
            *product((16.0, 30.0, 140.0), (7.7, 14.0, 30.0, 140.0)),
            *((7.7, 16.0), (9.0, 16.0), (14.0, 14.0), (30.0, 14.0), (14.0, 30.0), (64.0, 64.0), (160.0, 160.0)),
        )
    ),
    *({"shape": (17, 131, 3), "axes": (0, 1), "sigmas": (sigma, sigma)} for sigma in (7.7, 9.0, 30.0, 160.0)),
    *(
        {"shape": (17, 131), "axes": (0, 1), "sigmas": sigmas, "orders": orders}
        for sigmas, orders in (
            ((7.7, 9.0), (0, 1)),
            ((9.0, 9.0), (1, 0)),
            ((9.0, 14.0), (0, 1)),
            ((16.0, 14.0), (0, 1)),
            ((14.0, 14.0), (1, 0)),
            ((30.0, 30.0), (0, 1)),
        )
    ),
)
# Environment variable: as few launches as cover every kernel, since racecheck takes a thousand times as long for each.
FEWEST = "MILLRACE_TEST_FEWEST_LAUNCHES"
PARTS = 4  # that can run in parallel
# Variants with separate kernels for unaligned rows.
BOTH_WAYS = ("fused", "wide", "words", "words_apart", "bytes_apart", "tensor")
SLOW_TAPS = 1200  # most taps of a thread in variants that read every tap from memory


@cache
def _cases() -> tuple[Case, ...]:
    return tuple(case for case, _ in _listed())


@cache
def _usual() -> tuple[bool, ...]:
    """Whether each case is for all variants, or only for those with separate kernels for unaligned rows."""
    return tuple(usual for _, usual in _listed())


def _listed() -> Iterator[tuple[Case, bool]]:
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
            for aligned in (False, True):
                shape = (rows, COLUMNS[channels][aligned], channels)[: 2 + (channels > 1)]
                keeps = aligned and mode // 6 % 6 == 5  # "valid" leaves rows that are not
                usual = aligned == mode % 2
                yield case(dtype, mode - 6 if keeps else mode, shape=shape, axes=(0, 1), **what), usual
    for channels, reaches in product(EVEN_COLUMNS, WORD_REACHES):
        sigmas = tuple(reach / 4 for reach in reaches)
        for columns in EVEN_COLUMNS[channels]:
            shape = (ROWS, columns, channels)[: 2 + (channels > 1)]
            yield case("uint16", next(number) % 5, shape=shape, axes=(0, 1), sigmas=sigmas), False
    for dtype, channels in product(DTYPES, COLUMNS):  # windows that fit the largest blocks only
        yield case(dtype, next(number), shape=(9, 61, channels), axes=(0, 1), sizes=(3, 10_500 // channels)), True
    for channels in COLUMNS:  # sums of bytes that do not fit 32 bits
        yield case("uint8", next(number), shape=(9, 61, channels), axes=(0, 1), sizes=(4099, 4099)), True
    for dtype, what in product(DTYPES, VOLUMES):
        yield case(dtype, next(number), **what), True
    wide = (1, 14_000), (2, 8000), (4, 1250)  # windows of less usual blocks
    for dtype, (channels, size) in product(("uint16", "int16"), wide):
        yield case(dtype, next(number), shape=(9, 61, channels), axes=(0, 1), sizes=(3, size)), True


@cache
def _expected(place: int) -> Any:
    case = _cases()[place]
    return case.apply(case.image())


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


@pytest.mark.sanitize("smoothing")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kernel_is_right(cupy: Any, variant: str, part: int) -> None:
    chosen = _fewest if os.environ.get(FEWEST) else list
    with cupy.cuda.using_allocator():  # cudaMalloc
        for place in chosen(_launches(cupy, variant))[part::PARTS]:
            case = _cases()[place]
            result = smooth(_on_device(cupy, place, case.image()), case.windows(), case.cval, None, variant=variant)
            np.testing.assert_array_equal(cupy.asnumpy(result), _expected(place), err_msg=case.name, strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kernel_is_launched(cupy: Any, variant: str) -> None:
    missing = set(VARIANTS[variant].entries).difference(*_launches(cupy, variant).values())
    assert not missing, "no case launches them: give one, or do not compile them"


@cache
def _launches(cupy: Any, variant: str) -> dict[int, set[str]]:
    """The kernels of each case that the variant applies to, found by recording launches without making them."""
    kernels: dict[int, set[str]] = {}
    with pytest.MonkeyPatch.context() as patched:
        for place, case in enumerate(_cases()):
            if _applies(variant, place):
                asked = kernels[place] = set()
                patched.setattr(Kernel, "launch", lambda self, *_, asked=asked, **__: asked.add(self.expression))
                # A variant may call `smooth` again, which would record that nothing is launched.
                patched.setattr(cuda, "_repeated", lambda *_: False)
                patched.setattr(cuda, "_run_and_record", lambda chosen, *arguments: chosen.run(*arguments))
                image = _on_device(cupy, place, case.image())
                smooth(image, case.windows(), case.cval, None, variant=variant)
    return kernels


def _applies(variant: str, place: int) -> bool:
    case = _cases()[place]
    fits = VARIANTS[variant].can_filter(case.shape, np.dtype(case.dtype), case.windows())
    return fits and (_usual()[place] or variant in BOTH_WAYS) and not _is_too_slow(variant, case)


def _fewest(kernels: dict[int, set[str]]) -> list[int]:
    """A nearly minimal choice of these cases that covers every kernel."""
    chosen: list[int] = []
    left = set().union(*kernels.values())
    while left:
        best = max(kernels, key=lambda place: len(kernels[place] & left))
        chosen.append(best)
        left -= kernels[best]
    return chosen


def _on_device(cupy: Any, place: int, values: Any) -> Any:
    """A copy that ends with its memory; some of the unaligned ones start one sample after an aligned address."""
    whole = values.shape[1] in {aligned for _, aligned in COLUMNS.values()}
    row_bytes = values.nbytes // values.shape[0]
    offset = 0 if whole else max(row_bytes % 16 == 0, place // 4 % 2)
    for even in EVEN_COLUMNS.values():
        if values.shape[1] in even:
            offset = even.index(values.shape[1])
    copy = cupy.empty(offset + values.size, values.dtype)[offset:].reshape(values.shape)
    copy[...] = cupy.asarray(values)
    return copy


def _is_too_slow(variant: str, case: Case) -> bool:
    taps = int(np.prod([window.taps for window in case.windows()]))
    return variant in ("naive", "padded", "pitched") and taps > SLOW_TAPS and int(np.prod(case.shape)) > 1000
