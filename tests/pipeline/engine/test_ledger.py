"""A stopped job's ledger: what is in stays in, and only for the same job."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kernels.smoothing import uniform_filter
from pipeline.engine import checkpoints
from pipeline.engine import ledger as ledger_module
from pipeline.engine import run as run_module
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.identity import input_version
from pipeline.engine.ledger import Entry, Ledger, job_identity, remove_leftovers
from pipeline.engine.output import Output
from pipeline.engine.run import RunEvents, RunOptions, plan_job, published_before, run_job
from pipeline.errors import DeviceError, InputError, OutputError, ParameterError, StorageError
from pipeline.workloads import Budget, JobSpec, workloads
from tests.images import names_in, read_image, write_image

ROWS = 900


@pytest.fixture
def folder(tmp_path, monkeypatch):
    samples = np.random.default_rng(2).integers(0, 65536, (ROWS, 301)).astype(np.uint16)
    write_image(tmp_path / "in.npy", samples, "YX")
    monkeypatch.setattr(checkpoints, "INTERVAL_SECONDS", 0.05)
    return tmp_path


def job_in(folder, output="out.npy", *, resume=False, memory=64 << 20, chunk_bytes=30_000, size="5"):
    parameters = workloads()["smooth"].Parameters(size=size)
    spec = JobSpec(workload="smooth", input=folder / "in.npy", output=folder / output, parameters=parameters)
    options = RunOptions(memory_bytes=memory, chunk_bytes=chunk_bytes, resume=resume)
    return plan_job(spec, CpuDevice(2), options), options


class FailingAt:
    """Lets chunks be written until so many are, waits for the next entry, then fails if there is an error to fail with;
    counts what was written."""

    def __init__(self, folder, count, error=None):
        self.folder, self.count, self.error = folder, count, error
        self.written, self.kept = [], []

    def events(self):
        return RunEvents(on_written=self.note, on_kept=lambda kept, chunks: self.kept.append((kept, chunks)))

    def note(self, chunk):
        self.written.append(chunk.index)
        if len(self.written) == self.count:
            end = time.monotonic() + 30
            while not list(self.folder.glob("*.ledger/chunks-*")) and time.monotonic() < end:
                time.sleep(0.005)
            if self.error is not None:
                raise self.error


def fail(folder, error, output="out.npy"):
    failing = FailingAt(folder, 2, error)
    job, options = job_in(folder, output)
    with pytest.raises(type(error)):
        run_job(job, options, events=failing.events())
    return failing


@pytest.mark.parametrize("output", ["out.npy", "out.tif", "out.png", "out.zarr"])
def test_a_failed_job_goes_on_where_it_stopped(folder, output):
    failing = fail(folder, DeviceError("the GPU fell off the bus"), output)
    (kept, chunks) = failing.kept[0]
    assert 0 < kept < chunks
    assert not (folder / output).exists()
    written = []
    job, options = job_in(folder, output, resume=True, chunk_bytes=None)
    receipt = run_job(job, options, events=RunEvents(on_written=lambda chunk: written.append(chunk.index)))
    assert sorted(written) == list(range(chunks))  # those kept are told first
    assert receipt["resumed_chunks"] == kept
    assert receipt["stages"]["write"]["bytes"] < receipt["written_bytes"]
    assert receipt["audit"]["samples"] == 100
    np.testing.assert_array_equal(read_image(folder / output), uniform_filter(read_image(folder / "in.npy"), 5))
    assert names_in(folder) == ["in.npy", output, f"{output}.receipt.json"]


def test_stopping_keeps_what_is_in(folder):
    assert fail(folder, KeyboardInterrupt()).kept
    assert "out.npy.ledger" in names_in(folder)


def test_the_users_own_mistake_leaves_nothing(folder):
    assert fail(folder, InputError("in.npy: truncated")).kept == []
    assert names_in(folder) == ["in.npy"]


def test_a_short_job_keeps_no_ledger(folder, monkeypatch):
    monkeypatch.setattr(checkpoints, "INTERVAL_SECONDS", 30.0)

    def stop(chunk):
        raise DeviceError("gone")

    job, options = job_in(folder)
    with pytest.raises(DeviceError):
        run_job(job, options, events=RunEvents(on_written=stop))
    assert names_in(folder) == ["in.npy"]


def test_nothing_to_resume_is_a_run_from_the_start(folder):
    job, options = job_in(folder, resume=True)
    assert run_job(job, options)["resumed_chunks"] == 0
    np.testing.assert_array_equal(read_image(folder / "out.npy"), uniform_filter(read_image(folder / "in.npy"), 5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: {"size": "3"}, r"of another job \(parameters\.size: then \[5\], now \[3\]\); run"),
        (
            lambda folder: os.utime(folder / "in.npy", (1, 1)) or {},
            r"in\.npy has changed since the interrupted run: then [\d,]+ bytes of 20.*, now [\d,]+ bytes of "
            r"1970-01-01 00:00:01\.000\+00:00; run again without --resume, or restore the input",
        ),
        (lambda folder: {"chunk_bytes": 40_000}, "leave --chunk-bytes out"),
        (lambda folder: {"memory": 1 << 16, "chunk_bytes": None}, "raise it"),
    ],
)
def test_another_job_is_not_resumed_and_nothing_is_lost(folder, change, message):
    fail(folder, DeviceError("gone"))
    before = names_in(folder)
    with pytest.raises(ParameterError, match=message):
        run_job(*job_in(folder, resume=True, **change(folder)))
    assert names_in(folder) == before


def test_a_refusal_names_what_differs(tmp_path):
    then = {"millrace": "0.1", "parameters": {"size": [5], "mode": "wrap"}, "input": {"path": "/a"}, "chunks": 3}
    Ledger(tmp_path / "out.npy", then).create()
    for change, said in (
        ({"millrace": "0.2"}, 'millrace: then "0.1", now "0.2"'),
        ({"parameters": {"size": [5]}}, 'parameters.mode: then "wrap", now not given'),
        ({"parameters": then["parameters"] | {"sigma": 2.0}}, "parameters.sigma: then not given, now 2.0"),
        ({"input": {"path": "/b"}}, 'input.path: then "/a", now "/b"'),
        ({"chunks": 4}, "chunks: then 3, now 4"),
        ({"cut": {"budget_bytes": 9}}, 'cut: then not given, now {"budget_bytes": 9}'),
    ):
        with pytest.raises(ParameterError) as caught:
            Ledger.resumed(tmp_path / "out.npy", then | change)
        assert f"is of another job ({said}); run again without --resume" in str(caught.value)
    assert Ledger.resumed(tmp_path / "out.npy", then).identity["chunks"] == 3


def test_a_folder_in_which_an_older_file_changed_is_another_input(tmp_path):
    version = {"path": "/a.zarr", "bytes": 1, "files": 2, "mtime_ns": 0, "listing_sha256": "0123456789"}
    Ledger(tmp_path / "out.npy", {"input": version}).create()
    said = r"/a\.zarr has .* then 2 files \(01234567\), 1 byte of 1970.*, now 2 files \(98765432\), 1 byte of 1970"
    with pytest.raises(ParameterError, match=said):
        Ledger.resumed(tmp_path / "out.npy", {"input": {**version, "listing_sha256": "9876543210"}})


def test_a_lost_partial_output_is_one_clear_error(folder):
    fail(folder, DeviceError("gone"))
    (folder / "out.npy.partial").unlink()
    with pytest.raises(OutputError, match="run the job again without --resume"):
        run_job(*job_in(folder, resume=True))
    run_job(*job_in(folder))
    assert names_in(folder) == ["in.npy", "out.npy", "out.npy.receipt.json"]


@pytest.mark.parametrize("start_over", [False, True])
def test_a_disk_error_as_a_run_goes_on_loses_nothing(folder, monkeypatch, start_over):
    """Not even if it may start over: the disk would fail again."""
    kept = fail(folder, DeviceError("gone")).kept
    told = []

    def full(ledger):
        raise StorageError("no space")

    job, options = job_in(folder, resume=True)
    monkeypatch.setattr(Ledger, "go_on", full)
    with pytest.raises(StorageError, match="no space"):
        run_job(job, replace(options, start_over=start_over), events=RunEvents(on_kept=lambda *kept: told.append(kept)))
    monkeypatch.undo()
    assert told == kept
    assert run_job(*job_in(folder, resume=True))["resumed_chunks"] == kept[0][0]


class Killed(BaseException):
    """As if by kill -9: what a run does at other errors leaves as much where it has kept chunks."""


def killed_after(step, folder, monkeypatch, output="out.npy"):
    """A run that has begun a ledger and is killed when it has taken the step, a module's or class's function."""
    owner, name = step
    taken = getattr(owner, name)

    def kill(*arguments):
        taken(*arguments)
        raise Killed

    job, options = job_in(folder, output)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, kill)
        with pytest.raises(Killed):
            run_job(job, options, events=FailingAt(folder, 2).events())


@pytest.mark.parametrize("output", ["out.npy", "out.png", "out.zarr"])
@pytest.mark.parametrize("step", [(Output, "publish"), (run_module, "write_receipt")])
def test_a_run_killed_after_it_had_published_is_complete(folder, monkeypatch, step, output):
    write_image(folder / output, np.zeros((3, 3), np.uint8), "YX")  # an older result, which it has replaced
    killed_after(step, folder, monkeypatch, output)
    made = read_image(folder / output)
    np.testing.assert_array_equal(made, uniform_filter(read_image(folder / "in.npy"), 5))
    assert f"{output}.ledger" in names_in(folder)
    job, _ = job_in(folder, output, resume=True, chunk_bytes=None)
    receipt = published_before(job)
    assert receipt["chunks"] == len(job.plan.chunks)
    assert json.loads((folder / f"{output}.receipt.json").read_text()) == receipt
    assert names_in(folder) == ["in.npy", output, f"{output}.receipt.json"]
    np.testing.assert_array_equal(read_image(folder / output), made)
    assert published_before(job) is None


@pytest.mark.parametrize("published", [True, False])
def test_an_older_result_that_a_killed_run_renamed_is_settled(folder, published):
    """Where folders cannot be exchanged, a run renames the older result first, and removes it last."""
    output, older = folder / "out.zarr", folder / "out.zarr.partial.older"
    older.mkdir()
    (older / "sample").write_text("older")
    if published:
        output.mkdir()
        (output / "sample").write_text("newer")
    Ledger(output, {}).create()
    remove_leftovers(output)
    assert [path.name for path in folder.glob("out*")] == ["out.zarr"]
    assert (output / "sample").read_text() == ("newer" if published else "older")


def test_another_job_does_not_take_over_what_is_complete(folder, monkeypatch):
    killed_after((run_module, "write_receipt"), folder, monkeypatch)
    before = names_in(folder)
    with pytest.raises(ParameterError, match=r"of another job \(parameters\.size"):
        published_before(job_in(folder, resume=True, size="3", chunk_bytes=None)[0])
    os.utime(folder / "in.npy", (1, 1))
    with pytest.raises(ParameterError, match=r"in\.npy has changed since the interrupted run"):
        published_before(job_in(folder, resume=True, chunk_bytes=None)[0])
    assert names_in(folder) == before


def overwritten(output):
    """The same file, as long as it was."""
    output.write_bytes(bytes(output.stat().st_size))


def replaced(output):
    """Another file, of the same length and time."""
    found = output.stat()
    other = output.with_name("other")
    other.write_bytes(bytes(found.st_size))
    os.utime(other, ns=(found.st_atime_ns, found.st_mtime_ns))
    other.replace(output)


@pytest.mark.parametrize("changed", [overwritten, replaced, os.remove])
def test_an_output_that_is_no_longer_what_was_published_is_not_taken_for_it(folder, monkeypatch, changed):
    killed_after((run_module, "write_receipt"), folder, monkeypatch)
    changed(folder / "out.npy")
    job, options = job_in(folder, resume=True, chunk_bytes=None)
    assert published_before(job) is None
    with pytest.raises(OutputError, match="run the job again without --resume"):
        run_job(job, options)


@pytest.mark.parametrize("older", ["out.npy", "out.zarr"])
def test_an_older_output_is_not_taken_for_one_that_was_never_published(folder, monkeypatch, older):
    run_job(*job_in(folder, older, size="3"))
    before = read_image(folder / older)
    killed_after((Ledger, "conclude"), folder, monkeypatch, older)
    assert "receipt.json" in names_in(folder / f"{older}.ledger")
    job, options = job_in(folder, older, resume=True, chunk_bytes=None)
    assert published_before(job) is None
    np.testing.assert_array_equal(read_image(folder / older), before)
    run_job(job, options)
    np.testing.assert_array_equal(read_image(folder / older), uniform_filter(read_image(folder / "in.npy"), 5))


def test_a_second_run_of_the_same_output_leaves_the_firsts_ledger_alone(folder):
    job, _ = job_in(folder)
    ledger = Ledger(job.spec.output, job.identity)
    job.output.open()
    ledger.create()
    ledger.add(Entry(chunks=(0, 1), notes={}, device="cpu"))
    with pytest.raises(OutputError, match="another run is writing"):
        run_job(*job_in(folder))
    assert [entry.chunks for entry in ledger.entries()] == [(0, 1)]
    job.output.discard()


def test_a_folder_that_is_no_ledger_is_never_removed(folder):
    (folder / "out.npy.ledger").mkdir()
    (folder / "out.npy.ledger" / "precious").write_text("kept")
    with pytest.raises(OutputError, match=r"precious: does not belong in the ledger's folder; remove or rename"):
        run_job(*job_in(folder))
    assert (folder / "out.npy.ledger" / "precious").read_text() == "kept"


def test_what_lies_in_a_ledger_is_named_before_work_goes_on(folder):
    """Not when the output is complete and the ledger is to go."""
    fail(folder, DeviceError("the GPU fell off the bus"))
    stray = folder / "out.npy.ledger" / "precious"
    stray.write_text("kept")
    written = []
    with pytest.raises(OutputError, match=r"precious: does not belong in the ledger's folder"):
        run_job(*job_in(folder, resume=True), events=RunEvents(on_written=written.append))
    assert not written
    stray.unlink()
    run_job(*job_in(folder, resume=True))
    np.testing.assert_array_equal(read_image(folder / "out.npy"), uniform_filter(read_image(folder / "in.npy"), 5))


def ledger_of(folder):
    job, _ = job_in(folder)
    job.output.discard()
    ledger = Ledger(job.spec.output, job.identity)
    ledger.create()
    return ledger, job.plan


def test_entries_of_many_writers_come_back_in_order(folder):
    ledger, plan = ledger_of(folder)
    threads = [
        threading.Thread(target=ledger.add, args=(Entry(chunks=(n, n + 1), notes={"n": n}, device="cpu"),))
        for n in range(0, 20, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [entry.chunks for entry in ledger.entries()] == [(n, n + 1) for n in range(0, 20, 2)]
    assert ledger.within((4, 5)) == [Entry(chunks=(4, 5), notes={"n": 4}, device="cpu")]
    assert ledger.within((5, 6)) == ledger.within((4,)) == []
    left = plan.without({chunk for entry in ledger.entries() for chunk in entry.chunks})
    assert [chunk.index for chunk in left.chunks] == list(range(20, len(plan.chunks)))
    assert plan.without(set(range(len(plan.chunks)))) is None


def state_of(chunk):
    rng = np.random.default_rng(chunk)
    return {"image": rng.normal(size=(3, 5)) + 1j, "steps": np.arange(chunk + 1), "step": np.float64(0.5)}


class OfADevice:
    """An array that NumPy cannot read by itself, as those of a GPU."""

    def __init__(self, array):
        self._array = array

    def get(self):
        return self._array


def test_the_iterates_of_chunks_come_back_until_they_are_dropped(folder):
    ledger, _ = ledger_of(folder)
    assert ledger.iterate(0) is None
    assert not ledger.has_iterates
    for chunk in (0, 7, 7):
        ledger.save_iterate(chunk, {name: OfADevice(array) for name, array in state_of(chunk).items()})
    ledger.save_iterate(7, state_of(7))
    assert ledger.has_iterates
    for chunk in (0, 7):
        saved, expected = ledger.iterate(chunk), state_of(chunk)
        assert list(saved) == list(expected)
        for name, array in expected.items():
            np.testing.assert_array_equal(saved[name], array, strict=True)
    ledger.drop_iterates([0, 3])
    assert ledger.iterate(0) is None
    assert ledger.iterate(7) is not None
    ledger.drop_iterates([7])
    assert not ledger.has_iterates


@pytest.mark.parametrize("fault", ["objects", "text", "short"])
def test_a_damaged_iterate_counts_for_nothing(folder, fault):
    ledger, _ = ledger_of(folder)
    ledger.save_iterate(2, state_of(2))
    (saved,) = ledger.folder.glob("iterate-*")
    whole = saved.read_bytes()
    if fault == "objects":  # reading them would run what a stranger wrote
        np.savez(saved, image=np.array([None]))
    else:
        saved.write_bytes(b"text" if fault == "text" else whole[:-30])
    assert ledger.iterate(2) is None


def test_an_iterate_of_a_ledger_that_is_removed_is_named(folder):
    ledger, _ = ledger_of(folder)
    ledger.remove()
    with pytest.raises(OutputError, match="was removed while the job ran; run the job again"):
        ledger.save_iterate(2, state_of(2))


def entry(*chunks, by="cpu"):
    return Entry(chunks=chunks, notes={"by": by}, device="cpu")


def runs_of(folder, count):
    """The ledgers of runs that went on one after another, each with entries of its own; all share chunk 3."""
    identity = {"chunks": 99, "workload": "smooth"}
    ledgers = [Ledger(folder / "out.npy", identity)]
    ledgers[0].create()
    for number in range(count):
        if number:
            ledgers.append(Ledger.resumed(folder / "out.npy", identity))
            ledgers[-1].go_on()
        ledgers[-1].add(entry(3, 10 * (number + 1), by=number))
        ledgers[-1].add(entry(50 - number, by=number))
    return ledgers


def test_every_earlier_run_counts_and_the_last_one_first(folder):
    first, second, third = runs_of(folder, 3)
    assert [len(ledger.identity["runs"]) for ledger in (first, second, third)] == [1, 2, 3]
    assert third.identity["runs"][:2] == second.identity["runs"]
    found = [(each.chunks, each.notes["by"]) for each in third.entries()]
    assert found == [((3, 30), 2), ((48,), 2), ((49,), 1), ((50,), 0)]
    assert Ledger.resumed(folder / "out.npy", {"chunks": 99}).entries() == third.entries()
    assert third.within((3, 30, 49)) == [entry(3, 30, by=2)]
    # A run knows of those before it only.
    assert [each.chunks for each in first.entries()] == [(3, 10), (50,)]


def test_only_the_last_of_several_runs_owns_the_ledger(folder):
    ledgers = runs_of(folder, 3)
    assert [ledger.is_this_runs for ledger in ledgers] == [False, False, True]
    Ledger(folder / "out.npy", {"chunks": 99}).create()
    assert not ledgers[-1].is_this_runs
    Ledger(folder / "out.npy", {}).remove()
    assert not Ledger(folder / "out.npy", {}).is_this_runs, "there is none"


@pytest.mark.parametrize("runs", [None, "abc", {"abc": 1}])
def test_a_ledger_without_a_list_of_runs_has_no_entries(folder, runs):
    (ledger,) = runs_of(folder, 1)
    job = ledger.folder / "job.json"
    job.write_text(json.dumps(json.loads(job.read_text()) | {"runs": runs}))
    assert Ledger.resumed(folder / "out.npy", {"chunks": 99}).entries() == []


def test_what_identifies_a_job(folder, monkeypatch):
    """Anything that could give its chunks other bytes or other numbers."""
    job, _ = job_in(folder)
    job.output.discard()
    spec, chunks = job.spec, job.plan.chunks
    given = {"spec": spec, "version": job.version, "budget": job.budget, "plan": job.plan}
    before = job_identity(**given)
    assert before == json.loads(json.dumps(before)) == job_identity(**given)
    assert before["chunks"] == len(chunks)
    assert before["input"] == {"path": str(spec.input), **job.version}
    other = workloads()["smooth"].Parameters(size="3")
    moved = replace(chunks[0], region=chunks[1].region)
    haloed = replace(chunks[0], halo=((9, 9), (0, 0)))
    for change, key in (
        ({"spec": replace(spec, workload="other")}, "workload"),
        ({"spec": replace(spec, parameters=other)}, "parameters"),
        ({"spec": replace(spec, input=folder / "other.npy")}, "input"),
        ({"version": {**job.version, "mtime_ns": 1}}, "input"),
        ({"budget": replace(job.budget, target_bytes=1)}, "cut"),
        ({"plan": replace(job.plan, chunks=(moved, *chunks[1:]))}, "regions_sha256"),
        ({"plan": replace(job.plan, chunks=(haloed, *chunks[1:]))}, "regions_sha256"),
    ):
        found = job_identity(**(given | change))
        assert [name for name in before if found[name] != before[name]] == [key]
    (folder / "link").symlink_to(folder)
    assert job_identity(**(given | {"spec": replace(spec, input=folder / "link" / "in.npy")})) == before
    monkeypatch.setattr(ledger_module, "__version__", "99")
    assert job_identity(**given) == before | {"millrace": "99"}


def test_a_ledger_that_cannot_be_removed_is_none_any_more(folder, monkeypatch):
    """The output it speaks of may be gone."""
    (ledger,) = runs_of(folder, 1)

    def refuse(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(StorageError, match="EIO"):
        ledger.remove()
    assert ledger.exists
    assert not ledger.begun
    monkeypatch.undo()
    ledger.remove()
    ledger.remove()
    assert not ledger.exists


@pytest.mark.parametrize("lives", [True, False])
def test_removing_a_ledger_gives_up_on_a_worker_that_writes_for_ever(folder, monkeypatch, lives):
    (ledger,) = runs_of(folder, 1)
    rmtree, tries = shutil.rmtree, []

    def disturbed(path):
        tries.append(path)
        if lives or len(tries) < 20:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", disturbed)
    if lives:
        with pytest.raises(StorageError, match="ENOTEMPTY"):
            ledger.remove()
    else:
        ledger.remove()
    assert ledger.exists == lives
    assert len(tries) == 20 + lives


def test_removing_a_ledger_goes_on_where_a_file_went_by_itself(folder, monkeypatch):
    (ledger,) = runs_of(folder, 1)
    rmtree, tries = shutil.rmtree, []

    def disturbed(path):
        tries.append(path)
        if len(tries) == 2:
            rmtree(path)  # another process was as quick
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(shutil, "rmtree", disturbed)
    ledger.remove()
    assert len(tries) == 2


def test_a_ledger_is_removed_though_a_worker_of_a_lost_run_still_adds_to_it(folder, monkeypatch):
    (ledger,), rmdir = runs_of(folder, 1), os.rmdir
    late = [entry(number) for number in range(5)]

    def disturbed(path, **options):
        if late:
            ledger.add(late.pop())
        rmdir(path, **options)

    monkeypatch.setattr(os, "rmdir", disturbed)
    Ledger(folder / "out.npy", {"chunks": 99}).create()
    assert not late
    assert [path.name for path in ledger.folder.iterdir()] == ["job.json"]


def test_threads_that_enter_the_same_chunks_do_not_meet(folder, monkeypatch):
    """A segment may be tried again on a worker that was believed dead."""
    (ledger,) = runs_of(folder, 1)
    writing, go, fsync = threading.Event(), threading.Event(), os.fsync

    def slow(descriptor):
        if not writing.is_set():
            writing.set()
            assert go.wait(60)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(ledger.add, entry(7, by="late"))
        assert writing.wait(60)
        ledger.add(entry(7, by="quick"))
        go.set()
        late.result(60)
    assert ledger.within((7,)) == [entry(7, by="late")]
    assert not list(ledger.folder.glob(".*"))


def test_a_ledger_that_is_removed_as_the_job_runs_is_named(folder):
    ledger = Ledger(folder / "out.npy", {"chunks": 9})
    ledger.create()
    shutil.rmtree(ledger.folder)
    with pytest.raises(OutputError, match=r"out\.npy\.ledger: was removed while the job ran; run the job again"):
        ledger.add(Entry(chunks=(0,), notes={}, device="cpu"))


def test_a_chunk_in_two_entries_counts_once(folder):
    ledger, _ = ledger_of(folder)
    ledger.add(Entry(chunks=(3, 4), notes={}, device="cpu"))
    ledger.add(Entry(chunks=(4, 5), notes={}, device="cpu"))
    assert [entry.chunks for entry in ledger.entries()] == [(3, 4)]


@pytest.mark.parametrize(
    "damaged",
    [
        "{",
        "[]",
        '{"chunks": [4]}',
        '{"chunks": [99999], "notes": {}, "device": "cpu"}',
        '{"chunks": [-1], "notes": {}, "device": "cpu"}',
        '{"chunks": ["a"], "notes": {}, "device": "cpu"}',
        '{"chunks": [[1]], "notes": {}, "device": "cpu"}',
        '{"chunks": [], "notes": {}, "device": "cpu"}',
        '{"chunks": [4], "notes": [1], "device": "cpu"}',
    ],
)
def test_a_damaged_entry_counts_for_nothing(folder, damaged):
    ledger, _ = ledger_of(folder)
    ledger.add(Entry(chunks=(3,), notes={}, device="cpu"))
    ledger.add(Entry(chunks=(4,), notes={}, device="cpu"))
    next(ledger.folder.glob("chunks-00000004-*")).write_text(damaged)
    assert [entry.chunks for entry in ledger.entries()] == [(3,)]
    assert ledger.within((4,)) == []


@pytest.mark.parametrize(
    "damaged",
    ["{", "3", '{"cut": 3}', '{"cut": {"budget_bytes": 5}}', '{"cut": {"budget_bytes": 5, "target_bytes": -5}}',
     '{"cut": {"budget_bytes": 5, "target_bytes": "x"}}', '{"cut": {"budget_bytes": 5, "target_bytes": 0}}'],
)  # fmt: skip
def test_a_damaged_job_is_not_resumed(folder, damaged):
    fail(folder, DeviceError("gone"))
    (folder / "out.npy.ledger" / "job.json").write_text(damaged)
    assert Ledger.recorded_budget(folder / "out.npy") is None
    with pytest.raises(ParameterError, match="run again without --resume"):
        run_job(*job_in(folder, resume=True))
    run_job(*job_in(folder))


@pytest.mark.parametrize("notes", [{"x": 1.0}, {"99999": 1.0}, {"-1": 1.0}, {"1": "z"}, {"1": None}])
def test_notes_that_no_run_wrote_are_named(folder, notes):
    fail(folder, DeviceError("gone"))
    path = min(folder.glob("out.npy.ledger/chunks-*"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "notes": notes}))
    job, options = job_in(folder, resume=True, chunk_bytes=None)
    with pytest.raises(StorageError, match=r"out\.npy\.ledger: the entry of chunk \d+ is damaged; run again without"):
        run_job(job, options)


@pytest.fixture
def calls(monkeypatch):
    """What is made, made durable and renamed, in order, by name."""
    order = []
    sync, mkdir, rename = os.fsync, Path.mkdir, Path.replace

    def recorded_sync(descriptor):
        order.append(("sync", re.sub(r"\.\d+$", "", Path(f"/proc/self/fd/{descriptor}").readlink().name)))
        sync(descriptor)

    def recorded_mkdir(path, *arguments, **options):
        order.append(("mkdir", path.name))
        mkdir(path, *arguments, **options)

    def recorded_rename(path, target):
        order.append(("rename", target.name))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recorded_sync)
    monkeypatch.setattr(Path, "mkdir", recorded_mkdir)
    monkeypatch.setattr(Path, "replace", recorded_rename)
    return order


def written(name):
    """A file's content, then its name in the folder."""
    return [("sync", f".{name}"), ("rename", name), ("sync", "out.npy.ledger")]


