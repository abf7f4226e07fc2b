"""Grey morphology of images and volumes with flat windows, on NumPy arrays (CPU) and CuPy arrays (CUDA).

The functions are named as in scipy.ndimage, and are minima and maxima of `kernels.rank`: exact, the same bits on every
device. A dilation's window is the erosion's mirrored, so that an opening never exceeds the image: an even size reaches
one sample farther to the left in an erosion, to the right in a dilation. Each step extends its own input beyond the
edges, as in SciPy. Boxes cost nearly the same for any size on a GPU, and grow with the logarithm of it on a CPU.

Top-hats of integers saturate at the ends of the dtype, as in OpenCV; scipy.ndimage lets them wrap around.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import numpy as np

from kernels.rank import Options, maximum_filter, minimum_filter
from kernels.rank.task import Difference
from kernels.runtime.arrays import check_out
from kernels.runtime.filtering import filtered_axes, per_axis

__all__ = [
    "black_tophat",
    "difference",
    "grey_closing",
    "grey_dilation",
    "grey_erosion",
    "grey_opening",
    "white_tophat",
]


def grey_erosion(image: Any, size: int | Sequence[int] | None = None, **options: Unpack[Options]) -> Any:
    """The smallest sample of each window.

    The parameters are those of `kernels.rank.minimum_filter`. Raises ValueError or TypeError that names the parameter.
    """
    return minimum_filter(image, size, **options)


def grey_dilation(image: Any, size: int | Sequence[int] | None = None, **options: Unpack[Options]) -> Any:
    """The largest sample of each mirrored window. The parameters are those of `grey_erosion`."""
    footprint = options.get("footprint")
    if not hasattr(image, "dtype") or (size is None) == (footprint is None):
        return maximum_filter(image, size, **options)  # which refuses it
    axes = filtered_axes(image.shape, image.dtype, options.get("axes"), options.get("channel_axis"))
    sides = per_axis("size", size, axes) if footprint is None else np.shape(footprint)
    if footprint is not None:
        options["footprint"] = np.flip(np.asarray(footprint))
    if len(sides) == len(axes):
        moved = per_axis("origin", options.get("origin", 0), axes)
        options["origin"] = [-by - (side % 2 == 0) for by, side in zip(moved, sides, strict=True)]
    return maximum_filter(image, size, **options)


def grey_opening(image: Any, size: int | Sequence[int] | None = None, **options: Unpack[Options]) -> Any:
    """The dilation of the erosion: bright spots that do not hold the window go. As in `grey_erosion`."""
    return _in_turn(image, size, grey_erosion, grey_dilation, options)


def grey_closing(image: Any, size: int | Sequence[int] | None = None, **options: Unpack[Options]) -> Any:
    """The erosion of the dilation: dark spots that do not hold the window go. As in `grey_erosion`."""
    return _in_turn(image, size, grey_dilation, grey_erosion, options)


def white_tophat(image: Any, size: int | Sequence[int] | None = None, **options: Unpack[Options]) -> Any:
    """The image minus its opening: small bright spots without their background. As in `grey_erosion`."""
    return _top_hat(image, size, grey_erosion, grey_dilation, options)


def black_tophat(image: Any, size: int | Sequence[int] | None = None, **options: Unpack[Options]) -> Any:
    """The closing minus the image: small dark spots. As in `grey_erosion`."""
    return _top_hat(image, size, grey_dilation, grey_erosion, options)


def difference(image: Any, subtracted: Any, out: Any, nodata: float | None = None, stream: Any = None) -> Any:
    """Fill `out`, which may be `subtracted`, with a difference that saturates; nodata where either has it.

    image, subtracted, out : arrays of one kind, shape and dtype, of `kernels.rank.DTYPES`
    """
    if not isinstance(image, np.ndarray):
        from kernels.morphology import cuda

        cuda.difference(image, subtracted, out, nodata, stream=stream)
        return out
    missing = None
    if nodata is not None and not math.isnan(nodata):  # NaN spreads by itself
        missing = (image == nodata) | (subtracted == nodata)
    if out.dtype.kind == "u":
        np.subtract(image, np.minimum(image, subtracted), out=out)
    elif out.dtype.kind == "i":
        ends = np.iinfo(out.dtype)
        out[...] = np.subtract(image, subtracted, dtype=np.int32).clip(ends.min, ends.max)
    else:
        with np.errstate(invalid="ignore", over="ignore"):  # inf - inf is NaN
            np.subtract(image, subtracted, out=out)
    if missing is not None:
        out[missing] = nodata
    return out


def _top_hat(image: Any, size: Any, first: Callable[..., Any], second: Callable[..., Any], options: Options) -> Any:
    """The difference of an image and its opening or closing; on CUDA the last pass takes it if it can."""
    is_closing = first is grey_dilation
    taken = Difference(image=image, reverse=is_closing)
    found = _in_turn(image, size, first, second, options, taken)
    if taken.is_done:
        return found
    of, subtracted = (found, image) if is_closing else (image, found)
    return difference(of, subtracted, found, options.get("nodata"), options.get("stream"))


def _in_turn(
    image: Any,
    size: Any,
    first: Callable[..., Any],
    second: Callable[..., Any],
    options: Options,
    difference: Difference | None = None,
) -> Any:
    if options.get("mode", "reflect") == "valid" or "valid" in tuple(options.get("mode", ())):
        raise ValueError('mode "valid" would shrink the image twice; choose another')
    out = options.pop("out", None)
    if out is not None and hasattr(image, "dtype"):
        dtype = np.dtype(image.dtype).newbyteorder("=")
        check_out(out, image.shape, dtype, apart_from={"image": image})
    first, second = partial(first, size=size, **options), partial(second, size=size, out=out, **options)
    if isinstance(image, np.ndarray) or not hasattr(image, "__cuda_array_interface__"):
        return second(first(image))
    from kernels.morphology import cuda

    both = Difference(image=None, reverse=False) if difference is None else replace(difference)
    both.opens = True
    found = second(image, difference=both)
    if found is None:
        return cuda.in_turn(image, first, partial(second, difference=difference), stream=options.get("stream"))
    if difference is not None:
        difference.is_done = True
    return found
