"""Every filter at any border, of any type, along any axes, for any window, cut anywhere.

The whole image has the bits of the function in `kernels`, which is tested against other definitions; a chunk has those
of the whole image, on a GPU too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st

from kernels import composites, morphology, rank
from kernels.bilateral import bilateral
from kernels.rolling_ball import rolling_ball
from kernels.smoothing import gaussian_filter, uniform_filter
from kernels.smoothing.borders import BORDER_MODES
from pipeline.workloads import Budget, Chunk, JobSpec, workload_named
from pipeline.workloads.common import image_plan
from pipeline.workloads.common.tiling import Tiling
from tests.images import write_image
from tests.kernels.rank.cases import samples_of

Given = dict[str, Any]
# Kernels have u8, i16 and f32, in which the others are computed.
DTYPES, WIDENED = ("uint8", "int16", "float32"), ("bool", "int8", "float16")
AXES = {"YX": ("YX", "Y", "X"), "YXS": ("YX", "X"), "ZYX": ("ZYX", "YX", "ZX", "Z")}
SIDES, LONG_SIDES, SIGMAS = range(1, 8), (*range(1, 8), 70), (0.4, 1.5, 2.3, 4.0, 6.1, 9.0)
STEPS = {
    "gaussian": ("sigma", SIGMAS, gaussian_filter), "box": ("size", LONG_SIDES, uniform_filter),
    "median": ("size", SIDES, rank.median_filter), "open": ("size", SIDES, morphology.grey_opening),
}  # fmt: skip


def window(draw: Random, axes: int) -> Given:
    if draw.random() < 0.6:
        return {"size": tuple(draw.choices(SIDES, k=axes))}
    shapes = ["cross"] + ["disk"] * (axes == 2) + ["ball"] * (axes == 3)
    return {"footprint": draw.choice(shapes), "radius": draw.randint(1, 4)}


def gaussian(draw: Random, axes: int) -> Given:
    if draw.random() < 0.4:
        order = tuple(draw.choices(range(3), k=axes))
        return {"filter": "gaussian", "sigma": tuple(draw.choices(SIGMAS, k=axes)), "order": order}
    return {"filter": "gaussian", "sigma": tuple(draw.choices((0.0, *SIGMAS), k=axes))}


def chain(draw: Random, axes: int) -> Given:
    names = draw.choices([*STEPS], k=draw.choice((1, 2, 2, 3)))
    return {"step": [f"{name} {STEPS[name][0]}={draw.choice(STEPS[name][1])}" for name in names]}


# Of each family: the commands, and their options for so many axes.
FAMILIES: dict[str, tuple[tuple[str, ...], Callable[[Random, int], Given]]] = {
    "box": (("smooth",), lambda draw, axes: {"size": tuple(draw.choices(LONG_SIDES, k=axes))}),
    "gaussian": (("smooth",), gaussian),
    "rank": (("median", "minimum", "maximum"), window),
    "percentile": (("percentile",), lambda draw, axes: window(draw, axes) | {"percentile": draw.uniform(0, 100)}),
    "morphology": (("erode", "dilate", "open", "close", "tophat", "bottomhat"), window),
    "rolling ball": (("rolling-ball",),
                     lambda draw, axes: {"radius": draw.uniform(1, 5), "background": draw.random() < 0.5}),
    "bilateral": (("bilateral",),
                  lambda draw, axes: {"sigma_range": 3.0, "size": tuple(draw.choices((1, 3, 5), k=axes))}),
    "composites": (("dog", "log", "unsharp", "subtract-background"),
                   lambda draw, axes: {"sigma": tuple(draw.choices(SIGMAS, k=axes))}),
    "deviation": (("deviation",), lambda draw, axes: {"size": tuple(draw.choices(LONG_SIDES, k=axes))}),
    "chain": (("chain",), chain),
}  # fmt: skip


def by_kernel(name: str, image: Any, asked: Given, mode: str, axes: tuple[int, ...]) -> Any:
    """The result for the whole image."""
    options: Given = {"axes": axes, "mode": mode, "cval": 1}
    if name == "chain":
        for step in asked["step"]:
            name, _, value = step.partition(" ")
            image = STEPS[name][2](
                image, float(value.partition("=")[2]) if "sigma" in value else int(value[5:]), **options
            )
        return image
    if name == "rolling-ball":
        background = rolling_ball(image, asked["radius"], axes=axes)
        found = background if asked["background"] else image - background
        ends = np.iinfo(image.dtype) if image.dtype.kind != "f" else None
        return found if ends is None else np.rint(found).clip(ends.min, ends.max).astype(image.dtype)
    rest = {key: value for key, value in asked.items() if key != "filter"}
    if name == "dog":
        rest["low_sigma"] = rest.pop("sigma")
    if "footprint" in rest:
        rest["footprint"] = rank.footprint_named(rest["footprint"], rest.pop("radius"), len(axes))
    function: Any = {
        "smooth": gaussian_filter if "filter" in asked else uniform_filter,
        "median": rank.median_filter, "minimum": rank.minimum_filter, "maximum": rank.maximum_filter,
        "percentile": partial(rank.percentile_filter, percentile=rest.get("percentile")),
        "erode": morphology.grey_erosion, "dilate": morphology.grey_dilation, "open": morphology.grey_opening,
        "close": morphology.grey_closing, "tophat": morphology.white_tophat, "bottomhat": morphology.black_tophat,
        "bilateral": bilateral, "log": composites.gaussian_laplace, "unsharp": composites.unsharp_mask,
        "dog": composites.difference_of_gaussians,
        "subtract-background": composites.subtract_background, "deviation": composites.deviation_filter,
    }[name]  # fmt: skip
    return function(image, **rest, **options)


def image_of(shape: tuple[int, ...], dtype: str, seed: int, is_finite: bool) -> Any:
    kind = np.dtype(dtype).kind
    image = samples_of(shape, {"b": "uint8", "f": "float32"}.get(kind, dtype), seed)
    if kind == "b":
        return image > 99
    return image.clip(-9, 9).astype(dtype) if kind == "f" and (is_finite or dtype == "float16") else image


@contextmanager
def opened(name: str, image: Any, letters: str, asked: Given) -> Iterator[Any]:
    workload: Any = workload_named(name)
    with tempfile.TemporaryDirectory() as folder:
        source = write_image(Path(folder) / "in.npy", image, letters)
        parameters = workload.Parameters(**asked)
        job = workload.open(
            JobSpec(workload=name, input=source, output=Path(folder) / "out.npy", parameters=parameters)
        )
        yield job
        job.close()


def chunks_of(job: Any, extents: tuple[int, ...]) -> tuple[Chunk, ...]:
    """Of these sides, except along axes that a job does not cut."""

    def tiling(shape: Any, halo: Any, itemsize: int, *, whole: Any = (), padded: Any = (), **_: Any) -> Tiling:
        sides = tuple(
            n if axis in whole else min(side, n) for axis, (side, n) in enumerate(zip(extents, shape, strict=True))
        )
        return Tiling(shape=shape, extents=sides, halo=tuple(halo), grain=(1,) * len(shape), padded=frozenset(padded))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_plan, "best_tiling", tiling)
        return job.plan(Budget(budget_bytes=1 << 30, target_bytes=1 << 30)).chunks


def computed(job: Any, chunk: Chunk, module: Any) -> Any:
    inputs = [np.empty(spec.shape, spec.dtype) for spec in chunk.inputs]
    job.read(chunk, inputs)
    outputs = [module.empty(spec.shape, spec.dtype) for spec in chunk.outputs]
    job.compute(chunk, [module.asarray(each) for each in inputs], outputs, None)
    return outputs[0] if module is np else outputs[0].get()


def check(family: str, draw: Random, module: Any) -> None:
    commands, options = FAMILIES[family]
    name, letters = draw.choice(commands), draw.choice([*AXES])
    along = draw.choice(AXES[letters])
    if name == "chain" or (name == "rolling-ball" and len(along) == 1):
        along = AXES[letters][0]
    rows, columns = draw.randint(1, 40), draw.randint(5, 60)
    shape = {"YX": (rows, columns), "YXS": (rows, columns, 3), "ZYX": (rows % 7 + 1, rows // 2 + 1, columns)}[letters]
    dtype, mode = draw.choice(DTYPES * 2 + WIDENED), draw.choice((*BORDER_MODES, "wrap"))
    image = image_of(shape, dtype, draw.randrange(99), family not in ("rank", "percentile"))
    if module is not np and image.dtype.kind == "f":
        image[abs(image) < 1e-6] = 0  # CuPy's arithmetic has no subnormal numbers
    given = options(draw, len(along))
    extents = tuple(draw.choice((n, draw.randint(1, n), draw.randint(1, n))) for n in shape)
    note(f"{name} {given} {mode} of {dtype} {letters} {shape} along {along}, cut into {extents}")
    more = {"mode": mode} | ({"cval": 1} if mode == "constant" else {})
    with opened(name, image, letters, given | more | ({} if name == "chain" else {"axes": tuple(along)})) as job:
        (whole,) = chunks_of(job, shape)
        expected = computed(job, whole, np)
        if dtype in DTYPES:
            by_function = by_kernel(name, image, given, mode, tuple(letters.index(axis) for axis in along))
            np.testing.assert_array_equal(expected, by_function, strict=True)
        chunks = chunks_of(job, extents)
        for chunk in draw.sample(chunks, min(len(chunks), 3)):
            found = computed(job, chunk, module)
            np.testing.assert_array_equal(found, expected[chunk.region.slices], strict=True)


# A seed alone is drawn: hypothesis prefers small values, and varies what it has seen.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None, phases=PHASES)
@given(draw=st.randoms(use_true_random=True))
def test_a_chunk_has_the_bits_of_the_whole(family: str, draw: Random) -> None:
    check(family, draw, np)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, deadline=None, phases=PHASES, derandomize=True)  # a kernel that is new takes seconds
@given(draw=st.randoms(use_true_random=True))
def test_a_gpu_gives_the_bits_of_the_cpu(family: str, draw: Random) -> None:
    import cupy

    check(family, draw, cupy)


@pytest.mark.parametrize("name", ["open", "close", "tophat"])
def test_even_windows_at_a_mirror(name: str) -> None:
    """A chunk of one pixel at an edge needs what the first of two filters gives farther inside."""
    image, given = image_of((8, 13), "uint8", 3, is_finite=True), {"size": (6, 2)}
    expected = by_kernel(name, image, given, "mirror", (0, 1))
    with opened(name, image, "YX", given | {"mode": "mirror", "axes": ("Y", "X")}) as job:
        for chunk in chunks_of(job, (1, 1)):
            found = computed(job, chunk, np)
            np.testing.assert_array_equal(found, expected[chunk.region.slices], err_msg=str(chunk.region))
