"""The expressions of the dashboards and rules, as they are sent to Prometheus: for tests, and for the picture."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[1]
DASHBOARDS = DEPLOY / "grafana" / "dashboards"
RULES = DEPLOY / "prometheus" / "rules"
METRIC = re.compile(r"\b(?:[a-z_]+:)?millrace[a-z0-9_]*(?::[a-z0-9_]+)*")


@dataclass(frozen=True)
class Expression:
    """One expression. `where`: dashboard and panel, or the rule. `legend`: how Grafana names its series."""

    where: str
    expr: str
    legend: str = ""

    @property
    def metrics(self) -> frozenset[str]:
        """The series that it reads, recorded ones too."""
        return frozenset(METRIC.findall(re.sub(r'"[^"]*"', '""', self.expr)))


def dashboards() -> list[dict[str, Any]]:
    """The committed dashboards, in the order of their files."""
    return [json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))]


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """What is drawn; rows are only titles."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def panel_expressions(dashboard: dict[str, Any], panel: dict[str, Any], *, rate_interval: str) -> list[Expression]:
    """With everything chosen in the dashboard's lists, as Grafana fills the variables in.

    rate_interval : for `$__rate_interval`, which Grafana makes four scrapes long at least
    """
    filled = [
        Expression(
            where=f"{dashboard['title']}, {panel['title']}",
            expr=_filled(target["expr"], dashboard, rate_interval),
            legend=target["legendFormat"],
        )
        for target in panel["targets"]
    ]
    if any("$" in each.expr for each in filled):
        raise ValueError(f"{filled[0].where}: a variable is not filled in: {filled}")
    return filled


def _filled(expr: str, dashboard: dict[str, Any], rate_interval: str) -> str:
    for variable in dashboard["templating"].get("list", []):
        expr = expr.replace(f"${variable['name']}", variable["allValue"])
    return expr.replace("$__rate_interval", rate_interval)


def rules() -> Iterator[dict[str, Any]]:
    """Every rule of every file: those that record, and alerts."""
    for path in sorted(RULES.glob("*.yml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from group["rules"]


def rule_expressions() -> list[Expression]:
    """An alert's expression is silent while all is well; here its comparisons answer 0 or 1 instead."""
    return [
        Expression(where=rule["record"], expr=rule["expr"])
        if "record" in rule
        else Expression(where=rule["alert"], expr=_answering(rule["expr"]))
        for rule in rules()
    ]


def _answering(expr: str) -> str:
    return re.sub(r"\s(==|>|<)\s", r" \1 bool ", expr).replace(" unless ", " and ")
