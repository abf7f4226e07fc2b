"""The rolling ball against its definition in float64, and its laws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.rolling_ball import cpu, rolling_ball
from tests.kernels.rank.cases import samples_of


def ball(radius: float, axes: int) -> dict[tuple[int, ...], float]:
    """How far the ball lies below its top, at every place below it."""
    reach = int(radius)
    places = (tuple(int(at) - reach for at in index) for index in np.ndindex(*[2 * reach + 1] * axes))
    far = {place: sum(at * at for at in place) for place in places}
    return {place: radius - (radius**2 - square) ** 0.5 for place, square in far.items() if square <= radius**2}


def rolled(image: Any, radius: float, is_opened: bool) -> Any:
    apex, reach = np.full(image.shape, np.inf), int(radius)
    padded = np.pad(image, reach, constant_values=np.inf)
    for by, cap in ball(radius, image.ndim).items():
        around = padded[tuple(slice(reach + at, reach + at + n) for at, n in zip(by, image.shape, strict=True))]
        np.minimum(apex, around + cap, out=apex)
    return -rolled(-apex, radius, False) if is_opened else apex


@pytest.mark.parametrize(
    ("shape", "radius"), [((13, 17), 3), ((11, 9), 4.5), ((19, 7), 12.0), ((5, 6, 7), 2.3)], ids=str
)
def test_the_definition(shape: tuple[int, ...], radius: float) -> None:
    for dtype in ("uint8", "float32"):
        image = samples_of(shape, dtype)
        image = image.clip(-9, 9) if dtype == "float32" else image
        for is_opened in (False, True):
            found = rolling_ball(image, radius, is_opened=is_opened)
            assert found.dtype == np.float32
            expected = rolled(image.astype(np.float64), radius, is_opened)
            np.testing.assert_allclose(found, expected, rtol=0, atol=4e-5)


def test_laws() -> None:
    image = samples_of((41, 37, 3), "float32").clip(-9, 9)
    background = rolling_ball(image, 7.5, channel_axis=2)
    top = rolling_ball(image, 7.5, is_opened=False, channel_axis=2)
    assert (top <= background).all()
    assert (background <= image + 1e-5).all()
    np.testing.assert_allclose(rolling_ball(background, 7.5, channel_axis=2), background, rtol=0, atol=1e-5)
    for channel in range(3):
        np.testing.assert_array_equal(rolling_ball(image[..., channel].copy(), 7.5), background[..., channel])
    np.testing.assert_array_equal(rolling_ball(image, 7.5, channel_axis=2, workers=1), background)
    np.testing.assert_array_equal(rolling_ball(image.transpose(2, 1, 0), 7.5, axes=(2, 1)).T, background)
    even = np.full((9, 8), 7, np.uint8)
    np.testing.assert_array_equal(rolling_ball(even, 20), even)


def test_nan_does_not_stop_the_ball() -> None:
    image = np.ones((9, 9), np.float32)
    image[4, 4] = np.nan
    expected = np.ones((9, 9), np.float32)
    expected[4, 4] = 1 + 3 - 8**0.5  # the ball's top reaches through the hole
    np.testing.assert_allclose(rolling_ball(image, 3), expected, rtol=1e-6)


@pytest.mark.parametrize("radius", [0, -1, 201, float("nan"), "3", True])
def test_refused(radius: Any) -> None:
    with pytest.raises(ValueError, match="radius must lie above 0 and be at most 200"):
        rolling_ball(np.zeros((5, 7), np.uint8), radius)
    with pytest.raises(ValueError, match="a ball rolls along two or three; got 1"):
        rolling_ball(np.zeros(7, np.uint8), 3)


@pytest.mark.sanitize("rolling_ball")
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "float64"])
def test_a_gpu_gives_the_bits_of_the_cpu(dtype: str) -> None:
    import cupy

    for shape, radius in (((150, 170), 33.5), ((60, 41, 3), 7), ((9, 40, 35), 5)):
        image = samples_of(shape, dtype)
        image = image.clip(-9, 9) if dtype.startswith("float") else image
        channel_axis = 2 if shape[2:] == (3,) else None
        for is_opened in (False, True):
            found = rolling_ball(cupy.asarray(image), radius, is_opened=is_opened, channel_axis=channel_axis)
            expected = rolling_ball(image, radius, is_opened=is_opened, channel_axis=channel_axis)
            np.testing.assert_array_equal(found.get(), expected, strict=True)


@pytest.mark.parametrize(("shape", "radius", "lines"), [((64, 300), 9, 8), ((64, 900), 150, 3), ((3, 2, 70), 120, 1)])
def test_large_balls_take_few_lines_at_once(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], radius: int, lines: int
) -> None:
    """A computation is cancelled between parts: no part may take seconds."""
    parts: list[tuple[int, int]] = []
    monkeypatch.setattr(cpu, "touched_rows", lambda *given: parts.append(given[-2:]))
    rolling_ball(np.zeros(shape, np.uint8), radius, is_opened=False, workers=1)
    assert [first for first, _ in parts] == [0, *(last for _, last in parts[:-1])]
    assert parts[-1][1] == np.prod(shape[:-1])
    assert max(last - first for first, last in parts) == lines
