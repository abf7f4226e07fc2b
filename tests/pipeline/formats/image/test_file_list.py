"""Many files as one image: read and written as each would be alone, and published together."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import tifffile

from pipeline.errors import InputError, OutputError
from pipeline.formats import image as images
from pipeline.formats.image import file_list, whole_files
from pipeline.formats.image.base import Region
from pipeline.formats.image.file_list import FileList, ListedFile, StoredSamples, result_of
from pipeline.storage import confinement
from pipeline.storage.partial import Opening
from tests.images import names_in, read_image, write_image

SHAPE = (7, 11)


@pytest.fixture
def samples():
    return np.random.default_rng(5).integers(0, 65536, (5, *SHAPE)).astype(np.uint16)


@pytest.fixture(params=["by the interpreter", "by compiled loops"])
def loops(request, monkeypatch):
    """Whether compiled loops take the files."""
    found = None if request.param == "by the interpreter" else import_module("pipeline.codecs.loops.whole_files")
    monkeypatch.setattr(file_list, "loops_for", lambda count: found)
    file_list._parsed.cache_clear()
    yield found
    file_list._parsed.cache_clear()


def listed(folder, samples, *, suffix=".npy", output=".npy", stored=None):
    """A list of the samples as files, whose results are to lie in the folder `out`."""
    files = []
    for number, one in enumerate(samples):
        path = write_image(folder / f"a{number}{suffix}", one, "YX")
        found = path.stat()
        files.append(ListedFile(str(path), found.st_size, found.st_mtime_ns, f"b{number}{output}"))
    (folder / "out").mkdir(exist_ok=True)
    path = folder / "all.files"
    path.write_bytes(FileList(files=tuple(files), folder=str(folder / "out"), stored=stored).encoded())
    return path


def stored_in(path):
    with images.open_image(path) as reader:
        return StoredSamples(dtype=reader.run[0].str, offset=reader.run[1])


@pytest.mark.parametrize("suffix", [".npy", ".tif", ".png", ".pgm"])
def test_any_region_is_that_of_the_files(tmp_path, samples, suffix, loops):
    path = listed(tmp_path, samples, suffix=suffix)
    if suffix in (".npy", ".tif"):
        path = listed(tmp_path, samples, suffix=suffix, stored=stored_in(tmp_path / f"a0{suffix}"))
    with images.open_image(path) as reader:
        assert (reader.header.shape, reader.header.axes) == (samples.shape, "NYX")
        random = np.random.default_rng(1)
        regions = [Region.whole(samples.shape), Region((2, 0, 0), (4, *SHAPE))]
        for _ in range(20):
            start = random.integers(0, samples.shape)
            regions.append(
                Region(tuple(start.tolist()), tuple(random.integers(start, samples.shape, endpoint=True).tolist()))
            )
        for region in regions:
            out = np.full(region.shape, 7, np.uint16)
            reader.read(region, out)
            np.testing.assert_array_equal(out, samples[region.slices])


def test_bytes_in_the_other_order_are_swapped(tmp_path, samples, loops):
    path = listed(tmp_path, samples, stored=StoredSamples(dtype=">u2", offset=128))
    out = np.empty(samples.shape, np.uint16)
    with images.open_image(path) as reader:
        reader.read(Region.whole(samples.shape), out)
    np.testing.assert_array_equal(out, samples.byteswap())


@pytest.mark.parametrize("output", [".npy", ".tif", ".png", ".ome.tif"])
def test_results_are_those_of_one_writer_each(tmp_path, samples, output, loops):
    path = listed(tmp_path, samples, output=output)
    with images.open_image(path) as reader:
        header = reader.header
    writer = images.create_image(result_of(path), header)
    writer.write(Region((0, 0, 0), (2, *SHAPE)), samples[:2])
    writer.write(Region((2, 0, 0), (5, *SHAPE)), samples[2:])
    assert names_in(tmp_path / "out") == []
    writer.left_out = {3: "damaged"}
    writer.publish()
    assert names_in(tmp_path / "out") == [f"b{n}{output}" for n in (0, 1, 2, 4)]
    for number in (0, 1, 2, 4):
        (tmp_path / "one").mkdir(exist_ok=True)
        one = write_image(tmp_path / f"one/b{number}{output}", samples[number], "YX")
        assert (tmp_path / f"out/b{number}{output}").read_bytes() == one.read_bytes()
    assert not [name for name in names_in(tmp_path) if "staged" in name or "partial" in name]


def test_each_result_has_the_text_and_the_date_of_its_own_input(tmp_path, samples):
    path = listed(tmp_path, samples, suffix=".tif", output=".tif")
    rows = []
    for number, file in enumerate(FileList.read(path).files):
        text, date = (
            (f"leaf {number}", f"2024:02:29 13:07:{number:02}") if number != 3 else (None, "2025:01:01 00:00:00")
        )
        tifffile.imwrite(file.path, samples[number], description=text, datetime=date, metadata=None)
        found = Path(file.path).stat()
        rows.append(replace(file, nbytes=found.st_size, mtime_ns=found.st_mtime_ns))
    path.write_bytes(replace(FileList.read(path), files=tuple(rows)).encoded())
    with images.open_image(path) as reader:
        writer = images.create_image(result_of(path), reader.header)
    kinds = set()
    for row in rows:
        with images.open_image(Path(row.path)) as reader:
            kinds.add(repr(reader.header))
    assert len(kinds) == 1, "they share a plan"
    writer.write(Region.whole(samples.shape), samples)
    writer.publish()
    for number, row in enumerate(rows):
        with tifffile.TiffFile(tmp_path / "out" / row.output) as made, tifffile.TiffFile(row.path) as source:
            for tag in (270, 306):
                assert made.pages[0].tags.valueof(tag) == source.pages[0].tags.valueof(tag)
            np.testing.assert_array_equal(made.asarray(), samples[number])


def test_a_group_is_synced_once_before_any_result_has_its_name(tmp_path, samples, steps, loops, monkeypatch):
    moved = whole_files.WholeFiles.move

    def move(self, numbers, *folders):
        steps.extend(f"rename b{number}.npy" for number in numbers)
        return moved(self, numbers, *folders)

    monkeypatch.setattr(whole_files.WholeFiles, "move", move)
    path = listed(tmp_path, samples)
    with images.open_image(path) as reader:
        writer = images.create_image(result_of(path), reader.header)
    steps.clear()
    writer.write(Region.whole(samples.shape), samples)
    writer.publish()
    assert steps[0] == "sync all"
    assert steps.count("sync all") == 1
    assert sum(step.startswith("sync") for step in steps) <= 5
    last_result = max(number for number, step in enumerate(steps) if "b4.npy" in step)
    assert steps.index("sync all") < last_result < steps.index("rename all.result.files")


def test_another_process_writes_its_share_and_a_later_run_publishes(tmp_path, samples, loops):
    path = listed(tmp_path, samples)
    with images.open_image(path) as reader:
        header = reader.header
    owner = images.create_image(result_of(path), header)
    joined = images.create_image(result_of(path), header, Opening.JOIN)
    joined.write(Region((0, 0, 0), (3, *SHAPE)), samples[:3])
    joined.flush()
    joined.keep()
    owner.keep()
    later = images.create_image(result_of(path), header, Opening.RESUME)
    later.write(Region((3, 0, 0), (5, *SHAPE)), samples[3:])
    (tmp_path / "out/b1.npy").write_bytes((tmp_path / "all.result.files.staged/b1.npy").read_bytes())
    (tmp_path / "all.result.files.staged/b1.npy").unlink()  # a run that was killed while it published renamed it
    later.publish()
    for number in range(5):
        np.testing.assert_array_equal(read_image(tmp_path / f"out/b{number}.npy"), samples[number])


def test_discarding_removes_what_was_written(tmp_path, samples):
    path = listed(tmp_path, samples)
    with images.open_image(path) as reader:
        writer = images.create_image(result_of(path), reader.header)
    writer.write(Region.whole(samples.shape), samples)
    writer.discard()
    writer.discard()
    assert names_in(tmp_path / "out") == []
    assert not [name for name in names_in(tmp_path) if "result" in name]


def test_parts_of_files_are_not_written(tmp_path, samples):
    path = listed(tmp_path, samples)
    with images.open_image(path) as reader:
        writer = images.create_image(result_of(path), reader.header)
    with pytest.raises(ValueError, match="written whole"):
        writer.write(Region((0, 0, 0), (1, 3, 11)), samples[:1, :3])
    writer.discard()


def test_a_services_job_takes_no_list_that_a_user_has_put_there(tmp_path, samples, monkeypatch):
    path = listed(tmp_path, samples)
    with images.open_image(path) as reader:
        header = reader.header
    monkeypatch.setattr(confinement, "_known", {})
    confinement.confine(confinement.Confinement((tmp_path,)))
    with pytest.raises(InputError, match="a list of files, which a service does not take; submit the files"):
        images.open_image(path)
    with pytest.raises(InputError, match="a list of files, which a service does not take"):
        images.create_image(result_of(path), header)


def test_another_name_makes_no_list(tmp_path, samples):
    path = listed(tmp_path, samples).rename(tmp_path / "all.txt")
    with pytest.raises(InputError, match="unsupported image format"):
        images.open_image(path)


def test_the_header_is_that_of_a_file_as_it_was_listed(tmp_path, samples):
    path = listed(tmp_path, samples)
    (tmp_path / "a0.npy").unlink()
    write_image(tmp_path / "a1.npy", np.zeros((3, 4), np.uint8), "YX")
    with images.open_image(path) as reader:
        assert reader.header.shape == samples.shape
        out = np.empty((1, *SHAPE), np.uint16)
        with pytest.raises(InputError, match=r"a1.npy: changed while it was read; run again"):
            reader.read(Region((1, 0, 0), (2, *SHAPE)), out)


@pytest.mark.parametrize("text", ['{"millrace-files": 1', '{"millrace-files": 1, "files": 3}'])
def test_a_damaged_list_is_one_line(tmp_path, text):
    (tmp_path / "all.files").write_text(text)
    with pytest.raises(InputError, match=r"all.files: the list of files is damaged; run the job again"):
        images.open_image(tmp_path / "all.files")


def test_a_list_has_a_result_of_a_certain_name(tmp_path, samples):
    path = listed(tmp_path, samples)
    with images.open_image(path) as reader, pytest.raises(OutputError, match=r"name it so"):
        images.create_image(tmp_path / "other.files", reader.header)


@pytest.mark.parametrize("fault", ["gone", "rewritten", "cut short", "a pipe", "a folder"])
def test_a_file_that_is_not_as_listed_is_named_and_the_others_are_read(tmp_path, samples, loops, fault):
    path = listed(tmp_path, samples, stored=StoredSamples(dtype="<u2", offset=128))
    with images.open_image(path) as reader:
        changed = tmp_path / "a2.npy"
        whole = changed.read_bytes()
        changed.unlink()
        if fault == "rewritten":
            changed.write_bytes(whole[:-1] + b"\7")
        elif fault == "cut short":
            changed.write_bytes(whole[:-1])
        elif fault == "a pipe":
            os.mkfifo(changed)
        elif fault == "a folder":
            changed.mkdir()
        out = np.empty(samples.shape, np.uint16)
        message = {"gone": "no such file", "a pipe": "is not a regular file", "a folder": "is a folder"}
        with pytest.raises(InputError, match=rf"a2\.npy: {message.get(fault, 'changed while it was read')}"):
            reader.read(Region.whole(samples.shape), out)
        np.testing.assert_array_equal(out[:2], samples[:2])
        reader.read(Region((3, 0, 0), (5, *SHAPE)), out[3:])
        np.testing.assert_array_equal(out[3:], samples[3:])


def test_compiled_loops_leave_no_sound_file(tmp_path, samples, loops, monkeypatch):
    path = listed(tmp_path, samples, output=".tif", stored=StoredSamples(dtype="<u2", offset=128))
    slow = []

    def count(owner, name):
        plain = getattr(owner, name)

        def counted(*given, **named):
            slow.append(name)
            return plain(*given, **named)

        monkeypatch.setattr(owner, name, counted)

    count(file_list.FileListReader, "_read_run")
    count(file_list.FileListWriter, "_write")
    count(file_list.FileListWriter, "_put")
    out = np.empty(samples.shape, np.uint16)
    with images.open_image(path) as reader:
        reader.read(Region.whole(samples.shape), out)
        writer = images.create_image(result_of(path), reader.header)
    writer.write(Region.whole(samples.shape), out)
    writer.publish()
    assert len(slow) == (0 if loops else 15)
    for number in range(5):
        np.testing.assert_array_equal(read_image(tmp_path / f"out/b{number}.tif"), samples[number])


def test_files_of_several_folders_and_links_to_files_are_read(tmp_path, samples, loops):
    path = listed(tmp_path, samples, stored=StoredSamples(dtype="<u2", offset=128))
    (tmp_path / "further").mkdir()
    (tmp_path / "a1.npy").rename(tmp_path / "further/b.npy")
    (tmp_path / "a1.npy").symlink_to("further/b.npy")
    files = list(FileList.read(path).files)
    (tmp_path / "a3.npy").rename(tmp_path / "further/a3.npy")
    files[3] = replace(files[3], path=str(tmp_path / "further/a3.npy"))
    path.write_bytes(replace(FileList.read(path), files=tuple(files)).encoded())
    out = np.empty(samples.shape, np.uint16)
    with images.open_image(path) as reader:
        reader.read(Region.whole(samples.shape), out)
    np.testing.assert_array_equal(out, samples)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_service_follows_no_link_out_of_its_roots(tmp_path, samples, loops, monkeypatch, what):
    (tmp_path / "roots/in").mkdir(parents=True)
    path = listed(tmp_path / "roots/in", samples, stored=StoredSamples(dtype="<u2", offset=128))
    monkeypatch.setattr(confinement, "_known", {})
    confinement.confine(confinement.Confinement((tmp_path / "roots",)))
    file_list.vouch(path, file_list.sha256_of(path.read_bytes()))
    out = np.empty(samples.shape, np.uint16)
    with images.open_image(path) as reader:
        reader.read(Region.whole(samples.shape), out)
        np.testing.assert_array_equal(out, samples)
        moved = path.with_name("a2.npy") if what == "file" else path.parent
        moved.rename(tmp_path / "elsewhere")
        moved.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(InputError, match="leads out of the service's data roots"):
            reader.read(Region.whole(samples.shape), out)
    file_list.vouch(path, None)


def test_a_result_keeps_the_permissions_of_the_one_it_replaces(tmp_path, samples, loops):
    path = listed(tmp_path, samples)
    (tmp_path / "out/b3.npy").write_bytes(b"older")
    (tmp_path / "out/b3.npy").chmod(0o640)
    with images.open_image(path) as reader:
        writer = images.create_image(result_of(path), reader.header)
    writer.write(Region.whole(samples.shape), samples)
    writer.publish()
    assert (tmp_path / "out/b3.npy").stat().st_mode & 0o777 == 0o640
    for number in range(5):
        np.testing.assert_array_equal(read_image(tmp_path / f"out/b{number}.npy"), samples[number])
