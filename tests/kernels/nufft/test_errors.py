"""Every error of the public functions is one line that names the parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kernels.nufft import Nufft, Toeplitz, adjoint, forward, toeplitz_kernel

SHAPE = (8, 9)
K = np.zeros((5, 2), np.float32)
IMAGE = np.zeros(SHAPE, np.complex64)
SAMPLES = np.zeros(5, np.complex64)
BATCH = np.zeros((3, *SHAPE), np.complex64)


def plan() -> Nufft:
    return Nufft(K, SHAPE)


def toeplitz() -> Toeplitz:
    return Toeplitz(toeplitz_kernel(K, None, SHAPE), SHAPE)


def read_only(array: Any) -> Any:
    array = array.copy()
    array.flags.writeable = False
    return array


CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "list": (lambda: Nufft([[0.0, 0.0]], SHAPE), TypeError, "trajectory must be a NumPy or CuPy array; got list"),
    "whole numbers": (lambda: Nufft(K.astype(int), SHAPE), TypeError, "trajectory has dtype int64"),
    "three columns": (lambda: Nufft(np.zeros((5, 3)), SHAPE), ValueError, r"trajectory must be an array \[M, 2\]"),
    "not finite": (lambda: Nufft(np.array([[0, 0], [0, np.nan]]), SHAPE), ValueError, "column 1 of point 1 is nan"),
    "one axis": (lambda: Nufft(K, (8,)), ValueError, "shape must be 2 or 3 whole numbers"),
    "size zero": (lambda: Nufft(K, (8, 0)), ValueError, "shape must be 2 or 3 whole numbers"),
    "half a size": (lambda: Nufft(K, (8, 8.5)), ValueError, "shape must be 2 or 3 whole numbers"),  # type: ignore[arg-type]
    "no sizes": (lambda: Nufft(K, 8), TypeError, "shape must be 2 or 3 whole numbers"),  # type: ignore[arg-type]
    "eps": (lambda: Nufft(K, SHAPE, eps=0), ValueError, "eps must be from 1e-12 to 0.1; got 0"),
    "eps nan": (lambda: Nufft(K, SHAPE, eps=float("nan")), ValueError, "eps must be from"),
    "method": (lambda: Nufft(K, SHAPE, method="fft"), ValueError, "method must be one of auto, gridding, exact"),
    "workers": (lambda: Nufft(K, SHAPE, workers=0), ValueError, "workers must be a whole number"),
    "image's shape": (lambda: plan().forward(IMAGE.T), ValueError, r"images must have shape \[..., 8, 9\]"),
    "real image": (lambda: plan().forward(IMAGE.real), TypeError, "images has dtype float32"),
    "image list": (lambda: plan().forward([0]), TypeError, "images must be a NumPy or CuPy array"),
    "samples": (lambda: plan().adjoint(SAMPLES[:4]), ValueError, r"samples must have shape \[..., 5\]; got \(4,\)"),
    "weights": (lambda: plan().adjoint(SAMPLES, np.ones(4)), ValueError, r"weights must have shape \[5\]"),
    "complex weights": (lambda: plan().adjoint(SAMPLES, SAMPLES), TypeError, "weights has dtype complex64"),
    "out": (
        lambda: plan().forward(IMAGE, SAMPLES[:4]),
        ValueError,
        r"out must be a C-contiguous ndarray of shape \(5,\)",
    ),
    "read-only": (lambda: plan().forward(IMAGE, read_only(SAMPLES)), ValueError, "out is read-only"),
    "out is images": (
        lambda: plan().forward(IMAGE, IMAGE.ravel()[-5:]),
        ValueError,
        "out shares memory with images",
    ),
    "out is samples": (
        lambda: plan().adjoint(IMAGE.ravel()[:5], None, IMAGE),
        ValueError,
        "out shares memory with samples",
    ),
    "out is weights": (
        lambda: plan().adjoint(SAMPLES, IMAGE.view(np.float32).ravel()[:5], IMAGE),
        ValueError,
        "out shares memory with weights",
    ),
    "out beside image": (
        lambda: toeplitz().apply(BATCH[:2], BATCH[1:]),
        ValueError,
        "out shares memory with image",
    ),
    "out is a map": (
        lambda: toeplitz().apply_sense(IMAGE, BATCH, BATCH[1]),
        ValueError,
        "out shares memory with maps",
    ),
    "added to the image": (
        lambda: toeplitz().apply_sense(IMAGE, BATCH, IMAGE[:], add=True),
        ValueError,
        "out shares memory with image",
    ),
    "flat image": (lambda: forward(SAMPLES, K), ValueError, "images must have 2 axes or more"),
    "flat trajectory": (lambda: forward(IMAGE, SAMPLES.real), ValueError, r"trajectory must be an array \[M, 2\] or"),
    "adjoint": (lambda: adjoint(SAMPLES, K, (8, 9, 3)), ValueError, r"trajectory must be an array \[M, 3\]"),
    "kernel": (lambda: Toeplitz(np.zeros((8, 10)), SHAPE), ValueError, r"kernel must be float32 or float64 of shape"),
    "kernel list": (lambda: Toeplitz([1], SHAPE), TypeError, "kernel must be a NumPy or CuPy array"),
    "maps": (lambda: toeplitz().apply_sense(IMAGE, IMAGE), ValueError, r"maps \[coils, \*shape\]"),
    "maps' dtype": (
        lambda: toeplitz().apply_sense(IMAGE, IMAGE[None].astype(complex)),
        ValueError,
        "of one dtype",
    ),
    "kernel's weights": (lambda: toeplitz_kernel(K, np.ones(3), SHAPE), ValueError, r"weights must have shape \[5\]"),
}


@pytest.mark.parametrize("name", CALLS)
def test_refused(name: str) -> None:
    call, kind, message = CALLS[name]
    with pytest.raises(kind, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
