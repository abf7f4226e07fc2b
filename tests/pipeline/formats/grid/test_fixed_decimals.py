from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.formats.grid.fixed_decimals import NumberStyle, encode
from tests.pipeline.formats.image.contract import QUICK

DX = NumberStyle(decimals=7, letter="e", per_line=3)
CUBE = NumberStyle(decimals=6, letter="E", per_line=6)
STYLES = pytest.mark.parametrize("style", [DX, CUBE], ids=["dx", "cube"])
RNG = np.random.default_rng(11)


def text_of(values: NDArray[Any], style: NumberStyle, first: int = 0, row_length: int | None = None) -> str:
    out = np.full(len(values) * style.width, ord("?"), np.uint8)
    assert encode(values, out, style, first=first, row_length=row_length or len(values)) is None
    return out.tobytes().decode("ascii")


def printf(value: float, style: NumberStyle) -> str:
    """C's own conversion, by way of Python."""
    negative = np.signbit(value)
    text = f"%.{style.decimals - 1}e" % value if negative else f"%.{style.decimals}e" % value
    return text.replace("e", style.letter)


def expected(values: NDArray[Any], style: NumberStyle, first: int = 0, row_length: int | None = None) -> str:
    rows = row_length or len(values)
    columns = [(first + index) % rows for index in range(len(values))]
    ends = ["\n" if c == rows - 1 or c % style.per_line == style.per_line - 1 else " " for c in columns]
    return "".join(printf(float(value), style) + end for value, end in zip(values, ends, strict=True))


def bit_patterns(count: int) -> NDArray[np.float32]:
    values = RNG.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
    return values[np.isfinite(values)]


def around_powers_of_ten() -> NDArray[np.float32]:
    """Where the exponent or the number of digits changes, and the float32 beside it on either side."""
    texts = [
        f"{digits}e{power}" for power in range(-45, 39) for digits in ("1", "9.9999995", "9.9999999", "4.9999999", "5")
    ]
    middle = np.array([value for value in map(float, texts) if value < 3.4e38], np.float32)
    return np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(3.4e38))])


INPUTS = {
    "any bits": bit_patterns(60_000),
    "subnormal": RNG.integers(0, 1 << 23, 5000, dtype=np.uint32).view(np.float32),
    "potentials": (RNG.standard_normal(60_000) * 30).astype(np.float32),
    "powers of two": (2.0 ** np.arange(-149, 128)).astype(np.float32),
    "eighths": np.arange(-30_000, 30_000).astype(np.float32) / 8,
    "ties": (np.arange(1 << 15, 1 << 24, 1 << 9) * 2.0**-23).astype(np.float32),
    "large integers": (np.arange(1, 1 << 22, 211) * 2.0**30).astype(np.float32),
    "powers of ten": around_powers_of_ten(),
    "extremes": np.array([0, -0.0, 1e-45, -1e-45, 3.4028235e38, -3.4028235e38, 1, -1], np.float32),
}


@STYLES
@pytest.mark.parametrize("name", INPUTS)
def test_every_digit_is_as_printf_has_it(name: str, style: NumberStyle) -> None:
    for values in (INPUTS[name], -INPUTS[name]):
        assert text_of(values, style) == expected(values, style)


@STYLES
def test_many_ties_that_need_exact_arithmetic(style: NumberStyle) -> None:
    # Of seven digits the last would be a half; many more of them than are put aside at a time.
    values = np.concatenate([-np.arange(10_000_005, 10_020_000, 10), np.arange(16_700_005, 16_720_000, 10)])
    mixed = np.stack([values.astype(np.float32), INPUTS["potentials"][: len(values)]], axis=1).reshape(-1)
    assert text_of(mixed, style) == expected(mixed, style)


@QUICK
@given(st.integers(1, 40), st.integers(1, 17), st.integers(0, 100), st.sampled_from([DX, CUBE]))
def test_lines_end_where_the_rows_say(count: int, row_length: int, first: int, style: NumberStyle) -> None:
    values = (np.arange(count) - 7).astype(np.float32)
    assert text_of(values, style, first, row_length) == expected(values, style, first, row_length)


@QUICK
@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.sampled_from([DX, CUBE]))
def test_any_value(value: float, style: NumberStyle) -> None:
    values = np.array([value], np.float32)
    assert text_of(values, style) == expected(values, style)
    # One float32 step is the most that these digits lose where none are lost to the sign.
    assert abs(float(text_of(values, style)) - value) <= abs(value) * 0.51 * 10.0 ** (1 - style.decimals) + 1e-51


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 100, 199])
def test_a_value_without_a_text_is_named(value: float, place: int) -> None:
    values = bit_patterns(400)[:200].copy()
    values[place] = value
    out = np.zeros(200 * DX.width, np.uint8)
    assert encode(values, out, DX, first=0, row_length=200) == place
