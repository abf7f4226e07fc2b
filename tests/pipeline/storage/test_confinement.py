"""Files and folders that are replaced by links after their paths were checked."""

from __future__ import annotations

import errno
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import InputError, MillraceError, OutputError
from pipeline.formats.image import open_image
from pipeline.formats.image.base import ImageHeader, Region
from pipeline.formats.image.zarr import Zarr
from pipeline.storage.archive import packed
from pipeline.storage.confinement import (
    Confinement,
    Subfolders,
    by_descriptor,
    confine,
    in_its_folder,
    open_beneath,
    open_within,
    put_within,
    real_path,
    remove_files_within,
    resolved,
)
from pipeline.storage.partial import Opening, PartialFile, PartialFolder, behind_link
from pipeline.storage.positional import PositionalFile
from tests import commands

HEADER = ImageHeader(shape=(521, 8209), axes="YX", dtype=np.dtype(np.uint16))


@pytest.fixture
def root(tmp_path):
    """A confined folder; `outside` beside it has a folder and a file of the same names."""
    for folder in (tmp_path / "root", tmp_path / "outside"):
        (folder / "there").mkdir(parents=True)
        (folder / "there" / "x.npy").write_bytes(folder.name.encode())
    confine(Confinement((tmp_path / "root",), tmp_path / "root" / "state"))
    return tmp_path / "root"


@pytest.fixture
def outside(root):
    return root.parent / "outside"


@pytest.fixture
def image(root):
    """A Zarr image of six chunks; their values are 1."""
    path = root / "a.zarr"
    write_zarr(path, 1)
    return path


def write_zarr(path, value):
    writer = Zarr().create(path, HEADER)
    writer.write(Region.whole(HEADER.shape), np.full(HEADER.shape, value, np.uint16))
    writer.publish()


def swap(path, target):
    """A link to the target is now where the file or folder was."""
    path.rename(path.with_name(path.name + ".away"))
    path.symlink_to(target)


