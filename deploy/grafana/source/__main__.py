"""Writes the dashboards' JSON, as Grafana is provisioned with it."""

from __future__ import annotations

import json
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.grafana.source.gpus import gpus
from deploy.grafana.source.service import service
from deploy.grafana.source.throughput import throughput

FOLDER = Path(__file__).parents[1] / "dashboards"


def dashboards() -> dict[str, str]:
    """The JSON of each dashboard, by its file's name."""
    made = [make() for make in (service, throughput, gpus)]
    return {f"{each.uid}.json": json.dumps(each, cls=JSONEncoder, indent=2, ensure_ascii=False) + "\n" for each in made}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in dashboards().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
