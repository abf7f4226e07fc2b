"""Every filter at any border, of any type, along any axes, for any window: a chunk has the bits of the whole image.

On a GPU too. The whole image's result is that of the operator's reference, or of scipy.ndimage.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from kernels.smoothing.borders import BORDER_MODES
from pipeline.errors import MemoryTooSmall
from pipeline.workloads import Budget, Chunk, JobSpec, workload_named
from tests.images import write_image
from tests.kernels.rank.cases import samples_of

# Kernels of other types are those of u8, i16 and f32, and compiled for them.
DTYPES = ("bool", "uint8", "int8", "int16", "float16", "float32")
AXES = {"YX": ("YX", "Y", "X"), "YXS": ("YX", "X"), "ZYX": ("ZYX", "YX", "ZX", "Z")}
WINDOWS = st.integers(1, 7)
REACHES = st.sampled_from([0.0, 0.4, 1.5, 2.3, 4.0, 6.1, 9.0])
MORPHOLOGY = {
    "erode": ndimage.grey_erosion, "dilate": ndimage.grey_dilation, "open": ndimage.grey_opening,
    "close": ndimage.grey_closing,
}  # fmt: skip


def windows(axes: int) -> st.SearchStrategy[dict[str, Any]]:
    box = st.tuples(*[WINDOWS] * axes).map(lambda size: {"size": size})
    shape = "disk" if axes == 2 else "cross"
    return box | st.integers(1, 4).map(lambda radius: {"footprint": shape, "radius": radius})


def sigmas(axes: int) -> st.SearchStrategy[tuple[float, ...]]:
    return st.tuples(*[REACHES] * axes)


def steps(axes: int) -> st.SearchStrategy[list[str]]:
    one = st.one_of(
        REACHES.map(lambda sigma: f"gaussian sigma={sigma}"),
        WINDOWS.map(lambda size: f"box size={size}"),
        WINDOWS.map(lambda size: f"median size={size}"),
        WINDOWS.map(lambda size: f"open size={size}"),
    )
    along = st.sampled_from(["", " axes=YX", " axes=X"])
    return st.lists(st.tuples(one, along).map("".join), min_size=1, max_size=3)


def gaussians(axes: int) -> st.SearchStrategy[dict[str, Any]]:
    plain = sigmas(axes).map(lambda sigma: {"sigma": sigma})
    order = st.tuples(*[st.integers(0, 2)] * axes)
    derivatives = st.fixed_dictionaries({"sigma": st.tuples(*[REACHES.filter(bool)] * axes), "order": order})
    return (plain | derivatives).map(lambda given: {"filter": "gaussian"} | given)


# Of each family: the commands, and their options for so many axes.
FAMILIES: dict[str, tuple[tuple[str, ...], Callable[[int], st.SearchStrategy[dict[str, Any]]]]] = {
    "box": (("smooth",), lambda axes: st.fixed_dictionaries({"size": st.tuples(*[WINDOWS | st.just(70)] * axes)})),
    "gaussian": (("smooth",), gaussians),
    "rank": (("median", "minimum", "maximum"), windows),
    "percentile": (("percentile",), lambda axes: st.tuples(windows(axes), st.floats(0, 100)).map(
        lambda both: both[0] | {"percentile": both[1]})),
    "morphology": (("erode", "dilate", "open", "close", "tophat", "bottomhat"), windows),
    "rolling ball": (("rolling-ball",), lambda axes: st.fixed_dictionaries(
        {"radius": st.floats(1, 5), "background": st.booleans()})),
    "bilateral": (("bilateral",), lambda axes: st.fixed_dictionaries(
        {"sigma_range": st.just(3.0), "size": st.tuples(*[st.sampled_from([1, 3, 5])] * axes)})),
    "composites": (("dog", "log", "unsharp", "subtract-background"), lambda axes: st.fixed_dictionaries(
        {"sigma": st.tuples(*[REACHES.filter(bool)] * axes)})),
    "deviation": (("deviation",), lambda axes: st.fixed_dictionaries({"size": st.tuples(*[WINDOWS] * axes)})),
    "chain": (("chain",), lambda axes: st.fixed_dictionaries({"step": steps(axes)})),
}  # fmt: skip


@contextmanager
def opened(name: str, image: Any, letters: str, asked: dict[str, Any]) -> Iterator[Any]:
    workload: Any = workload_named(name)
    with tempfile.TemporaryDirectory() as folder:
        source = write_image(Path(folder) / "in.npy", image, letters)
        parameters = workload.Parameters(**asked)
        job = workload.open(
            JobSpec(workload=name, input=source, output=Path(folder) / "out.npy", parameters=parameters)
        )
        yield job
        job.close()


def computed(job: Any, chunk: Chunk, module: Any) -> Any:
    inputs = [np.empty(spec.shape, spec.dtype) for spec in chunk.inputs]
    job.read(chunk, inputs)
    outputs = [module.empty(spec.shape, spec.dtype) for spec in chunk.outputs]
    job.compute(chunk, [module.asarray(each) for each in inputs], outputs, None)
    return outputs[0] if module is np else outputs[0].get()


def chunks_of(job: Any, share: float) -> tuple[Chunk, ...]:
    """Of the least memory that the job takes (0) to four times that (1)."""
    budget = 1 << 10
    try:
        return job.plan(Budget(budget_bytes=budget, target_bytes=budget)).chunks
    except MemoryTooSmall as error:
        budget = int(budget * error.times * (1 + 3 * share)) + 64
        return job.plan(Budget(budget_bytes=budget, target_bytes=budget)).chunks


def image_of(shape: tuple[int, ...], dtype: str, seed: int, is_finite: bool) -> Any:
    kind = np.dtype(dtype).kind
    image = samples_of(shape, {"b": "uint8", "f": "float32"}.get(kind, dtype), seed)
    if kind == "b":
        return image > 99
    return image.clip(-9, 9).astype(dtype) if is_finite or dtype == "float16" else image


def check_definition(name: str, job: Any, whole: Chunk, found: Any, image: Any, asked: dict[str, Any]) -> None:
    if name in MORPHOLOGY and "size" in asked and image.dtype.kind in "iu":
        sizes = dict(zip(job.axes, asked["size"], strict=True))
        size = [sizes.get(axis, 1) for axis in range(image.ndim)]
        theirs = MORPHOLOGY[name](image, size, mode=asked["mode"], cval=asked.get("cval", 0))
        np.testing.assert_array_equal(found, theirs, strict=True)
    elif getattr(getattr(job, "definition", None), "reference", None) is not None:
        samples = job.samples(whole.region)
        defined = job.defined(samples.astype(np.float64), whole.region)
        assert job.reference()._error(found, defined, samples) <= job.reference().tolerance


def check(family: str, data: st.DataObject, module: Any) -> None:
    commands, options = FAMILIES[family]
    name = data.draw(st.sampled_from(commands))
    letters, along = data.draw(st.sampled_from([(a, b) for a, each in AXES.items() for b in each]))
    if name in ("rolling-ball", "bilateral") and len(along) == 1:
        along = "YX"
    rows, columns = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 60)))
    shape = {"YX": (rows, columns), "YXS": (rows, columns, 3), "ZYX": (rows % 7 + 1, rows // 2 + 1, columns + 4)}[
        letters
    ]
    dtype, mode = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(BORDER_MODES))
    image = image_of(shape, dtype, data.draw(st.integers(0, 99)), family not in ("rank", "percentile"))
    asked = data.draw(options(len(along))) | {"mode": mode} | ({"cval": 1} if mode == "constant" else {})
    with opened(name, image, letters, asked | ({} if name == "chain" else {"axes": tuple(along)})) as job:
        (whole,) = job.plan(Budget(budget_bytes=1 << 30, target_bytes=1 << 30)).chunks
        expected = computed(job, whole, np)
        check_definition(name, job, whole, expected, image, asked)
        chunks = chunks_of(job, data.draw(st.floats(0, 1)))
        for at in data.draw(st.sets(st.integers(0, len(chunks) - 1), min_size=1, max_size=3)):
            found = computed(job, chunks[at], module)
            np.testing.assert_array_equal(found, expected[chunks[at].region.slices], strict=True)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_chunk_has_the_bits_of_the_whole(family: str, data: st.DataObject) -> None:
    check(family, data, np)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_gpu_gives_the_bits_of_the_cpu(family: str, data: st.DataObject) -> None:
    import cupy

    check(family, data, cupy)
