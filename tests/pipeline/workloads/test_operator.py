"""Functions as workloads: chunked equals whole, whatever the halo, borders, axes and dtypes; what is refused, and how
a function's faults are told."""

from __future__ import annotations

import json
import pickle
import sys
from typing import Annotated, Literal

import numpy as np
import pytest
import scipy.ndimage
from pydantic import Field, ValidationError

from pipeline import image_operator
from pipeline.engine import run as engine_run
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.run import RunOptions, plan_job, run_job
from pipeline.errors import AuditError, OperatorError, ParameterError, UserError
from pipeline.workloads import JobSpec
from tests.images import names_in, read_image, write_image
from tests.pipeline.cluster.processes import kill_9, run, running, wait_until, worker_processes
from tests.pipeline.workloads.packages import install

MODES = ["reflect", "mirror", "nearest", "wrap", "constant"]


@image_operator(halo=lambda asked: (asked.size - 1) / 2)
def median(block, *, size: int = 5):
    """Take the median of a box.

    More of it.
    """
    return scipy.ndimage.median_filter(block, size)


@image_operator(halo=(1, 2), axes="YX", dtype="float32")
def slope(block, *, weight: float = 1.0, xp):
    """How much each place differs from its neighbours."""
    rows = block.astype(xp.float32)
    return weight * (xp.roll(rows, 1, 0) - xp.roll(rows, 2, 1))


@image_operator(axes="YXS", halo=(2, 2, 0), dtype="float64")
def mixed(block):
    """Mean of the channels, smoothed."""
    mean = scipy.ndimage.uniform_filter(block.astype(np.float64).mean(axis=2), 3)
    return np.repeat(mean[..., None], block.shape[2], axis=2)


