"""The dashboards: the committed files are what the script makes, and what Grafana and an operator need is in them."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.expressions import (
    DASHBOARDS,
    DEPLOY,
    dashboards,
    panel_expressions,
    panels,
    rule_expressions,
    rules,
)
from deploy.grafana.source.__main__ import dashboards as made
from pipeline.metrics.table import TABLE
from pipeline.workloads import workloads

GRID_COLUMNS = 24
# What Grafana writes a number in; another name, unless it is a suffix of ours, would stand behind the number as it is.
UNITS = {unit for name, unit in vars(units).items() if not name.startswith("_") and isinstance(unit, str)}
PROVISIONING = DEPLOY / "grafana" / "provisioning"
BOARDS = {board["uid"]: board for board in dashboards()}
PANELS = [
    pytest.param(board, panel, id=f"{board['uid']}-{panel['id']}")
    for board in BOARDS.values()
    for panel in panels(board)
]


def test_the_committed_files_are_what_the_script_makes():
    assert {path.name: path.read_text() for path in DASHBOARDS.iterdir()} == made()


def test_addresses_that_people_keep():
    assert set(BOARDS) == {"millrace-service", "millrace-throughput", "millrace-gpus"}
    for board in BOARDS.values():
        identities = [panel["id"] for panel in board["panels"]]
        assert len(identities) == len(set(identities))
        assert min(identities) > 0


@pytest.mark.parametrize("uid", sorted(BOARDS))
def test_the_types_of_grafana_hold_all_that_is_in_a_file(uid):
    plugins.register_default_plugins()
    read = Dashboard.from_json(BOARDS[uid])
    for link in read.links:
        link.placement = None  # where a file says nothing, the types fill in a menu
    assert json.loads(json.dumps(read, cls=JSONEncoder)) == BOARDS[uid]


@pytest.mark.parametrize(("board", "panel"), PANELS)
def test_a_panel_says_what_it_shows_and_in_which_unit(board, panel):
    defaults = panel["fieldConfig"]["defaults"]
    assert panel["title"]
    assert len(panel["description"]) > 15
    assert panel["description"].endswith(".")
    assert defaults["unit"] in UNITS or defaults["unit"].startswith("suffix: ")
    queries = panel_expressions(board, panel, rate_interval="1m")
    assert all(query.legend for query in queries)
    assert panel["datasource"]["uid"] == "millrace-prometheus"
    assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
    letters = [target["refId"] for target in panel["targets"]]
    assert len(letters) == len(set(letters)) > 0
    steps = defaults.get("thresholds", {}).get("steps", [])
    values = [step["value"] for step in steps[1:]]
    assert values == sorted(values)
    assert panel["type"] != "timeseries" or len(steps) < 2 or "thresholdsStyle" in defaults["custom"]


@pytest.mark.parametrize("uid", sorted(BOARDS))
def test_no_panel_lies_on_another_or_beside_the_grid(uid):
    taken = set()
    for panel in BOARDS[uid]["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= GRID_COLUMNS
        cells = {
            (row, column)
            for row in range(place["y"], place["y"] + place["h"])
            for column in range(place["x"], place["x"] + place["w"])
        }
        assert not cells & taken
        taken |= cells


def _alert_limit(name):
    expr = next(rule["expr"] for rule in rules() if rule.get("alert") == name)
    return float(re.search(r"[>=] ([\d.]+)", expr)[1])


@pytest.mark.parametrize(
    ("uid", "title", "alert"),
    [
        ("millrace-service", "Oldest in the queue", "MillraceQueueAges"),
        ("millrace-service", "Share that fails", "MillraceJobsFailing"),
        ("millrace-service", "Audit error", "MillraceAuditError"),
        ("millrace-service", "Workers started again", "MillraceWorkersRestarting"),
        ("millrace-gpus", "Share of the memory", "MillraceGpuMemoryFull"),
        ("millrace-gpus", "Fullest memory", "MillraceGpuMemoryFull"),
    ],
)
def test_a_panel_turns_red_where_the_alert_comes(uid, title, alert):
    found = [panel for panel in panels(BOARDS[uid]) if panel["title"] == title]
    assert found
    for panel in found:
        step = panel["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]
        assert (step["color"], step["value"]) == ("red", _alert_limit(alert))


def test_overlap_efficiency_stands_against_the_recorded_goal():
    goal = next(rule["expr"] for rule in rules() if rule.get("record") == "millrace:overlap_efficiency:goal")
    found = [panel for panel in panels(BOARDS["millrace-throughput"]) if panel["title"].startswith("Overlap")]
    assert len(found) == 2
    for panel in found:
        step = panel["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]
        assert f"vector({step['value']})" == goal
        assert step["color"] == "green"


@pytest.mark.parametrize("title", ["Work", "Work by worker"])
def test_work_of_every_unit_can_be_seen_beside_the_others(title):
    """Pairs are thousands of times as many as samples: on a linear axis one would hide the other."""
    described, panel = (
        next(panel for panel in panels(BOARDS["millrace-throughput"]) if panel["title"] == each)
        for each in ("Work", title)
    )
    assert panel["fieldConfig"]["defaults"]["custom"]["scaleDistribution"] == {"type": "log", "log": 10}
    assert "min" not in panel["fieldConfig"]["defaults"]
    assert {workload.unit for workload in workloads().values()} <= set(re.findall(r"\w+", described["description"]))


def test_every_metric_is_shown_or_ruled_on_and_every_series_is_there_to_be_read():
    shown = {
        name
        for board in BOARDS.values()
        for panel in panels(board)
        for query in panel_expressions(board, panel, rate_interval="1m")
        for name in query.metrics
    } | {name for expression in rule_expressions() for name in expression.metrics}
    served = {row.name + "_bucket" if row.kind == "histogram" else row.name for row in TABLE}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert shown == served | recorded


def test_grafana_is_told_of_the_datasource_and_the_folder():
    source = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"][0]
    assert (source["uid"], source["type"]) == ("millrace-prometheus", "prometheus")
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    provider = yaml.safe_load((PROVISIONING / "dashboards" / "millrace.yml").read_text())["providers"][0]
    assert provider["type"] == "file"
    assert provider["options"]["path"].startswith("/")
    assert not provider["allowUiUpdates"]
