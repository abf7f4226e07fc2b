"""Test inputs for transposes and their expected results, for the tests and benchmarks of every device.

The oracle copies each element by its index; results must be bitwise equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.classic.transpose import transpose

Array = NDArray[Any]

DTYPES = ("uint8", "int16", "float32", "float64", "complex128")
# Every element size from 1 to 16 bytes; CuPy has dtypes of 1, 2, 4, 8 and 16 only.
VOIDS = tuple(f"V{size}" for size in range(1, 17))
SHAPES = (
    (1, 1), (1, 37), (41, 1), (2, 3), (31, 33), (32, 32), (64, 64), (67, 129), (128, 256), (257, 64), (61, 512),
    (131, 137), (0, 5), (5, 0), (3, 67, 31), (7, 16, 48), (2, 3, 16, 16), (0, 4, 4), (1025, 16), (16, 2063),
)  # fmt: skip
LAYOUTS = ("C", "F", "part", "reversed")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One batch of matrices of random bits."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    layout: str = "C"  # "part": slices of larger matrices, with gaps between rows and matrices

    @property
    def name(self) -> str:
        return f"{'x'.join(map(str, self.shape))}-{self.dtype}-{self.layout}"

    def array(self) -> Array:
        """The input, C-contiguous, random bits including NaNs; the same for every call."""
        dtype = np.dtype(self.dtype)
        rng = np.random.default_rng(sum(self.shape))
        return rng.integers(0, 256, math.prod(self.shape) * dtype.itemsize, np.uint8).view(dtype).reshape(self.shape)

    def laid_out(self, xp: Any = np) -> Any:
        """The input in the case's layout, as an array of the library `xp`."""
        if self.layout == "F":  # CuPy's asfortranarray does not preserve the bits of every NaN
            return xp.swapaxes(xp.asarray(np.ascontiguousarray(np.swapaxes(self.array(), -1, -2))), -1, -2)
        array = xp.asarray(self.array())
        if self.layout == "part":
            around = xp.zeros((*array.shape[:-2], array.shape[-2] + 3, array.shape[-1] + 16), array.dtype)
            around[..., 1:-2, 8:-8] = array
            return around[..., 1:-2, 8:-8]
        if self.layout == "reversed":
            return array[..., ::-1, ::-1]
        return array

    def exact(self) -> Array:
        """The transpose by index arithmetic on bytes."""
        array = self.laid_out()
        rows, columns = array.shape[-2:]
        size = array.dtype.itemsize
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        elements = flat.reshape(math.prod(array.shape[:-2]), rows * columns, size)
        target = np.arange(rows * columns)
        source = target % max(rows, 1) * columns + target // max(rows, 1)
        turned: Array = np.ascontiguousarray(elements[:, source])
        return np.asarray(turned.reshape(-1).view(array.dtype).reshape(*array.shape[:-2], columns, rows))

    def apply(self, array: Any, **options: Any) -> Any:
        """The public function on an array of any supported library."""
        return transpose(array, **options)

    def check(self, result: Any) -> None:
        """AssertionError unless a result, copied to the host, has every bit right."""
        expected = self.exact()
        assert result.shape == expected.shape, f"{self.name}: shape {result.shape}, expected {expected.shape}"
        assert result.dtype == expected.dtype, f"{self.name}: dtype {result.dtype}"
        assert result.flags.c_contiguous, f"{self.name}: not C-contiguous"
        assert result.tobytes() == expected.tobytes(), f"{self.name}: bits differ"

    def bytes(self) -> int:
        """Minimum traffic: everything read once and written once."""
        return 2 * math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def flops(self) -> int:
        return 0


def cases(dtypes: tuple[str, ...] = DTYPES) -> Iterator[Case]:
    """Every dtype in every shape; every layout; small."""
    for dtype in dtypes:
        for shape in SHAPES:
            yield Case(shape=shape, dtype=dtype)
        for layout in LAYOUTS[1:]:
            for shape in ((67, 129), (64, 128), (3, 31, 48), (2, 2, 9, 7)):
                yield Case(shape=shape, dtype=dtype, layout=layout)
