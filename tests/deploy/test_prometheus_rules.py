"""The scrape configuration, the rules and their tests, as `promtool` sees them; alerts and their runbooks."""

from __future__ import annotations

import re
import shutil
import subprocess
from inspect import isclass

import pytest
import yaml

from deploy.grafana.expressions import DEPLOY, rules
from pipeline import errors
from pipeline.errors import AuditError, UserError

PROMETHEUS = DEPLOY / "prometheus"
TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))
ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus"
)


def promtool(*arguments):
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


@needs_promtool
def test_the_configuration_and_the_rules_are_clean():
    code, said = promtool("check", "config", "--lint=all", "--lint-fatal", PROMETHEUS / "prometheus.yml")
    assert code == 0, said
    assert "2 rule files found" in said
    for path in sorted((PROMETHEUS / "rules").glob("*.yml")):
        code, said = promtool("check", "rules", "--lint=all", "--lint-fatal", path)
        assert code == 0, said


@needs_promtool
@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_rules_do_what_their_tests_say(path):
    code, said = promtool("test", "rules", path)
    assert code == 0, said


def _outcomes():
    """For each alert, whether cases are there in which it fires and in which it is quiet; the same for records."""
    fires, quiet, recorded = set(), set(), set()
    for path in TESTS:
        for case in yaml.safe_load(path.read_text())["tests"]:
            for asked in case.get("alert_rule_test", []):
                (fires if asked["exp_alerts"] else quiet).add(asked["alertname"])
            recorded |= {asked["expr"] for asked in case.get("promql_expr_test", [])}
    return fires, quiet, recorded


def test_every_alert_is_seen_to_fire_and_to_be_quiet_and_every_record_is_computed():
    fires, quiet, recorded = _outcomes()
    assert fires == quiet == set(ALERTS)
    assert recorded >= {rule["record"] for rule in rules() if "record" in rule}


def _anchors(markdown):
    """Where a link to a heading leads: small letters, hyphens for spaces, nothing else that is no letter or digit."""
    headings = re.findall(r"^#+ (.+)$", markdown, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_an_alert_says_how_urgent_it_is_and_what_to_do(name):
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert {"summary", "description", "runbook_url"} == set(rule["annotations"])
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    markdown = (DEPLOY.parent / page).read_text()
    assert anchor in _anchors(markdown)
    assert f"`{name}`" in markdown


def test_errors_of_users_wake_nobody():
    theirs = {name for name, kind in vars(errors).items() if isclass(kind) and issubclass(kind, UserError)}
    excluded = re.search(r'kind!~"([^"]+)"', ALERTS["MillraceErrors"]["expr"])[1]
    assert set(excluded.split("|")) == theirs | {AuditError.__name__}
