"""`millrace config check`: the settings as people write them, and places that cannot be used."""

from __future__ import annotations

import os

import pytest

from pipeline.service.settings import ServiceSettings
from pipeline.service.store import Store
from tests.images import names_in
from tests.pipeline.answers import run


def test_settings_are_shown_as_people_write_them(tmp_path, own_settings):
    lines = run("config", "check", "--data-roots", tmp_path, "--port", 8000).output.splitlines()
    shown = {line.split()[0]: " ".join(line.split()[1:]) for line in lines}
    assert (shown["memory"], shown["port"]) == ("1.0 GiB (default)", "8000 (--port)")
    assert "[default: 1GiB]" in run("serve", "--help").output


def test_places_that_cannot_be_used_are_told_beside_the_settings(tmp_path, own_settings, millrace):
    (tmp_path / "file").touch()
    usable = ("config", "check", "--state-dir", tmp_path / "made" / "later")
    code, out, err = millrace(*usable, "--data-roots", tmp_path)
    assert (code, err) == (0, "")
    assert names_in(tmp_path) == ["file"]
    assert millrace(*usable, "--data-roots", ":")[::2] == (
        2,
        "millrace: data_roots: name at least one folder whose files jobs may read and write\n",
    )
    wrong = ("--data-roots", f"{tmp_path}/none:{tmp_path}:{tmp_path}/file", "--tokens-file", tmp_path / "none")
    code, out, err = millrace(*usable, *wrong, "--state-dir", tmp_path / "file" / "state")
    assert (code, len(out.splitlines())) == (2, len(ServiceSettings.model_fields))
    way_out = "correct that, or choose another"
    assert err.replace(str(tmp_path), "T").splitlines() == [
        f"millrace: data_roots: T/none cannot be used as a folder (No such file or directory); {way_out}",
        f"millrace: data_roots: T/file cannot be used as a folder (Not a directory); {way_out}",
        "millrace: tokens_file T/none: No such file or directory; choose one that this user may read",
        "millrace: state_dir T/file/state: T/file is not a folder that this user may write to; choose another",
    ]


def test_a_groups_folder_under_a_data_root_is_told_as_by_serve(tmp_path, own_settings, millrace):
    (tmp_path / "mri").mkdir()
    given = ("--data-roots", tmp_path, "--group-roots", f"mri={tmp_path}/mri", "--state-dir", tmp_path / "state")
    code, _, err = millrace("config", "check", *given)
    assert (code, err) == (2, millrace("serve", *given)[2])
    assert err.startswith(f"millrace: group_roots: {tmp_path}/mri of mri lies under the data root {tmp_path}, ")


@pytest.mark.parametrize("name", ["x" * 256, "later/" + "x" * 256, "x" * 256 + "/later"])
def test_a_state_dir_whose_name_is_too_long_is_told_before_the_service_starts(tmp_path, own_settings, millrace, name):
    folder = tmp_path / name
    code, _, err = millrace("config", "check", "--data-roots", tmp_path, "--state-dir", folder)
    assert (code, err) == (2, f"millrace: state_dir {folder}: File name too long; choose another\n")


@pytest.mark.parametrize("command", [("config", "check"), ("serve",)], ids=" ".join)
def test_a_state_dir_beyond_what_sqlite_takes_is_refused(tmp_path, own_settings, millrace, command):
    parent = tmp_path / ("é" * 50) / ("é" * 50)
    left = 492 - len(os.fsencode(parent)) - 1
    folder = parent / ("x" * (left // 2)) / ("x" * (left - left // 2 - 1))
    assert millrace("config", "check", "--data-roots", tmp_path, "--state-dir", folder)[::2] == (0, "")
    Store(folder / "jobs.sqlite").close()
    code, _, err = millrace(*command, "--data-roots", tmp_path, "--state-dir", f"{folder}x")
    assert (code, err.count("\n")) == (2, 1)
    assert err.endswith("x: SQLite takes a folder's whole name of at most 492 bytes; choose another\n")
