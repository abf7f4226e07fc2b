"""Objects of a real S3 server as paths: what their errors become, and servers that fail."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time

import numpy as np
import pytest

from pipeline.errors import InputError, OutputError, StorageError
from pipeline.storage import objects
from pipeline.storage.object_file import opened_to_read
from pipeline.storage.objects import ChangedError, ObjectPath, is_url, path_named
from tests.object_server import EXPIRED, Proxy, use_environment


@pytest.mark.parametrize("url", ["s3://b/a/c.zarr", "gs://b/c d.tif", "az://b/%41.npy", "https://host:1/x.zarr"])
def test_a_path_is_its_url(url):
    path = path_named(url)
    assert isinstance(path, ObjectPath)
    assert str(path) == os.fspath(path) == f"{path}" == url
    assert pickle.loads(pickle.dumps(path)) == path
    assert str((path / "0" / "zarr.json").parent.parent.with_name("y")) == url.rpartition("/")[0] + "/y"
    assert path.absolute() == path
    assert is_url(path)


def test_names_of_files_stay_files():
    for name in ("a/b.tif", "s3/b.tif", "s3:/b/c", "file:///b", "ftp://b/c"):
        assert not isinstance(path_named(name), ObjectPath)


@pytest.mark.parametrize(
    "url",
    [
        "https://user:secret@host/a.zarr", "s3://key:secret@b/a", "https://h/a.tif?X-Amz-Signature=secret",
        "https://h/a#secret", "s3://", "s3:///a", "s3://b/../a", "s3://b/./a", "https://h/%2e%2e/a", "s3://b/a\nb",
    ],
)  # fmt: skip
def test_credentials_and_ways_out_are_refused_and_not_repeated(url):
    with pytest.raises(InputError) as refused:
        path_named(url)
    assert "secret" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_objects_are_written_read_listed_and_removed(s3):
    data = np.random.default_rng(0).bytes(700_001)
    (s3 / "a" / "x").put([np.frombuffer(data[:5], np.uint8), memoryview(data)[5:]])
    assert (s3 / "a" / "x").read_bytes() == data
    assert (s3 / "a" / "x").stat().st_size == len(data)
    assert bytes((s3 / "a" / "x").get(None, (11, 700_000))[0]) == data[11:700_000]
    (s3 / "a" / "y.json").write_bytes(b"")
    assert (s3 / "a" / "y.json").read_bytes() == b""
    assert [path.name for path in (s3 / "a").iterdir()] == ["x", "y.json"]
    assert [path.name for path in (s3 / "a").glob("*.json")] == ["y.json"]
    (s3 / "ab").write_bytes(b"beside")
    (s3 / "a").remove_below()
    assert not (s3 / "a" / "x").exists()
    assert (s3 / "ab").exists()
    for _ in range(2):
        (s3 / "ab").unlink(missing_ok=True)


def test_conditions_hold(s3):
    first = s3.put([b"1"], new=True)
    with pytest.raises(ChangedError):
        s3.put([b"2"], new=True)
    second = s3.put([b"2"], replaces=first)
    with pytest.raises(ChangedError):
        s3.put([b"3"], replaces=first)
    s3.put([b"3"], replaces=second)
    assert s3.read_bytes() == b"3"


def test_a_file_of_ranges(s3):
    data = np.random.default_rng(0).bytes(900_001)
    s3.write_bytes(data)
    file = opened_to_read(s3)
    assert file.size == len(data)
    rng = np.random.default_rng(1)
    for nbytes in (1, 300, 262_145, 700_000):
        for offset in [*rng.integers(0, len(data) - nbytes, 5).tolist(), len(data) - nbytes]:
            into = bytearray(nbytes)
            file.read_at(offset, memoryview(into))
            assert into == data[offset : offset + nbytes]
    starts = rng.integers(0, 899_000, 50).tolist()
    runs = [(start, memoryview(bytearray(777))) for start in starts]
    file.read_runs(runs)
    assert all(into == data[start : start + 777] for start, into in runs)
    assert file.head(100, len(data) - 7) == data[-7:]
    assert file.head(7, len(data)) == b""
    with pytest.raises(InputError, match="truncated: the object ends at byte 900,001, 1 byte short"):
        file.read_at(len(data) - 9, memoryview(bytearray(10)))


def test_missing_ones_are_named(s3):
    with pytest.raises(FileNotFoundError):
        (s3 / "nothing").read_bytes()
    for call in (lambda path: path.stat(), lambda path: path.read_bytes(), lambda path: next(path.iterdir())):
        with pytest.raises(InputError, match=r"^s3://no-such-bucket/x: there is no bucket no-such-bucket \("):
            call(ObjectPath.of("s3://no-such-bucket/x"))
    with pytest.raises(OutputError, match="there is no bucket no-such-bucket"):
        ObjectPath.of("s3://no-such-bucket/x").write_bytes(b"1")
    with pytest.raises(InputError, match="no such file; check the path"):
        opened_to_read(s3 / "nothing")


def test_denied_ones_are_named(s3, s3_server, monkeypatch):
    s3.write_bytes(b"1")
    use_environment(monkeypatch, s3_server.environment("reader"))
    assert s3.read_bytes() == b"1"
    with pytest.raises(OutputError, match=r"access is denied \(403 Forbidden, AccessDenied\); check AWS_ACCESS_KEY_ID"):
        s3.write_bytes(b"2")
    with pytest.raises(InputError, match="access is denied"):
        ObjectPath.of("s3://closed/x").read_bytes()
    use_environment(monkeypatch, {**s3_server.environment(), "AWS_SECRET_ACCESS_KEY": "wrong"})
    with pytest.raises(InputError, match=r"access is denied \(403 Forbidden, SignatureDoesNotMatch\)"):
        s3.stat()
    use_environment(monkeypatch, {**s3_server.environment(), "AWS_ACCESS_KEY_ID": "unknown"})
    with pytest.raises(InputError, match="InvalidAccessKeyId"):
        s3.read_bytes()


def test_expired_credentials_are_no_mistake_in_the_job(s3, proxy):
    proxy.how = lambda number: EXPIRED
    for call in (s3.read_bytes, s3.stat, lambda: s3.write_bytes(b"1")):
        with pytest.raises(StorageError, match=r"the credentials have expired \(ExpiredToken\); renew them"):
            call()


def test_a_connection_that_breaks_now_and_then_is_not_noticed(s3, proxy):
    data = np.random.default_rng(0).bytes(1_000_003)
    proxy.how = lambda number: "through" if number % 3 == 2 else "dropped"
    s3.write_bytes(data)
    assert s3.read_bytes() == data
    into = bytearray(len(data))
    opened_to_read(s3).read_at(0, memoryview(into))
    assert into == data
    assert proxy.count >= 3  # a connection that holds may be used again


@pytest.mark.parametrize("how", [b"", b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n", "silent"])
def test_a_server_that_never_answers_is_given_up_in_time(s3, proxy, monkeypatch, how):
    s3.write_bytes(bytes(1_000_003))
    for name, seconds in {"REQUEST_S": 0.3, "CONNECT_S": 0.3, "RETRY_S": 1.0}.items():
        monkeypatch.setattr(objects, name, seconds)
    objects._stores.clear()
    proxy.how = lambda number: how
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"the object store .*; check the network and the endpoint, then run again"):
        s3.read_bytes()
    assert time.monotonic() - began < 20
    objects._stores.clear()


def test_no_server_at_all(s3, s3_server, monkeypatch):
    gone = Proxy(s3_server.port)
    gone.close()
    monkeypatch.setattr(objects, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(objects, "_answered", set())
    use_environment(monkeypatch, s3_server.environment(port=gone.port))
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"does not answer as it should \(Connection refused\); check the network"):
        s3.stat()
    assert time.monotonic() - began < 30, "its address is wrong: it has never answered"


def test_a_server_that_is_gone_for_a_while_is_asked_again(s3, proxy, monkeypatch):
    s3.write_bytes(b"data")
    monkeypatch.setattr(objects, "FIRST_PAUSE_S", 0.001)
    objects._stores.clear()
    before = proxy.count
    proxy.how = lambda number: b"" if number < before + 15 else "through"
    assert s3.read_bytes() == b"data"
    objects._stores.clear()


def test_a_busy_server_is_asked_again_as_long_as_is_allowed(s3, proxy, monkeypatch):
    s3.write_bytes(b"data")
    busy = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    monkeypatch.setattr(objects, "FIRST_PAUSE_S", 0.001)
    objects._stores.clear()
    before = proxy.count
    proxy.how = lambda number: busy if number < before + 15 else "through"
    assert s3.read_bytes() == b"data"
    objects._stores.clear()


def test_ctrl_c_does_not_wait_for_a_server_that_is_read(s3, proxy, monkeypatch):
    class Interrupt(Exception):
        pass

    def interrupt(*_):
        raise Interrupt

    s3.write_bytes(b"data")
    for name in ("REQUEST_S", "RETRY_S"):
        monkeypatch.setattr(objects, name, 8.0)
    objects._stores.clear()
    proxy.how = lambda number: "silent"
    older, began = signal.signal(signal.SIGALRM, interrupt), time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(Interrupt):
            s3.read_bytes()
    finally:
        signal.signal(signal.SIGALRM, older)
    assert time.monotonic() - began < 5
    objects._stores.clear()


@pytest.mark.parametrize("address", ["nonsense", "ftp://127.0.0.1", "http://", "http://a b"])
def test_an_endpoint_that_is_no_url(s3_server, monkeypatch, address):
    """The client library ends in a panic, with a backtrace."""
    use_environment(monkeypatch, {**s3_server.environment(), "AWS_ENDPOINT_URL": address})
    with pytest.raises(InputError, match=f"^AWS_ENDPOINT_URL={address}: must be a URL, such as https://HOST:PORT"):
        ObjectPath.of("s3://open/a").stat()


def test_without_obstore_the_message_says_how_to_install_it(s3, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    objects._stores.clear()
    with pytest.raises(InputError, match="need the package obstore; install it: pip install obstore"):
        s3.stat()
