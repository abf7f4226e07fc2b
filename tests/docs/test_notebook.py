"""The example notebook, cell by cell, in what looks like a notebook's kernel, against a service that is alive."""

from __future__ import annotations

import ast
import json
import re
import sys
from types import SimpleNamespace

import pytest

from pipeline.cli.demo import make_demo_inputs
from pipeline.client.display import in_notebook, job_html
from tests.docs.pages import ROOT
from tests.pipeline.service.live import WAIT_S, live_service

VIEW = {
    "workload": "smooth", "input": "a<b>.tif", "output": "out.tif", "state": "running", "error": None,
    "chunks": 4000, "chunks_done": 1250,
}  # fmt: skip


class Display:
    """IPython's: notes the HTML of each object that is shown, first and in the same place again."""

    def __init__(self):
        self.shown = []

    def display(self, thing, *, display_id):
        assert display_id is True
        self.update(thing)
        return self

    def update(self, thing):
        self.shown.append(thing._repr_html_())


@pytest.fixture
def notebook(monkeypatch):
    display = Display()
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell, display=display))
    return display


def run_cell(source, known):
    """The value of the last line, if it is an expression, as a notebook shows it."""
    *body, last = ast.parse(source).body
    if not isinstance(last, ast.Expr):
        body, last = [*body, last], None
    exec(compile(ast.Module(body, []), "cell", "exec"), known)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), known)


def test_the_notebook_runs(tmp_path, monkeypatch, notebook):
    cells = json.loads((ROOT / "docs" / "examples" / "service.ipynb").read_text())["cells"]
    known = {}
    monkeypatch.setattr("pipeline.client.job.MOST_DRAWING_S", WAIT_S)
    with live_service(tmp_path) as (url, _, data):
        make_demo_inputs(data, 256, 0)
        monkeypatch.setenv("MILLRACE_URL", url)
        monkeypatch.delenv("MILLRACE_TOKEN", raising=False)
        monkeypatch.chdir(tmp_path)
        values = [run_cell("".join(cell["source"]), known) for cell in cells if cell["cell_type"] == "code"]
        names, _, job, facts, audit = values
        assert {"smooth", "coulomb", "mri"} <= set(names)
        assert facts[0] == (256, 256, 3)
        assert audit["worst_error"] <= 1
    assert ": queued" in notebook.shown[0] or ": planning" in notebook.shown[0] or ": running" in notebook.shown[0]
    assert ": succeeded" in notebook.shown[-1]
    assert "data:image/png;base64," in notebook.shown[-1]
    assert "<img" not in job._repr_html_()  # the service is gone
    known["client"].close()
    assert job._repr_html_() == job_html(job.view)


def test_a_running_job_has_a_bar_and_its_names_are_text():
    found = job_html(VIEW)
    assert re.search(r'<progress max="4000" value="1250"></progress> 1,250 of 4,000 chunks', found)
    assert "a&lt;b&gt;.tif → out.tif: running" in found
    assert "<img" not in found


def test_a_failed_job_names_its_error():
    assert job_html(VIEW | {"state": "failed", "error": "no <space>"}).endswith("failed<br>no &lt;space&gt;</div>")


def test_a_terminal_is_no_notebook(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not in_notebook()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert not in_notebook()