@image_operator(halo=2, axes="z")
def along_planes(block):
    return scipy.ndimage.maximum_filter1d(block, 5)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Runs an operator on samples; the receipt and the result."""

    def make(operator, samples, axes, *, chunk_bytes=None, **parameters):
        write_image(tmp_path / "in.npy", samples, axes)
        monkeypatch.setattr(engine_run, "workload_named", lambda name: operator)
        spec = JobSpec(
            workload=operator.name, input=tmp_path / "in.npy", output=tmp_path / "out.npy",
            parameters=operator.Parameters(**parameters),
        )  # fmt: skip
        options = RunOptions(memory_bytes=64 << 20, chunk_bytes=chunk_bytes)
        receipt = run_job(plan_job(spec, CpuDevice(2), options), options)
        return receipt, read_image(tmp_path / "out.npy")

    return make


def samples_of(shape, dtype=np.uint16):
    rng = np.random.default_rng(5)
    if np.dtype(dtype).kind == "f":
        return rng.normal(size=shape).astype(dtype)
    return rng.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


# Chunked equals whole


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dtype", "size"), [(np.uint8, 3), (np.int16, 7), (np.float32, 5), (np.float64, 1)])
def test_any_cut_gives_what_scipy_gives_of_the_whole(made, mode, dtype, size):
    samples, options = samples_of((61, 47), dtype), {"cval": 7} if mode == "constant" else {}
    expected = scipy.ndimage.median_filter(samples, size, mode=mode, **options)
    for chunk_bytes in (None, 4_000, 1_500):
        receipt, found = made(median, samples, "YX", chunk_bytes=chunk_bytes, size=size, mode=mode, **options)
        np.testing.assert_array_equal(found, expected, strict=True)
        assert receipt["audit"]["samples"] > 0
        assert receipt["audit"]["worst_error"] == 0
    assert receipt["chunks"] > 1
    assert receipt["parameters"] == {"levels": "auto", "size": size, "mode": mode, **options}


@pytest.mark.parametrize("named", ["float32", np.float32, np.dtype(np.float32)], ids=str)
def test_blocks_have_the_type_that_is_asked_for(made, named):
    seen = set()

    @image_operator(computes_in=lambda dtype: named)
    def root(block):
        seen.add(block.dtype)
        return np.sqrt(block)

    samples = samples_of((61, 47))
    receipt, found = made(root, samples, "YX", chunk_bytes=4_000)
    np.testing.assert_array_equal(found, np.floor(np.sqrt(samples) + 0.5).astype(np.uint16), strict=True)
    assert seen >= {np.dtype(np.float32)}
    assert receipt["image"]["computed in"] == "float32"


@pytest.mark.parametrize(("shape", "axes"), [((40, 31, 3), "YXS"), ((9, 23, 17), "ZYX"), ((7, 19, 12, 2), "ZYXS")])
def test_each_channel_and_plane_is_a_block_of_its_own(made, shape, axes):
    samples = samples_of(shape, np.float32)
    _, found = made(slope, samples, axes, chunk_bytes=3_000, weight=0.5, mode="wrap")
    rows, columns = axes.index("Y"), axes.index("X")
    expected = np.float32(0.5) * (np.roll(samples, 1, rows) - np.roll(samples, 2, columns))
    np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.parametrize(("shape", "axes"), [((40, 31, 3), "YXS"), ((9, 23, 17), "ZYX")])
def test_all_spatial_axes_are_the_default(made, shape, axes):
    samples = samples_of(shape)
    _, found = made(median, samples, axes, chunk_bytes=4_000, size=3)
    size = [1 if letter == "S" else 3 for letter in axes]
    np.testing.assert_array_equal(found, scipy.ndimage.median_filter(samples, size))


def test_channels_may_be_among_the_axes(made):
    samples = samples_of((50, 41, 3), np.uint8)
    _, found = made(mixed, samples, "YXS", chunk_bytes=5_000)
    expected = scipy.ndimage.uniform_filter(samples.astype(np.float64).mean(axis=2), 3)
    np.testing.assert_allclose(found, np.repeat(expected[..., None], 3, axis=2), rtol=1e-13, strict=True)


def test_one_axis_of_three(made):
    samples = samples_of((21, 13, 11))
    _, found = made(along_planes, samples, "ZYX", chunk_bytes=3_000)
    np.testing.assert_array_equal(found, scipy.ndimage.maximum_filter1d(samples, 5, axis=0))


def test_a_halo_wider_than_the_image(made):
    samples = samples_of((5, 3), np.uint8)
    _, found = made(median, samples, "YX", size=41, mode="mirror")
    np.testing.assert_array_equal(found, scipy.ndimage.median_filter(samples, 41, mode="mirror"))


@pytest.mark.slow
def test_two_processes_a_kill_and_a_resume_make_the_same(tmp_path, monkeypatch, own_settings):
    source = "import time, scipy.ndimage\nfrom pipeline import image_operator\n@image_operator(halo=2)\n"
    source += "def slow(block, *, seconds: float = 0.0):\n    time.sleep(seconds)\n"
    source += "    return scipy.ndimage.median_filter(block, 5)\n"
    install(tmp_path, "slowly", source, slow="slowly:slow")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    samples = samples_of((400, 301))
    write_image(tmp_path / "in.npy", samples, "YX")
    expected = scipy.ndimage.median_filter(samples, 5)
    options = ("run", "slow", "in.npy", "out.npy", "--device", "cpu", "--chunk-bytes", "20KB", "--seconds", "0.05")
    with running(*options, "--workers", 2, cwd=tmp_path) as process:
        wait_until(lambda: list((tmp_path / "out.npy.ledger").glob("chunks-*.json")), "the first segment")
        kill_9(worker_processes(process)[0])
        process.kill()
        process.wait()
        wait_until(lambda: not worker_processes(process), "the workers' end")
    code, out, err = run(*options, "--workers", 2, "--resume", "--json", cwd=tmp_path)
    assert (code, err) == (0, "")
    receipt = json.loads(out)
    assert receipt["resumed_chunks"] > 0
    assert receipt["audit"]["samples"] > 0
    np.testing.assert_array_equal(read_image(tmp_path / "out.npy"), expected)
    assert [name for name in names_in(tmp_path) if name.startswith("out")] == ["out.npy", "out.npy.receipt.json"]


# The audit


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
@pytest.mark.parametrize("chunk_bytes", [None, 2_000])
def test_too_small_a_halo_is_found(made, tmp_path, dtype, chunk_bytes):
    @image_operator(halo=1)
    def wide(block):
        return scipy.ndimage.median_filter(block, 5)

    with pytest.raises(AuditError, match=r"samples \(\d+, \d+\) to .*: operator wide .*its halo is too small"):
        made(wide, samples_of((61, 47), dtype), "YX", chunk_bytes=chunk_bytes)
    assert names_in(tmp_path) == ["in.npy"]


def test_a_result_that_depends_on_the_whole_block_is_found(made):
    @image_operator(halo=1, dtype="float64")
    def normalised(block):
        return block / block.mean()

    with pytest.raises(AuditError, match="depends on more than the block"):
        made(normalised, samples_of((61, 47)), "YX")


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.uint8, 0.51), (np.float32, 256 * np.finfo(np.float32).eps)])
def test_a_reference_is_compared_in_float64(made, dtype, tolerance):
    def exact(block, *, sigma):
        assert block.dtype == np.float64
        return scipy.ndimage.gaussian_filter(block, sigma, radius=4)

    @image_operator(halo=4, reference=exact)
    def blur(block, *, sigma: float = 1.0):
        result = scipy.ndimage.gaussian_filter(block.astype(np.float32), sigma, radius=4)
        return result if block.dtype.kind == "f" else np.rint(result).astype(block.dtype)

    receipt, _ = made(blur, samples_of((61, 47, 3), dtype), "YXS", chunk_bytes=5_000, sigma=1.3)
    assert receipt["audit"]["samples"] == 100
    assert 0 < receipt["audit"]["worst_error"] <= receipt["audit"]["tolerance"] == pytest.approx(tolerance)


def test_another_value_than_the_reference_names_place_and_operator(made):
    @image_operator(reference=lambda block: block + 1)
    def same(block):
        return block

    with pytest.raises(AuditError, match=r"at sample \(\d+, \d+\): operator same wrote .* its reference says"):
        made(same, samples_of((9, 7), np.float32), "YX")


def test_a_stated_tolerance_stands(made):
    @image_operator(reference=lambda block: block + 1, tolerance=1)
    def same(block):
        return block

    assert made(same, samples_of((9, 7)), "YX")[0]["audit"]["worst_error"] == 1


@pytest.mark.parametrize("audited", ["reference", "recomputed"])
def test_nan_and_infinity_are_values(made, audited):
    samples = np.full((30, 20), np.nan, np.float32)
    samples[:10], samples[10:20] = np.inf, 1e30

    @image_operator(reference=(lambda block: block * 1e10) if audited == "reference" else None)
    def scaled(block, *, xp):
        with xp.errstate(over="ignore"):
            return block * xp.float32(1e10)

    receipt, found = made(scaled, samples, "YX")
    assert receipt["audit"]["worst_error"] == 0
    assert np.isnan(found[20:]).all()
    assert np.isposinf(found[:20]).all()


# Parameters


@image_operator
def options(
    block,
    *,
    count: int,
    kind: Literal["soft", "hard"] = "soft",
    power: Literal[1, 2] = 1,
    flag: bool = False,
    steps: tuple[int, ...] = (1, 2),
    share: Annotated[float, Field(ge=0, le=1, description="how much")] = 0.5,
    label: str | None = None,
    xp,
):
    return block


def test_keyword_parameters_are_fields():
    schema = options.Parameters.model_json_schema()
    assert list(schema["properties"]) == [
        "chunks", "shards", "compression", "levels", "crop", "times", "mode", "cval", "count", "kind", "power", "flag",
        "steps", "share", "label",
    ]  # fmt: skip
    assert schema["required"] == ["count"]
    assert schema["properties"]["share"]["description"] == "how much"
    told = options.Parameters(count="3", kind="hard", power="2", flag=True, steps="3x5", share="0.25")
    assert told.own() == {
        "count": 3, "kind": "hard", "power": 2, "flag": True, "steps": (3, 5), "share": 0.25, "label": None,
    }  # fmt: skip
    assert options.Parameters(count=1, steps=4).steps == (4,)
    for wrong in ({}, {"count": 1, "share": 2}, {"count": 1, "cval": 3}, {"count": True}, {"count": 1, "radius": 1}):
        with pytest.raises(ValidationError):
            options.Parameters(**wrong)


def test_an_operator_is_the_function_and_a_workload():
    block = samples_of((9, 9))
    np.testing.assert_array_equal(median(block, size=3), scipy.ndimage.median_filter(block, 3))
    assert (median.name, median.summary, median.unit) == ("median", "Take the median of a box.", "pixels")
    assert along_planes.summary == "Apply along_planes to an image."


def test_parameters_go_to_other_processes():
    asked = options.Parameters(count=3)
    module = type(asked).__module__
    assert (module, type(asked).__qualname__) == (__name__, "options.Parameters")
    sys.modules[__name__].options = options
    assert pickle.loads(pickle.dumps(asked)) == asked


def _no_block():
    pass


def _positional(block, radius: int = 3):
    pass


def _unannotated(block, *, radius=3):
    pass


def _several(block, *radii):
    pass


def _any_keyword(block, **options):
    pass


def _of_the_engine(block, *, memory: int = 3):
    pass


def _of_every_operator(block, *, mode: str = "a"):
    pass


def _of_pydantic(block, *, json: int = 3):
    pass


def _always_on(block, *, clip: bool = True):
    pass


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (_no_block, "first parameter must be the block"),
        (_positional, "parameter radius must be keyword-only"),
        (_unannotated, "parameter radius has no annotation"),
        (_several, "parameter radii must be keyword-only"),
        (_any_keyword, "parameter options must be keyword-only"),
        (_of_the_engine, "parameter memory is called like"),
        (_of_every_operator, "parameter mode is called like"),
        (_of_pydantic, "parameter json is called like"),
        (_always_on, "parameter clip is a flag"),
    ],
)
def test_signatures_that_cannot_become_options_are_refused(function, said):
    with pytest.raises(TypeError, match=said) as refused:
        image_operator(function, name="it")
    assert "\n" not in str(refused.value)


def test_no_parameter_hides_an_option_of_the_commands():
    from pipeline.cli import client, local
    from pipeline.workloads.operator.parameters import RESERVED

    sections = [*local.run_options().values(), client.submit_options()]
    names = {option.name for options in sections for option in options}
    assert names <= RESERVED


# What goes wrong


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"axes": "ZY"}, r"works along the axes Z,Y, and .*in.npy has Y,X"),
        ({"halo": (1, 2, 3)}, r"its halo is \(1, 2, 3\); it must be .* for each of Y,X"),
        ({"halo": -1}, "its halo is -1"),
        ({"halo": lambda asked: float("nan")}, "its halo is nan"),
        ({"dtype": "float7"}, "there is no dtype 'float7'"),
    ],
)
def test_declarations_that_do_not_fit_the_image(made, declared, said):
    with pytest.raises(ParameterError, match=said):
        made(image_operator(lambda block: block, name="it", **declared), samples_of((9, 7)), "YX")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda block: block * 0.5, "returns float64, which uint16 does not hold: declare dtype="),
        (lambda block: block.astype(np.int64), "returns int64, which uint16 does not hold"),
        (lambda block: block[1:-1, 1:-1], r"returns an array of \(\d+, \d+\) for a block of .*halo included"),
        (lambda block: None, r"returns NoneType, not an array of the block's shape \(\d+, \d+\)"),
        (lambda block: block.mean(), "returns float64, not an array of the block's shape"),
    ],
)
def test_results_that_cannot_be_stored(made, function, said):
    with pytest.raises(OperatorError, match=rf"^operator it {said}"):
        made(image_operator(function, name="it", halo=1), samples_of((9, 7)), "YX")


def test_a_result_may_be_of_a_shorter_dtype(made):
    _, found = made(image_operator(lambda block: block > 9, name="it", dtype="uint8"), samples_of((9, 7)), "YX")
    assert found.dtype == np.uint8


@image_operator(halo=1)
def failing(block):
    if block.shape[0] > 3:
        _helper(block)
    return block


def _helper(block):
    raise KeyError("no such\nthing")


@pytest.mark.parametrize("operator", [failing, image_operator(lambda block: sys.exit(3), name="failing")])
def test_an_exception_is_one_line_with_its_place(made, operator, tmp_path):
    with pytest.raises(OperatorError) as failed:
        made(operator, samples_of((40, 30)), "YX", chunk_bytes=2_000)
    line = str(failed.value)
    kind = r"KeyError: 'no such\nthing'" if operator is failing else "SystemExit: 3"
    assert line.startswith(f"operator failing: {kind} (")
    assert f"{__file__}:" in line
    assert "samples (" in line
    assert "\n" not in line
    assert "Traceback" in failed.value.trace
    assert pickle.loads(pickle.dumps(failed.value)).trace == failed.value.trace
    assert names_in(tmp_path) == ["in.npy"]


def test_the_users_own_errors_pass(made):
    def refusing(block):
        raise UserError("not this one")

    with pytest.raises(UserError, match="not this one"):
        made(image_operator(refusing), samples_of((9, 7)), "YX")
