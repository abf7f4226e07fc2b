"""Other libraries' smoothing on a GPU: cupyx.scipy.ndimage, NPP, PyTorch and cuCIM, if installed.

OpenCV's wheels have no CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.images import npp
from benchmarks.images.smoothing.inputs import Workload
from benchmarks.rounds import Rival, device_copy, event_seconds, library
from kernels.smoothing import gaussian_filter, uniform_filter

Work = Callable[[], object]


def cuda_rivals(work: Workload, host_image: Any) -> Iterator[Rival]:
    """Every library that can do this work on arrays in device memory, and a device copy."""
    import cupy

    image = cupy.asarray(host_image)
    contenders = {
        "millrace": _ours(work, image),
        "cupyx": _ndimage(work, image, "cupyx.scipy.ndimage"),
        "NPP": _npp(work, image),
        "PyTorch": _torch(work, image),
        "cuCIM": _cucim(work, image),
        "copy": device_copy(image),
    }
    for name, run in contenders.items():
        yield Rival(name=name, device="cuda", run=run, clock=event_seconds)


def _ours(work: Workload, image: Any) -> Work:
    import cupy

    out = cupy.ones_like(image)
    common: dict[str, Any] = {"mode": "mirror", "axes": (0, 1), "out": out}
    if work.size:
        return lambda: uniform_filter(image, work.size, **common)
    return lambda: gaussian_filter(image, float(work.sigma or 0), **common)


def _ndimage(work: Workload, image: Any, module: str) -> Work | None:
    import cupy

    ndimage = library(module)
    if ndimage is None:
        return None
    out = cupy.ones_like(image)
    if work.size:
        size = (work.size, work.size, 1)[: image.ndim]
        return lambda: ndimage.uniform_filter(image, size, out, mode="mirror")
    sigma = (work.sigma, work.sigma, 0)[: image.ndim]
    return lambda: ndimage.gaussian_filter(image, sigma, output=out, mode="mirror")


def _cucim(work: Workload, image: Any) -> Work | None:
    filters = library("cucim.skimage.filters")
    if filters is None or not work.sigma:
        return None
    channel_axis = 2 if image.ndim == 3 else None
    return lambda: filters.gaussian(image, work.sigma, mode="mirror", preserve_range=True, channel_axis=channel_axis)


def _torch(work: Workload, image: Any) -> Work | None:
    """Box means of one float channel, the only matching filter of PyTorch; 1023 × 1023 takes ten seconds."""
    torch = library("torch")
    if torch is None or image.dtype != "float32" or image.ndim != 2 or not 1 <= (work.size or 0) < 1000:
        return None
    size = work.size
    plane = torch.as_tensor(image, device="cuda")[None, None]
    return lambda: torch.nn.functional.avg_pool2d(plane, size, stride=1, padding=size // 2, count_include_pad=False)


def _npp(work: Workload, image: Any) -> Work | None:
    """A Gaussian of any width takes its weights along one axis from us; past σ = 64 it needs minutes."""
    if work.size:
        return npp.filtering("nppiFilterBoxBorder", image, *npp.window(work.size))
    if (work.sigma or 0) > 64:
        return None
    import cupy

    sigma = float(work.sigma or 0)
    taps = cupy.exp(-0.5 * (cupy.arange(-4 * sigma, 4 * sigma + 1) / sigma) ** 2)
    weights = (taps / taps.sum()).astype("float32")
    return npp.filtering("nppiFilterGaussAdvancedBorder", image, weights.size, weights)
