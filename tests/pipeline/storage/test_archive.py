"""A folder as a stream and back: all of it comes through, and nothing from elsewhere."""

from __future__ import annotations

import io
import os
import shutil
import tarfile

import numpy as np
import pytest

from pipeline.errors import ServiceError, StorageError
from pipeline.storage.archive import packed, unpack


def tree(folder):
    return {path.relative_to(folder): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "in.zarr"
    for name, size in (("zarr.json", 1), ("c/0/0", 511), ("c/0/1", 512), ("c/1/0", 513), ("ü " + 120 * "n", 3_000_000)):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(np.random.default_rng(size).bytes(size))
    (made / "empty").mkdir()
    (made / "nothing").touch()
    for each in (made, *made.rglob("*")):  # a clock's tick before anything happens to them
        os.utime(each, (1e9, 1e9))
    return made


@pytest.mark.parametrize("size", [1, 700, 1 << 20])
def test_there_and_back(folder, tmp_path, size):
    whole = b"".join(packed(folder))
    if size == 1:
        (folder / ("ü " + 120 * "n")).unlink()
        whole = b"".join(packed(folder))
    unpack((whole[at : at + size] for at in range(0, len(whole), size)), tmp_path / "out")
    assert tree(tmp_path / "out") == tree(folder)
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:  # any tar can read it
        assert archive.getnames()[0] == "in.zarr"


def test_links_stay_behind(folder, tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "file").symlink_to(tmp_path / "secret")
    (folder / "folder").symlink_to(tmp_path)
    assert b"secret" not in b"".join(packed(folder))


def test_a_file_that_becomes_shorter(folder):
    pieces = packed(folder)
    for piece in pieces:
        if len(piece) == 1 << 20:
            (folder / ("ü " + 120 * "n")).write_bytes(b"")
            break
    with pytest.raises(StorageError, match="became shorter"):
        list(pieces)


def test_a_subfolder_that_is_removed_midway(folder):
    pieces = packed(folder)
    next(pieces)
    shutil.rmtree(folder / "c" / "1")
    with pytest.raises(StorageError, match=r"in.zarr/c: was changed while it was read"):
        list(pieces)


@pytest.mark.parametrize("name", ["c/1", "zarr.json"])
def test_what_is_removed_after_its_name_was_read(folder, name):
    pieces = packed(folder)
    for piece in pieces:
        if piece.startswith(b"in.zarr/c/0/\0"):
            break
    path = folder / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(StorageError, match=rf"{name}: was removed while its folder was read"):
        list(pieces)


@pytest.mark.parametrize("change", ["emptier", "fuller"])
def test_a_folder_that_becomes_emptier_or_fuller(folder, change):
    """All that is then in it is packed, and yet it is not the whole folder at any one time."""
    pieces = packed(folder)
    next(pieces)
    (folder / "c" / "1" / "0").unlink() if change == "emptier" else (folder / "c" / "1" / "new").touch()
    with pytest.raises(StorageError, match=r"c/1: was changed while it was read; fetch it again"):
        list(pieces)


def test_a_folder_that_a_newer_result_replaces(folder, tmp_path):
    """As a later job does it: the newer tree takes the name, of which every file is there as well."""
    shutil.copytree(folder, tmp_path / "newer")
    pieces = packed(folder)
    next(pieces)
    folder.rename(tmp_path / "older")
    (tmp_path / "newer").rename(folder)
    with pytest.raises(StorageError, match=r"in.zarr: was changed while it was read"):
        list(pieces)


def test_what_is_no_file_is_named_and_not_waited_for(folder):
    os.mkfifo(folder / "pipe")
    with pytest.raises(StorageError, match="pipe: is neither a file nor a folder"):
        list(packed(folder))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("/etc/x", tarfile.REGTYPE), ("a/../../x", tarfile.REGTYPE), ("a/x", tarfile.SYMTYPE), ("a/x", tarfile.CHRTYPE)],
)
def test_what_leads_elsewhere_is_not_unpacked(tmp_path, name, kind):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, "/etc/passwd"
        archive.addfile(member)
    with pytest.raises(ServiceError, match="which is not unpacked"):
        unpack(iter([made.getvalue()]), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_damaged_archive(folder, tmp_path):
    whole = b"".join(packed(folder))
    with pytest.raises(ServiceError, match="damaged archive"):
        unpack(iter([whole[:900_000]]), tmp_path / "out")
