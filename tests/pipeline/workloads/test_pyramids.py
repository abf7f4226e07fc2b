"""Jobs that write pyramids: the same levels however the job is cut, by whom it is computed, and after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import zarr
from numpy.typing import NDArray
from pydantic import ValidationError

from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.run import RunOptions, plan_job, run_job
from pipeline.errors import ParameterError
from pipeline.formats.image.base import ImageHeader, Region
from pipeline.formats.image.pyramid import ALIGNED, Reduction
from pipeline.workloads import JobSpec, workloads
from tests.images import names_in, read_image, write_image
from tests.pipeline.cluster.processes import kill_9, run, running, wait_until, worker_processes

ROWS, COLUMNS = 523, 301


def levels_in(path: Path) -> list[NDArray[Any]]:
    """All levels of a result, as readers that others wrote find them."""
    if path.suffix == ".tif":
        with tifffile.TiffFile(path) as file:
            return [level.asarray() for level in file.series[0].levels]
    group: Any = zarr.open_group(path, mode="r")
    return [group[level["path"]][...] for level in group.attrs.asdict()["ome"]["multiscales"][0]["datasets"]]


def assert_is_a_pyramid(levels: list[NDArray[Any]], level_0: NDArray[Any], count: int) -> None:
    assert len(levels) == count
    header = ImageHeader(shape=level_0.shape, axes="YX", dtype=level_0.dtype)
    expected = level_0
    for level in levels:
        np.testing.assert_array_equal(level, expected, strict=True)
        expected = Reduction.of(header).halved(expected)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    samples = np.random.default_rng(2).integers(0, 65536, (ROWS, COLUMNS)).astype(np.uint16)
    write_image(tmp_path / "in.npy", samples, "YX")
    return tmp_path


def job_in(folder: Path, output: str, *, chunk_bytes: int | None = None, workload: str = "smooth", **given: Any) -> Any:
    parameters = workloads()[workload].Parameters(**given)
    spec = JobSpec(workload=workload, input=folder / "in.npy", output=folder / output, parameters=parameters)
    options = RunOptions(memory_bytes=64 << 20, chunk_bytes=chunk_bytes)
    return plan_job(spec, CpuDevice(2), options), options


@pytest.mark.parametrize("chunk_bytes", [None, 20_000, 40_000, 150_000])
@pytest.mark.parametrize("output", ["out.zarr", "out.tif"])
def test_any_chunks_make_the_same_levels(folder: Path, output: str, chunk_bytes: int | None) -> None:
    job, options = job_in(folder, output, chunk_bytes=chunk_bytes, size="5", levels=10, chunks="112")
    regions: list[Region] = [chunk.region for chunk in job.plan.chunks]
    assert chunk_bytes is None or len(regions) > 1
    for region in regions:
        assert all(start % ALIGNED == 0 for start in region.start)
        assert all(stop % ALIGNED == 0 or stop in (ROWS, COLUMNS) for stop in region.stop)
    run_job(job, options)
    assert_is_a_pyramid(levels_in(folder / output), read_image(folder / output), 10)


def test_the_result_of_a_step_that_is_kept_is_a_pyramid_too(folder: Path) -> None:
    job, options = job_in(
        folder,
        "out.zarr",
        workload="chain",
        step=["median size=3", "minimum size=3"],
        keep=1,
        levels=3,
        chunk_bytes=20_000,
    )
    run_job(job, options)
    results = list(folder.glob("*.zarr"))
    assert len(results) == 2
    for path in results:
        assert_is_a_pyramid(levels_in(path), read_image(path), 3)


def test_a_pyramid_in_makes_a_pyramid_out(folder: Path) -> None:
    job, options = job_in(folder, "first.tif", size="3", levels=2)
    run_job(job, options)
    first = workloads()["smooth"].Parameters(size="3")
    for output, levels in (("second.tif", 2), ("third.ome.tif", 2), ("fourth.zarr", 2)):
        spec = JobSpec(workload="smooth", input=folder / "first.tif", output=folder / output, parameters=first)
        run_job(plan_job(spec, CpuDevice(2), options), options)
        assert_is_a_pyramid(levels_in(folder / output), read_image(folder / output), levels)


@pytest.mark.slow
@pytest.mark.parametrize("output", ["out.zarr", "out.ome.tif"])
def test_two_processes_a_kill_and_a_resume_make_the_same(folder: Path, output: str, own_settings: Any) -> None:
    options = ("run", "rolling-ball", "in.npy", output, "--radius", "9", "--levels", "6")
    options += ("--device", "cpu", "--chunk-bytes", "60KB", "--workers", "2")
    ledger = folder / f"{output}.ledger"
    with running(*options, cwd=folder) as process:
        wait_until(lambda: list(ledger.glob("chunks-*.json")), "the first segment")
        kill_9(worker_processes(process)[0])
        process.kill()
        process.wait()
        wait_until(lambda: not worker_processes(process), "the workers' end")
    assert not (folder / output).exists()
    code, out, err = run(*options, "--resume", "--json", cwd=folder)
    assert (code, err) == (0, "")
    assert json.loads(out)["resumed_chunks"] > 0
    assert_is_a_pyramid(levels_in(folder / output), read_image(folder / output), 6)
    assert [name for name in names_in(folder) if name.startswith("out")] == [output, f"{output}.receipt.json"]
    if output.endswith(".tif"):
        killed = (folder / output).read_bytes()
        run_job(*job_in(folder, output, workload="rolling-ball", radius=9, levels=6, chunk_bytes=60_000))
        assert (folder / output).read_bytes() == killed


def test_formats_without_levels_refuse_them(folder: Path) -> None:
    with pytest.raises(ParameterError, match=r"--levels: PNG leaves no choice of levels"):
        job_in(folder, "out.png", levels=2)
    job_in(folder, "out.png", levels=1)[0].job.close()
    with pytest.raises(ParameterError, match=r"--levels 99: 523 × 301 pixels have 11 levels"):
        job_in(folder, "out.zarr", levels="99")


@pytest.mark.parametrize("given", ["0", "-1", "many", 1.5, True])
def test_numbers_of_levels(given: Any) -> None:
    with pytest.raises(ValidationError, match="levels"):
        workloads()["smooth"].Parameters(levels=given)
    assert workloads()["smooth"].Parameters().storage.levels is None
    assert workloads()["smooth"].Parameters(levels=" 3 ").storage.levels == 3
