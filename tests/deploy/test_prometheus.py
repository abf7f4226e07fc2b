"""A real Prometheus scrapes a real service at work, as deploy/prometheus says; every expression of every panel and rule
is asked of it, and answered with data.

What only a GPU's driver can say (`millrace_gpu_*`), and lost ranks, cannot be had on a machine without GPUs: an
exporter in this test serves samples under these names, with the labels of the metrics' table. All else is the service's
own, collectives too: those of ranks on the CPU.
"""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import numpy as np
import pytest
import yaml
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from deploy.grafana.expressions import DEPLOY, dashboards, panel_expressions, panels, rule_expressions, rules
from pipeline.cli.demo.scan import make_scan
from pipeline.client import Client
from pipeline.metrics.table import ROWS, TABLE
from pipeline.workloads import workloads
from tests.images import write_image
from tests.pipeline.service.soak import server
from tests.pipeline.workloads.coulomb.coulomb_jobs import write_trajectory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="Prometheus is not installed: apt-get install prometheus"
    ),
]
# Long enough that a loaded machine's scrapes are in time; twice this is the least for a rate.
SCRAPE_S = 2
# Patience, not speed: on a loaded machine everything takes several times as long.
WAIT_S = 150.0
SAMPLES = (301, 203)


class Driver:
    """Samples as a driver would give them for two GPUs; its counters grow between scrapes. No rank is ever lost."""

    def collect(self):
        passed = time.monotonic()
        for row in TABLE:
            if row.name == "millrace_communicator_aborts_total":
                yield family(row, [(("deadline",), 0.0)])
            elif row.name.startswith("millrace_gpu_"):
                values = [
                    ((gpu, *rest), passed * 1e9 if row.kind == "counter" else VALUES[row.name] * share)
                    for gpu, share in (("GPU-1", 1.0), ("GPU-2", 0.5))
                    for rest in ([("rx",), ("tx",)] if "direction" in row.labels else [()])
                ]
                yield family(row, values)


VALUES = {
    "millrace_gpu_memory_used_bytes": 60e9,
    "millrace_gpu_memory_total_bytes": 150e9,
    "millrace_gpu_utilization_ratio": 0.8,
    "millrace_gpu_power_watts": 500.0,
    "millrace_gpu_temperature_celsius": 60.0,
    "millrace_gpu_pcie_link_bytes_per_second": 63e9,
}


def family(row, values):
    made = (CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily)(row.name, row.help, labels=row.labels)
    for labels, value in values:
        made.add_metric(labels, value)
    return made


@contextmanager
def driver_samples():
    """Yields the port."""
    registry = CollectorRegistry()
    registry.register(Driver())
    exporter, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        yield exporter.server_port
    finally:
        exporter.shutdown()
        exporter.server_close()
        thread.join()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def configuration(service_port, driver_port):
    """The one in deploy/prometheus, at the service's port, in quick steps, and with the driver's samples besides."""
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    assert text.count("127.0.0.1:8765") == 3  # twice, and a comment
    config = yaml.safe_load(text.replace("127.0.0.1:8765", f"127.0.0.1:{service_port}"))
    pace = f"{SCRAPE_S}s"
    config["global"] = {"scrape_interval": pace, "scrape_timeout": pace, "evaluation_interval": pace}
    config["rule_files"] = [str(DEPLOY / "prometheus" / pattern) for pattern in config["rule_files"]]
    for job in config["scrape_configs"]:
        for discovery in job.get("http_sd_configs", []):
            discovery["refresh_interval"] = pace
    targets = [{"targets": [f"127.0.0.1:{driver_port}"]}]
    config["scrape_configs"].append({"job_name": "driver-samples", "static_configs": targets})
    return config


class Prometheus:
    """What a Prometheus says over HTTP."""

    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path, **parameters):
        with urlopen(f"{self.url}/api/v1/{path}?{urlencode(parameters)}", timeout=60) as answer:
            found = json.load(answer)
        assert found["status"] == "success"
        return found["data"]

    def values(self, expr):
        """By labels, what is a number."""
        found = self.get("query", query=expr)
        samples = [({}, found["result"])] if found["resultType"] == "scalar" else [
            (each["metric"], each["value"]) for each in found["result"]
        ]  # fmt: skip
        return [(labels, float(value)) for labels, (_, value) in samples if not math.isnan(float(value))]


@contextmanager
def prometheus(folder, config):
    """Yields it, ready. Another program may take a free port first: then on another."""
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    for _ in range(3):
        port = free_port()
        with (folder / "prometheus.log").open("a") as log:
            process = subprocess.Popen(
                ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
                 f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"], stdout=log, stderr=log,
            )  # fmt: skip
        try:
            if is_ready(process, port):
                yield Prometheus(port)
                return
        finally:
            process.terminate()
            process.wait(WAIT_S)
    pytest.fail((folder / "prometheus.log").read_text())


def is_ready(process, port):
    end = time.monotonic() + WAIT_S
    while process.poll() is None:
        try:
            with urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=10):
                return True
        except (URLError, TimeoutError, ConnectionError):
            assert time.monotonic() < end
            time.sleep(0.1)
    return False


