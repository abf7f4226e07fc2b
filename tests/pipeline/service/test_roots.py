"""Which files jobs may read: by no link is it one outside the roots, neither in a folder nor beside the named file."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from pipeline.engine.receipt import write_receipt
from pipeline.errors import InputError, OutputError, ParameterError
from pipeline.formats.image.base import ImageHeader, Region
from pipeline.formats.image.zarr import Zarr
from pipeline.service.roots import DataRoots
from pipeline.storage.positional import first_bytes


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture
def image(root):
    """A Zarr image of four chunks."""
    path, header = root / "a.zarr", ImageHeader(shape=(512, 8192), axes="YX", dtype=np.dtype(np.uint16))
    writer = Zarr().create(path, header)
    writer.write(Region.whole(header.shape), np.ones(header.shape, np.uint16))
    writer.publish()
    return path


def moved(path, elsewhere):
    """The file or folder is elsewhere, and a link in its place."""
    elsewhere.parent.mkdir(parents=True, exist_ok=True)
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def refused(path):
    return pytest.raises(InputError, match=rf"^{re.escape(str(path))}: is a symlink that leaves .*data roots \(.*\); ")


@pytest.mark.parametrize("part", ["0/c/0/1", "0/c/1", "0/c", "0", "0/zarr.json"])
def test_no_link_in_a_zarr_folder_leads_out(root, image, tmp_path, part):
    moved(image / part, tmp_path / "outside" / "x")
    with refused(image / part):
        DataRoots([root]).readable("a.zarr")


def test_nor_one_by_way_of_another_folder_under_the_roots(root, image, tmp_path):
    moved(image / "0" / "c" / "1", root / "elsewhere")
    assert DataRoots([root]).readable("a.zarr") == image
    moved(root / "elsewhere" / "0", tmp_path / "outside" / "x")
    with refused(root / "elsewhere" / "0"):
        DataRoots([root]).readable("a.zarr")


def test_links_to_an_annex_under_the_roots_are_followed(root, image, tmp_path):
    """As git-annex has every file in, one of whose contents has not been fetched."""
    for number, path in enumerate(found for found in sorted(image.rglob("*")) if found.is_file()):
        moved(path, root / ".git" / "annex" / "objects" / f"{number}" / "key")
    assert DataRoots([root]).readable("a.zarr") == image
    (root / ".git" / "annex" / "objects" / "0" / "key").unlink()
    assert DataRoots([root]).readable("a.zarr") == image
    with refused(image / "zarr.json"):
        DataRoots([image]).readable(".")


def test_links_in_a_circle_end(root, image):
    (image / "0" / "c" / "again").symlink_to(image)
    assert DataRoots([root]).readable("a.zarr") == image


@pytest.mark.parametrize("named", ["scan.cfl", "scan.hdr", "scan"])
@pytest.mark.parametrize("part", ["scan.cfl", "scan.hdr"])
def test_the_other_file_of_a_pair_lies_under_the_roots_too(root, tmp_path, named, part):
    for suffix in (".cfl", ".hdr"):
        (root / f"scan{suffix}").touch()
    roots = DataRoots([root])
    roots.readable(named)
    roots.check_further([root / named])
    moved(root / part, tmp_path / "outside" / part)
    for check in (lambda: roots.readable(named), lambda: roots.check_further([root / named])):
        with pytest.raises(InputError, match="is outside the service's data roots"):
            check()


def test_a_pair_is_sought_beside_the_name_that_a_job_gives(root):
    """A trajectory is opened by that name, an input by the one that its link leads to."""
    (root / "there").mkdir()
    for path in (root / "there" / "x.cfl", root / "there" / "x.hdr"):
        path.touch()
    (root / "scan.cfl").symlink_to(root / "there" / "x.cfl")
    (root / "scan.hdr").symlink_to("/etc/passwd")
    assert DataRoots([root]).readable("scan.cfl") == root / "there" / "x.cfl"
    with pytest.raises(InputError, match=r"scan.hdr: is outside the service's data roots"):
        DataRoots([root]).check_further([root / "scan.cfl"])


def test_a_file_is_looked_for_without_its_parts_being_read(root, image, tmp_path):
    """Results are fetched and jobs accepted by name alone."""
    moved(image / "0" / "c" / "1", tmp_path / "outside" / "x")
    assert DataRoots([root]).within("a.zarr") == image


def test_a_receipt_is_not_written_through_a_link(root, tmp_path):
    secret = tmp_path / "secret.cfg"
    secret.write_text("kept")
    (root / "y.npy.receipt.json").symlink_to(secret)
    write_receipt(DataRoots([root]).writable("y.npy"), {"job": "1"})
    assert secret.read_text() == "kept"
    assert (root / "y.npy.receipt.json").read_text() == '{\n  "job": "1"\n}\n'


def test_names_that_no_file_system_takes_are_refused_in_one_line(root):
    roots, long = DataRoots([root]), "x" * 300
    for check in (lambda: roots.readable(long), lambda: roots.check_further([root / long])):
        with pytest.raises(InputError, match=r"x: has a name too long for its file system; use a shorter one$"):
            check()


def test_the_root_of_all_files(tmp_path):
    assert DataRoots([Path("/")]).readable("/") == Path("/")
    assert DataRoots([Path("/")]).readable(str(tmp_path)) == tmp_path


def test_the_services_own_files_are_no_jobs(tmp_path):
    """Else who may submit could put a picture of theirs in the place of another job's."""
    (tmp_path / "state" / "previews").mkdir(parents=True)
    (tmp_path / "link").symlink_to("state")
    roots = DataRoots([tmp_path], but=tmp_path / "state")
    for name in (
        "state/previews/0123456789ab.png",
        "link/previews/0123456789ab.png",
        "state/jobs.sqlite-wal",
        "state/lock",
    ):
        with pytest.raises(OutputError, match="outside the service's data roots"):
            roots.writable(name)
        with pytest.raises(InputError, match="outside the service's data roots"):
            roots.readable(name)
    for name in ("statement.png", "state/data/previews.png"):
        assert roots.writable(name) == tmp_path / name


