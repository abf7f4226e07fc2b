"""What `millrace serve` refuses before it serves: each mistake in one line, and nothing is left behind or made up."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import uvicorn

from pipeline.cluster.dask import worker_processes
from pipeline.config import Settings
from pipeline.engine.devices import discovery
from pipeline.errors import DeviceUnavailable, ParameterError
from pipeline.service import server
from pipeline.service.http.users.tokens import TokensFile, token_line
from pipeline.service.settings import ServiceSettings
from pipeline.service.store import Store


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Settings of a server that does not come to serve."""
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(server, "Runner", lambda *arguments, **options: pytest.fail("nothing was refused"))

    def made(**others):
        named = {"state_dir": tmp_path / "state", "data_roots": [tmp_path / "data"], "port": 0}
        return ServiceSettings(**named | others)

    return made


@pytest.mark.parametrize("gpus", [[], [0], [0, 1]])
def test_the_executor_is_what_was_asked_for(settings, monkeypatch, gpus):
    monkeypatch.setattr(server, "usable_gpus", lambda: gpus)
    asked = {
        (): ("all", None) if gpus else ("cpu", 1),
        (("device", "cpu"),): ("cpu", 1),
        (("device", "all"),): ("all", None),
        (("device", "cpu"), ("workers", 3)): ("cpu", 3),
        (("device", "cuda:3"),): ("cuda:3", None),
        (("device", "cuda"), ("workers", 2)): ("cuda", 2),
        (("scheduler", "tcp://host:1"), ("workers", 2)): ("auto", 2),
    }
    for given, expected in asked.items():
        executor = server._executor_settings(settings(**dict(given)))
        assert (executor.device, executor.workers) == expected


def test_a_gpu_that_is_not_here_is_not_replaced_by_the_cpu(settings, monkeypatch):
    with pytest.raises(DeviceUnavailable, match="--device cuda:99"):
        server.serve(settings(device="cuda:99"))
    monkeypatch.setattr(discovery, "_driver_version", lambda: None)
    with pytest.raises(DeviceUnavailable, match="--device all: no NVIDIA driver answers"):
        server.serve(settings(device="all"))


@pytest.mark.parametrize("others", [{"scheduler": "tcp://127.0.0.1:1"}, {"device": "cuda:0"}])
def test_workers_that_nothing_would_start_are_refused(settings, others):
    with pytest.raises(ParameterError, match="--workers"):
        server.serve(settings(workers=2, **others))


def test_a_state_folder_that_cannot_be_one_is_a_mistake(settings, tmp_path):
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "file", tmp_path / "file" / "state", "/proc/state"):
        with pytest.raises(ParameterError, match=f"state_dir {re.escape(str(wrong))}: .*; choose another"):
            server.serve(settings(state_dir=wrong))
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "previews").touch()
    with pytest.raises(ParameterError, match=r"previews: is not a folder; remove it"):
        server.serve(settings())


