"""Other libraries' smoothing on a GPU: cupyx.scipy.ndimage, NPP (through ctypes), PyTorch and cuCIM, if installed.

Rivals and the copy are timed in the same way: ten calls queued between two events. A single call would include the
host's launch overhead, which a busy stream hides; for calls of fifty milliseconds or more one is enough.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.images.smoothing.inputs import Workload
from benchmarks.rounds import Rival, queued_seconds
from kernels.smoothing import gaussian_filter, uniform_filter

NPP_LIBRARIES = ("libnppif.so.13", "libnppif.so.12", "/usr/local/cuda/lib64/libnppif.so")
NPP_BORDER_REPLICATE = 2
QUEUED_CALLS = 10
LONG_S = 0.05
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
        "copy": _copy(image),
    }
    for name, run in contenders.items():
        yield Rival(name=name, device="cuda", run=run, clock=_event_seconds)


def _event_seconds(run: Work) -> float:
    alone = queued_seconds(run, 1)
    return alone if alone > LONG_S else queued_seconds(run, QUEUED_CALLS)


def _ours(work: Workload, image: Any) -> Work:
    import cupy

    out = cupy.ones_like(image)
    common: dict[str, Any] = {"mode": "mirror", "axes": (0, 1), "out": out}
    if work.size:
        return lambda: uniform_filter(image, work.size, **common)
    return lambda: gaussian_filter(image, float(work.sigma or 0), **common)


def _copy(image: Any) -> Work:
    import cupy

    out = cupy.ones_like(image)
    return lambda: cupy.copyto(out, image)


def _ndimage(work: Workload, image: Any, module: str) -> Work | None:
    import cupy

    ndimage = _module(module)
    if ndimage is None:
        return None
    out = cupy.ones_like(image)
    if work.size:
        size = (work.size, work.size, 1)[: image.ndim]
        return lambda: ndimage.uniform_filter(image, size, out, mode="mirror")
    sigma = (work.sigma, work.sigma, 0)[: image.ndim]
    return lambda: ndimage.gaussian_filter(image, sigma, output=out, mode="mirror")


def _cucim(work: Workload, image: Any) -> Work | None:
    filters = _module("cucim.skimage.filters")
    if filters is None or not work.sigma:
        return None
    channel_axis = 2 if image.ndim == 3 else None
    return lambda: filters.gaussian(image, work.sigma, mode="mirror", preserve_range=True, channel_axis=channel_axis)


def _torch(work: Workload, image: Any) -> Work | None:
    """Box means of one float channel, the only matching filter of PyTorch."""
    torch = _module("torch")
    if torch is None or image.dtype != "float32" or image.ndim != 2 or not work.size:
        return None
    size = work.size
    plane = torch.as_tensor(image, device="cuda")[None, None]
    return lambda: torch.nn.functional.avg_pool2d(plane, size, stride=1, padding=size // 2, count_include_pad=False)


class _Pair(ctypes.Structure):
    """NppiSize and NppiPoint."""

    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_int))


class _StreamContext(ctypes.Structure):
    """NppStreamContext."""

    _fields_ = (
        ("stream", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("device", "multiprocessors", "threads_multiprocessor", "threads_block")),
        ("shared_bytes_block", ctypes.c_size_t),
        *((name, ctypes.c_int) for name in ("major", "minor")),
        ("stream_flags", ctypes.c_uint),
        ("reserved", ctypes.c_int),
    )


def _npp(work: Workload, image: Any) -> Work | None:
    import cupy

    library = _npp_library()
    suffix = {"uint8": "8u", "uint16": "16u", "float32": "32f"}[work.dtype] + f"_C{work.channels}R"
    if library is None or not work.size:
        return None
    function = getattr(library, f"nppiFilterBoxBorder_{suffix}_Ctx")
    out = cupy.ones_like(image)
    rows, columns = image.shape[:2]
    size, step = _Pair(columns, rows), image.strides[0]
    context = _npp_context()
    source, target = (ctypes.c_void_p(array.data.ptr) for array in (image, out))
    mask, anchor = _Pair(work.size, work.size), _Pair(work.size // 2, work.size // 2)

    def run() -> None:
        status = function(
            source, step, size, _Pair(0, 0), target, step, size, mask, anchor, NPP_BORDER_REPLICATE, context
        )
        if status != 0:
            raise RuntimeError(f"NPP returned {status}")

    return run


def _npp_context() -> _StreamContext:
    import cupy

    found = cupy.cuda.runtime.getDeviceProperties(0)
    return _StreamContext(
        device=0, multiprocessors=found["multiProcessorCount"], major=found["major"], minor=found["minor"],
        threads_multiprocessor=found["maxThreadsPerMultiProcessor"], threads_block=found["maxThreadsPerBlock"],
        shared_bytes_block=found["sharedMemPerBlock"],
    )  # fmt: skip


def _npp_library() -> Any:
    for name in NPP_LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
