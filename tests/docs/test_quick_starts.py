"""The commands and the Python of quick starts and tutorials, run from top to bottom in an empty folder."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.workloads.paths import receipt_path
from tests.deploy.waiting import wait_until
from tests.docs.pages import ROOT, blocks, commands
from tests.pipeline.conftest import millrace, own_settings  # noqa: F401

START, TUTORIALS = ROOT / "docs" / "start", ROOT / "docs" / "tutorials"
RUN_HERE = [page for page in [*START.glob("*.md"), *TUTORIALS.glob("*.md")] if page.stem != "administrators"]


@pytest.mark.usefixtures("own_settings")
@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch, millrace):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    known: dict[str, object] = {}
    ran = 0
    for language, text in blocks(page):
        if language == "python":
            exec(compile(text, str(page), "exec"), known)
        elif language == "bash":
            for line in text.replace("\\\n", " ").splitlines():
                if line.startswith("cd "):
                    monkeypatch.chdir(line.split()[1])
                for words in commands(line):
                    code, _, err = millrace(*words)
                    assert (code, err) == (0, ""), f"{line}: {err}"
                    ran += 1
                    if words[0] == "run" and "--dry-run" not in words:
                        outputs = [word for word in words[3:] if not word.startswith("-")]
                        assert receipt_path(Path(outputs[0])).is_file()
                    if "--preview" in words:
                        assert Path(words[words.index("--preview") + 1]).stat().st_size > 0
    assert ran >= 4


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_administrators_page(tmp_path):
    first, second = (text for _, text in blocks(START / "administrators.md", "bash"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")} | {
        "MILLRACE_PORT": "0", "MILLRACE_STATE_DIR": str(tmp_path / "state"), "MILLRACE_DEVICE": "cpu",
        "MILLRACE_CACHE_DIR": os.environ.get("MILLRACE_CACHE_DIR", str(Path.home() / ".cache" / "millrace")),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    log = tmp_path / "log"
    with log.open("wb") as written:
        shell = ["bash", "-ec", first.replace("millrace serve", "exec millrace serve")]
        service = subprocess.Popen(shell, cwd=tmp_path, env=environment, stdout=written, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: "http://" in log.read_text() or service.poll(), "the service's start", log.read_text)
        address = re.search(r"http://[\w.:]+", log.read_text())
        assert address is not None, log.read_text()
        asked = environment | {"MILLRACE_URL": address.group()}
        shell = ["bash", "-ec", second]
        done = subprocess.run(shell, cwd=tmp_path, env=asked, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "succeeded" in done.stdout
        assert (tmp_path / "demo" / "smooth.tif").is_file()
    finally:
        service.terminate()  # SIGINT may have been ignored since before the tests began
        assert service.wait(60) in (0, 128 + signal.SIGTERM)