def test_further_inputs_are_named_under_the_roots(root, tmp_path):
    """Only names under the roots are looked at again when a file is opened."""
    (root / "x.npy").touch()
    (tmp_path / "alias").symlink_to(root)
    with pytest.raises(InputError, match=rf"alias/x.npy: leads into .* from outside; name it {root}/x.npy$"):
        DataRoots([root]).check_further([tmp_path / "alias" / "x.npy"])
    DataRoots([tmp_path / "alias"]).check_further([tmp_path / "alias" / "x.npy", root / "x.npy"])


def test_jobs_carry_the_roots(root, tmp_path):
    (root / "x.npy").symlink_to("/etc/passwd")
    DataRoots([root], but=tmp_path / "state").confine()
    with pytest.raises(InputError, match=rf"^{root}/x.npy: leads out of the service's data roots"):
        first_bytes(root / "x.npy")


def test_a_groups_roots_lie_beside_those_of_all(root, tmp_path):
    inside, outside = root / "mri", tmp_path / "mri"
    inside.mkdir()
    outside.mkdir()
    with pytest.raises(ParameterError, match=f"group_roots: {inside} of mri lies under the data root {root}"):
        DataRoots([root], groups={"mri": [outside, inside]})
    (tmp_path / "link").symlink_to(inside)
    with pytest.raises(ParameterError, match=f"group_roots: {inside} of mri lies under"):
        DataRoots([root], groups={"mri": [tmp_path / "link"]})
    with pytest.raises(ParameterError, match="cannot be used as a folder"):
        DataRoots([root], groups={"mri": [tmp_path / "none"]})
    shared = DataRoots([root], groups={"mri": [outside, root], "all": [tmp_path]})
    assert shared.of("mri").within("x") == outside / "x"
    assert shared.of("mri").within(str(root / "x")) == root / "x"
    assert shared.of("all").within(str(outside / "x")) == outside / "x"
    assert shared.of("eeg") is shared.of("") is shared
    with pytest.raises(InputError, match="outside the service's data roots"):
        shared.of("eeg").within(str(outside / "x"))


def test_a_group_names_files_among_parameters_by_their_whole_paths(root, tmp_path):
    """Workloads look for relative ones in the working folder, the first root of all."""
    own = tmp_path / "mri"
    own.mkdir()
    roots = DataRoots([root], groups={"mri": [own]})
    with pytest.raises(InputError, match=f"frames.npy: among parameters, name a file by its whole path, {own}/frames"):
        roots.of("mri").check_further([Path("frames.npy")])
    roots.of("mri").check_further([own / "frames.npy"])
    roots.check_further([Path("frames.npy")])


def test_links_that_leave_a_groups_roots_are_not_followed(root, tmp_path):
    own = tmp_path / "mri"
    own.mkdir()
    (root / "secret.npy").write_bytes(b"secret")
    (own / "a.npy").symlink_to(root / "secret.npy")
    roots = DataRoots([root], groups={"mri": [own]})
    with pytest.raises(InputError, match="outside the service's data roots"):
        roots.of("mri").readable("a.npy")
    roots.confine()
    with pytest.raises(InputError, match="leads out of the service's data roots"):
        first_bytes(own / "a.npy", 4)
