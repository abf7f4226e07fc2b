"""Rows of the table as objects of prometheus_client: metrics to update, and families to fill at a scrape."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from pipeline.metrics.table import ROWS

# Otherwise each series gets a further one with its creation time, which Prometheus does not use.
disable_created_metrics()  # type: ignore[no-untyped-call]


def counter(name: str) -> Counter:
    return Counter(name, ROWS[name].help, ROWS[name].labels)


def gauge(name: str) -> Gauge:
    return Gauge(name, ROWS[name].help, ROWS[name].labels)


def histogram(name: str) -> Histogram:
    return Histogram(name, ROWS[name].help, ROWS[name].labels, buckets=ROWS[name].buckets)


def counter_family(name: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, ROWS[name].help, labels=ROWS[name].labels)


def gauge_family(name: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, ROWS[name].help, labels=ROWS[name].labels)


def histogram_family(name: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, ROWS[name].help, labels=ROWS[name].labels)


def cumulated(name: str, counts: Sequence[int]) -> list[tuple[str, float]]:
    """Cumulative counts for a histogram's family from those of each bucket, the last of all above."""
    total, found = 0, []
    for bound, count in zip([*map(float, ROWS[name].buckets), float("inf")], counts, strict=True):
        total += count
        found.append(("+Inf" if bound == float("inf") else repr(bound), float(total)))
    return found
