"""The HTTP API against its own description: Schemathesis makes requests of it, valid or not, and checks each answer."""

from __future__ import annotations

from contextlib import suppress

import pytest

from pipeline.service.http.users.tokens import Tokens, token_line
from pipeline.service.jobs import Computed, Planned, Published
from pipeline.service.store import Facts

TOKEN = "mr_of-the-tests"
# What is valid by the schema may still be refused: a path outside the roots, an array that ends before it begins.
ALSO_REFUSED = {"expected-statuses": ["2xx", "401", "403", "404", "409", "422"]}
CONFIG = {
    "seed": 1,
    "auth": {"openapi": {"token": {"bearer": TOKEN}}},
    "generation": {"max-examples": 4, "deterministic": True, "database": "none"},
    "phases": {"stateful": {"max-steps": 5}},
    "operations": [
        *(
            {"include-name": what, "checks": {"positive_data_acceptance": ALSO_REFUSED}}
            for what in ("POST /v1/jobs", "GET /v1/files", "GET /v1/images", "GET /v1/images/slice")
        ),
        # A target is exactly one of its fields.
        *(
            {"include-name": f"POST /v1/admin/{what}", "checks": {"positive_data_acceptance": ALSO_REFUSED}}
            for what in ("hold", "release", "cancel")
        ),
    ],
}


@pytest.fixture
def app(world, tmp_path):
    """A service whose jobs end as soon as they are there: waiting for their events does not take for ever."""
    pytest.importorskip("schemathesis", reason="needs Schemathesis")
    (tmp_path / "tokens").write_text(token_line("ada", TOKEN, "operator"))

    def finish(*_):
        store = world.store
        while (claimed := store.claim("r", now=1.0, lease_s=9.0, owner_cap=99)) is not None:
            job, epoch = claimed.job.id, claimed.job.epoch
            for event in (Planned(epoch, 4), Computed(epoch)):
                store.apply(job, event, now=2.0)
            store.apply(job, Published(epoch), now=3.0, facts=Facts(receipt={"chunks": 4}))
            (world.previews / f"{job}.png").write_bytes(b"\x89PNG")
            with suppress(OSError, ValueError):
                (world.data / claimed.asked.output).write_bytes(b"samples")

    world.runner.wake = world.runner.act = finish
    world.store.set_cap = lambda *_, **__: None  # it would refuse the other requests
    return world.http(Tokens(tmp_path / "tokens")).app


@pytest.mark.slow
def test_every_answer_is_as_described(app, monkeypatch):
    # Requests looks for proxies in the whole environment, twice for each request.
    monkeypatch.setattr("requests.sessions.get_environ_proxies", lambda *_, **__: {})
    from schemathesis.config import SchemathesisConfig
    from schemathesis.engine import Status, events, from_schema
    from schemathesis.openapi import from_asgi

    schema = from_asgi("/openapi.json", app, config=SchemathesisConfig.from_dict(CONFIG))
    faults, phases, statuses = [], {}, set()
    for event in from_schema(schema).execute():
        if isinstance(event, events.PhaseFinished):
            phases[event.phase.name.name] = event.status
        elif isinstance(event, events.NonFatalError | events.FatalError):
            faults.append(str(event))
        elif isinstance(event, events.ScenarioFinished):
            statuses |= {(each.response.status_code) for each in event.recorder.interactions.values() if each.response}
            faults += [
                f"{check.failure_info.failure.operation}: {check.failure_info.failure.title}: "
                f"{check.failure_info.failure.message}\n{event.recorder.cases[case].value.as_curl_command()}"
                for case, checks in event.recorder.checks.items()
                for check in checks
                if check.failure_info is not None
            ]
    assert faults == [], "\n\n".join(faults)
    assert {name: phases[name] for name in ("EXAMPLES", "COVERAGE", "FUZZING", "STATEFUL_TESTING")} == dict.fromkeys(
        ("EXAMPLES", "COVERAGE", "FUZZING", "STATEFUL_TESTING"), Status.SUCCESS
    )
    assert {200, 201, 401, 404, 422} <= statuses
