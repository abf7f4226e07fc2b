"""Chains give the bits of their steps run one after the other, for any cut; what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline import image_operator
from pipeline.errors import ParameterError, UserError
from pipeline.formats.image.base import Region
from pipeline.workloads import JobSpec, registry
from tests.images import names_in, read_image, write_image
from tests.kernels.rank.cases import samples_of
from tests.pipeline.workloads.filters.jobs import filtered


@image_operator(halo=[(0, 5), (2, 0)], dtype="float32")
def ahead(block: Any, *, weight: float = 0.5, xp: Any) -> Any:
    """One-sided, and of another package."""
    return block.astype(xp.float32) - xp.float32(weight) * xp.roll(xp.roll(block, -5, 0), 2, 1)


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._BUILT_IN, "ahead", lambda: ahead)


# Of a chain's steps: how the command says them, and the separate commands.
CHAINS: dict[str, Any] = {
    "median size=3": ("median", {"size": 3}),
    "tophat size=4,6": ("tophat", {"size": (4, 6)}),
    "tophat size=5,3": ("tophat", {"size": (5, 3)}),
    "gaussian sigma=1.5": ("smooth", {"filter": "gaussian", "sigma": 1.5}),
    "gaussian sigma=9": ("smooth", {"filter": "gaussian", "sigma": 9}),
    "gaussian sigma=2 order=1,0": ("smooth", {"filter": "gaussian", "sigma": 2, "order": (1, 0)}),
    "box size=4": ("smooth", {"size": 4}),
    "ahead weight=0.25": ("ahead", {"weight": 0.25}),
    "close footprint=disk radius=2": ("close", {"footprint": "disk", "radius": 2}),
    "dog sigma=1": ("dog", {"sigma": 1}),
    "rolling-ball radius=2": ("rolling-ball", {"radius": 2}),
    "minimum size=2 axes=X": ("minimum", {"size": 2, "axes": "X"}),
}


@pytest.mark.parametrize("mode", ["reflect", "wrap", "constant"])
@pytest.mark.parametrize(
    "steps",
    [
        ("median size=3", "tophat size=4,6", "gaussian sigma=1.5"),
        ("ahead weight=0.25", "box size=4", "minimum size=2 axes=X"),
        ("gaussian sigma=9", "close footprint=disk radius=2", "dog sigma=1"),
        ("median size=3", "tophat size=5,3", "gaussian sigma=2 order=1,0"),
        ("rolling-ball radius=2", "box size=4", "ahead weight=0.25"),
    ],
    ids=["median", "ahead", "wide", "derivative", "ball"],
)
def test_a_chain_is_its_steps_one_after_the_other(tmp_path: Any, steps: tuple[str, ...], mode: str) -> None:
    image = samples_of((263, 391), "uint8")
    options = {"mode": mode, **({"cval": 7} if mode == "constant" else {})}
    expected, between = image, []
    for step in steps:
        name, given = CHAINS[step]
        _, expected = filtered(tmp_path, name, expected, "YX", **given, **options)
        between.append(expected)
    for chunk_bytes in (None, 60_000):
        receipt, found = filtered(
            tmp_path, "chain", image, "YX", chunk_bytes=chunk_bytes, step=list(steps), keep=2, **options
        )
        np.testing.assert_array_equal(found, expected, strict=True)
        np.testing.assert_array_equal(read_image(tmp_path / "out.step2.npy"), between[1], strict=True)
        assert receipt["audit"]["samples"] > 0
        assert names_in(tmp_path) == ["in.npy", "out.npy", "out.npy.receipt.json", "out.step2.npy"]
    is_whole = "gaussian sigma=9" in steps or (mode == "wrap" and "rolling-ball radius=2" in steps)
    assert receipt["chunks"] > 1 or is_whole
    assert receipt["parameters"]["step"] == list(steps)


@pytest.mark.parametrize("mode", ["reflect", "wrap", "constant"])
def test_a_long_box_of_floats_in_a_chain_has_the_bits_of_its_command(tmp_path: Any, mode: str) -> None:
    """Its sums depend on where a chunk begins: a wrapped image that another step follows is not cut."""
    image = samples_of((2003, 601), "float32")
    options = {"mode": mode, **({"cval": 7} if mode == "constant" else {})}
    _, boxed = filtered(tmp_path, "smooth", image, "YX", size=(301, 2), **options)
    _, expected = filtered(tmp_path, "median", boxed, "YX", size=3, **options)
    step = ["box size=301,2", "median size=3"]
    receipt, found = filtered(tmp_path, "chain", image, "YX", chunk_bytes=240_000, step=step, **options)
    np.testing.assert_array_equal(found, expected, strict=True)
    assert receipt["chunks"] > 1 or mode == "wrap"
    for chunk_bytes in (None, 240_000):
        _, found = filtered(tmp_path, "deviation", image, "YX", chunk_bytes=chunk_bytes, size=(301, 2), **options)
        expected = found if chunk_bytes is None else expected
    np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(700, 1024), (301, 1031), (40, 37), (5, 60, 77)], ids=str)
def test_a_gpu_gives_the_bits_of_the_cpu(tmp_path: Any, shape: tuple[int, ...]) -> None:
    """Rows of whole vectors and others, for the whole image and a part of it."""
    import cupy

    write_image(tmp_path / "in.npy", samples_of(shape, "uint16"), "ZYX"[-len(shape) :])
    steps = ["median size=3", "tophat size=4,6", "box size=4"] if len(shape) == 2 else ["minimum size=2", "open size=3"]
    workload: Any = registry.workload_named("chain")
    whole = Region((0,) * len(shape), shape)
    part = Region(tuple(n // 3 for n in shape), tuple(2 * n // 3 for n in shape))
    for mode in ("reflect", "mirror", "nearest", "wrap", "constant"):
        parameters = workload.Parameters(step=steps, mode=mode)
        files = {"input": tmp_path / "in.npy", "output": tmp_path / "out.npy"}
        job: Any = workload.open(JobSpec(workload="chain", **files, parameters=parameters))
        for region in (whole, part):
            samples = job.samples(region)
            found = job.computed(cupy.asarray(samples), region).get()
            np.testing.assert_array_equal(found, job.computed(samples, region), strict=True)
        job.close()


def test_channels_and_one_step(tmp_path: Any) -> None:
    image = samples_of((31, 29, 3), "uint8")
    _, found = filtered(tmp_path, "chain", image, "YXS", step="median size=3; maximum size=5", chunk_bytes=9_000)
    _, first = filtered(tmp_path, "median", image, "YXS", size=3)
    np.testing.assert_array_equal(found, filtered(tmp_path, "maximum", first, "YXS", size=5)[1], strict=True)
    _, found = filtered(tmp_path, "chain", image, "YXS", step=["median size=3"])
    np.testing.assert_array_equal(found, first, strict=True)


def test_the_kept_result_never_replaces_the_input(tmp_path: Any) -> None:
    image = samples_of((9, 7), "uint8")
    write_image(tmp_path / "out.step1.npy", image, "YX")
    parameters = registry.workload_named("chain").Parameters(step=["median", "open"], keep=1)
    spec = JobSpec(
        workload="chain", input=tmp_path / "out.step1.npy", output=tmp_path / "out.npy", parameters=parameters
    )  # fmt: skip
    with pytest.raises(UserError, match=r"out.step1.npy"):
        registry.workload_named("chain").open(spec)
    with pytest.raises(ValidationError, match="give at least one, such as 'median size=3'"):
        registry.workload_named("chain").Parameters(step=[" ; "])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"step": ["medain size=3"]}, "--step 1, 'medain size=3': no operator is called medain; there are ahead, .*"),
        ({"step": ["smooth sigma=2"]}, "no operator is called smooth; give a step box or gaussian"),
        ({"step": ["median", "open side=3"]}, "--step 2, 'open side=3': open has no parameter side; it has size, .*"),
        ({"step": ["median size=0"]}, "--step 1, 'median size=0': size: .*greater than or equal to 1"),
        ({"step": ["gaussian sigma=1 order=4"]}, "--step 1, .*: order: .*less than or equal to 3"),
        ({"step": ["median", "gaussian sigma=1 order=1,1,1"]}, "--step 2, gaussian: --order has 3 values: give 1 or 2"),
        ({"step": ["median size=3 size=5"]}, "--step 1, .*: size is given twice"),
        ({"step": ["median 3"]}, "'3' must be PARAMETER=VALUE, such as size=3"),
        ({"step": ["median mode=wrap"]}, "mode is the same for all steps: give --mode"),
        ({"step": ["median 'size=3"]}, "--step 1, .*: No closing quotation"),
        ({"step": ["median", "open size=3,3,3"]}, "--step 2, open: --size has 3 values: give 1 or 2"),
        ({"step": ["median", "open"], "keep": 2}, "--keep 2: name a step before the last"),
        (
            {"step": ["ahead", "median size=2001", "open size=2001"]},
            "--memory is too small for one chunk of .* with its halo",
        ),
    ],
    ids=lambda each: "" if isinstance(each, dict) else each[:20],
)
def test_what_is_refused(tmp_path: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said) as refused:
        filtered(tmp_path, "chain", np.zeros((9, 7), np.uint16), "YX", **given)
    assert "\n" not in str(refused.value)
