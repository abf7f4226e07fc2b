"""The table of metrics: code, documentation and Prometheus' conventions agree with it, and runs feed what it has."""

from __future__ import annotations

import time
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
from prometheus_client import generate_latest

from pipeline import errors, metrics
from pipeline.cluster.communicators.solo import SoloCommunicator
from pipeline.engine import checkpoints
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.run import RunEvents, RunOptions, plan_job, run_job
from pipeline.engine.stages import STAGES, StageRecord
from pipeline.errors import AuditError, MillraceError, ParameterError
from pipeline.metrics.pipelines import Level
from pipeline.metrics.registered import REGISTRY
from pipeline.metrics.table import TABLE, as_markdown
from pipeline.service.store import NoSuchJob
from pipeline.workloads import JobSpec, workloads
from pipeline.workloads.smoothing.audit import SmoothingAudit
from tests.images import write_image
from tests.pipeline.scrapes import families, free_port, samples

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
SUFFIXES = ("_seconds", "_bytes", "_ratio", "_watts", "_celsius", "_per_second", "_info", "_epoch")
# Gauges and counters of things, which have no unit but the things themselves.
COUNTED = {"jobs", "errors", "chunks", "aborts", "workers", "restarts", "the label's unit", "iterations", "objective"}


def here():
    """What this process serves now."""
    return samples(generate_latest(REGISTRY).decode())


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_names_follow_the_conventions_of_prometheus(row):
    assert row.name.startswith("millrace_")
    assert row.name.endswith("_total") == (row.kind == "counter")
    bare = row.name.removesuffix("_total")
    assert bare.endswith(SUFFIXES) == (row.unit not in COUNTED)
    assert not {"job", "user", "owner", "path", "file", "array"} & set(row.labels)
    assert bare.endswith("_ratio") == (row.unit == "ratio")
    assert row.help.endswith(".")
    assert "|" not in row.help
    assert bool(row.buckets) == (row.kind == "histogram")
    assert list(row.buckets) == sorted(set(row.buckets))


def test_no_metric_stands_in_the_table_twice():
    assert len({row.name for row in TABLE}) == len(TABLE)


def test_the_documentation_has_the_table():
    between = PAGE.read_text().partition("metrics.table -->\n")[2].partition("<!-- end of the table -->")[0]
    assert between == as_markdown(), "put what `python -m pipeline.metrics.table` prints into docs/metrics.md"


def test_what_this_process_serves_stands_in_the_table():
    """All that is not the service's own to tell, with the table's types, labels and help."""
    metrics.work_of("smooth", "pixels")
    served = families(generate_latest(REGISTRY).decode())
    rows = {row.name.removesuffix("_total"): row for row in TABLE}
    assert served.keys() <= rows.keys()
    only_of_a_service = {
        "millrace_jobs", "millrace_queue_oldest_age_seconds", "millrace_workers",
        "millrace_worker_heartbeat_age_seconds",
    }  # fmt: skip
    assert rows.keys() - served.keys() == only_of_a_service
    for name, family in served.items():
        row = rows[name]
        assert (family.type, family.documentation) == (row.kind, row.help)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(row.labels)


def test_every_kind_of_error_stands_there_from_the_start():
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type)} | {"internal"}
    served = {dict(labels)["kind"] for name, labels in here() if name == "millrace_errors_total"}
    assert served == kinds


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ParameterError("no"), "ParameterError"),
        (NoSuchJob("no"), "ParameterError"),  # a class of its own, elsewhere: what it is of the tree
        (MillraceError("no"), "MillraceError"),
        (ValueError("no"), "internal"),
    ],
)
def test_errors_are_counted_by_their_place_in_the_tree(error, kind):
    counted = ("millrace_errors_total", (("kind", kind),))
    before = here()[counted]
    metrics.count_error(error)
    assert here()[counted] == before + 1


