"""`millrace run open` and its kin: chunked equals whole at every border, and what is refused."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import kernels.morphology as kernels
from kernels.rank import disk
from kernels.smoothing.borders import BORDER_MODES
from pipeline.errors import AuditError, ParameterError
from pipeline.formats.image.base import Region
from pipeline.workloads import JobSpec, registry
from pipeline.workloads.filters import morphology
from pipeline.workloads.operator.edges import Edges
from tests.images import write_image
from tests.kernels.rank.cases import samples_of
from tests.pipeline.workloads.filters.jobs import filtered

FUNCTIONS = {
    "erode": kernels.grey_erosion, "dilate": kernels.grey_dilation, "open": kernels.grey_opening,
    "close": kernels.grey_closing, "tophat": kernels.white_tophat, "bottomhat": kernels.black_tophat,
}  # fmt: skip


@pytest.mark.parametrize(("name", "mode"), [*zip(FUNCTIONS, [*BORDER_MODES, "constant"], strict=True)])
def test_any_cut_gives_the_same(tmp_path: Any, name: str, mode: str) -> None:
    options = {"mode": mode, **({"cval": 7} if mode == "constant" else {})}
    for dtype, size in (("int16", (4, 7)), ("uint8", (3, 4))):
        samples = samples_of((97, 83), dtype)
        receipt, found = filtered(tmp_path, name, samples, "YX", chunk_bytes=3_000, size=size, **options)
        np.testing.assert_array_equal(found, FUNCTIONS[name](samples, size, **options), strict=True)
        assert (receipt["audit"]["worst_error"], receipt["audit"]["samples"] > 50) == (0, True)
        assert receipt["chunks"] > 1


@pytest.mark.parametrize("mode", ["reflect", "mirror", "nearest", "wrap"])
def test_openings_in_one_step_need_no_edges_between_the_steps(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Where one pass over a block is allowed, extending the first step's result changes nothing."""
    allowed, this = set(), threading.local()
    decide, extend = morphology._is_one_step, Edges.extend

    def extended(self: Any, found: Any, axes: Any) -> None:
        before = found.copy()
        extend(self, found, axes)
        allowed.add(this.is_one)
        assert not this.is_one or np.array_equal(before, found)

    def decided(*given: Any) -> bool:
        this.is_one = decide(*given)
        return False

    monkeypatch.setattr(morphology, "_is_one_step", decided)
    monkeypatch.setattr(Edges, "extend", extended)
    for size in ((5, 3), (4, 7)):
        filtered(tmp_path, "open", samples_of((97, 83), "uint8"), "YX", chunk_bytes=3_000, size=size, mode=mode)
    assert allowed == {True, False} or mode == "nearest"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["open", "close", "tophat", "bottomhat"])
def test_a_gpu_opens_blocks_in_one_pass(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    import cupy

    image = samples_of((83, 331), "uint16")
    write_image(tmp_path / "in.npy", image, "YX")
    workload: Any = registry.workload_named(name)
    files = {"input": tmp_path / "in.npy", "output": tmp_path / "out.npy"}
    for mode, size, rows, columns in (
        ("reflect", (5, 9), (0, 83), (0, 331)),
        ("wrap", (3, 31), (20, 60), (0, 331)),
        ("mirror", (3, 3), (0, 40), (100, 140)),
        ("nearest", (4, 6), (20, 50), (100, 233)),
    ):
        job: Any = workload.open(JobSpec(workload=name, **files, parameters=workload.Parameters(size=size, mode=mode)))
        region = Region((rows[0], columns[0]), (rows[1], columns[1]))
        samples = job.samples(region)
        expected = job.computed(samples, region)
        with monkeypatch.context() as patched:
            patched.setitem(morphology._FILTERS, name, (None, morphology._FILTERS[name][1]))
            found = job.computed(cupy.asarray(samples), region)
        job.close()
        np.testing.assert_array_equal(found.get(), expected, strict=True)


def test_footprints_and_missing_samples(tmp_path: Any) -> None:
    samples = samples_of((31, 29), "uint8")
    samples[3:9, 20:] = 255
    for name in ("close", "tophat"):
        options = {"mode": "nearest", "nodata": 255}
        _, found = filtered(tmp_path, name, samples, "YX", chunk_bytes=2_000, footprint="disk", radius=3, **options)
        np.testing.assert_array_equal(found, FUNCTIONS[name](samples, footprint=disk(3), **options), strict=True)


def test_windows_that_do_not_fit(tmp_path: Any) -> None:
    with pytest.raises(ParameterError, match=r"--size has 3 values: give 1 or 2 .*in.npy is filtered along Y,X"):
        filtered(tmp_path, "open", samples_of((9, 7), "uint8"), "YX", size=(3, 5, 7))


def test_the_audit_finds_results_that_depend_on_the_cut(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(block: Any, *, out: Any, **_: Any) -> None:
        out[...] = len(block)

    monkeypatch.setitem(morphology._FILTERS, "open", (rows,))
    with pytest.raises(AuditError, match="operator open gives other values if the image is cut otherwise"):
        filtered(tmp_path, "open", samples_of((23, 31), "uint16"), "YX")
