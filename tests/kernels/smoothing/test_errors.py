"""Each error names the wrong parameter in one line."""

import math
import threading

import numpy as np
import pytest

from kernels.smoothing import gaussian_filter, uniform_filter

U16 = np.zeros((7, 9), np.uint16)
F32, OTHER = np.zeros((7, 9), np.float32), np.zeros((7, 9), np.float32)

REFUSALS = {
    "list": (TypeError, "image must be a NumPy or CuPy array; got list", lambda: uniform_filter([[1, 2]])),
    "complex": (
        TypeError,
        "image has dtype complex64; supported are uint8, ",
        lambda: uniform_filter(U16.astype(np.complex64)),
    ),
    "empty": (
        ValueError,
        r"image has shape \(0, 3\): there is nothing",
        lambda: uniform_filter(np.zeros((0, 3), np.uint8)),
    ),
    "scalar": (ValueError, r"image has shape \(\): there is nothing", lambda: uniform_filter(np.zeros((), np.uint8))),
    "size 0": (ValueError, "size must lie in 1 … 1048576; got 0", lambda: uniform_filter(U16, 0)),
    "size 2**20 + 1": (ValueError, "size must lie in 1 … 1048576; got 1048577", lambda: uniform_filter(U16, 1048577)),
    "box of 2**41": (
        ValueError,
        "size makes a box of 2,199,",
        lambda: uniform_filter(np.zeros((2, 2, 2)), (1 << 20, 1 << 20, 2)),
    ),
    "size 3.0": (TypeError, "size must be a whole number of samples; got 3.0", lambda: uniform_filter(U16, 3.0)),
    "size True": (TypeError, "size must be a whole number of samples; got True", lambda: uniform_filter(U16, True)),
    "three sizes": (ValueError, "size has 3 values for 2 filtered axes", lambda: uniform_filter(U16, (3, 3, 3))),
    "sigma -1": (
        ValueError,
        r"sigma must be a number of samples, 0 \(no smoothing\) or more; got -1",
        lambda: gaussian_filter(U16, -1),
    ),
    "sigma nan": (ValueError, "sigma must be a number of samples, .*; got nan", lambda: gaussian_filter(U16, math.nan)),
    "sigma inf": (ValueError, "sigma must be a number of samples, .*; got inf", lambda: gaussian_filter(U16, math.inf)),
    "sigma text": (ValueError, "sigma must be a number of samples, .*; got 'a'", lambda: gaussian_filter(U16, "a")),
    "sigma 1e6": (ValueError, r"sigma 1e\+06 reaches 4000000 samples to each side", lambda: gaussian_filter(U16, 1e6)),
    "order 4": (ValueError, "order must be a whole number, 0 … 3; got 4", lambda: gaussian_filter(U16, 2, order=4)),
    "order at sigma 0": (ValueError, "sigma 0 reaches no neighbour", lambda: gaussian_filter(U16, (0, 2), order=1)),
    "order and mask": (
        ValueError,
        "order: the derivative of a mean",
        lambda: gaussian_filter(F32, 2, order=1, mask=F32 == 0),
    ),
    "truncate 0": (ValueError, "truncate must be a positive number", lambda: gaussian_filter(U16, 1, truncate=0)),
    "radius -1": (
        ValueError,
        "radius must be a whole number of samples, 0 or more",
        lambda: gaussian_filter(U16, 1, radius=-1),
    ),
    "radius 2**20": (ValueError, "at most 524287 are supported", lambda: gaussian_filter(U16, 1, radius=1 << 20)),
    "offset 0.5": (
        TypeError,
        "offset must be a whole number of samples; got 0.5",
        lambda: gaussian_filter(U16, 9, offset=0.5),
    ),
    "mode": (
        ValueError,
        "mode must be one of reflect, .*valid; got 'circular'",
        lambda: uniform_filter(U16, mode="circular"),
    ),
    "axis twice": (ValueError, r"axes \(0, -2\) names an axis twice", lambda: uniform_filter(U16, axes=(0, -2))),
    "axis 2": (ValueError, "axes 2 is out of range for an image of 2 dimensions", lambda: uniform_filter(U16, axes=2)),
    "axis 1.0": (ValueError, "axes 1.0 is out of range", lambda: uniform_filter(U16, axes=(1.0,))),
    "channel axis": (ValueError, "channel_axis 2 is out of range", lambda: uniform_filter(U16, channel_axis=2)),
    "both": (ValueError, "axes 1 contains channel_axis 1", lambda: uniform_filter(U16, axes=1, channel_axis=1)),
    "cval -1": (
        ValueError,
        "cval must be a whole number in 0 … 65535 for uint16",
        lambda: uniform_filter(U16, cval=-1),
    ),
    "cval 0.5": (ValueError, "cval must be a whole number", lambda: uniform_filter(U16, cval=0.5)),
    "cval nan": (ValueError, "cval must be a whole number", lambda: uniform_filter(U16, cval=math.nan)),
    "cval list": (
        TypeError,
        "cval must be a number; got list",
        lambda: uniform_filter(F32, cval=[1.0] * F32.shape[-1]),
    ),
    "cval 1e39": (
        ValueError,
        r"cval must be within ±3.40282e\+38 for float32 images",
        lambda: uniform_filter(F32, cval=-1e39),
    ),
    "cval inf": (ValueError, "cval must be a whole number", lambda: uniform_filter(U16, cval=math.inf)),
    "too short": (
        ValueError,
        "axis 0 has 7 samples, fewer than the window's 8",
        lambda: uniform_filter(U16, 8, mode="valid"),
    ),
    "mask on integers": (TypeError, "mask needs a float image; got uint16", lambda: uniform_filter(U16, mask=U16 == 0)),
    "mask shape": (
        ValueError,
        "mask must be a boolean array of the image's shape",
        lambda: uniform_filter(F32, mask=F32[1:] == 0),
    ),
    "mask dtype": (ValueError, "mask must be a boolean array", lambda: uniform_filter(F32, mask=U16)),
    "nan_policy": (
        ValueError,
        "nan_policy must be one of propagate, omit, raise",
        lambda: uniform_filter(F32, nan_policy="skip"),
    ),
    "nan": (ValueError, "image contains NaN", lambda: uniform_filter(F32 * math.nan, nan_policy="raise")),
    "out shape": (
        ValueError,
        r"out must be a C-contiguous ndarray of shape \(7, 9\)",
        lambda: uniform_filter(U16, out=U16[1:]),
    ),
    "out dtype": (
        ValueError,
        "out must be a C-contiguous ndarray .* and dtype uint16",
        lambda: uniform_filter(U16, out=F32),
    ),
    "out order": (
        ValueError,
        "out must be a C-contiguous",
        lambda: uniform_filter(U16, out=np.zeros((9, 7), np.uint16).T),
    ),
    "out overlaps": (ValueError, "out shares memory with image", lambda: uniform_filter(U16, out=U16)),
    "out over mask": (
        ValueError,
        "out shares memory with mask",
        lambda: uniform_filter(F32, mask=_mask_in(OTHER), out=OTHER),
    ),
    "out protected": (ValueError, "out is read-only", lambda: uniform_filter(U16, out=_protected())),
    "workers 0": (
        ValueError,
        "workers must be a whole number of threads, 1 or more; got 0",
        lambda: uniform_filter(U16, workers=0),
    ),
}


def _mask_in(memory: np.ndarray) -> np.ndarray:
    """A mask with as many samples, within an array's memory."""
    return memory.view(np.bool_).reshape(-1)[: memory.size].reshape(memory.shape)


def _protected() -> np.ndarray:
    out = np.zeros_like(U16)
    out.flags.writeable = False
    return out


@pytest.mark.parametrize(("kind", "message", "call"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(kind, message, call) -> None:
    with pytest.raises(kind, match=message) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_callers_in_several_threads_do_not_disturb_each_other() -> None:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 65536, (800, 1000), np.uint16) for _ in range(4)]
    expected = [uniform_filter(image, 5, workers=1) for image in images]
    failed = []

    def call(image: np.ndarray, right: np.ndarray) -> None:
        for workers in (1, 2, 3):
            if not np.array_equal(uniform_filter(image, 5, workers=workers), right):
                failed.append(workers)

    callers = [threading.Thread(target=call, args=pair) for pair in zip(images, expected, strict=True)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failed