def test_a_scrape_shows_every_stage_and_collective():
    record = StageRecord()
    for number, stage in enumerate(STAGES, 1):
        record.add(stage, 0, 1.0, 1.0 + number / 8, 1000 * number)
    alone = SoloCommunicator(epoch=3)
    alone.allreduce(np.ones(1000))
    alone.abort("deadline")
    port = free_port()
    metrics.serve(port)
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        found = samples(response.read().decode())
    assert found["millrace_collective_bytes_total", (("op", "allreduce"),)] >= 8000
    assert found["millrace_collective_seconds_total", (("op", "allreduce"),)] > 0
    assert found["millrace_communicator_aborts_total", (("reason", "deadline"),)] >= 1
    assert found["millrace_communicator_epoch", ()] == 3.0
    for number, stage in enumerate(STAGES, 1):
        label = (("stage", stage),)
        assert found["millrace_stage_seconds_total", label] >= number / 8
        assert found["millrace_stage_bytes_total", label] >= 1000 * number
    assert found["millrace_build_info", (("version", "0.1.0"),)] == 1.0
    with pytest.raises(ParameterError, match=f"--metrics-port {port}: .*; choose another port"):
        metrics.serve(port)
    with pytest.raises(ParameterError, match=f"--metrics-port {port}: .*; choose another port"):
        metrics.check_port("127.0.0.1", port)


def test_a_stages_histogram_adds_up():
    count = metrics.stages["read"]
    before = here()
    count.add(0.0003, 10)
    count.add(0.00025, 10)  # a bound belongs to the bucket below it
    count.add(90.0, 10)
    count.add(6.0, 100, 3)  # three chunks of which only the sum is known
    after = here()

    def grown(name, *labels):
        key = (name, tuple(sorted((("stage", "read"), *labels))))
        return after[key] - before[key]

    name = "millrace_stage_duration_seconds"
    assert grown(f"{name}_count") == grown(f"{name}_bucket", ("le", "+Inf")) == 6
    assert grown(f"{name}_sum") == pytest.approx(96.00055) == grown("millrace_stage_seconds_total")
    at_most = [grown(f"{name}_bucket", ("le", bound)) for bound in ("0.0001", "0.00025", "0.0005", "2.5", "60.0")]
    assert at_most == [0, 1, 2, 5, 5]
    assert grown("millrace_stage_bytes_total") == 130


def test_time_at_work_goes_on_and_is_counted_once_for_each_pipeline():
    """Two passages of one pipeline at once are no more time than one; two pipelines have twice the lanes."""

    def told():
        found = here()
        wall = found["millrace_pipeline_wall_seconds_total", ()]
        return wall, *(found["millrace_stage_lane_seconds_total", (("stage", stage),)] for stage in ("read", "compute"))

    one, other = metrics.AtWork({"read": 2, "compute": 3}), metrics.AtWork({"read": 2, "compute": 3})
    outside, began = told(), time.perf_counter()
    with one, one:
        amid = told()
        with other:
            time.sleep(0.05)
        within = told()
    after, took = told(), time.perf_counter() - began
    assert outside[0] <= amid[0] < within[0] <= after[0]  # while it is at work, not only at its end
    wall, read, compute = (last - first for last, first in zip(after, outside, strict=True))
    assert 0.05 <= wall <= took
    assert 2 * (wall + 0.05) <= read + 1e-6
    assert read <= 4 * wall
    assert compute == pytest.approx(1.5 * read)
    assert told() == after


def test_a_level_is_integrated_over_time():
    level = Level()
    began = time.perf_counter()
    level.change(3, began)
    level.change(-1, began + 2.0)
    level.change(1, began + 1.0)  # a moment before what was last told: it is taken as now
    level.change(-3, began + 3.0)
    assert level.integral == pytest.approx(9.0)
    assert level.integral == level.integral


