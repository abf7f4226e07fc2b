"""The manual builds without a warning, asks nothing of other sites, and leaves out no page."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT

pytest.importorskip("mkdocs", reason="needs MkDocs: the extra docs")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built manual. Broken links, anchors and references are warnings, which --strict refuses."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "not included in the" not in built.stderr, built.stderr  # pages that the navigation leaves out
    return folder


def test_pages_load_nothing_from_other_sites(site):
    loaded = re.compile(r"<(?:script|img|source)[^>]* src=\"?(https?:[^\s\">]+)|<link[^>]* href=\"?(https?:.+?)\"")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        assert loaded.findall(page.read_text()) == [], page
    for sheet in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//[^)]*", sheet.read_text()) == [], sheet


def test_the_reference_has_every_command_option_and_path(site):
    from pipeline.cli import cli
    from pipeline.workloads import workloads

    text = {page.name: page.read_text() for page in (site / "reference").rglob("*.html")}
    assert all(f'id="{name}"' in text["run.html"] for name in workloads())
    for option in ("--memory", "--sigma", "--traj-units", "--scheme", "--footprint"):
        assert f"<code>{option}" in text["run.html"]
    everything = "".join(text.values())
    assert [name for name in cli.commands if f"millrace {name}" not in everything] == []
    assert all(path in text["http.html"] for path in ("POST /v1/jobs", "GET /v1/jobs/{job}/events", "GET /readyz"))
    assert 'id="pipeline.client.Client.submit"' in text["python.html"]
    assert "<code>size</code>: samples along each filtered axis" in text["python.html"]


def test_the_readme_links_to_files_and_headings():
    text = (ROOT / "README.md").read_text()
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]+)(#[^)]*)?\)", text):
        assert (ROOT / target).exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (ROOT / target).read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", each).strip().lower().replace(" ", "-") for each in headings}
            assert anchor[1:] in slugs, target + anchor


def test_charts_are_drawn_from_their_data():
    drawing = runpy.run_path(str(ROOT / "docs" / "pictures" / "performance.py"))
    for name, text in drawing["charts"]().items():
        assert (ROOT / "docs" / "pictures" / name).read_text() == text, f"{name}: run docs/pictures/performance.py"
    bars = drawing["chart"]("a < b", "s", [("each", {"Millrace": 1.0, "rival": 100.0})])
    widths = [float(each) for each in re.findall(r'<rect x="100" [^>]*width="([0-9.]+)"', bars)]
    assert widths == [92.5, 277.5]  # a decade each, from 0.1 to 1000
    assert "a &lt; b" in bars
