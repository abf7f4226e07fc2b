"""One browser for the tests of a module."""

from __future__ import annotations

import pytest

from tests.pipeline.service.live import WAIT_S


@pytest.fixture(scope="module")
def browser():
    from tests.pipeline.service.web.browsing import CHROMIUM, OPTIONS, playwright

    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=list(OPTIONS), timeout=1e3 * WAIT_S)
        yield started
        started.close()
