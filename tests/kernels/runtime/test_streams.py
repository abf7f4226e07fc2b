"""Work on a stream that is not CuPy's current one: all of it waits for what the stream does before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kernels import composites
from kernels.bilateral import bilateral
from kernels.morphology import white_tophat
from kernels.rank import median_filter
from kernels.rolling_ball import rolling_ball
from kernels.smoothing import gaussian_filter, uniform_filter

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "box": lambda image, **o: uniform_filter(image, 5, **o),
    "omit": lambda image, **o: gaussian_filter(image, 2, nan_policy="omit", **o),
    "median": lambda image, **o: median_filter(image, 3, axes=(0, 2), **o),
    "tophat": lambda image, **o: white_tophat(image, 5, axes=(0, 1), **o),
    "bilateral": lambda image, **o: bilateral(image, 1.0, axes=(0, 2), **o),
    "rolling ball": lambda image, **o: rolling_ball(image, 5, axes=(0, 1), **o),
    "unsharp": lambda image, **o: composites.unsharp_mask(image, 2, axes=(0, 1), **o),
    "deviation": lambda image, **o: composites.deviation_filter(image, 3, nan_policy="omit", axes=(0, 1), **o),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_everything_waits_for_the_stream(name: str) -> None:
    import cupy

    values = np.random.default_rng(1).uniform(0, 9, (61, 47, 31)).astype(np.float32)
    function, source = FUNCTIONS[name], cupy.asarray(values)
    expected = function(values)
    for _ in range(2):  # the second call may repeat launches
        stream, image, slow = cupy.cuda.Stream(non_blocking=True), cupy.full_like(source, 7), cupy.ones((4096, 4096))
        cupy.cuda.Device().synchronize()
        with stream:
            for _ in range(20):
                slow = slow @ slow / 4096
            image[...] = source
        found = function(image, stream=stream)
        stream.synchronize()
        np.testing.assert_array_equal(found.get(), expected, strict=True)
