"""The record of the GPU tests speaks of all of them, or is left as it was."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests import gpu_record

EVERY = ["-p", "no:benchmark", "-n", "20", "--dist", "worksteal", "--durations=10"]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Runs of pytest that pass one test each; what they are given, and how they end."""
    ran = SimpleNamespace(arguments=[], status=0, record=tmp_path / "gpu-record.json")

    def main(arguments, plugins):
        ran.arguments.append(arguments)
        plugins[0].outcomes["tests/test_a.py::test_one"] = "passed"
        return ran.status

    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setattr(gpu_record, "RECORD", ran.record)
    monkeypatch.setattr(gpu_record, "devices", lambda: {"devices": ["a GPU"]})
    monkeypatch.setattr(gpu_record, "_files", lambda: ["tests/test_a.py"])
    monkeypatch.setattr(pytest, "main", main)
    return ran


@pytest.mark.parametrize(
    "arguments", [[], EVERY, ["-q", "-n20"], ["-vv", "--tb", "short", "-rA"], ["-pno:cacheprovider"]]
)
def test_a_run_of_every_test_is_recorded(runs, arguments):
    assert gpu_record.run(arguments) == 0
    assert runs.arguments == [["-m", "gpu or multi_gpu", *arguments, "tests/test_a.py"]]
    record = json.loads(runs.record.read_text())
    assert (record["passed"], record["failed"], record["arguments"]) == (1, 0, arguments)
    assert gpu_record.check()[0]


@pytest.mark.parametrize(
    "arguments",
    [
        ["-k", "one"], ["-kone"], ["-m", "gpu"], ["tests/test_b.py"], ["--lf"], ["--last-failed"], ["--ff", "-x"],
        ["-x"], ["--maxfail=1"], ["--deselect", "tests/test_a.py::test_two"], ["--deselect=tests/test_a.py::test_two"],
        ["--ignore=tests/kernels"], ["--collect-only"], ["--co"], ["--stepwise"], ["-c", "other.ini"],
        ["-o", "testpaths=x"], [*EVERY, "-k", "one"], ["-n", "2", "tests/test_b.py"], ["-qx"], ["--an-option-to-come"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_run_of_some_tests_leaves_the_record_alone(runs, arguments, capsys):
    runs.record.write_text("the one before")
    assert gpu_record.run(arguments) == 0
    assert len(runs.arguments) == 1
    assert runs.record.read_text() == "the one before"
    assert "the record stays" in capsys.readouterr().err


@pytest.mark.parametrize(("devices", "ranks"), [(["one"], "several on one GPU"), (["one", "two"], "a GPU each")])
def test_the_record_says_whether_ranks_shared_a_gpu(runs, monkeypatch, devices, ranks):
    monkeypatch.setattr(gpu_record, "devices", lambda: {"devices": devices})
    gpu_record.run([])
    assert json.loads(runs.record.read_text())["ranks"] == ranks
    assert f"on {', '.join(devices)} (ranks: {ranks}), " in gpu_record.check()[1]


def test_the_environment_selects_too(runs, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k 'one or two'")
    assert gpu_record.run([]) == 0
    assert not runs.record.exists()


@pytest.mark.parametrize("status", [pytest.ExitCode.INTERRUPTED, pytest.ExitCode.USAGE_ERROR])
def test_a_run_that_came_to_no_end_leaves_the_record_alone(runs, status):
    runs.status = int(status)
    assert gpu_record.run([]) == status
    assert not runs.record.exists()
