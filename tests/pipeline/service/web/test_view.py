"""Looking at files in the page, in a real browser: what the canvases show against the samples."""

from __future__ import annotations

import re
from urllib.parse import quote

import numpy as np
import pytest

from pipeline.client import Client
from pipeline.formats import image as images
from pipeline.formats.image.base import ImageHeader, Region, Storage
from pipeline.formats.image.metadata import Calibration, Channel
from tests.images import read_image, write_image
from tests.pipeline.service.live import WAIT_S, live_service
from tests.pipeline.service.web.browsing import NEEDS_CHROMIUM, PHONE, page_of, playwright, shows

pytestmark = NEEDS_CHROMIUM

# Boxes of 8 x 8 samples, so that scaling does not matter.
BOXES = np.random.default_rng(4).integers(0, 4096, (5, 8, 12), np.uint16)
VOLUME = BOXES.repeat(8, axis=1).repeat(8, axis=2)
# The shade of the canvas at a share of the plane, as the page places it.
SHADE = """(canvas, [share_y, share_x]) => {
  const picture = pictures.find((each) => each.canvas === canvas), [rows, columns] = picture.sizes;
  const x = canvas.clientWidth / 2 + (share_x - view.x) * columns * picture.scale;
  const y = canvas.clientHeight / 2 + (share_y - view.y) * rows * picture.scale;
  const paper = new OffscreenCanvas(1, 1).getContext("2d");
  paper.drawImage(canvas, Math.floor(x * devicePixelRatio), Math.floor(y * devicePixelRatio), 1, 1, 0, 0, 1, 1);
  return Array.from(paper.getImageData(0, 0, 1, 1).data);
}"""


@pytest.fixture
def service(tmp_path):
    with live_service(tmp_path) as (url, _, data):
        write_image(data / "a.tif", VOLUME, "ZYX")
        yield url, data


def opened(page, *paths, **further):
    page.goto(
        "/view?" + "&".join([f"path={quote(str(path))}" for path in paths] + [f"{k}={v}" for k, v in further.items()])
    )
    settled(page)


def until(page, expression):
    """Waits in the page, whose policy forbids Playwright's own way."""
    page.evaluate(
        f"""async () => {{
          for (const end = Date.now() + {1e3 * WAIT_S}; !({expression}); await new Promise(requestAnimationFrame))
            if (Date.now() > end) throw new Error("it did not happen");
        }}"""
    )


def settled(page):
    page.wait_for_load_state("networkidle")
    until(page, "seen.length && seen.every((each) => each.whole)")


def assert_shows(page, number, plane, low, high, boxes=((1, 1), (3, 5), (6, 10))):
    """The middles of some boxes."""
    canvas = page.locator("canvas").nth(number)
    for row, column in boxes:
        share = [(row + 0.5) / plane.shape[0], (column + 0.5) / plane.shape[1]]
        expected = float(np.clip((float(plane[row, column]) - low) / (high - low), 0, 1) * 255)
        found = canvas.evaluate(SHADE, share)
        assert found[3] == 255
        assert found[:3] == pytest.approx([expected] * 3, abs=2), (row, column)


def limits(page):
    return [float(page.input_value(f"[name={name}]")) for name in ("low", "high")]


def test_a_result_beside_its_input(browser, service):
    url, data = service
    with Client(url) as client, page_of(browser, url) as page:
        job = client.submit("smooth", "a.tif", "out.tif", size=5).wait(timeout_s=WAIT_S)
        page.goto(f"/jobs/{job.id}")
        page.click("text=View")
        shows(page, "h1", "^a.tif and out.tif$")
        settled(page)
        result = read_image(data / "out.tif")[:, 4::8, 4::8]  # where all pixels of a window are of one box
        low, high = limits(page)
        assert (low, high) == pytest.approx((BOXES[2].min(), BOXES[2].max()), rel=1e-3)
        assert_shows(page, 0, BOXES[2], low, high)
        assert "Z 5 × Y 64 × X 96 · uint16" in page.locator(".facts").first.inner_text()
        # Another plane, of both.
        page.locator("[data-axis=Z] input").fill("4")
        until(page, "asked.get('at') === 'Z:4'")
        page.select_option("[name=contrast]", "same")
        until(page, "seen[1].whole.low === seen[0].whole.low")
        settled(page)
        low, high = limits(page)
        assert_shows(page, 0, BOXES[4], low, high)
        assert_shows(page, 1, result[4], low, high)
        # A contrast of one's own.
        page.fill("[name=low]", "1000")
        page.fill("[name=high]", "2000")
        page.keyboard.press("Enter")
        until(page, "seen.every((each) => each.whole.low === 1000 && each.whole.high === 2000)")
        assert page.input_value("[name=contrast]") == "fixed"
        assert_shows(page, 0, BOXES[4], 1000, 2000)
        assert_shows(page, 1, result[4], 1000, 2000)
        # The other planes.
        page.select_option("[name=plane]", "ZX")
        until(page, "asked.get('plane') === 'ZX'")
        playwright.expect(page.locator("[data-axis=Z]")).to_be_hidden()
        assert_shows(page, 0, BOXES[:, 4], 1000, 2000, [(0, 0), (2, 5), (4, 11)])
        page.reload()
        settled(page)
        assert page.input_value("[name=plane]") == "ZX", "the address keeps it"


