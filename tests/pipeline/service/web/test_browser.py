"""The pages in a real browser, headless Chromium, before a service that is alive."""

from __future__ import annotations

from dataclasses import replace
from threading import Event

import pytest

from pipeline.client import Client
from pipeline.engine.run import stream_on_device
from pipeline.errors import printable
from pipeline.service.http.users.tokens import Tokens, new_token, token_line
from tests.pipeline.service.live import WAIT_S, live_service
from tests.pipeline.service.web.browsing import NEEDS_CHROMIUM, PHONE, page_of, playwright, shows

pytestmark = NEEDS_CHROMIUM

HOSTILE = '"><img src=x onerror="window.hacked=1"><script>window.hacked=1</script>.npy'


class Gate:
    """Holds every job at its third chunk until opened."""

    def __init__(self):
        self.open = Event()

    def stream(self, job, plan, ledger, events):
        def written(chunk):
            events.on_written(chunk)
            if chunk.index == 2:
                assert self.open.wait(WAIT_S)

        return stream_on_device(job, plan, ledger, replace(events, on_written=written))


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def url(tmp_path, gate):
    with live_service(tmp_path, stream=gate.stream) as (url, _, _):
        yield url
        gate.open.set()


def submit(page, **values):
    page.goto("/submit")
    for name, value in values.items():
        page.fill(f'[name="{name}"], [data-parameter="{name}"]', value)
    page.click("#submit button >> text=Submit")


def test_submit_watch_cancel_retry_and_see_the_picture(browser, url, gate):
    with page_of(browser, url) as page:
        submit(page, input="in.npy", output="out.npy", size="5", time="1.5 h", memory="2GiB", gpus="1")
        page.wait_for_url("**/jobs/*")
        shows(page, "#state", "^running$")
        shows(page, "article", "Limits\\s*90 min, 2.0 GiB of memory, 1 GPU")
        shows(page, "#chunks", r"^[1-9]\d* of \d\d chunks$")
        playwright.expect(page.locator("#throughput")).to_be_visible(timeout=1e3 * WAIT_S)
        shows(page, "#rate-read", r"^[1-9][\d.]* [KM]?i?B/s$")
        shows(page, '[data-stage="compute"]', r"compute\s*\d+ % busy")
        shows(page, "#log", "queued.*planning.*running")
        assert page.locator("#progress").evaluate("bar => bar.value") > 0
        page.click("text=Cancel")
        playwright.expect(page.locator("#stopping")).to_be_visible(timeout=1e3 * WAIT_S)
        gate.open.set()
        shows(page, "#state", "^cancelled$")
        page.click("text=Retry")
        shows(page, "#state", "^succeeded$")
        picture = page.locator(".preview")
        picture.wait_for()
        assert picture.evaluate("image => image.complete && image.naturalWidth > 0")
        shows(page, "article", "size\\s*5")
        shows(page, "article", r"pixels verified, all within rounding \(0\.\d+ of a step\)")
        with page.expect_download() as fetched:
            page.click("text=Download")
        assert fetched.value.suggested_filename == "out.npy"


def test_the_list_follows_what_happens_and_can_be_filtered(browser, url, gate):
    with page_of(browser, url) as page, Client(url) as client:
        page.goto("/")
        shows(page, ".empty", "No jobs yet")
        first = client.submit("smooth", "in.npy", "first.npy")
        page.wait_for_selector(".state.running")
        gate.open.set()
        page.wait_for_selector(".state.succeeded")
        failed = client.submit("smooth", "absent.npy", "second.npy").wait(timeout_s=WAIT_S)
        page.click(".tabs >> text=failed")
        page.wait_for_url("**/?state=failed")
        assert page.locator(".jobs a").all_text_contents() == ["second.npy"]
        page.select_option("[name=workload]", "coulomb")
        page.click("text=Filter")
        shows(page, ".empty", "No jobs match these filters")
        assert "state=failed" in page.url
        page.goto(f"/jobs/{failed.id}")
        shows(page, ".error >> nth=0", r"absent\.npy: no such file")
        page.goto(f"/submit?like={first.id}")
        assert page.input_value("[name=output]") == "first.npy"


