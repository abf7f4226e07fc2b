"""Files of one kind are found without reading every header; an interrupted list goes on from its ledger."""

from __future__ import annotations

import errno
import json
import os

import numpy as np
import pytest
import tifffile

from pipeline.codecs.loops import whole_files
from pipeline.engine import checkpoints, listing, many
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.listing import Scan, Wanted
from pipeline.engine.many import ManyEvents, ManyFilesRun, ManyOptions
from pipeline.engine.run import RunOptions
from pipeline.errors import OutputError, StorageError
from pipeline.formats import image as images
from pipeline.formats.image import file_list
from pipeline.formats.image.file_list import FileListWriter, ListedFile
from pipeline.stopping import Stopped
from pipeline.storage.writable import writing
from pipeline.workloads import workload_named
from tests.images import names_in, read_image, write_image


def asked(folder, *, resume=False, workload="smooth", chunk_bytes=None, **parameters):
    return ManyOptions(
        workload=workload, parameters=workload_named(workload).Parameters(**parameters), folder=folder / "out",
        run=RunOptions(memory_bytes=64 << 20, resume=resume, chunk_bytes=chunk_bytes),
    )  # fmt: skip


def wanted_in(folder, count, shape=(16, 17)):
    random = np.random.default_rng(1)
    found = []
    for number in range(count):
        path = folder / f"i{number}.tif"
        write_image(path, random.integers(0, 65536, shape).astype(np.uint16), "YX")
        found.append(Wanted(path, folder / "out" / path.name))
    return found


@pytest.mark.parametrize("loops", [None, whole_files], ids=["by the interpreter", "by compiled loops"])
def test_kinds_are_those_that_headers_tell(tmp_path, monkeypatch, loops):
    monkeypatch.setattr(listing, "loops_for", lambda count: loops)
    random, wanted = np.random.default_rng(2), []

    def add(name, **options):
        samples = random.integers(0, 255, (20, 21)).astype(np.uint16)
        tifffile.imwrite(tmp_path / name, samples, **options)
        wanted.append(Wanted(tmp_path / name, tmp_path / "out" / name))

    for number in range(4):
        add(f"plain{number}.tif")
        add(f"fine{number}.tif", resolution=(300, 300))
        add(f"coarse{number}.tif", resolution=(100, 100))
        add(f"big{number}.tif", byteorder=">")
        add(f"packed{number}.tif", compression="zlib")
    opened = []
    monkeypatch.setattr(images, "open_image", lambda path, plain=images.open_image: opened.append(path) or plain(path))
    scan = Scan()
    scan.add_all([*wanted, Wanted(tmp_path / "gone.tif", tmp_path / "out/gone.tif")])
    assert [str(path.input) for path in scan.failed] == [str(tmp_path / "gone.tif")]
    for files in scan.kinds.values():
        for file, entered in files:
            stat = file.input.stat()
            assert entered == ListedFile(str(file.input), stat.st_size, stat.st_mtime_ns, file.output.name)
    found = sorted(tuple(sorted(file.input.name for file, _ in files)) for files in scan.kinds.values())
    kinds = ("big", "coarse", "fine", "packed", "plain")
    expected = [tuple(f"{kind}{n}.tif" for n in range(4)) for kind in kinds]
    # What is stored compressed or in the other byte order is of the same shape, dtype and metadata, but read otherwise.
    assert found == expected
    assert len(opened) == 4 + 4  # of the packed ones all
    for kind, _ in scan.kinds:
        assert kind.nbytes == 20 * 21 * 2


def test_an_interrupted_list_goes_on_from_its_ledger(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "INTERVAL_SECONDS", 0.01)
    wanted, done = wanted_in(tmp_path, 12), []
    one_chunk = 2 * 2 * 16 * 17 * 2

    def stop(count):
        done.append(count)
        ledger = tmp_path / "out/.millrace/00001.result.files.ledger"
        if len(done) > 2:
            for _ in range(2000):
                if [*ledger.glob("chunks-*.json")]:
                    break
                checkpoints.time.sleep(0.005)
            raise Stopped(2)

    options = {"size": "3", "chunk_bytes": one_chunk}
    with pytest.raises(Stopped):
        ManyFilesRun(asked(tmp_path, **options), CpuDevice(1), events=ManyEvents(on_files=stop)).run(wanted)
    assert not [*(tmp_path / "out").glob("*.tif")]
    told = []
    again = asked(tmp_path, resume=True, size="3")
    receipt = ManyFilesRun(again, CpuDevice(1), events=ManyEvents(on_files=told.append)).run(wanted)
    assert receipt["jobs"][0]["resumed_chunks"] >= 1
    assert receipt["published"] == sum(told) == 12
    for each in wanted:
        from kernels.smoothing import uniform_filter

        np.testing.assert_array_equal(read_image(each.output), uniform_filter(read_image(each.input), 3))