def test_channels_are_shown_together_in_their_colours(browser, service):
    url, data = service
    colours = np.array([[0, 0, 255], [255, 128, 0]])
    channels = tuple(
        Channel(f"stain {n}", "".join(f"{each:02X}" for each in colour)) for n, colour in enumerate(colours)
    )
    write_image(
        data / "c.ome.tif", VOLUME[:4].reshape(2, 2, 64, 96), "CZYX", calibration=Calibration(channels=channels)
    )

    def assert_composed(page, limits):
        for row, column in ((1, 1), (3, 5), (6, 10)):
            values = [float(BOXES[2 * channel + 1, row, column]) for channel in range(2)]
            shares = [
                np.clip((value - low) / (high - low), 0, 1) for value, (low, high) in zip(values, limits, strict=True)
            ]
            found = page.locator("canvas").evaluate(SHADE, [(row + 0.5) / 8, (column + 0.5) / 12])
            assert found[:3] == pytest.approx(np.clip(shares @ colours, 0, 255), abs=3)

    with page_of(browser, url) as page:
        opened(page, "c.ome.tif")
        page.check("[name=composite]")
        until(page, "seen[0].whole.limits.includes(',')")
        playwright.expect(page.locator("[data-axis=C]")).to_be_hidden()
        assert page.locator(".channel").all_inner_texts()[0].startswith("stain 0 ")
        ends = [(float(each.min()), float(each.max())) for each in (BOXES[1], BOXES[3])]
        assert page.evaluate("seen[0].whole.limits") == ",".join(f"{low}:{high}" for low, high in ends)
        assert_composed(page, ends)
        page.reload()
        settled(page)
        assert page.is_checked("[name=composite]"), "the address keeps it"
        page.fill("[name=low]", "1000")
        page.fill("[name=high]", "2000")
        page.keyboard.press("Enter")
        until(page, "seen[0].whole.low === 1000 && seen[0].whole.high === 2000")
        assert_composed(page, [(1000, 2000)] * 2)
        parts = page.evaluate("seen[0].contrast(seen[0].whole)")
        assert parts == {"limits": "1000.0:2000.0,1000.0:2000.0"}, "of parts, as of the whole plane"


def test_mouse_and_keys_move_all_pictures_alike(browser, service):
    url, data = service
    write_image(data / "b.tif", VOLUME[::-1], "ZYX")
    with page_of(browser, url) as page:
        opened(page, data / "a.tif", data / "b.tif", at="Z:1")
        canvas = page.locator("canvas").first
        box = canvas.bounding_box()
        # The sample under the mouse stays there.
        page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + box["height"] * 0.4)
        under = """() => { const [first] = seen; return [
          view.x + (0.7 - 0.5) * first.canvas.clientWidth / (96 * first.scale),
          view.y + (0.4 - 0.5) * first.canvas.clientHeight / (64 * first.scale)]; }"""
        before = page.evaluate(under)
        for _ in range(4):
            page.mouse.wheel(0, -100)
        until(page, "Math.abs(view.zoom - 4) < 1e-6")
        assert page.evaluate(under) == pytest.approx(before, abs=1e-3)
        low, high = limits(page)
        inside = [(row, column) for row, column in ((3, 6), (3, 7), (2, 7))]
        assert_shows(page, 0, BOXES[1], low, high, inside)
        x, y, scale = page.evaluate("[view.x, view.y, seen[0].scale]")
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.7 + 48, box["y"] + box["height"] * 0.4 + 32, steps=3)
        page.mouse.up()
        assert page.evaluate("[view.x, view.y]") == pytest.approx(
            [x - 48 / (96 * scale), y - 32 / (64 * scale)], abs=1e-3
        )
        canvas.focus()
        page.keyboard.press("ArrowRight")
        assert page.evaluate("view.x") == pytest.approx(x + 12 / (96 * scale), abs=1e-3)
        page.keyboard.press("+")
        assert page.evaluate("view.zoom") == pytest.approx(6)
        page.keyboard.press("0")
        assert page.evaluate("[view.x, view.y, view.zoom]") == [0.5, 0.5, 1]
        page.keyboard.press("PageUp")
        until(page, "asked.get('at') === 'Z:2'")
        settled(page)
        assert_shows(page, 0, BOXES[2], *page.evaluate("[seen[0].whole.low, seen[0].whole.high]"))
        assert_shows(page, 1, BOXES[2], *page.evaluate("[seen[1].whole.low, seen[1].whole.high]"))
        page.click("[data-zoom='2']")
        assert page.evaluate("view.zoom") == 2
        page.click("text=Whole")
        assert page.evaluate("view.zoom") == 1


