"""What lies under the data roots: who may see which folders, and in what order."""

from __future__ import annotations

import os

import numpy as np
import pytest

from pipeline.service.http.users.tokens import Tokens, token_line
from tests.images import write_image
from tests.pipeline.service.calls import assert_problem


def files(client, path=None, **params):
    response = client.get("/v1/files", params=({} if path is None else {"path": str(path)}) | params)
    assert response.status_code == 200, response.text
    return response.json()


def names(client, path, **params):
    return [each["name"] for each in files(client, path, **params)["entries"]]


def test_a_folder_with_kinds_sizes_and_dates(world):
    client, data = world.http(), world.data
    write_image(data / "a.zarr", np.zeros((7, 5), np.uint8), "YX")
    write_image(data / "B.TIF", np.zeros((7, 5), np.uint8), "YX")
    (data / "folder").mkdir()
    (data / "text.pqr").write_text("ATOM\n")
    (data / ".hidden").touch()
    os.utime(data / "text.pqr", (5.0, 5.0))
    (roots,) = files(client)["entries"]
    assert (roots["path"], roots["kind"]) == (str(data), "folder")
    found = files(client, data)
    assert (found["path"], found["parent"], found["next"], found["left_out"]) == (str(data), None, None, 0)
    assert [(each["name"], each["kind"]) for each in found["entries"]] == [
        ("B.TIF", "image"), ("a.zarr", "image"), ("folder", "folder"), ("text.pqr", "file"),
    ]  # fmt: skip
    last = found["entries"][-1]
    assert (last["path"], last["bytes"], last["modified_at"]) == (str(data / "text.pqr"), 5, 5.0)
    assert files(client, data / "folder")["parent"] == str(data)
    assert files(client, "folder")["path"] == str(data / "folder"), "relative to the first root"


def test_a_long_folder_comes_in_parts(world):
    client = world.http()
    expected = sorted(f"{number}.dat" for number in range(101))
    for name in expected:
        (world.data / name).touch()
    found, after = [], ""
    while after is not None:
        page = files(client, world.data, after=after, limit=20)
        assert len(page["entries"]) <= 20
        found += [each["name"] for each in page["entries"]]
        after = page["next"]
    assert found == expected
    assert names(client, world.data, contains="7.DAT") == [name for name in expected if "7.dat" in name]
    assert names(client, world.data, limit=101) == expected


def test_what_leads_out_of_the_roots_is_not_shown(world, tmp_path):
    client, data = world.http(), world.data
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "in.npy").touch()
    (data / "out").symlink_to(tmp_path / "secret")
    (data / "broken").symlink_to(data / "nothing")
    (data / "inside").symlink_to(data / "folder")
    (data / "folder").mkdir()
    os.mkfifo(data / "pipe")
    (data / os.fsdecode(b"\xff")).touch()
    found = files(client, data)
    assert [each["name"] for each in found["entries"]] == ["folder", "inside", "pipe"]
    assert found["left_out"] == 2
    for path in (data / "out", "/etc", "..", "a\0b", ""):
        answer = client.get("/v1/files", params={"path": str(path)})
        assert_problem(answer, 422, "is outside the service's data roots")
    assert_problem(client.get("/v1/files", params={"path": "nothing"}), 422, "nothing: no such file; check the path")
    (data / "file").touch()
    assert_problem(client.get("/v1/files", params={"path": "file"}), 422, "file: is a file; name the folder")


def test_the_state_of_the_service_is_not_shown(world, tmp_path):
    (tmp_path / "state").mkdir(exist_ok=True)
    (tmp_path / "state" / "mine.npy").touch()
    client = world.http(data=tmp_path)
    assert names(client, tmp_path / "state") == ["mine.npy"]


@pytest.mark.parametrize(
    ("name", "sees"),
    [("ada", {"mri"}), ("eve", {"mri"}), ("bob", {"data"}), ("cy", {"data", "mri"}), ("root", {"data", "mri"})],
)
def test_each_group_sees_its_own_roots(world, tmp_path, name, sees):
    people = {
        "ada": ("user", ["mri"]), "eve": ("viewer", ["mri"]), "bob": ("user", ["eeg"]), "cy": ("user", ["eeg", "mri"]),
        "root": ("operator", []),
    }  # fmt: skip
    (tmp_path / "tokens").write_text("\n".join(token_line(each, each, *what) for each, what in people.items()))
    (tmp_path / "mri").mkdir()
    (tmp_path / "mri" / "raw.h5").touch()
    (world.data / "scan.tif").touch()
    client = world.http(Tokens(tmp_path / "tokens"), group_roots={"mri": [tmp_path / "mri"]})
    client.headers["Authorization"] = f"Bearer {name}"
    assert {each["name"] for each in files(client)["entries"]} == {str(tmp_path / each) for each in sees}
    for folder, inside in (("data", "scan.tif"), ("mri", "raw.h5")):
        if folder in sees:
            assert names(client, tmp_path / folder) == [inside]
        else:
            answer = client.get("/v1/files", params={"path": str(tmp_path / folder)})
            assert_problem(answer, 422, "is outside the service's data roots")


def test_strangers_see_nothing(world, tmp_path):
    (tmp_path / "tokens").write_text(token_line("ada", "t"))
    assert_problem(world.http(Tokens(tmp_path / "tokens")).get("/v1/files"), 401, "send a token")
