"""Convolution on a CUDA device: every variant against float64, for all sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.classic.convolution import convolve
from kernels.classic.convolution.cuda import VARIANTS, applies, ladders, production
from kernels.classic.convolution.cuda import convolve as convolve_on_cuda
from kernels.classic.convolution.cuda import layer as layer_on_cuda
from tests.kernels.classic.convolution.cases import Case, cases

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


def on_device(cupy: Any, case: Case) -> tuple[Any, Any]:
    samples, mask = case.arrays()
    return cupy.asarray(samples), cupy.asarray(mask) if case.operation == "layer" else mask


@pytest.mark.sanitize("convolution")
@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_every_variant_gives_the_definition(cupy: Any, case: Case) -> None:
    samples, mask = on_device(cupy, case)
    case.check(case.apply(samples, mask).get())
    for name in VARIANTS:
        if not applies(name, case.operation):
            continue
        out = cupy.full(case.out_shape(), cupy.nan, cupy.float32)
        if case.operation == "layer":
            layer_on_cuda(samples, mask, out, out.shape, variant=name)
        else:
            convolve_on_cuda(samples, mask, out, variant=name)
        case.check(out.get())
    np.testing.assert_array_equal(samples.get(), case.arrays()[0], strict=True)


def shifted_sum(cupy: Any, samples: Any, mask: Any, first: int, end: int) -> Any:
    """Rows first … end - 1 of a convolution of integers, one weight at a time."""
    half = mask.shape[0] // 2, mask.shape[1] // 2
    rows, columns = samples.shape
    total = cupy.zeros((end - first, columns), cupy.float32)
    for (v, u), weight in np.ndenumerate(mask):
        dy, dx = half[0] - v, half[1] - u
        low, high = max(first + dy, 0), min(end + dy, rows)
        left, right = max(dx, 0), min(columns + dx, columns)
        total[low - dy - first : high - dy - first, left - dx : right - dx] += weight * samples[low:high, left:right]
    return total


@pytest.mark.parametrize("name", [name for name in VARIANTS if applies(name, "image")])
@pytest.mark.large
def test_images_of_more_than_4_gib(cupy: Any, name: str) -> None:
    samples = cupy.random.default_rng(1).integers(-9, 10, (32_771, 32_783)).astype(cupy.float32)
    assert samples.nbytes > 1 << 32
    mask = np.random.default_rng(2).integers(-9, 10, (3, 5)).astype(np.float32)
    out = cupy.full(samples.shape, cupy.nan, cupy.float32)
    convolve_on_cuda(samples, mask, out, variant=name)
    for first in range(0, len(samples), 8192):
        end = min(first + 8192, len(samples))
        assert bool((out[first:end] == shifted_sum(cupy, samples, mask, first, end)).all()), f"rows {first} and on"


@pytest.mark.parametrize("name", [name for name in VARIANTS if applies(name, "line")])
@pytest.mark.large
def test_lines_of_more_than_4_gib(cupy: Any, name: str) -> None:
    line = cupy.random.default_rng(1).integers(-9, 10, (1 << 30) + 12_347).astype(cupy.float32)
    mask = np.random.default_rng(2).integers(-9, 10, 5).astype(np.float32)
    out = cupy.full(line.shape, cupy.nan, cupy.float32)
    convolve_on_cuda(line, mask, out, variant=name)
    step = 1 << 28
    for first in range(0, line.size, step):
        low, high = max(first - 2, 0), min(first + step + 2, line.size)
        expected = shifted_sum(cupy, line[None, low:high], mask[None], 0, 1)[0]
        end = min(first + step, line.size)
        assert bool((out[first:end] == expected[first - low : end - low]).all()), f"results {first} and on"


@pytest.mark.parametrize("name", [name for name in VARIANTS if applies(name, "layer")])
@pytest.mark.large
def test_layers_of_more_than_4_gib(cupy: Any, name: str) -> None:
    rng = cupy.random.default_rng(1)
    images = rng.integers(-9, 10, (70, 1, 515, 511)).astype(cupy.float32)
    filters = rng.integers(-9, 10, (61, 1, 2, 1)).astype(cupy.float32)
    shape = (70, 61, 514, 511)
    out = cupy.full(shape, cupy.nan, cupy.float32)
    assert out.nbytes > 1 << 32
    layer_on_cuda(images, filters, out, shape, variant=name)
    for image, maps in zip(images, out, strict=True):
        expected = filters[:, :, 0, :] * image[0, :-1] + filters[:, :, 1, :] * image[0, 1:]
        assert bool((maps == expected).all())


def test_any_strides_offsets_and_the_stream_given(cupy: Any) -> None:
    case = Case(shape=(41, 52), mask_shape=(3, 5))
    samples, mask = case.arrays()
    stream = cupy.cuda.Stream(non_blocking=True)
    turned, memory = cupy.asfortranarray(cupy.asarray(samples)), cupy.empty(samples.size + 1, cupy.float32)
    out = memory[1:].reshape(case.shape)  # rows are whole vectors, but begin 4 bytes off
    cupy.cuda.get_current_stream().synchronize()
    result = convolve(turned, mask, out=out, stream=stream)
    stream.synchronize()
    assert result is out
    case.check(out.get())
    with pytest.raises(ValueError, match="cannot compute what is asked for: image"):
        convolve_on_cuda(turned, mask, None, variant="line_direct")


def test_ladders_can_be_run(cupy: Any) -> None:
    for ladder in ladders():
        assert ladder.variants[-1] == production(ladder.name.split()[0])
        ladder.prepare(ladder.variants[-1])()
        if "cuDNN (PyTorch)" not in (libraries := ladder.libraries()):
            for run in libraries.values():
                run()
    cupy.cuda.get_current_stream().synchronize()
