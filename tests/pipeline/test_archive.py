"""A folder as a stream and back: all of it comes through, and nothing from elsewhere."""

from __future__ import annotations

import io
import tarfile

import numpy as np
import pytest

from pipeline.archive import packed, unpack
from pipeline.errors import ServiceError, StorageError


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