@pytest.mark.parametrize("device", ["desk", "phone"])
def test_files_are_chosen_by_clicks_and_by_keys(browser, tmp_path, gate, device):
    gate.open.set()
    with (
        live_service(tmp_path, stream=gate.stream) as (url, _, data),
        page_of(browser, url, **(PHONE if device == "phone" else {})) as page,
    ):
        (data / "sub dir").mkdir()
        (data / "sub dir" / "scan.npy").write_bytes((data / "in.npy").read_bytes())
        page.goto("/submit")
        page.click("[data-choose=input]")
        page.click("#chooser .folder >> text=data")
        page.wait_for_selector("#chooser >> text=in.npy")
        page.focus("#chooser .folder >> text=sub dir")
        page.keyboard.press("Enter")
        page.wait_for_selector("#chooser >> text=scan.npy")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.click("#chooser .crumb >> text=data roots")
        page.click("#chooser .folder >> text=data")
        page.click("#chooser >> text=in.npy")
        assert page.input_value("[name=input]") == f"{data}/in.npy"
        page.click("[data-choose=output]")  # beside the input
        page.click("#chooser .folder >> text=sub dir")
        page.wait_for_selector("#chooser >> text=scan.npy")
        assert page.input_value("#chooser [name=name]") == "in-smooth.npy"
        page.keyboard.press("Escape")
        assert page.input_value("[name=output]") == ""
        page.click("[data-choose=output]")
        page.click("#chooser .folder >> text=sub dir")
        page.wait_for_selector("#chooser >> text=scan.npy")
        page.click("#chooser >> text=Write here")
        assert page.input_value("[name=output]") == f"{data}/sub dir/in-smooth.npy"
        page.click("#submit button >> text=Submit")
        page.wait_for_url("**/jobs/*")
        page.wait_for_selector(".preview")  # for which the page loads itself once more
        page.goto(f"/data?path={data}")
        page.click("text=Use as input")
        assert page.input_value("[name=input]") == f"{data}/in.npy"


def test_what_the_service_refuses_is_said_in_the_form(browser, url):
    with page_of(browser, url, refusals=1) as page:
        submit(page, input="/etc/passwd", output="out.npy")
        shows(page, "#refused", "outside the service's data roots")
        assert page.url.endswith("/submit")


def test_an_older_result_is_kept_if_the_form_asks_for_it(browser, url, tmp_path):
    (tmp_path / "data" / "older.npy").write_bytes(b"older")
    with page_of(browser, url, refusals=1) as page:
        page.goto("/submit")
        page.fill("[name=input]", "in.npy")
        page.fill("[name=output]", "older.npy")
        page.check("[name=no_clobber]")
        page.click("#submit button >> text=Submit")
        shows(page, "#refused", "older.npy: exists, and --no-clobber keeps it")


def test_names_cannot_become_markup(browser, url, gate):
    gate.open.set()
    with page_of(browser, url) as page:
        submit(page, input=HOSTILE, output=f"out-{HOSTILE}", size="3")
        page.wait_for_url("**/jobs/*")
        shows(page, "#state", "^failed$")
        job = page.url
    for path in (job, "/", f"/?owner={HOSTILE}"):
        with page_of(browser, url) as page:  # the one before reloads itself once the job has ended
            page.goto(path)
            assert page.evaluate("[window.hacked === undefined, document.querySelectorAll('main img').length]") == [
                True, 0,
            ]  # fmt: skip


def test_names_that_come_later_are_written_as_the_pages_write_them(browser, url, gate):
    texts = [
        "scan\u202eypn.fit",
        "a\nb\tc\rd\x1be\x7f",
        "\xa0\u2028\u2029\ufeff\u200b",
        "\U000e0041",
        "σ 画像 🙂 \\",
    ]
    gate.open.set()
    with page_of(browser, url) as page:
        page.goto("/")
        assert page.evaluate("texts => texts.map(printable)", texts) == [printable(text) for text in texts]
        submit(page, input=texts[0], output=f"{texts[0]}.npy", size="3")
        page.wait_for_url("**/jobs/*")
        shows(page, "#state", "^failed$")
        assert "\u202e" not in page.locator("body").inner_text()


