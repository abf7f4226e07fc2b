"""What a receipt says of the input: the bytes that the result was made from, or nothing at all."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from kernels.smoothing import uniform_filter
from pipeline.engine import identity
from pipeline.engine import run as run_module
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.identity import InputIdentity, input_version
from pipeline.engine.run import RunOptions, plan_job, run_job
from pipeline.errors import AuditError, InputError
from pipeline.workloads import JobSpec, workloads
from tests.images import names_in, read_image, write_image
from tests.pipeline.in_time import in_time


def samples(seed):
    return np.random.default_rng(seed).integers(0, 65536, (300, 101)).astype(np.uint16)


@pytest.fixture
def job(tmp_path):
    write_image(tmp_path / "in.npy", samples(1), "YX")
    parameters = workloads()["smooth"].Parameters(size="5")
    spec = JobSpec(workload="smooth", input=tmp_path / "in.npy", output=tmp_path / "out.npy", parameters=parameters)
    return plan_job(spec, CpuDevice(1), RunOptions(memory_bytes=64 << 20))


def run(job):
    return run_job(job, RunOptions(memory_bytes=64 << 20, checksum=True))


def replace_input(job):
    other = job.spec.input.with_name("other.npy")
    write_image(other, samples(2), "YX")
    other.replace(job.spec.input)


def test_the_digest_is_of_what_was_read(tmp_path, job):
    content = (tmp_path / "in.npy").read_bytes()
    found = run(job)["input"]
    assert found["sha256"] == hashlib.sha256(content).hexdigest()
    assert found["bytes"] == len(content)
    assert found["mtime"] == pytest.approx((tmp_path / "in.npy").stat().st_mtime, abs=1e-6)
    assert "listing_sha256" not in found
    np.testing.assert_array_equal(read_image(tmp_path / "out.npy"), uniform_filter(samples(1), 5))


def in_the_audit(job, monkeypatch):
    audit = job.output.audit

    def slow():
        verdict = audit()
        replace_input(job)
        return verdict

    monkeypatch.setattr(job.output, "audit", slow)


def before_a_failing_audit(job, monkeypatch):
    def fail():
        replace_input(job)
        raise AuditError("audit failed at sample (0, 0); nothing was published; please report this")

    monkeypatch.setattr(job.output, "audit", fail)


def while_it_is_hashed(job, monkeypatch):
    result = InputIdentity.confirmed

    def late(identity):
        replace_input(job)
        return result(identity)

    monkeypatch.setattr(InputIdentity, "confirmed", late)


@pytest.mark.parametrize("changed", [in_the_audit, before_a_failing_audit, while_it_is_hashed])
def test_an_input_replaced_at_the_end_is_told_and_nothing_is_published(tmp_path, job, monkeypatch, changed):
    changed(job, monkeypatch)
    with pytest.raises(InputError, match=r"in\.npy: changed while it was read; nothing was published; run again"):
        run(job)
    assert names_in(tmp_path) == ["in.npy"]


def put_back(path):
    path.with_name("other.npy").rename(path)


@pytest.mark.parametrize("after", [put_back, Path.touch, lambda path: None], ids=["put back", "another", "gone"])
def test_a_wrong_result_of_an_input_that_was_away_for_a_while_is_no_failure_of_the_audit(job, monkeypatch, after):
    """An alert pages somebody for results that are wrong."""
    path, counted = job.spec.input, []

    def fail():
        path.rename(path.with_name("other.npy"))  # its size and time stay
        after(path)
        raise AuditError("audit failed at sample (0, 0); nothing was published; please report this")

    monkeypatch.setattr(job.output, "audit", fail)
    monkeypatch.setattr(run_module, "_count_audit", lambda *found: counted.append(found))
    with pytest.raises(InputError, match=r"in\.npy: changed while it was read; nothing was published; run again"):
        run(job)
    assert not counted


def test_a_wrong_result_of_an_input_that_did_not_change_is_ours_to_answer_for(job, monkeypatch):
    def fail():
        raise AuditError("audit failed at sample (0, 0); nothing was published; please report this")

    monkeypatch.setattr(job.output, "audit", fail)
    with pytest.raises(AuditError, match="please report this"):
        run(job)


def test_a_folder_has_the_bytes_of_its_files(tmp_path):
    write_image(tmp_path / "in.zarr", samples(1), "YX")
    files = [path for path in (tmp_path / "in.zarr").rglob("*") if path.is_file()]
    found = InputIdentity(tmp_path / "in.zarr").confirmed()
    assert found["bytes"] == sum(path.stat().st_size for path in files)
    assert found["mtime"] == pytest.approx(max(path.stat().st_mtime for path in files), abs=1e-6)
    assert found["sha256"] is None
    before = found["listing_sha256"]
    files[0].rename(files[0].with_name("renamed"))
    assert InputIdentity(tmp_path / "in.zarr").confirmed()["listing_sha256"] != before


def test_a_version_changes_with_a_files_size_time_and_name(tmp_path):
    path = tmp_path / "in"
    path.write_bytes(b"12345")
    os.utime(path, ns=(1, 1_000_000_007))
    before = input_version(path)
    assert (before["bytes"], before["files"], before["mtime_ns"]) == (5, 1, 1_000_000_007)
    os.utime(path, ns=(1, 1_000_000_008))
    assert input_version(path)["listing_sha256"] != before["listing_sha256"]
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    for number, name in enumerate(("b", "deep/a")):
        (folder / name).write_bytes(b"x" * (number + 1))
        os.utime(folder / name, ns=(1, 5_000_000_000 - number))
    found = input_version(folder)
    assert (found["bytes"], found["files"], found["mtime_ns"]) == (3, 2, 5_000_000_000)
    # What is in a folder counts, not where it is.
    assert input_version(folder.rename(tmp_path / "moved")) == found


@pytest.mark.parametrize(("size", "always", "hashed"), [(8, False, True), (9, False, False), (9, True, True)])
def test_large_inputs_are_hashed_only_on_request(tmp_path, monkeypatch, size, always, hashed):
    monkeypatch.setattr(identity, "HASHED_UP_TO_BYTES", 8)
    monkeypatch.setattr(identity, "BLOCK_BYTES", 3)
    path = tmp_path / "in"
    path.write_bytes(bytes(range(size)))
    with InputIdentity(path, always_hash=always) as found:
        receipt = found.confirmed()
    assert receipt["sha256"] == (hashlib.sha256(path.read_bytes()).hexdigest() if hashed else None)
    assert receipt["path"] == str(path)


def test_an_input_is_compared_with_what_was_planned(tmp_path, monkeypatch):
    path = tmp_path / "in"
    path.write_bytes(b"planned")
    version = input_version(path)
    path.write_bytes(b"changed since")
    with InputIdentity(path, version) as found, pytest.raises(InputError, match="changed while it was read"):
        found.check()
    path.unlink()
    found.check()  # the reader reports a missing input
    path.write_bytes(b"planned")
    os.utime(path, ns=(1, version["mtime_ns"]))
    monkeypatch.chdir(tmp_path)
    with InputIdentity(Path("in"), version) as found:
        assert found.confirmed()["path"] == str(path)


@in_time
def test_a_job_that_ends_early_does_not_wait_for_the_digest(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "BLOCK_BYTES", 1)
    path, blocks, left = tmp_path / "in", [], threading.Event()
    path.write_bytes(b"0123456789")

    class Watched:
        def update(self, block):
            blocks.append(block)
            assert left.wait(60)

    monkeypatch.setattr(identity.hashlib, "sha256", Watched)
    with InputIdentity(path, {"bytes": 10}) as found:
        pass
    left.set()
    found._thread.join()
    assert len(blocks) <= 1


def test_an_input_that_cannot_be_hashed_has_no_digest(tmp_path, monkeypatch):
    path = tmp_path / "in"
    path.write_bytes(b"12345")

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(identity, "open_beneath", refuse)
    with InputIdentity(path) as found:
        assert found.confirmed()["sha256"] is None