def test_tokens_and_data_roots_are_looked_at_first(settings, tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff")
    for name, said in (
        ("none", "No such file or directory; choose one"),
        (".", "Is a directory; choose"),
        ("binary", "is not a text"),
    ):
        with pytest.raises(ParameterError, match=said) as caught:
            server.serve(settings(tokens_file=tmp_path / name))
        assert "Errno" not in str(caught.value)
    with pytest.raises(ParameterError, match="cannot be used as a folder"):
        server.serve(settings(data_roots=[tmp_path / "none"]))
    assert not os.path.lexists(tmp_path / "state")


def test_a_connection_whose_client_reads_nothing_breaks_off(settings, monkeypatch):
    monkeypatch.setattr(server, "UNREAD_S", 1)
    with server._listening(settings()) as listener, socket.create_connection(listener.getsockname()) as client:
        answering = listener.accept()[0]
        answering.settimeout(60)
        with answering, pytest.raises(TimeoutError) as caught:
            answering.sendall(bytes(64 << 20))
        assert caught.value.errno == errno.ETIMEDOUT
        assert client.recv(1)


def test_a_port_is_one_servers_from_the_start(settings):
    """Not only once it serves: of two that start at once one would never hear of any request."""
    with server._listening(settings()) as first:
        taken = settings(port=first.getsockname()[1])
        with pytest.raises(ParameterError, match="Address already in use; choose another"), server._listening(taken):
            pass


@pytest.mark.parametrize("host", ["a..b", "a" * 70, "\udcff"])
def test_a_host_that_can_have_no_such_name_is_a_mistake(settings, tmp_path, host):
    with (
        pytest.raises(ParameterError, match="is not a host name; choose another"),
        server._listening(settings(host=host)),
    ):
        pass


def test_tokens_are_those_of_the_file_as_it_is_now(tmp_path, caplog):
    path = tmp_path / "tokens"
    path.write_text(token_line("ada", "a"))
    tokens = TokensFile(path).now
    assert tokens().user("a").name == "ada"
    path.write_text("ada sha256:")
    for _ in range(3):
        assert tokens().user("a").name == "ada"
    (record,) = caplog.records
    assert record.getMessage().startswith(f"tokens_file {path}, line 1: is not NAME sha256:HEX")
    assert record.getMessage().endswith("; the tokens read before stay valid")
    path.write_text("")  # the last line was removed: its owner is out at once
    assert tokens().user("a") is None
    path.write_text(token_line("bob", "b"))
    assert tokens().user("b").name == "bob"
    path.unlink()
    assert tokens().user("b").name == "bob"
    assert "No such file" in caplog.records[-1].getMessage()


def test_readiness_is_checked_without_writing_each_time(tmp_path):
    store = Store(tmp_path / "jobs.sqlite")
    fault, log = server._StoreFault(store), tmp_path / "jobs.sqlite-wal"
    assert fault() is None
    written = log.stat().st_size, log.stat().st_mtime_ns
    for _ in range(100):
        assert server._missing(fault, lambda: [{"name": "cpu"}], threading.Event()) is None
    assert (log.stat().st_size, log.stat().st_mtime_ns) == written
    store.close()


def test_readiness_is_checked_again_after_a_while(tmp_path, monkeypatch):
    store = Store(tmp_path / "jobs.sqlite")
    fault = server._StoreFault(store)
    assert fault() is None
    (tmp_path / "jobs.sqlite").rename(tmp_path / "moved")
    assert fault() is None
    monkeypatch.setattr(server, "READY_S", 0.0)
    assert "is gone since the service opened it" in fault()
    (tmp_path / "moved").rename(tmp_path / "jobs.sqlite")
    assert fault() is None
    store.close()


def test_a_server_goes_on_ignoring_what_is_ignored_from_the_start(foreground):
    """As a background job of a shell without job control: Ctrl-C is meant for what is in the foreground."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serving = server._Server(uvicorn.Config(lambda *_: None))
    serving.stopping = threading.Event()
    with serving.capture_signals():
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert not serving.stopping.is_set()


def test_a_terminal_that_is_closed_ends_the_server_as_sigterm_does(foreground, monkeypatch):
    stopped, earlier = threading.Event(), signal.getsignal(signal.SIGHUP)
    serving = server._Server(uvicorn.Config(lambda *_: None))
    serving.stopping, serving.closing, serving.on_stop = threading.Event(), threading.Event(), stopped.set
    with serving.capture_signals():
        os.kill(os.getpid(), signal.SIGHUP)
        assert stopped.wait(60)
    assert serving.stopping.is_set()
    assert signal.getsignal(signal.SIGHUP) is earlier


def test_there_is_room_for_more_than_a_thousand_connections(monkeypatch):
    asked = []
    monkeypatch.setattr(server.resource, "setrlimit", lambda what, limits: asked.append((what, limits)))
    for limits, wanted in (((1024, 524_288), 65_536), ((1024, 4096), 4096), ((1024, -1), 65_536), ((70_000, -1), None)):
        monkeypatch.setattr(server.resource, "getrlimit", lambda what, limits=limits: limits)
        asked.clear()
        server._allow_files()
        assert asked == ([(server.resource.RLIMIT_NOFILE, (wanted, limits[1]))] if wanted else [])


@pytest.mark.parametrize("device", ["all", "cuda:0"])
def test_a_single_gpu_has_a_worker_of_its_own(monkeypatch, device):
    workers = SimpleNamespace(stream="the workers' stream")
    begun = []

    @contextmanager
    def local_workers(specs):
        begun.append(specs)
        yield workers

    monkeypatch.setattr(server.worker_start, "start_fork_server", lambda: begun.append("fork server"))
    monkeypatch.setattr(server, "worker_specs", lambda settings: [settings.device])
    monkeypatch.setattr(worker_processes, "local_workers", local_workers)
    with server._open_workers(Settings(device=device)) as executor:
        assert (executor.device, executor.stream) == (workers, workers.stream)
    assert begun == ["fork server", [device]]