def test_a_phone_shows_everything_without_scrolling_sideways(browser, url, gate):
    gate.open.set()
    long = "a-rather-long-folder-name/" * 4 + "out.npy"
    with Client(url) as client, page_of(browser, url, **PHONE) as page:
        done = client.submit("smooth", "in.npy", "out.npy").wait(timeout_s=WAIT_S)
        failed = client.submit("smooth", f"no-{long}", long).wait(timeout_s=WAIT_S)
        paths = ["/", "/data", "/data?path=.", f"/jobs/{done.id}", f"/jobs/{failed.id}", "/workers", "/api", "/login"]
        paths += [f"/submit?workload={each['name']}" for each in client.workloads()]
        for path in paths:
            page.goto(path)
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["viewport"]["width"], path


def test_a_job_that_has_nothing_to_show_yet_takes_the_whole_width(browser, url, gate):
    gate.open.set()
    width = "sections => sections.at(-1).offsetWidth / document.querySelector('article').offsetWidth"
    with Client(url) as client, page_of(browser, url) as page:
        done = client.submit("smooth", "in.npy", "out.npy").wait(timeout_s=WAIT_S)
        failed = client.submit("smooth", "none.npy", "2.npy").wait(timeout_s=WAIT_S)
        for job, share in ((failed, 1.0), (done, 0.5)):
            page.goto(f"/jobs/{job.id}")
            assert page.eval_on_selector_all("section.card", width) == pytest.approx(share, abs=0.02)


def test_everything_can_be_read_without_javascript(browser, url, gate):
    gate.open.set()
    with Client(url) as client, page_of(browser, url, java_script_enabled=False) as page:
        job = client.submit("smooth", "in.npy", "out.npy", size=5).wait(timeout_s=WAIT_S)
        page.goto("/")
        page.click("text=out.npy")
        for said in ("succeeded", r"\d+ of \d+ chunks", r"compute\s*\d+ % busy", "publishing", r"size\s*5", " UTC"):
            shows(page, "article", said)
        page.click("text=Full receipt")
        shows(page, "pre", f'"job": "{job.id}"')
        page.goto("/workers")
        shows(page, ".workers", "cpu")
        page.goto("/submit")
        shows(page, "noscript code", "millrace submit smooth INPUT OUTPUT")


def test_signing_in_and_out(browser, tmp_path):
    token = new_token()
    (tmp_path / "tokens").write_text(token_line("ada", token))
    with (
        live_service(tmp_path, tokens=Tokens(tmp_path / "tokens")) as (url, _, _),
        page_of(browser, url, refusals=1) as page,
    ):
        page.goto("/workers")
        page.fill("[name=token]", "wrong")
        page.click("#login button")
        shows(page, "#refused", "the token is not known here")
        page.fill("[name=token]", token)
        page.click("#login button")
        page.wait_for_url("**/workers")
        page.click("text=Sign out ada")
        page.wait_for_url("**/login")
        page.goto("/")
        assert "/login" in page.url


@pytest.mark.parametrize("width", ["desk", "phone"])
def test_each_role_sees_what_it_may_do(browser, tmp_path, width):
    people = {"ada": ("user", ["mri"]), "eve": ("viewer", ["mri"]), "bob": ("user", ["eeg"]), "root": ("operator", [])}
    lines = [token_line(name, name, role, groups) for name, (role, groups) in people.items()]
    (tmp_path / "tokens").write_text("\n".join(lines))
    with live_service(tmp_path, tokens=Tokens(tmp_path / "tokens")) as (url, store, _):
        store.hold("group", "mri", by="root", now=1.0)
        with Client(url, token="ada") as client:
            job = client.submit("smooth", "in.npy", "out.npy", size=3).id
        for name, sees, submits, changes in (
            ("ada", True, True, True), ("eve", True, False, False), ("bob", False, True, False),
            ("root", True, True, True),
        ):  # fmt: skip
            missing = 0 if sees else 1  # the page of the job is refused
            with page_of(browser, url, refusals=missing, **(PHONE if width == "phone" else {})) as page:
                page.goto("/")
                page.fill("[name=token]", name)
                page.click("#login button")
                page.wait_for_selector("#jobs")
                assert page.locator(f"a[href='/jobs/{job}']").count() == sees
                assert page.locator("nav a[href='/submit']").count() == submits
                assert page.locator("text=an operator holds them").count() == (name in ("ada", "eve"))
                page.goto(f"/jobs/{job}")
                if sees:
                    shows(page, "article", "mri")
                else:
                    shows(page, "main", f"there is no job {job}")
                assert page.locator("button[data-post]").count() == changes
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