@pytest.mark.parametrize("loops", [None, whole_files], ids=["by the interpreter", "by compiled loops"])
def test_a_full_disk_publishes_the_files_that_are_written(tmp_path, monkeypatch, loops):
    monkeypatch.setattr(file_list, "loops_for", lambda count: loops)
    wanted, written, plain = wanted_in(tmp_path, 12), [], FileListWriter.write
    wanted[2].input.write_bytes(wanted[2].input.read_bytes()[:-9])

    def write(writer, region, samples):
        if len(written) == 3:
            staged = writer._staged / "i7.tif"
            with writing(staged.parent / "i7.tif", 544):
                staged.write_bytes(b"II*")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(writer, region, samples)
        written.append(region.start[0])

    monkeypatch.setattr(FileListWriter, "write", write)
    options = {"size": "3", "chunk_bytes": 2 * 2 * 16 * 17 * 2}
    run = ManyFilesRun(asked(tmp_path, **options), CpuDevice(1))
    receipt = run.run(wanted)
    assert (receipt["published"], receipt["failed"], run.published) == (6, 6, 6)
    errors = [row[4] for row in receipt["files"]]
    assert "i2.tif: " in errors[2]
    assert set(errors[7:]) == {errors[7]}
    assert "5 files not written: " in errors[7]
    assert "no space: 544 bytes are needed" in errors[7]
    assert names_in(tmp_path / "out") == [*(f"i{n}.tif" for n in (0, 1, 3, 4, 5, 6)), many.TABLE]
    monkeypatch.setattr(FileListWriter, "write", plain)
    receipt = ManyFilesRun(asked(tmp_path, resume=True, **options), CpuDevice(1)).run(wanted)
    assert (receipt["published"], receipt["skipped"], receipt["failed"]) == (11, 6, 1)


def test_a_disk_that_is_full_from_the_start_is_one_line(tmp_path, monkeypatch):
    def write(writer, region, samples):
        raise StorageError("out/i0.tif: no space")

    monkeypatch.setattr(FileListWriter, "write", write)
    with pytest.raises(StorageError, match="no space"):
        ManyFilesRun(asked(tmp_path), CpuDevice(1)).run(wanted_in(tmp_path, 3))
    assert names_in(tmp_path / "out") == [".millrace"]


def test_progress_counts_every_file_once(tmp_path):
    wanted = wanted_in(tmp_path, 7)
    wanted[3].input.write_bytes(b"II*\0")
    told = []
    receipt = ManyFilesRun(asked(tmp_path), CpuDevice(2), events=ManyEvents(on_files=told.append)).run(wanted)
    assert sum(told) == 7
    assert (receipt["published"], receipt["failed"]) == (6, 1)
    assert json.loads((tmp_path / "out" / many.TABLE).read_text())["runs"] == [json.loads(json.dumps(receipt))]


def test_one_run_at_a_time_writes_into_a_folder(tmp_path):
    wanted = wanted_in(tmp_path, 2)
    second = ManyFilesRun(asked(tmp_path), CpuDevice(1))

    def again(count):
        with pytest.raises(OutputError, match="another run is writing this output"):
            second.run(wanted)

    assert ManyFilesRun(asked(tmp_path), CpuDevice(1), events=ManyEvents(on_files=again)).run(wanted)["published"] == 2


def test_files_that_would_be_cut_run_alone(tmp_path):
    wanted = wanted_in(tmp_path, 2, shape=(300, 301))
    receipt = ManyFilesRun(asked(tmp_path, chunk_bytes=100_000, size="3"), CpuDevice(1)).run(wanted)
    assert receipt["published"] == 2
    assert receipt["jobs"] == [] or all(job["chunks"] for job in receipt["jobs"])
    for each in wanted:
        assert os.path.getsize(each.output) > 300 * 301 * 2  # noqa: PTH202