def test_what_is_entered_outlives_a_power_cut(folder, calls):
    ledger, _ = ledger_of(folder)
    assert calls == [("mkdir", "out.npy.ledger"), ("sync", folder.name), *written("job.json")]
    calls.clear()
    ledger.add(Entry(chunks=(3,), notes={}, device="cpu"))
    (entry,) = ledger.folder.glob("chunks-*")
    assert calls == written(entry.name)
    calls.clear()
    (folder / "out.npy.partial").touch()
    ledger.conclude({"chunks": 1})
    assert calls == written("receipt.json")


def test_a_file_system_that_cannot_sync_folders_has_a_ledger_all_the_same(folder, monkeypatch):
    sync = os.fsync

    def refuse(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    ledger, _ = ledger_of(folder)
    ledger.add(Entry(chunks=(3,), notes={}, device="cpu"))
    assert [entry.chunks for entry in ledger.entries()] == [(3,)]


def test_the_recorded_budget_comes_back(folder):
    ledger, _ = ledger_of(folder)
    (ledger.folder / "job.json").write_text(json.dumps({"cut": {"budget_bytes": 5, "target_bytes": 4}}))
    assert Ledger.recorded_budget(folder / "out.npy") == Budget(budget_bytes=5, target_bytes=4)


def test_a_ledger_that_cannot_be_written_is_named(folder, monkeypatch):
    identity = {"cut": {"budget_bytes": 1, "target_bytes": 1}}
    ledger = Ledger(folder / "out.npy", identity)

    def refuse(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (folder / "out.npy.partial").touch()
    for step, call in (
        ("mkdir", ledger.create),
        ("replace", ledger.create),
        ("replace", ledger.go_on),
        ("replace", lambda: ledger.add(entry(0))),
        ("replace", lambda: ledger.conclude({})),
    ):
        monkeypatch.setattr(Path, step, refuse)
        with pytest.raises(StorageError, match=r"out\.npy\.ledger: .*EIO"):
            call()
        monkeypatch.undo()
        ledger.create()
    assert Ledger.recorded_budget(folder / "out.npy") == Budget(budget_bytes=1, target_bytes=1)


def test_the_recorded_budget_of_another_job_is_not_taken(folder):
    """That job is cut anew, which a run that may start over does."""
    job, _ = job_in(folder)
    job.output.discard()
    assert Ledger.recorded_budget(folder / "out.npy", job.spec) is None
    Ledger(folder / "out.npy", job.identity).create()
    assert Ledger.recorded_budget(folder / "out.npy", job.spec) == job.budget
    other = workloads()["smooth"].Parameters(size="3")
    for change in ({"parameters": other}, {"workload": "other"}):
        assert Ledger.recorded_budget(folder / "out.npy", replace(job.spec, **change)) is None
    assert Ledger.recorded_budget(folder / "out.npy") == job.budget


def make_file(path, _):
    path.write_text("precious")


def make_link(path, elsewhere):
    elsewhere.mkdir()
    (elsewhere / "job.json").write_text("precious")
    path.symlink_to(elsewhere)


def make_dangling_link(path, elsewhere):
    path.symlink_to(elsewhere)


def make_mixed(path, _):
    path.mkdir()
    (path / "job.json").write_text("{}")
    (path / "thesis.doc").write_text("precious")


@pytest.mark.parametrize("make", [make_file, make_link, make_dangling_link, make_mixed])
@pytest.mark.parametrize("resume", [False, True])
def test_what_is_no_ledger_is_refused_and_left_alone(folder, make, resume):
    make(folder / "out.npy.ledger", folder / "elsewhere")
    before = sorted(str(path) for path in folder.rglob("*"))
    with pytest.raises((OutputError, ParameterError), match=r"out\.npy\.ledger"):
        run_job(*job_in(folder, resume=resume))
    assert sorted(str(path) for path in folder.rglob("*")) == before


def test_a_folder_changed_in_place_is_another_input(folder):
    samples = np.random.default_rng(2).integers(0, 65536, (ROWS, 301)).astype(np.uint16)
    write_image(folder / "in.zarr", samples, "YX")
    before = input_version(folder / "in.zarr")
    assert before == input_version(folder / "in.zarr")
    chunk = next(path for path in (folder / "in.zarr").rglob("*") if path.is_file() and path.parent.name.isdecimal())
    chunk.write_bytes(chunk.read_bytes())
    os.utime(chunk, ns=(1, before["mtime_ns"] + 1))
    assert before != input_version(folder / "in.zarr")