def tree(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def content(path):
    file = PositionalFile(path)
    try:
        return file.head(100)
    finally:
        file.close()


def test_a_file_replaced_by_a_link_is_not_read(root, outside):
    path = root / "there" / "x.npy"
    assert content(path) == b"root"
    swap(path, outside / "there" / "x.npy")
    with pytest.raises(InputError, match=rf"^{path}: leads out of the service's data roots by a symbolic link; put"):
        content(path)


def test_nor_below_a_folder_replaced_by_a_link(root, outside):
    swap(root / "there", outside / "there")
    with pytest.raises(InputError, match="leads out"):
        content(root / "there" / "x.npy")
    with pytest.raises(OSError, match="leads out of the data roots"), by_descriptor(root / "there" / "x.npy"):
        pass


def test_links_that_stay_under_the_roots_are_followed(root):
    (root / "link").symlink_to(root / "there")
    (root / "relative").symlink_to("link/x.npy")
    assert content(root / "link" / "x.npy") == content(root / "relative") == b"root"


def test_other_paths_are_opened_as_usual(root, outside):
    (outside / "link").symlink_to(outside / "there" / "x.npy")
    assert content(outside / "link") == b"outside"
    assert resolved(outside / "link") == outside / "there" / "x.npy"
    with by_descriptor(outside / "link") as name, in_its_folder(outside / "new") as new:
        assert (name, new) == (outside / "link", outside / "new")


def test_paths_with_dots_are_confined_too(root, outside):
    with pytest.raises(InputError, match="leads out"):
        content(root / ".." / "outside" / "there" / "x.npy")
    with pytest.raises(OSError, match="leads out of the data roots"), in_its_folder(root / ".." / "outside" / "new"):
        pass


def test_the_services_state_is_not_read_by_a_link_into_it(root):
    (root / "state" / "previews").mkdir(parents=True)
    (root / "state" / "jobs.sqlite").write_bytes(b"state")
    (root / "link").symlink_to(root / "state" / "jobs.sqlite")
    with pytest.raises(InputError, match="leads out"):
        content(root / "link")
    assert content(root / "state" / "jobs.sqlite") == b"state"  # by the service itself


def test_a_pipe_in_a_files_place_does_not_wait(root):
    os.mkfifo(root / "pipe")
    with pytest.raises(InputError, match="not a regular file"):
        content(root / "pipe")
    with pytest.raises(OSError, match=os.strerror(errno.ENXIO)), by_descriptor(root / "pipe"):
        pass


def test_a_link_itself_is_not_opened_where_none_is_wanted(root):
    (root / "link").symlink_to(root / "there" / "x.npy")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        open_beneath(root / "link", os.O_RDONLY | os.O_NOFOLLOW)


def test_a_root_may_be_a_link_on_this_host(tmp_path):
    (tmp_path / "real" / "a").mkdir(parents=True)
    (tmp_path / "real" / "a" / "x").write_bytes(b"x")
    (tmp_path / "name").symlink_to(tmp_path / "real")
    confine(Confinement((tmp_path / "name",)))
    for path in (tmp_path / "name" / "a" / "x", tmp_path / "real" / "a" / "x"):
        assert content(path) == b"x"
        with in_its_folder(path) as here:
            assert here.read_bytes() == b"x"
            assert here != path
    (tmp_path / "real" / "etc").symlink_to("/etc")
    with pytest.raises(InputError, match="leads out"):
        content(tmp_path / "real" / "etc" / "passwd")


def test_the_root_of_all_files_confines_nothing(tmp_path):
    (tmp_path / "x").write_bytes(b"x")
    everywhere = Confinement((Path("/"),))
    assert everywhere.place_of("/etc/passwd") == "/etc/passwd"
    assert everywhere.holds("/etc/passwd")


def test_every_process_that_receives_a_confinement_applies_it(root, outside):
    """As workers do, which get it with a job's spec."""
    swap(root / "there" / "x.npy", outside / "there" / "x.npy")
    program = (
        "import pickle, sys; from pipeline.storage.positional import first_bytes; from pathlib import Path\n"
        "first_bytes(Path(sys.argv[1]))\n"
        "pickle.loads(bytes.fromhex(sys.argv[2]))\n"
        "first_bytes(Path(sys.argv[1]))"
    )
    sent = pickle.dumps(Confinement((root,))).hex()
    done = commands.run(
        [sys.executable, "-c", program, root / "there" / "x.npy", sent],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "line 4, in <module>" in done.stderr
    assert "InputError" in done.stderr
    assert "leads out" in done.stderr


@pytest.mark.parametrize("part", ["0", "0/c", "0/c/1", "0/c/1/0", "0/zarr.json"])
def test_a_part_of_a_zarr_replaced_by_a_link_is_not_read(image, outside, part):
    write_zarr(outside / "a.zarr", 60_000)
    found = np.empty(HEADER.shape, np.uint16)
    reader = open_image(image) if part != "0/zarr.json" else None
    swap(image / part, outside / "a.zarr" / part)
    with pytest.raises(InputError, match="leads out"):
        (reader or open_image(image)).read(Region.whole(HEADER.shape), found)


def test_links_within_a_zarr_that_stay_under_the_roots_are_followed(image, root):
    swap(image / "0" / "c" / "1", image / "0" / "c" / "1.away")
    found = np.empty(HEADER.shape, np.uint16)
    open_image(image).read(Region.whole(HEADER.shape), found)
    assert (found == 1).all()


@pytest.mark.parametrize("opening", [Opening.NEW, Opening.JOIN, Opening.RESUME])
@pytest.mark.parametrize("kind", [PartialFile, PartialFolder])
def test_no_partial_output_is_made_or_joined_in_a_folder_replaced_by_a_link(root, outside, kind, opening):
    (outside / "there" / "y.partial").mkdir() if kind is PartialFolder else (outside / "there" / "y.partial").touch()
    before = tree(outside)
    swap(root / "there", outside / "there")
    arguments = (0,) if kind is PartialFile else (lambda folder: True,)
    with pytest.raises(OutputError, match=rf"{root}/there/y: the folder {root}/there leads elsewhere by a symbolic"):
        kind(root / "there" / "y", *arguments, opening)
    assert tree(outside) == before


def test_no_partial_output_is_written_through_a_link_of_its_name(root, outside):
    (root / "y.partial").symlink_to(outside / "there" / "x.npy")
    with pytest.raises(OutputError, match=rf"^{root}/y: a symbolic link .* \({root}/y.partial\); remove it"):
        PartialFile(root / "y", 5)
    assert (outside / "there" / "x.npy").read_bytes() == b"outside"


@pytest.mark.parametrize("end", ["publish", "discard"])
@pytest.mark.parametrize("kind", [PartialFile, PartialFolder])
def test_nothing_is_renamed_or_removed_outside(root, outside, kind, end):
    """The folder of the output is replaced while the output is written."""
    arguments = () if kind is PartialFile else (lambda folder: True,)
    partial = kind(root / "there" / "y", *arguments)
    for name in ("y", "y.partial", "y.partial.older"):
        (outside / "there" / name).mkdir()
    swap(root / "there", outside / "there")
    before = tree(outside)
    with pytest.raises(OutputError, match="leads elsewhere by a symbolic link"):
        getattr(partial, end)()
    partial.keep()
    assert tree(outside) == before


@pytest.mark.parametrize("part", ["0", "0/c", "0/c/1"])
def test_no_chunk_is_written_or_completed_through_a_link(root, outside, part):
    write_zarr(outside / "a.zarr", 60_000)
    before = tree(outside)
    writer = Zarr().create(root / "y.zarr", HEADER)
    writer.write(Region.whole(HEADER.shape), np.ones(HEADER.shape, np.uint16))
    swap(root / "y.zarr.partial" / part, outside / "a.zarr" / part)
    with pytest.raises(MillraceError):
        writer.write(Region.whole(HEADER.shape), np.ones(HEADER.shape, np.uint16))
    writer.write(Region((304, 16), (496, 8000)), np.ones((192, 7984), np.uint16))  # parts of chunks, which are held
    with pytest.raises(MillraceError):  # the chunks are read first
        writer.flush()
    writer.discard()
    assert tree(outside) == before
    assert not (root / "y.zarr.partial").exists()


def test_files_within_a_folder(tmp_path):
    (tmp_path / "link").symlink_to("/etc")
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        folders = Subfolders(folder)
        put_within(folders, "a/b/c", [b"first"], "new/1")
        put_within(folders, "a/b/c", [memoryview(np.arange(2, dtype=np.int32)), b"\2\0\0\0"], "new/1")
        assert (tmp_path / "a" / "b" / "c").read_bytes() == np.arange(3, dtype=np.int32).tobytes()
        assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["c"]
        for name in ("link/passwd", "../x", "a/../../x", "", "/etc/passwd", "a/b/"):
            with pytest.raises(OSError, match=rf"leads out|{os.strerror(errno.ENOTDIR)}|No such file"):
                open_within(folder, name, os.O_RDONLY)
        (tmp_path / "a" / "x").symlink_to("/etc/passwd")
        with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
            open_within(folder, "a/x", os.O_RDONLY)
        put_within(folders, "a/x", [b"mine"], "new/1")  # in the link's place
        assert (tmp_path / "a" / "x").read_bytes() == b"mine"
        assert not (tmp_path / "a" / "x").is_symlink()
        (tmp_path / "new" / "left").touch()
        remove_files_within(folder, "new")
        assert not (tmp_path / "new").exists()
        with pytest.raises(OSError, match=os.strerror(errno.ENOTDIR)):
            remove_files_within(folder, "link")
    finally:
        os.close(folder)


def test_a_link_put_at_an_outputs_name_is_not_resolved(root, outside):
    (root / "y").symlink_to(outside / "y")
    assert resolved(root / "y") == root / "y"
    with pytest.raises(OutputError, match="a symbolic link that cannot be followed is in the way"):
        behind_link(root / "y")


def test_an_archive_has_nothing_of_a_folder_replaced_by_a_link(root, outside):
    (root / "results" / "there").mkdir(parents=True)
    (root / "results" / "there" / "x.npy").write_bytes(b"root")
    pieces = packed(root / "results")
    found = [next(pieces), next(pieces)]  # the headers of both folders
    swap(root / "results" / "there", outside / "there")
    with pytest.raises(MillraceError, match="there: leads out of the data roots"):
        found.extend(pieces)
    assert b"outside" not in b"".join(found)


def test_real_paths_are_those_of_python(tmp_path):
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    (folder / "inner").mkdir(parents=True)
    elsewhere.mkdir()
    (folder / "file").touch()
    (folder / "link").symlink_to(elsewhere)
    (folder / "linked").symlink_to("file")
    (folder / "broken").symlink_to("missing/too")
    (folder / "loop").symlink_to("loop")
    names = ("file", "inner", "link", "linked", "broken", "loop", "missing", "missing/too", "file/below", "link/new")
    for name in (*names, "", ".", "..", "inner/..", "link/..", "link/../x", "inner/./../y", "loop/x", "inner//z"):
        path = f"{folder}/{name}"
        assert real_path(path) == os.path.realpath(path), name
    assert real_path("/") == "/"
    assert real_path("/x") == "/x"