def test_overlap_efficiency_is_the_busiest_stage_over_the_wall():
    record = StageRecord()
    record.add("read", 0, 5.0, 6.0, 1)
    record.add("compute", 0, 1.0, 7.0, 1)
    record.totals["compute"].lanes = 2
    assert record.overlap_efficiency == 0.0
    record.wall_seconds = 4.0
    assert record.overlap_efficiency == 0.75


def test_what_others_did_is_counted_here_only_where_nobody_asks_them():
    told = {"write": (1.5, 100, 3)}
    label = (("stage", "write"),)
    before = here()
    StageRecord().include(told)
    assert here()["millrace_stage_bytes_total", label] == before["millrace_stage_bytes_total", label]
    StageRecord(gathers=True).include(told)
    assert here()["millrace_stage_bytes_total", label] == before["millrace_stage_bytes_total", label] + 100


class Stopped(Exception):
    """What stops a run on purpose."""


def test_chunks_are_written_kept_or_failed(tmp_path, monkeypatch):
    """A run that is stopped and one that goes on: every chunk is written once; those found finished are kept."""
    write_image(tmp_path / "in.npy", np.random.default_rng(2).integers(0, 65536, (700, 301)).astype(np.uint16), "YX")
    spec = JobSpec(
        workload="smooth", input=tmp_path / "in.npy", output=tmp_path / "out.npy",
        parameters=workloads()["smooth"].Parameters(size="5"),
    )  # fmt: skip
    monkeypatch.setattr(checkpoints, "INTERVAL_SECONDS", 0.001)
    options = RunOptions(memory_bytes=64 << 20, chunk_bytes=60_000, resume=True)
    before, written = here(), []

    def stop(chunk):
        written.append(chunk)
        if len(written) == 4:
            raise Stopped

    with pytest.raises(Stopped):
        run_job(plan_job(spec, CpuDevice(1), options), options, events=RunEvents(on_written=stop))
    amid = here()
    receipt = run_job(plan_job(spec, CpuDevice(1), options), options)
    after = here()

    def grown(name, **labels):
        key = (f"millrace_{name}", tuple(sorted(labels.items() | {("workload", "smooth")})))
        return after[key] - before.get(key, 0.0)

    failed = ("millrace_chunks_total", (("outcome", "failed"), ("workload", "smooth")))
    assert amid[failed] - before.get(failed, 0.0) == 1
    assert grown("chunks_total", outcome="failed") == 1
    assert grown("chunks_total", outcome="kept") == receipt["resumed_chunks"] >= 3
    assert grown("chunks_total", outcome="written") >= receipt["chunks"]
    assert grown("work_total", unit="pixels") >= 700 * 301
    assert grown("output_bytes_total") >= 2 * 700 * 301
    assert grown("input_bytes_total") > grown("output_bytes_total") * 0.9
    assert after["millrace_audit_error_ratio", (("workload", "smooth"),)] <= 1


@pytest.mark.parametrize(("error", "ratio"), [(7.0, 14.0), (float("nan"), float("inf"))])
def test_a_refused_result_is_seen_in_the_metrics(tmp_path, monkeypatch, error, ratio):
    write_image(tmp_path / "in.npy", np.zeros((40, 30), np.uint8), "YX")
    spec = JobSpec(
        workload="smooth", input=tmp_path / "in.npy", output=tmp_path / "out.npy",
        parameters=workloads()["smooth"].Parameters(size="3"),
    )  # fmt: skip
    monkeypatch.setattr(SmoothingAudit, "_error", lambda *_: error)
    options = RunOptions(memory_bytes=64 << 20)
    with pytest.raises(AuditError, match="audit failed at sample"):
        run_job(plan_job(spec, CpuDevice(1), options), options)
    assert here()["millrace_audit_error_ratio", (("workload", "smooth"),)] == ratio
    monkeypatch.undo()
    run_job(plan_job(spec, CpuDevice(1), options), options)
    assert here()["millrace_audit_error_ratio", (("workload", "smooth"),)] <= 1
