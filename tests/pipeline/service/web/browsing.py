"""A real browser, headless Chromium, for tests of the pages."""

from __future__ import annotations

import re
import shutil
from contextlib import contextmanager

import pytest

from tests.pipeline.service.live import WAIT_S

playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NEEDS_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")

OPTIONS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}


@contextmanager
def page_of(browser, url, *, refusals=0, **options):
    """A page of a fresh browser; nothing may have gone wrong in it, and nothing may have been asked of anybody else.

    refusals : requests that the service is expected to refuse, which Chromium reports as errors
    """
    context = browser.new_context(base_url=url, **options)
    context.set_default_timeout(1e3 * WAIT_S)
    page, asked, faults = context.new_page(), [], []
    context.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    yield page
    refused = [fault for fault in faults if fault.startswith("Failed to load resource: the server responded with")]
    assert len(refused) == refusals, faults
    assert len(faults) == refusals, faults
    assert [each for each in asked if not each.startswith(f"{url}/")] == []
    context.close()


def shows(page, place, text):
    playwright.expect(page.locator(place)).to_have_text(re.compile(text, re.DOTALL), timeout=1e3 * WAIT_S)
