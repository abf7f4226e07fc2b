"""The page of the HTTP API: it has all of the OpenAPI document, needs no other machine, and its examples work."""

from __future__ import annotations

import json
import re
import shlex

import numpy as np
import pytest

from pipeline.service.http.users.tokens import Tokens, token_line
from pipeline.service.web.reference import marked, operations
from tests.images import write_image


def asked(client, curl):
    """The answer to a request that a command line would make."""
    words = shlex.split(curl.replace("\\\n", " "))
    assert words.pop(0) == "curl"
    path, method, body, headers = words.pop(0).removeprefix("$MILLRACE_URL"), "GET", None, {}
    while words:
        match words.pop(0):
            case "-H":
                name, _, value = words.pop(0).partition(": ")
                headers[name] = value.replace("$MILLRACE_TOKEN", "secret")
            case "-X":
                method = words.pop(0)
            case "-d":
                method, body = "POST", words.pop(0)
            case option:
                assert option in ("--no-buffer", "--remote-name", "--remote-header-name")
    return client.request(method, path, headers=headers, content=body)


def test_every_example_is_a_request_that_the_service_takes(world, tmp_path):
    (tmp_path / "tokens").write_text(token_line("ada", "secret", "operator"))
    client = world.http(Tokens(tmp_path / "tokens"))
    write_image(world.data / "scan.tif", np.ones((5, 7), np.uint8), "YX")
    found = list(operations(client.app.openapi()))
    assert {f"{each.method} {each.path}" for each in found} >= {"POST /v1/jobs", "POST /v1/admin/caps", "GET /livez"}
    for each in found:
        answer = asked(client, each.curl)
        of_a_job = "5f0c2b9a1d3e" in each.curl and answer.status_code == 404
        assert answer.is_success or (of_a_job and "there is no job 5f0c2b9a1d3e" in answer.text), (each.curl, answer)
    assert world.store.list_jobs()[0].asked.output == "smooth.tif"


def test_everything_that_is_described_is_on_the_page(world):
    client = world.http()
    document, page = client.app.openapi(), client.get("/api").text
    assert page.count('class="card operation"') == sum(map(len, document["paths"].values())) + len(
        document["components"]["schemas"]
    )
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert f'<section class="card operation" id="{operation["operationId"]}">' in page, path
            for parameter in operation.get("parameters", ()):
                assert f"<code>{parameter['name']}</code>" in page
    for name, schema in document["components"]["schemas"].items():
        assert f'id="{name.lower()}"' in page
        for field in (*schema.get("properties", ()), *schema.get("enum", ())):
            assert f"<code>{field}</code>" in page
    targets = set(re.findall(r'href="#([^"]+)"', page)) - {"main"}
    assert targets <= set(re.findall(r' id="([^"]+)"', page)), "each link leads somewhere"
    assert "export MILLRACE_URL=http://127.0.0.1:8765" in page
    assert "export MILLRACE_TOKEN" not in page, "this service needs none"
    assert re.findall(r'(?:src|href)="(?:https?:)?//', page) == []
    assert '<a href="/api">HTTP API</a>' in client.get("/").text


def test_only_those_who_are_signed_in_see_it(world, tmp_path):
    (tmp_path / "tokens").write_text(token_line("eve", "secret", "viewer"))
    client = world.http(Tokens(tmp_path / "tokens"))
    assert client.get("/api", follow_redirects=False).headers["location"] == "/login?next=/api"
    assert client.post("/login", content=json.dumps({"token": "secret"}), headers={"Content-Type": "application/json"})
    assert "export MILLRACE_TOKEN=…" in client.get("/api").text


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("one\ntwo `<b>` & three\n\nfour", "one two <code>&lt;b&gt;</code> &amp; three\n\nfour"),
        ("a folder\n\nafter    : only names\nwith this", "a folder\n\nafter    : only names with this"),
        ("before\nafter : x\ncontains : y", "before\nafter : x\ncontains : y"),
        ("list of [JobView](#jobview)", 'list of <a href="#jobview">JobView</a>'),
        ("[a](javascript:x)", "[a](javascript:x)"),
    ],
)
def test_texts(text, html):
    assert marked(text) == html
