"""A service without workers, for tests of what it says over HTTP."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient

from pipeline.errors import ServiceRefused
from pipeline.service.app import make_app
from pipeline.service.http.app_state import Service
from pipeline.service.http.edge import recent
from pipeline.service.roots import DataRoots
from pipeline.service.settings import ServiceSettings
from pipeline.service.store import Store
from tests.pipeline.service.calls import Processes

LOCAL = "http://127.0.0.1:8765"
_routes = {}


class Runner:
    """Notes what it is told."""

    def __init__(self):
        self.woken = 0
        self.acted = []

    def wake(self):
        self.woken += 1

    def act(self, job, actions):
        self.acted.append((job, actions))

    def estimate(self, stored):
        raise ServiceRefused("another job is being planned; ask again")

    def under_way(self, job):
        return None


@pytest.fixture(autouse=True)
def _no_recent_answers(monkeypatch):
    """Tests change what a probe tells faster than a service would tell it."""
    monkeypatch.setattr(recent, "KEEP_S", 0.0)
    monkeypatch.setattr(recent, "KEEP_TIMES", 0.0)
    monkeypatch.setattr(recent, "MOST_PAUSE_S", 0.0)


@pytest.fixture
def world(tmp_path):
    """A service without workers: its parts, and a client of its API as `.http(…)` makes one."""
    data = tmp_path / "data"
    data.mkdir()
    store, runner = Store(tmp_path / "state" / "jobs.sqlite"), Runner()
    made = SimpleNamespace(
        store=store, runner=runner, data=data, previews=tmp_path / "previews", missing=None, audit=None,
        stopping=threading.Event(), closing=threading.Event(), processes=Processes(),
    )  # fmt: skip
    made.previews.mkdir()

    def http(tokens=None, base_url=LOCAL, peer="127.0.0.1", data=data, **settings):
        named = {"tokens_file": tmp_path / "tokens"} if tokens else {}
        wanted = ServiceSettings(state_dir=tmp_path / "state", data_roots=[data], **named, **settings)
        roots = DataRoots([data], but=tmp_path / "state", groups=wanted.group_roots)
        service = Service(
            settings=wanted, store=store, runner=runner, roots=roots,
            previews=made.previews, processes=made.processes, workers=lambda: [{"name": "cpu"}],
            ready=lambda: made.missing, tokens=lambda: tokens, stopping=made.stopping, closing=made.closing,
            audit=made.audit,
        )  # fmt: skip
        app = make_app(service)
        # Analysed at the first request, which takes most of a short test; the same for every service.
        app.router.routes[:] = _routes.setdefault("all", app.router.routes[:])
        return TestClient(app, base_url=base_url, raise_server_exceptions=False, client=(peer, 50_000))

    made.http = http
    yield made
    store.close()
