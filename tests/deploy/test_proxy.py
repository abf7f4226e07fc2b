"""The manual's reverse proxy passes on what the service reads."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_nginx_names_the_client_and_the_scheme():
    """Without them the cookie would not be for https only, and the audit log would list the proxy's address."""
    passed = re.findall(r"proxy_set_header (\S+) ", (ROOT / "docs/deploy.md").read_text())
    read = re.findall(r'"(x-forwarded-\w+)"', (ROOT / "pipeline/service/http/users/proxies.py").read_text())
    assert {name.lower() for name in passed} == {"host", *read} == {"host", "x-forwarded-for", "x-forwarded-proto"}
