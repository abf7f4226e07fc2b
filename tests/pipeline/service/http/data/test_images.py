"""Pictures of files: who may see them, what is refused, when they are drawn again, and what hostile files do."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time

import imagecodecs
import numpy as np
import pytest
from starlette.exceptions import HTTPException

from pipeline.cluster.dask.worker_start import start_fork_server
from pipeline.formats import image as images
from pipeline.formats.image.base import ImageHeader, Region, Storage
from pipeline.formats.image.metadata import Calibration, Channel, Step
from pipeline.formats.slices import drawing
from pipeline.service.http import viewing
from pipeline.service.http.data import images as views
from pipeline.service.http.users.tokens import Tokens, token_line
from pipeline.service.http.viewing import Viewing
from pipeline.service.reporting.audit import AuditLog
from pipeline.service.running.job_process import JobProcesses
from tests.images import write_image
from tests.pipeline.service.calls import assert_problem

SAMPLES = np.random.default_rng(2).integers(0, 65536, (5, 61, 43), np.uint16)


def slice_of(client, path, headers=None, **params):
    return client.get("/v1/images/slice", params={"path": str(path)} | params, headers=headers)


def assert_shown(response, plane, low, high):
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "image/png"
    expected = np.clip((plane.astype(np.longdouble) - low) / (high - low), 0, 1) * 255
    np.testing.assert_allclose(imagecodecs.png_decode(response.content), expected, rtol=0, atol=0.5 + 1e-6)


@pytest.fixture
def scan(world):
    return write_image(world.data / "scan.tif", SAMPLES, "ZYX")


def test_a_description_and_pictures(world, scan):
    client = world.http()
    found = client.get("/v1/images", params={"path": str(scan)})
    assert found.status_code == 200, found.text
    assert found.json() == {
        "path": str(scan), "plane": "YX", "at": {"Z": 2}, "dtype": "uint16", "samples": 1, "levels": 1, "channels": [],
        "colours": [],
        "axes": [{"letter": each, "length": n, "step": None} for each, n in zip("ZYX", SAMPLES.shape, strict=True)],
    }  # fmt: skip
    assert_shown(slice_of(client, "scan.tif", at="Z:4", low=100, high=60000), SAMPLES[4], 100, 60000)
    part = slice_of(client, scan, rows="10:30", columns="5:43", low=0, high=65535)
    assert_shown(part, SAMPLES[2, 10:30, 5:43], 0, 65535)
    assert part.headers["millrace-rows"] == "10:30"
    assert part.headers["millrace-columns"] == "5:43"
    assert part.headers["millrace-blocks"] == "1/1"
    side = slice_of(client, scan, plane="ZX", at="Y:60")
    low, high = (float(side.headers[f"millrace-{each}"]) for each in ("low", "high"))
    assert (low, high) == (SAMPLES[:, 60].min(), SAMPLES[:, 60].max())
    assert_shown(side, SAMPLES[:, 60], low, high)
    small = imagecodecs.png_decode(slice_of(client, scan, size=9).content)
    assert max(small.shape) <= 9
    head = client.head("/v1/images/slice", params={"path": str(scan)})
    assert (head.status_code, head.content) == (200, b"")


def test_the_pyramid_of_a_result_is_used(world):
    samples = SAMPLES[0].astype(np.float32)
    header = ImageHeader(shape=samples.shape, axes="YX", dtype=samples.dtype)
    writer = images.format_for_output(world.data / "a.zarr", Storage(levels=3)).create(world.data / "a.zarr", header)
    writer.write(Region.whole(samples.shape), samples)
    writer.publish()
    client = world.http()
    assert client.get("/v1/images", params={"path": "a.zarr"}).json()["levels"] == 3
    assert [slice_of(client, "a.zarr", size=n).headers["millrace-level"] for n in (61, 60, 31, 16, 2)] == [
        "0", "1", "1", "2", "2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("query", "status", "said"),
    [
        ({"at": "Z:5"}, 422, "at Z:5: indices along Z go from 0 to 4"),
        ({"at": "C:0"}, 422, "at C: the axes beside the plane YX are Z"),
        ({"at": "Z"}, 422, "at: "),
        ({"at": "Z:-1"}, 422, "at: "),
        ({"plane": "YQ"}, 422, "plane YQ: name two of the axes Z, Y, X"),
        ({"plane": "Y"}, 422, "plane: "),
        ({"rows": "0:62"}, 422, "rows 0:62: choose a part of 0:61 along Y"),
        ({"columns": "9:3"}, 422, "columns 9:3: choose a part of 0:43 along X"),
        ({"rows": "3"}, 422, "rows: "),
        ({"size": "0"}, 422, "size: "),
        ({"size": "2049"}, 422, "size: "),
        ({"low": "nan"}, 422, "low: "),
        ({"low": "5", "high": "5"}, 422, "low 5: must be below high, 5"),
        ({"part": "half"}, 422, "part: "),
        ({"path": ""}, 422, "is outside the service's data roots"),
        ({"path": "absent.tif"}, 422, "absent.tif: no such file; check the path"),
        ({"path": "notes.txt"}, 422, "unsupported image format"),
        ({"path": "."}, 422, "is a folder but not a Zarr array"),
        ({"path": "/etc/passwd"}, 422, "is outside the service's data roots"),
        ({"path": "out/secret.npy"}, 422, "is outside the service's data roots"),
        ({"path": "list.files"}, 422, "is a list of files, which a service does not take"),
        ({"path": "pipe.npy"}, 422, "pipe.npy"),
    ],
)
def test_bad_values_are_refused_in_a_line(world, scan, tmp_path, query, status, said):
    (world.data / "notes.txt").write_text("text")
    (tmp_path / "secret").mkdir()
    np.save(tmp_path / "secret" / "secret.npy", SAMPLES)
    (world.data / "out").symlink_to(tmp_path / "secret")
    (world.data / "list.files").write_text('{"millrace-files": 1')
    os.mkfifo(world.data / "pipe.npy")
    for where in ("/v1/images/slice", "/v1/images") if "path" in query else ("/v1/images/slice",):
        answer = world.http().get(where, params={"path": str(scan)} | query)
        assert_problem(answer, status, said)
        assert "\n" not in answer.json()["detail"]


def test_a_link_that_is_put_into_a_zarr_folder_is_not_followed(world, tmp_path):
    write_image(world.data / "a.zarr", SAMPLES[0], "YX")
    (tmp_path / "elsewhere").mkdir()
    (world.data / "a.zarr" / "0" / "c").rename(tmp_path / "elsewhere" / "c")
    (world.data / "a.zarr" / "0" / "c").symlink_to(tmp_path / "elsewhere" / "c")
    assert_problem(
        slice_of(world.http(), "a.zarr"), 422, "/0/c/0/0: leads out of the service's data roots by a symbolic link"
    )


def test_a_picture_is_sent_again_only_once_the_file_has_changed(world, scan, monkeypatch):
    client = world.http()
    first = slice_of(client, scan)
    tag = first.headers["etag"]
    assert "no-cache" in first.headers["cache-control"]
    for given in (tag, f'"other", W/{tag}'):
        again = slice_of(client, scan, headers={"If-None-Match": given})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert slice_of(client, scan, size=3).headers["etag"] != tag
    assert slice_of(client, scan, headers={"If-None-Match": '"other"'}).status_code == 200
    write_image(world.data / "new.tif", SAMPLES + 1, "ZYX")
    (world.data / "new.tif").replace(scan)
    changed = slice_of(client, scan, headers={"If-None-Match": tag})
    assert changed.status_code == 200
    assert changed.headers["etag"] != tag
    tags = set()
    for number in range(2):
        write_image(world.data / "a.zarr", SAMPLES[number], "YX")
        tags.add(slice_of(client, "a.zarr").headers["etag"])
        for suffix, content in ((".hdr", "# Dimensions\n2 3\n"), (".cfl", bytes(48))):
            (world.data / f"b{suffix}").write_bytes(content.encode() if suffix == ".hdr" else content)
        tags.add(slice_of(client, "b.cfl").headers["etag"])
        os.utime(world.data / "b.hdr", (9.0, 9.0 + number))
    (world.data / "a.zarr" / "further" / "folder").mkdir(parents=True)
    for number in range(2):  # a chunk that is written in place
        (chunk,) = (each for each in (world.data / "a.zarr" / "0" / "c").rglob("*") if each.is_file())
        os.utime(chunk, (9.0, 9.0 + number))
        tags.add(slice_of(client, "a.zarr").headers["etag"])
    assert len(tags) == 6
    monkeypatch.setattr(views, "_MOST_ENTRIES", 4)
    assert "etag" not in slice_of(client, "a.zarr").headers
    assert "etag" in slice_of(client, scan).headers


def test_channels_are_shown_together_each_in_its_colour(world):
    samples = np.random.default_rng(3).integers(0, 200, (2, 20, 30)).astype(np.uint16)
    channels = (Channel("nuclei", "0000FF"), Channel("membrane", "FF8000"))
    calibration = Calibration({each: Step(0.5, "micrometer") for each in "YX"}, channels=channels)
    write_image(world.data / "a.ome.tif", samples, "CYX", calibration=calibration)
    client = world.http()
    seen = client.get("/v1/images", params={"path": "a.ome.tif"}).json()
    assert (seen["colours"], seen["channels"]) == (["0000FF", "FF8000"], ["nuclei", "membrane"])
    assert seen["axes"][-1]["step"] == "0.5 µm"
    answer = slice_of(client, "a.ome.tif", composite=True)
    again = slice_of(client, "a.ome.tif", composite=True, limits=answer.headers["millrace-limits"])
    assert again.content == answer.content
    for limits in ("0:200", "0:200,0:200,0:200", "9:1,0:1", "0:1e999,0:1", "0:x"):
        assert slice_of(client, "a.ome.tif", composite=True, limits=limits).status_code == 422, limits


@pytest.mark.parametrize("name", ["ada", "eve", "bob", "root"])
def test_each_role_sees_what_its_groups_may_see(world, tmp_path, name):
    people = {"ada": ("user", ["mri"]), "eve": ("viewer", ["mri"]), "bob": ("user", ["eeg"]), "root": ("operator", [])}
    (tmp_path / "tokens").write_text("\n".join(token_line(each, each, *what) for each, what in people.items()))
    (tmp_path / "mri").mkdir()
    np.save(tmp_path / "mri" / "brain.npy", SAMPLES)
    np.save(world.data / "scan.npy", SAMPLES)
    world.audit = AuditLog(tmp_path / "audit.jsonl", most_bytes=1 << 20, files=2)
    client = world.http(Tokens(tmp_path / "tokens"), group_roots={"mri": [tmp_path / "mri"]})
    assert_problem(slice_of(client, world.data / "scan.npy"), 401, "send a token")
    client.headers["Authorization"] = f"Bearer {name}"
    for path, seen_by in ((tmp_path / "mri" / "brain.npy", "ada eve root"), (world.data / "scan.npy", "bob root")):
        for where in ("/v1/images", "/v1/images/slice", "/v1/images/slice"):
            answer = client.get(where, params={"path": str(path)})
            if name in seen_by.split():
                assert answer.status_code == 200, answer.text
                tag = answer.headers.get("etag")
            else:
                assert_problem(answer, 422, "is outside the service's data roots")
        if name not in seen_by.split():
            tag = '"*"'
            assert_problem(slice_of(client, path, headers={"If-None-Match": tag}), 422, "is outside")
    world.audit.close()
    noted = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [each["what"] for each in noted] == ["view"] * (2 if name == "root" else 1), "once for each file"
    assert {each["who"] for each in noted} == {name}


def test_many_requests_are_refused_rather_than_queued(monkeypatch):
    monkeypatch.setattr(viewing, "AT_ONCE", 1)
    monkeypatch.setattr(viewing, "MOST_WAITING", 2)
    monkeypatch.setattr(viewing, "MOST_OF_A_USER", 2)

    async def story():
        turns, end = Viewing(), asyncio.Event()

        async def wait(user):
            async with turns.turn(user):
                running.append(user)
                await end.wait()

        running = []
        waiting = [asyncio.create_task(wait(user)) for user in ("ada", "ada", "bob")]
        while not running or turns._of_users.total() < 3:
            await asyncio.sleep(0)
        assert running == ["ada"]
        for user, status in (("ada", 429), ("cy", 503)):
            with pytest.raises(HTTPException) as refused:
                await wait(user)
            assert refused.value.status_code == status
            assert refused.value.headers == {"Retry-After": "1"}
        end.set()
        await asyncio.gather(*waiting)
        await wait("cy")
        assert running == ["ada", "ada", "bob", "cy"]
        assert not turns._of_users

    asyncio.run(story())


def test_a_look_is_noted_again_after_a_while(monkeypatch):
    now = 0.0
    monkeypatch.setattr(viewing.time, "monotonic", lambda: now)
    monkeypatch.setattr(viewing, "MOST_NOTED", 2)
    turns = Viewing()
    assert turns.is_news("ada", "a")
    assert not turns.is_news("ada", "a")
    now = 3599.0
    assert not turns.is_news("ada", "a")
    now = 3601.0
    assert turns.is_news("ada", "a")
    assert [turns.is_news("bob", each) for each in ("a", "b", "a")] == [True, True, False]
    assert turns.is_news("ada", "a"), "it was forgotten"


# Real processes


@pytest.fixture(scope="module")
def processes():
    start_fork_server()
    made = JobProcesses(600 << 20)
    yield made
    made.close()


def test_processes_draw_the_same_and_keep_to_the_roots(world, processes, tmp_path):
    world.processes = processes
    np.save(world.data / "a.npy", SAMPLES)
    client = world.http()
    assert_shown(slice_of(client, "a.npy", at="Z:1", low=0, high=65535), SAMPLES[1], 0, 65535)
    (tmp_path / "secret").mkdir()
    write_image(tmp_path / "secret" / "a.zarr", SAMPLES[0], "YX")
    write_image(world.data / "b.zarr", SAMPLES[0], "YX")
    (world.data / "b.zarr" / "0" / "c").rename(tmp_path / "c")
    (world.data / "b.zarr" / "0" / "c").symlink_to(tmp_path / "secret" / "a.zarr" / "0" / "c")
    assert_problem(
        slice_of(client, "b.zarr"), 422, "/0/c/0/0: leads out of the service's data roots by a symbolic link"
    )


def test_hostile_files_hurt_no_server(world, processes, monkeypatch):
    world.processes = processes
    client = world.http()
    monkeypatch.setattr(views, "MOST_BYTES", 100 << 20)
    # A map whose text is parsed into more than it may take.
    count = 20_000_000
    head = f"object 1 class gridpositions counts 1 1 {count}\nobject 3 class array items {count} data follows\n"
    (world.data / "a.dx").write_bytes(head.encode() + b"1 " * count)
    assert_problem(
        slice_of(client, "a.dx"), 422, "a.dx: looking at it takes more than 100 MiB of memory; check the file"
    )
    np.save(world.data / "b.npy", SAMPLES)
    assert slice_of(client, "b.npy").status_code == 200


def stuck(path, *_):
    threading.Event().wait()


def killed(path, *_):
    os.abort()


def test_what_takes_too_long_or_dies_is_ended(world, processes, monkeypatch):
    world.processes = processes
    client = world.http()
    np.save(world.data / "a.npy", SAMPLES)
    monkeypatch.setattr(views, "MOST_S", 0.1)
    monkeypatch.setattr(views, "describe", stuck)
    began = time.monotonic()
    answer = client.get("/v1/images", params={"path": "a.npy"})
    assert_problem(answer, 422, "a.npy: looking at it takes more than 0 s; choose a smaller part, or write a pyramid")
    assert time.monotonic() - began < 30
    monkeypatch.setattr(views, "MOST_S", 60.0)
    monkeypatch.setattr(views, "describe", killed)
    answer = client.get("/v1/images", params={"path": "a.npy"})
    assert_problem(answer, 422, "a.npy: the process that read it died; the file is damaged, or too large to show")
    assert slice_of(client, "a.npy").status_code == 200


def test_of_a_large_image_only_a_share_is_read(world, monkeypatch):
    monkeypatch.setattr(drawing, "MOST_READ_BYTES", 1000)
    monkeypatch.setattr(drawing, "_RUN_BYTES", 100)
    np.save(world.data / "a.npy", SAMPLES)
    assert slice_of(world.http(), "a.npy").headers["millrace-blocks"] == "1/6"
