"""The metrics a run serves: every stage's seconds and bytes, where Prometheus looks for them."""

from __future__ import annotations

import socket
from urllib.request import urlopen

import numpy as np
import pytest

from pipeline import metrics
from pipeline.cluster.communicator import SoloCommunicator
from pipeline.engine.stages import STAGES, StageRecord
from pipeline.errors import ParameterError


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def scraped(port):
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        return dict(line.rsplit(" ", 1) for line in response.read().decode().splitlines() if not line.startswith("#"))


def test_a_scrape_shows_every_stage_and_collective():
    record = StageRecord()
    for number, stage in enumerate(STAGES, 1):
        record.add(stage, 0, 1.0, 1.0 + number / 8, 1000 * number)
    alone = SoloCommunicator(epoch=3)
    alone.allreduce(np.ones(1000))
    alone.abort("deadline")
    port = free_port()
    metrics.serve(port)
    lines = scraped(port)
    assert float(lines['millrace_collective_bytes_total{op="allreduce"}']) >= 8000
    assert float(lines['millrace_collective_seconds_total{op="allreduce"}']) > 0
    assert float(lines['millrace_communicator_aborts_total{reason="deadline"}']) >= 1
    assert lines["millrace_communicator_epoch"] == "3.0"
    for number, stage in enumerate(STAGES, 1):
        assert float(lines[f'millrace_stage_seconds_total{{stage="{stage}"}}']) >= number / 8
        assert float(lines[f'millrace_stage_bytes_total{{stage="{stage}"}}']) >= 1000 * number
    assert lines['millrace_build_info{version="0.1.0"}'] == "1.0"
    with pytest.raises(ParameterError, match=f"--metrics-port {port}: .*; choose another port"):
        metrics.serve(port)


def test_overlap_efficiency_is_the_busiest_stage_over_the_wall():
    record = StageRecord()
    record.add("read", 0, 5.0, 6.0, 1)
    record.add("compute", 0, 1.0, 7.0, 1)
    record.totals["compute"].lanes = 2
    assert record.overlap_efficiency == 0.0
    record.wall_seconds = 4.0
    assert record.overlap_efficiency == 0.75
