"""Whole runs from and to an object store, by a real S3 server: bytes as in files, kills, and one-line messages."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from kernels.smoothing import uniform_filter
from pipeline.engine import checkpoints
from pipeline.engine.run import finished_before
from pipeline.storage import partial_objects
from pipeline.storage.objects import ObjectPath
from tests import commands
from tests.images import read_image, write_image
from tests.object_server import EXPIRED, use_environment
from tests.pipeline.formats.image.test_zarr_objects import contents

SMOOTH = ("run", "smooth")
OPTIONS = ("--size", "5", "--device", "cpu", "--chunks", "64", "--chunk-bytes", "60K", "--quiet")
# The command, which enters chunks in the ledger at once, and is slow enough to be killed among them.
SLOW = """
import sys, time
from pipeline.cli import main
from pipeline.engine import checkpoints
from pipeline.storage.partial_objects import PartialObjects
checkpoints.INTERVAL_SECONDS = 0.05
put = PartialObjects.put
PartialObjects.put = lambda *arguments: (time.sleep(0.03), put(*arguments))
main()
"""


@pytest.fixture
def samples():
    return np.random.default_rng(0).integers(0, 65536, (701, 331)).astype(np.uint16)


@pytest.fixture
def source(s3, samples):
    return write_image(s3 / "in.zarr", samples, "YX")


def test_a_run_leaves_result_and_receipt(s3, source, samples, millrace, tmp_path):
    output = s3 / "out.zarr"
    assert millrace(*SMOOTH, source, output, *OPTIONS)[0] == 0
    np.testing.assert_array_equal(read_image(output), uniform_filter(samples, 5))
    receipt = json.loads((s3 / "out.zarr.receipt.json").read_bytes())
    assert receipt["input"]["path"] == str(source)
    assert receipt["output"] == str(output)
    assert sorted({name.partition("/")[0] for name in contents(s3)}) == ["in.zarr", "out.zarr", "out.zarr.receipt.json"]
    assert "identical bits" in millrace("verify", output, "--device", "cpu", "--chunks", "all")[1]
    local = tmp_path / "out.zarr"
    assert millrace(*SMOOTH, source, local, *OPTIONS)[0] == 0
    assert contents(output) == contents(local)
    code, _, said = millrace(*SMOOTH, source, output, *OPTIONS)
    assert (code, said.count("\n")) == (2, 1)
    assert "exists, and objects are not replaced" in said
    (source / "0" / "zarr.json").write_bytes((source / "0" / "zarr.json").read_bytes() + b" ")
    code, _, said = millrace("verify", output, "--device", "cpu")
    assert code == 2
    assert "is not the input that the result was made from" in said


def test_a_killed_run_is_resumed_with_the_same_bytes(s3, source, millrace, monkeypatch, tmp_path):
    output = s3 / "out.zarr"
    arguments = [sys.executable, "-c", SLOW, *map(str, (*SMOOTH, source, output, *OPTIONS))]
    with commands.Popen(arguments, stderr=subprocess.PIPE) as process:
        until = time.monotonic() + 60
        while not any((s3 / "out.zarr.ledger").glob("chunks-*.json")):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < until
        process.send_signal(signal.SIGKILL)
    assert not [name for name in contents(output) if name.endswith("zarr.json")]
    monkeypatch.setattr(partial_objects, "_LOST_AFTER_S", 0.2)
    code, _, said = millrace(*SMOOTH, source, output, *OPTIONS[:-3], "--json", "--resume")
    assert code == 0, said
    receipt = json.loads((s3 / "out.zarr.receipt.json").read_bytes())
    assert 0 < receipt["resumed_chunks"] < receipt["chunks"]
    local = tmp_path / "out.zarr"
    assert millrace(*SMOOTH, source, local, *OPTIONS)[0] == 0
    assert contents(output) == contents(local)
    assert sorted({name.partition("/")[0] for name in contents(s3)}) == ["in.zarr", "out.zarr", "out.zarr.receipt.json"]


def test_a_run_killed_after_publishing_is_complete(s3, source, millrace, monkeypatch):
    output = s3 / "out.zarr"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "INTERVAL_SECONDS", 0.0)
        patch.setattr("pipeline.engine.run.write_receipt", lambda *_: sys.exit(9))  # as if killed there
        assert millrace(*SMOOTH, source, output, *OPTIONS)[0] == 9
    before = contents(output)
    assert finished_before(output, "another job") is None
    assert not (s3 / "out.zarr.receipt.json").exists()
    code, said, _ = millrace(*SMOOTH, source, output, *OPTIONS[:-1], "--resume")
    assert code == 0
    assert "published" in said
    assert contents(output) == before
    assert sorted({name.partition("/")[0] for name in contents(s3)}) == ["in.zarr", "out.zarr", "out.zarr.receipt.json"]


def test_a_flapping_server_is_not_noticed(s3, source, samples, proxy, millrace):
    proxy.how = lambda number: "dropped" if number % 2 else "through"
    assert millrace(*SMOOTH, source, s3 / "out.zarr", *OPTIONS)[0] == 0
    np.testing.assert_array_equal(read_image(s3 / "out.zarr"), uniform_filter(samples, 5))


def test_a_pyramid_has_the_levels_that_a_local_one_has(s3, source, tmp_path, millrace):
    """The last two are made of level 4, read back from the store."""
    for output in (s3 / "out.zarr", tmp_path / "out.zarr"):
        assert millrace(*SMOOTH, source, output, *OPTIONS, "--levels", "7")[0] == 0
    for level in range(7):
        written = [
            path.relative_to(tmp_path) for path in (tmp_path / "out.zarr" / str(level)).rglob("*") if path.is_file()
        ]
        assert written
        for path in written:
            assert (s3 / str(path)).read_bytes() == (tmp_path / path).read_bytes(), path


def test_two_workers_share_an_output(s3, source, samples):
    """In a process of its own: workers have the environment of the process that first starts one."""
    command = [sys.executable, "-m", "pipeline", *SMOOTH, source, s3 / "out.zarr", *OPTIONS, "--workers", "2"]
    done = commands.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(read_image(s3 / "out.zarr"), uniform_filter(samples, 5))


@pytest.mark.parametrize("names", [("s3://closed/a.zarr", "out.zarr"), ("in.zarr", "out.zarr")])
def test_denied_access_is_named_in_one_line(s3, s3_server, source, millrace, monkeypatch, names):
    use_environment(monkeypatch, s3_server.environment("reader"))
    read, written = (name if "//" in name else s3 / name for name in names)
    code, _, error = millrace(*SMOOTH, read, written, *OPTIONS)
    assert (code, error.count("\n")) == (2, 1)
    assert "access is denied (403 Forbidden, AccessDenied); check AWS_ACCESS_KEY_ID" in error


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("s3://no-such-bucket/a.zarr", "out.zarr"), "there is no bucket no-such-bucket"),
        (("in.zarr", "s3://no-such-bucket/a.zarr"), "there is no bucket no-such-bucket"),
        (("nothing.zarr", "out.zarr"), "nothing.zarr: no such file; check the path"),
        (("in.zarr", "out.tif"), "only Zarr is written to an object store; end the name with .zarr"),
        (("in.zarr", "in.zarr"), "is the input itself"),
        (("s3://key:secret@open/in.zarr", "out.zarr"), "would be shown in receipts and logs"),
    ],
)
def test_mistakes_are_named_in_one_line(s3, source, millrace, names, said):
    before = contents(s3)
    read, written = (name if "//" in name else s3 / name for name in names)
    code, _, error = millrace(*SMOOTH, read, written, "--device", "cpu")
    assert (code, error.count("\n")) == (2, 1)
    assert said in error
    assert "secret" not in error
    assert contents(s3) == before


def test_expired_credentials_and_patterns(s3, source, proxy, millrace):
    assert "run objects one by one" in millrace(*SMOOTH, f"{s3}/*.tif", s3 / "out", *OPTIONS)[2]
    proxy.how = lambda number: EXPIRED
    code, _, error = millrace(*SMOOTH, source, s3 / "out.zarr", *OPTIONS)
    assert (code, error.count("\n")) == (1, 1)
    assert "the credentials have expired (ExpiredToken); renew them, then run again" in error


def test_an_input_that_changes_is_found(s3, source, millrace, monkeypatch):
    read = ObjectPath.get
    seen = []

    def changed(self, *arguments):
        if "/c/" in self.key and not seen:
            seen.append(self)
            metadata = source / "zarr.json"
            metadata.write_bytes(read(metadata)[0].to_bytes() + b" ")
        return read(self, *arguments)

    monkeypatch.setattr(ObjectPath, "get", changed)
    code, _, error = millrace(*SMOOTH, source, s3 / "out.zarr", *OPTIONS)
    assert code == 2
    assert "changed while it was read; nothing was published" in error
    assert not [name for name in contents(s3) if name.startswith("out.zarr")]
