"""Metrics of a service for Prometheus: of this process and of the jobs in the store, and the workers' addresses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import REGISTRY, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, Field

from pipeline.api_models import TERMINAL
from pipeline.cluster.dask.worker_states import zero_counters
from pipeline.errors import MillraceError
from pipeline.metrics.families import gauge_family
from pipeline.metrics.registered import count_error, job_duration, job_queue_wait, jobs_finished
from pipeline.service.store import Store
from pipeline.workloads import workloads

Workers = Callable[[], Sequence[Mapping[str, Any]]]


class TargetGroup(BaseModel):
    """One entry of Prometheus' HTTP service discovery."""

    targets: list[str] = Field(examples=[["127.0.0.1:34567"]])
    labels: dict[str, str] = Field(examples=[{"worker": "millrace-0", "device": "cpu"}])


def target_groups(workers: Sequence[Mapping[str, Any]]) -> list[TargetGroup]:
    """The workers that serve metrics. `device`: "cpu", or the GPU's UUID as in the label `gpu`."""
    return [
        TargetGroup(
            targets=[worker["metrics_address"]],
            labels={"worker": worker["worker"], "device": worker.get("uuid", worker["name"])},
        )
        for worker in workers
        if worker.get("metrics_address") is not None
    ]


def exposition(store: Store, workers: Workers) -> bytes:
    """All metrics of a service, in Prometheus' text format."""
    return generate_latest(_Everything(_OfService(store, workers)))


def begin_job_counts() -> None:
    """As `zero_counters`, for the metrics of jobs too. Imports every workload, which takes a while."""
    zero_counters()
    for workload in workloads():
        job_queue_wait.labels(workload)
        for outcome in TERMINAL:
            jobs_finished.labels(workload, outcome)
            job_duration.labels(workload, outcome)


class _Everything(Collector):
    """The registry of this process and the collector of one service: a process may have had several."""

    def __init__(self, own: Collector) -> None:
        self._own = own

    def collect(self) -> Iterable[Metric]:
        yield from self._own.collect()
        yield from REGISTRY.collect()


class _OfService(Collector):
    """Reads the store at each scrape."""

    def __init__(self, store: Store, workers: Workers) -> None:
        self._store = store
        self._workers = workers

    def collect(self) -> Iterable[Metric]:
        found = self._workers()
        workers, heartbeats = gauge_family("millrace_workers"), gauge_family("millrace_worker_heartbeat_age_seconds")
        workers.add_metric([], len(found))
        for worker in found:
            if worker.get("heartbeat_age_s") is not None:
                heartbeats.add_metric([worker["worker"]], worker["heartbeat_age_s"])
        yield workers
        yield heartbeats
        try:
            counts, oldest = self._store.counts(), self._store.oldest_queued()
        except MillraceError as error:
            count_error(error)  # the other metrics are still served
            return
        jobs, age = gauge_family("millrace_jobs"), gauge_family("millrace_queue_oldest_age_seconds")
        for state, number in counts.items():
            jobs.add_metric([state], number)
        age.add_metric([], 0.0 if oldest is None else max(time.time() - oldest, 0.0))
        yield jobs
        yield age