def expressions():
    """By where it stands and what it is."""
    asked = [
        query
        for board in dashboards()
        for panel in panels(board)
        for query in panel_expressions(board, panel, rate_interval="5m")
    ]
    return [*asked, *rule_expressions()]


def jobs_of_each_kind(client, number):
    """A map of smoothing, one of sums by several ranks' collectives, iterations, and one that fails. Waits for all."""
    jobs = [
        client.submit("smooth", "in.npy", f"smooth-{number}.npy", size=5),
        client.submit("coulomb", "a.pqr", f"coulomb-{number}.npy", trajectory="a.dcd", cell="none", spacing=1.0),
        client.submit("mri", "scan.npz", f"mri-{number}.npy", regularizer="l1-wavelet", strength="0.01", iterations=5),
        client.submit("smooth", "absent.npy", f"never-{number}.npy"),
    ]
    assert [job.wait(timeout_s=WAIT_S).state for job in jobs] == ["succeeded", "succeeded", "succeeded", "failed"]


def until(found, what):
    end = time.monotonic() + WAIT_S
    while not (value := found()):
        assert time.monotonic() < end, what
        time.sleep(0.25)
    return value


@contextmanager
def watched(folder):
    """A service at work and its Prometheus: (Prometheus, expressions that stayed without data, rounds of jobs)."""
    data = folder / "data"
    data.mkdir()
    write_image(data / "in.npy", np.random.default_rng(1).integers(0, 65536, SAMPLES).astype(np.uint16), "YX")
    write_trajectory(data, 8)
    make_scan(data / "scan.npz", pixels=32, spokes=24, coils=3, seed=0)
    port = free_port()
    with (
        server(folder, port), driver_samples() as driver_port, Client(f"http://127.0.0.1:{port}") as client,
        prometheus(folder, configuration(port, driver_port)) as found,
    ):  # fmt: skip
        # Counters must have been seen before they move: a rate needs a difference.
        until(lambda: found.values('up{job="millrace-workers"} == 1'), "no worker is scraped")
        waiting, rounds, end = expressions(), 0, time.monotonic() + WAIT_S
        while waiting and time.monotonic() < end:
            jobs_of_each_kind(client, rounds)
            rounds += 1
            time.sleep(SCRAPE_S)
            waiting = [each for each in waiting if not found.values(each.expr)]
        yield found, waiting, rounds


def test_every_expression_of_every_panel_and_rule_has_data(tmp_path):
    with watched(tmp_path) as (found, waiting, rounds):
        assert waiting == []
        check_every_series_that_is_read(found)
        check_targets(found)
        check_rules(found)
        check_lists_of_the_dashboards(found)
        check_that_all_is_counted_once(found, rounds)


def check_every_series_that_is_read(found):
    read = {name for each in expressions() for name in each.metrics}
    assert read - set(found.get("label/__name__/values")) == set()


def check_targets(found):
    """All answer, and the workers were found by discovery."""
    active = found.get("targets")["activeTargets"]
    assert {each["labels"]["job"] for each in active} == {"millrace", "millrace-workers", "driver-samples"}
    until(lambda: all(value == 1 for _, value in found.values("up")), active)
    worker = next(each["labels"] for each in active if each["labels"]["job"] == "millrace-workers")
    assert worker["device"] == "cpu"
    assert worker["worker"]


def check_rules(found):
    """All are evaluated without fault. Whether alerts come rightly, the rules' own tests say: load is none to them."""
    held = [rule for group in found.get("rules")["groups"] for rule in group["rules"]]
    assert len(held) == len(list(rules()))
    assert [rule for rule in held if rule["health"] != "ok"] == []


def check_lists_of_the_dashboards(found):
    listed = {
        variable["name"]: set(found.get(f"label/{label}/values", **{"match[]": metric}))
        for board in dashboards()
        for variable in board["templating"].get("list", [])
        for metric, label in [variable["definition"].removeprefix("label_values(").removesuffix(")").split(", ")]
    }
    assert listed == {"workload": set(workloads()), "gpu": {"GPU-1", "GPU-2"}}


def check_that_all_is_counted_once(found, rounds):
    """Over service and workers together."""
    pixels = rounds * math.prod(SAMPLES)

    def settled():
        finished = found.values("sum by (outcome) (millrace_jobs_finished_total) > 0")
        ended = {labels["outcome"]: value for labels, value in finished}
        work = {labels["unit"]: value for labels, value in found.values("sum by (unit) (millrace_work_total)")}
        return ended == {"succeeded": 3 * rounds, "failed": rounds} and work["pixels"] == pixels

    until(settled, "the sums are not those of the jobs")
    [(_, written)] = found.values('sum(millrace_output_bytes_total{workload="smooth"})')
    assert written == 2 * pixels
    busy = found.values("instance:millrace_overlap_efficiency:ratio_rate5m")
    assert busy
    assert all(0 < value <= 1 for _, value in busy)


def test_the_samples_of_the_driver_have_the_names_and_labels_of_the_table():
    for made in Driver().collect():
        row = ROWS[made.name + "_total" if made.type == "counter" else made.name]
        assert all(set(sample.labels) == set(row.labels) for sample in made.samples)
