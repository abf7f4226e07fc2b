"""The web pages as the server renders them: everything is there without JavaScript, and nothing is left unescaped."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from urllib.parse import quote

import pytest

from pipeline.engine.stages import StageRecord
from pipeline.service.http.users.tokens import Tokens, new_token, token_line
from pipeline.service.jobs import Failed, Planned
from pipeline.service.running.run import UnderWay
from tests.pipeline.service.calls import accepted, succeed

EVIL = '<script>alert("x")</script>'
VOID = {"br", "img", "input", "link", "meta"}


class Balanced(HTMLParser):
    """Every tag that opens also closes, in order."""

    def __init__(self):
        super().__init__()
        self.open, self.inline = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self.inline += [name for name, _ in attrs if name.startswith("on") or name == "style"]

    def handle_endtag(self, tag):
        if tag in ("option", "li", "dt", "dd", "tr", "td", "th") and self.open[-1] != tag:
            return
        assert self.open.pop() == tag


def page(client, path, status=200, **options):
    response = client.get(path, **options)
    assert response.status_code == status, response.text
    assert "script-src 'self'" in response.headers["content-security-policy"]
    parser = Balanced()
    parser.feed(response.text)
    assert (parser.open, parser.inline) == ([], [])
    assert re.search(r'(src|href)="(https?:)?//', response.text) is None, "a page asks for something elsewhere"
    return response.text


def test_the_queue_with_filters_and_pages(world):
    client = world.http()
    assert "No jobs yet" in page(client, "/")
    jobs = [accepted(client, output=f"{number}.npy") for number in range(60)]
    text = page(client, "/")
    assert text.count('<a href="/jobs/') == 50
    older = re.search(r'href="(/\?[^"]*before=\d+)"', text)[1].replace("&amp;", "&")
    assert page(client, older).count('<a href="/jobs/') == 10
    succeed(world.store, jobs[0])
    text = page(client, "/?state=succeeded&workload=smooth&owner=local")
    assert jobs[0] in text
    assert text.count('<a href="/jobs/') == 1
    assert "No jobs match" in page(client, "/?owner=nobody")


def test_folders_lead_to_their_files(world):
    client, data = world.http(), world.data
    (data / EVIL.replace("/", "")).mkdir()
    (data / "sub dir").mkdir()
    for number in range(60):
        (data / "sub dir" / f"{number:02}.npy").touch()
    (data / "sub dir" / "atoms.pqr").touch()
    assert f'href="/data?path={data}"' in page(client, "/data")
    text = page(client, f"/data?path={data}")
    inside = re.search(r'href="(/data\?path=[^"]*sub%20dir)"', text)[1]
    text = page(client, inside)
    assert text.count('href="/view?path=') == 50
    assert f"/submit?input={data}/sub%20dir/00.npy" in text
    text = page(client, re.search(r'href="(/data[^"]*after=49.npy)"', text)[1].replace("&amp;", "&"))
    assert text.count('href="/view?path=') == 10
    assert "/view?" not in page(client, f"{inside}&contains=atoms")
    assert "No names here contain this text" in page(client, f"{inside}&contains=nothing")
    assert "outside the service" in page(client, "/data?path=/etc", 422, headers={"Accept": "text/html"})
    assert f'name="input" required maxlength="4096" value="{data}/in.npy"' in page(
        client, f"/submit?input={data}/in.npy"
    )


def test_rare_parameters_are_folded_unless_they_were_given(world):
    client = world.http()
    for path, is_open in (("/submit", ""), (f"/submit?like={accepted(client, parameters={'mode': 'wrap'})}", " open")):
        text = page(client, path)
        folded = text[text.index(f"<details{is_open}>") : text.index("</details>")]
        assert 'data-parameter="mode"' in folded
        assert 'data-parameter="size"' not in folded


def test_a_job_in_each_of_its_states(world):
    client = world.http()
    job = accepted(client)
    text = page(client, f"/jobs/{job}")
    assert f'data-post="/v1/jobs/{job}/cancel"' in text
    world.store.claim("r", now=1.0, lease_s=9.0, owner_cap=99)
    world.store.apply(job, Planned(1, 4), now=2.0)
    assert "0 of 4 chunks" in page(client, f"/jobs/{job}")
    world.store.apply(job, Failed(1, "in.npy: truncated", transient=False), now=3.0)
    text = page(client, f"/jobs/{job}")
    assert "in.npy: truncated" in text
    assert f'data-post="/v1/jobs/{job}/retry"' in text
    assert "/cancel" not in text


def test_a_result_with_stages_receipt_and_picture(world):
    client = world.http()
    job = accepted(client)
    stage = {"seconds": 1.0, "bytes": 1 << 20, "lanes": 2}
    succeed(world.store, job, {"chunks": 4, "wall_seconds": 2.0, "stages": {"read": stage, "compute": stage}})
    (world.previews / f"{job}.png").write_bytes(b"\x89PNG")
    assert "Download" not in page(client, f"/jobs/{job}"), "the result has been moved"
    (world.data / "out.npy").write_bytes(b"samples")
    text = page(client, f"/jobs/{job}")
    assert text.count("25 % busy") == 2
    assert "512 KiB/s" in text
    assert f'src="/v1/jobs/{job}/preview"' in text
    assert "wall_seconds" in text
    assert f'href="/v1/jobs/{job}/result"' in text


def test_a_run_under_way_shows_what_workers_have_not_finished_too(world):
    client = world.http()
    job = accepted(client)
    world.store.claim("r", now=1.0, lease_s=9.0, owner_cap=99)
    world.store.apply(job, Planned(1, 8), now=2.0)
    record = StageRecord()
    record.include({"read": (1.0, 4 << 20, 4), "write": (0.5, 1 << 20, 4)})
    record.under_way["segment"] = {"read": (1.0, 2 << 20, 2), "write": (0.5, 1 << 20, 2)}
    run = UnderWay(seconds=4.0, stages=record.now(), chunks_done=6)
    world.runner.under_way = lambda asked: run if asked == job else None
    text = page(client, f"/jobs/{job}")
    for said in ("6 of 8 chunks", "50 % busy", "25 % busy", "1.5 MiB/s", "512 KiB/s"):
        assert said in text
    assert record.totals["read"].nbytes == 4 << 20, "what is under way is not counted yet"


@pytest.mark.parametrize("field", ["input", "output"])
def test_what_users_write_is_escaped(world, field):
    client = world.http()
    job = accepted(client, **{field: f"{EVIL}.npy"})
    world.store.log(job, EVIL, now=1.0)
    for path in ("/", f"/jobs/{job}", f"/?owner={EVIL}"):
        assert EVIL not in page(client, path)
    assert page(client, f"/jobs/{job}").count("&lt;script&gt;") >= 2


def test_a_name_cannot_pass_itself_off_as_another(world):
    """U+202E turns what follows it around; a line break would be shown as a blank."""
    client, name = world.http(), "scan\u202eypn.fit\n.npy"
    job = accepted(client, output=name)
    world.store.log(job, name, now=1.0)
    for path in ("/", f"/jobs/{job}"):
        assert "\u202e" not in page(client, path)
        assert r"scan\u202eypn.fit\n.npy" in page(client, path)
    assert page(client, f"/submit?like={job}").count(name) == 1, "what is sent again is the name itself"


def test_the_form_asks_for_every_parameter(world):
    from pipeline.workloads import workloads

    client = world.http()
    for name, workload in workloads().items():
        text = page(client, f"/submit?workload={name}")
        for field, info in workload.Parameters.model_fields.items():
            assert f'data-parameter="{info.alias or field}"' in text
    assert client.get("/submit?workload=mining").status_code == 404


@pytest.mark.parametrize("name", ["lambda", "lamda"])
def test_the_form_shows_an_earlier_job_s_lambda_by_either_spelling(world, name):
    client = world.http()
    job = accepted(client, workload="mri", output="out.npy", parameters={name: 0.25})
    text = page(client, f"/submit?like={job}")
    assert re.search(r'data-parameter="lambda" placeholder="0.01" value="0.25"', text)
    assert "lamda" not in text


def test_workers_and_static_files(world):
    client = world.http()
    assert "cpu" in page(client, "/workers")
    world.missing = "there is no worker"
    assert "there is no worker" in page(client, "/workers")
    for name, kind in (("style.css", "text/css"), ("app.js", "text/javascript")):
        assert client.get(f"/static/{name}").headers["content-type"].startswith(kind)
    assert client.get("/jobs/000000000000").status_code == 404


def test_a_page_for_looking_at_files(world):
    client = world.http()
    text = page(client, f"/view?path={quote(EVIL)}&path=folder/a.tif")
    assert EVIL not in text
    assert 'href="/data?path=folder"' in text
    assert text.count("<canvas") == text.count("/v1/images/slice?path=") == 2
    assert "/data?path=" not in page(client, "/view?path=s3://bucket/a.zarr")
    for query in ("", "?path=a&path=b&path=c", f"?path={'a' * 5000}"):
        page(client, f"/view{query}", 422, headers={"Accept": "text/html"})
    job = accepted(client, input="in sub/in.npy", output="out.npy")
    assert "/view?" not in page(client, f"/jobs/{job}")
    succeed(world.store, job)
    pair = f"/view?path={world.data}/in%20sub/in.npy&amp;path={world.data}/out.npy"
    assert f'href="{pair}"' in page(client, f"/jobs/{job}")
    other = accepted(client, workload="coulomb", input="in.pqr", output="map.dx", parameters={"spacing": "1"})
    succeed(world.store, other)
    assert f'href="/view?path={world.data}/map.dx"' in page(client, f"/jobs/{other}")


def test_signing_in(world, tmp_path):
    token = new_token()
    (tmp_path / "tokens").write_text(token_line("ada", token))
    client = world.http(Tokens(tmp_path / "tokens"))
    answer = client.get("/", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, "/login?next=/")
    assert 'data-next="/"' in page(client, "/login?next=//evil.example")
    assert client.post("/login", json={"token": "wrong"}).status_code == 401
    signed = client.post("/login", json={"token": token})
    cookie = signed.headers["set-cookie"]
    assert signed.status_code == 204
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "Sign out ada" in page(client, "/")
    assert accepted(client)
    assert client.post("/logout", follow_redirects=False).headers["location"] == "/login"
    assert client.get("/", follow_redirects=False).status_code == 307


def test_the_form_for_another_like_it_takes_what_it_shows(world):
    """Of parameters that came as JSON lists, too."""
    client = world.http()
    job = accepted(client, parameters={"size": [3, 5], "mode": "wrap"})
    shown = client.get("/submit", params={"like": job}).text
    size = re.search(r'<input data-parameter="size"[^>]* value="([^"]*)"', shown)[1]
    assert size == "3,5"
    assert accepted(client, output="other.npy", parameters={"size": size})
    assert "<option selected>wrap</option>" in shown
    assert '<input type="checkbox" name="no_clobber">' in shown
    kept = accepted(client, output="kept.npy", no_clobber=True)
    assert '<input type="checkbox" name="no_clobber" checked>' in client.get("/submit", params={"like": kept}).text
    assert "kept.npy (not replaced if it exists)" in client.get(f"/jobs/{kept}").text