def test_fingers_on_a_phone(browser, service):
    url, data = service
    with page_of(browser, url, **PHONE) as page:
        opened(page, data / "a.tif", data / "a.tif")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["viewport"]["width"]
        canvas = page.locator("canvas").first
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        fingers = page.context.new_cdp_session(page)

        def touch(kind, *places):
            points = [{"x": box["x"] + x, "y": box["y"] + y, "id": n} for n, (x, y) in enumerate(places)]
            fingers.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

        touch("touchStart", (100, 100), (160, 100))
        for spread in (10, 20, 30):
            touch("touchMove", (100 - spread, 100), (160 + spread, 100))
        touch("touchEnd")
        until(page, "view.zoom > 1.5")
        assert page.evaluate("view.zoom") == pytest.approx(2, rel=0.05)
        x = page.evaluate("view.x")
        touch("touchStart", (100, 100))
        for by in (10, 20, 30):
            touch("touchMove", (100 + by, 100))
        touch("touchEnd")
        until(page, f"view.x < {x}")
        settled(page)
        low, high = limits(page)
        assert_shows(page, 1, BOXES[2], low, high, [(3, 5), (4, 4)])


def test_zooming_in_reads_finer_levels_of_the_part_that_is_seen(browser, service):
    url, data = service
    samples = np.random.default_rng(1).random((2048, 2048)).astype(np.float32).cumsum(axis=1)
    header = ImageHeader(shape=samples.shape, axes="YX", dtype=samples.dtype)
    writer = images.format_for_output(data / "p.zarr", Storage(levels=4)).create(data / "p.zarr", header)
    writer.write(Region.whole(samples.shape), samples)
    writer.publish()
    with page_of(browser, url) as page:
        opened(page, data / "p.zarr")
        shows(page, ".facts", "level 1 of 4")
        page.locator("canvas").focus()
        with page.expect_response(re.compile("rows=")) as answer:
            for _ in range(5):
                page.keyboard.press("+")
        assert answer.value.headers["millrace-level"] == "0"
        shows(page, ".facts", "level 0 of 4")
        assert answer.value.headers["millrace-low"] == str(page.evaluate("seen[0].whole.low")), "the same contrast"
        until(page, "seen[0].part.bitmap.width < 2048")


def test_files_that_cannot_be_shown(browser, service):
    url, data = service
    name = '"><img src=x onerror="window.hacked=1">.txt'
    (data / name).write_text("text")
    with page_of(browser, url, refusals=1) as page:
        page.goto(f"/view?path={quote(str(data / name))}&path={data}/a.tif")
        shows(page, ".error >> nth=0", "unsupported image format; Millrace reads TIFF")
        settled(page)
        assert page.evaluate("[window.hacked === undefined, document.querySelectorAll('main img').length]") == [True, 0]
        assert_shows(page, 1, BOXES[2], *limits(page)), "the other one is there"
        page.goto(f"/data?path={data}")
        page.click("text=a.tif")
        page.wait_for_url("**/view?path=*")
        settled(page)


def test_complex_samples_have_parts(browser, service):
    url, data = service
    boxes = np.random.default_rng(6).normal(size=(2, 8, 12)) @ np.eye(12)
    np.save(data / "c.npy", (boxes[0] + 1j * boxes[1]).astype(np.complex64).repeat(8, axis=0).repeat(8, axis=1))
    with page_of(browser, url) as page:
        opened(page, data / "c.npy")
        for part, values in (
            ("phase", np.arctan2(boxes[1], boxes[0])),
            ("real", boxes[0]),
            ("magnitude", np.hypot(*boxes)),
        ):
            with page.expect_response(re.compile(f"part={part}")):
                page.select_option("[name=part]", part)
            until(page, f"Math.abs(seen[0].whole.low - {values.min()}) < 1e-3")
            assert_shows(page, 0, values, *limits(page))


def test_without_javascript_there_is_a_picture(browser, service):
    url, data = service
    with page_of(browser, url, java_script_enabled=False) as page:
        page.goto(f"/view?path={data}/a.tif")
        assert page.locator("noscript img").evaluate("image => image.naturalWidth") == 96
