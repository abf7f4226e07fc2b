"""What a scrape says, as Python values."""

from __future__ import annotations

import socket
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def families(text):
    """Our families by name, without `_total`."""
    found = {family.name: family for family in text_string_to_metric_families(text)}
    return {name: family for name, family in found.items() if name.startswith("millrace_")}


def samples(text):
    """Our samples: values by (name, labels sorted)."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families(text).values()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def scraped(address):
    """Our samples at HOST:PORT."""
    with urlopen(f"http://{address}/metrics", timeout=60) as response:
        return samples(response.read().decode())
