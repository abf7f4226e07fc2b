"""TLS of the service and its client: who is trusted, what is refused at the start, and renewal without a restart."""

from __future__ import annotations

import json
import socket
import ssl

import numpy as np
import pytest
from distributed import Client as DaskClient
from distributed.security import Security

from pipeline.client import Client
from pipeline.errors import ParameterError, ServiceError, ServiceRefused
from pipeline.service.http.edge import tls
from pipeline.service.http.edge.connections import MOST_HEAD_BYTES
from pipeline.service.http.edge.tls import Renewal, check_certificate, warn_if_plain
from pipeline.service.http.users.tokens import Tokens, token_line
from pipeline.service.settings import ServiceSettings, load_service_settings
from tests.images import write_image
from tests.pipeline.cluster.processes import run, running, running_scheduler
from tests.pipeline.service.certificates import Authority
from tests.pipeline.service.live import WAIT_S, live_service


@pytest.fixture
def authority(tmp_path):
    (tmp_path / "ca").mkdir()
    return Authority(tmp_path / "ca")


@pytest.fixture
def service(tmp_path, authority):
    """A service over TLS with the user ada, whose token is `t`: its URL."""
    cert, key = authority.sign()
    (tmp_path / "tokens").write_text(token_line("ada", "t"))
    tokens = Tokens(tmp_path / "tokens")
    with live_service(tmp_path, tokens=tokens, ssl_certfile=cert, ssl_keyfile=key) as (url, _, _):
        yield url


def test_a_client_that_trusts_the_authority_gets_its_result(service, authority, tmp_path, monkeypatch, millrace):
    assert service.startswith("https://")
    with Client(service, token="t", ca_file=authority.file) as client:
        job = client.submit("smooth", "in.npy", "out.npy", size=3)
        assert job.wait(timeout_s=WAIT_S).state == "succeeded"
        assert job.result(tmp_path / "got.npy").stat().st_size > 0
    monkeypatch.setenv("MILLRACE_CA_FILE", str(authority.file))
    monkeypatch.setenv("MILLRACE_URL", service.replace("127.0.0.1", "localhost"))
    monkeypatch.setenv("MILLRACE_TOKEN", "t")
    code, out, _ = millrace("jobs")
    assert (code, out.splitlines()[1].startswith(job.id)) == (0, True)


def test_a_client_that_does_not_trust_it_sends_nothing(service, tmp_path):
    other = Authority(tmp_path, "other")
    for ca_file in (None, other.file):
        with (
            Client(service, token="t", ca_file=ca_file) as client,
            pytest.raises(ServiceError, match="set MILLRACE_CA_FILE to the certificate of the authority"),
        ):
            client.workers()


def test_a_ca_file_that_is_none_is_named(tmp_path):
    (tmp_path / "text").write_text("no certificate")
    for name, said in (("none", "No such file or directory"), ("text", "is not a PEM certificate")):
        with pytest.raises(ServiceRefused, match=f"MILLRACE_CA_FILE {tmp_path / name}: {said}; name the authority's"):
            Client("https://127.0.0.1:9", ca_file=tmp_path / name)


def test_the_limits_of_requests_hold_under_tls(service, authority):
    port = int(service.rpartition(":")[2])
    context = ssl.create_default_context(cafile=authority.file)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        secure.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\nx: " + b"a" * MOST_HEAD_BYTES)
        assert secure.recv(100).startswith(b"HTTP/1.1 431 ")


def test_plain_http_to_it_is_no_answer(service):
    with Client(service.replace("https", "http"), token="t") as client, pytest.raises(ServiceError, match="no service"):
        client.workers()


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("mismatch", "do not belong together"), ("encrypted", "are not a certificate and key in PEM"),
        ("text", "are not a certificate and key in PEM"), ("missing", "No such file or directory; choose one"),
    ],
)  # fmt: skip
def test_what_is_no_certificate_is_refused_at_the_start(authority, tmp_path, case, said, millrace):
    cert, key = authority.sign("a", password=b"secret" if case == "encrypted" else None)
    if case == "mismatch":
        _, key = authority.sign("b")
    elif case == "text":
        cert.write_text("no certificate")
    elif case == "missing":
        key.unlink()
    settings = ServiceSettings(data_roots=[tmp_path], tls_cert=cert, tls_key=key, state_dir=tmp_path / "state")
    with pytest.raises(ParameterError, match="tls_") as caught:
        check_certificate(settings)
    assert said in str(caught.value)
    flags = ("--tls-cert", cert, "--tls-key", key, "--data-roots", tmp_path, "--state-dir", tmp_path / "state")
    code, _, error = millrace("config", "check", *flags)
    assert (code, error) == (2, f"millrace: {caught.value}\n")


def test_both_or_neither(tmp_path):
    for name in ("tls_cert", "tls_key"):
        with pytest.raises(ParameterError, match="tls_cert and tls_key: set both, or neither"):
            load_service_settings({"data_roots": str(tmp_path), name: "/x"})


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"host": "0.0.0.0"}, True), ({"host": "127.0.0.1"}, False),
        ({"host": "0.0.0.0", "trusted_proxies": "10.0.0.1"}, False),
        ({"host": "0.0.0.0", "tls_cert": "/c", "tls_key": "/k"}, False),
    ],
)  # fmt: skip
def test_plain_http_over_a_network_is_warned_of(tmp_path, caplog, settings, warned):
    warn_if_plain(ServiceSettings(data_roots=[tmp_path], **settings))
    assert bool(caplog.records) == warned
    assert all("tokens and data cross the network unencrypted" in each.getMessage() for each in caplog.records)


def serial(context, authority):
    """Of the certificate that a server with this context shows."""
    trusting = ssl.create_default_context(cafile=authority.file)
    ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(theirs, ours, server_hostname="localhost")
    server = context.wrap_bio(ours, theirs, server_side=True)
    for _ in range(5):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return client.getpeercert()["serialNumber"]


def test_a_renewed_certificate_is_used_and_a_wrong_one_is_not(authority, monkeypatch, caplog):
    monkeypatch.setattr(tls, "POLL_S", 0.0)
    cert, key = authority.sign()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    renewal = Renewal(cert, key)
    shown = [serial(context, authority)]
    renewal.look(context)
    shown.append(serial(context, authority))
    authority.sign()
    renewal.look(context)
    shown.append(serial(context, authority))
    cert.write_text("half a certifi")
    for _ in range(3):
        renewal.look(context)
    shown.append(serial(context, authority))
    assert shown[0] == shown[1] != shown[2] == shown[3]
    (record,) = caplog.records
    assert record.getMessage().endswith("; the one read before stays in use")


@pytest.mark.slow
def test_the_service_and_its_cluster_under_tls(tmp_path, authority):
    """Every process as an administrator starts it; the audit log has its start and its end."""
    server_cert, server_key = authority.sign()
    cert, key = authority.sign("cluster")
    (tmp_path / "data").mkdir()
    write_image(tmp_path / "data" / "in.npy", np.arange(40 * 50, dtype=np.uint16).reshape(40, 50), "YX")
    ours = ("--scheduler-ca", authority.file, "--scheduler-cert", cert, "--scheduler-key", key)
    dask = ("--tls-ca-file", authority.file, "--tls-cert", cert, "--tls-key", key, "--protocol", "tls")
    roles = {
        f"tls_{role}_{name}": str(file)
        for role in ("client", "worker")
        for name, file in (("cert", cert), ("key", key))
    }
    security = Security(require_encryption=True, tls_ca_file=str(authority.file), **roles)
    flags = ("--data-roots", tmp_path / "data", "--state-dir", tmp_path / "state", "--port", 0)
    with (
        running_scheduler(tmp_path, 0, *dask) as (_, address),
        running("worker", address, "--device", "cpu", "--workers", 1, *ours, cwd=tmp_path),
        DaskClient(address, security=security, set_as_default=False) as watching,
    ):
        watching.wait_for_workers(1, timeout=WAIT_S)  # the service waits for less on a busy machine
        with running(
            "serve",
            "--scheduler",
            address,
            *ours,
            *flags,
            "--tls-cert",
            server_cert,
            "--tls-key",
            server_key,
            cwd=tmp_path,
        ) as serving:
            check_service(serving, address, authority, tmp_path)
    noted = [json.loads(line)["what"] for line in (tmp_path / "state" / "audit.jsonl").read_text().splitlines()]
    assert noted == ["start", "submit", "stop"]


def check_service(serving, address, authority, folder):
    assert address.startswith("tls://")
    line = serving.stdout.readline()
    assert line, serving.communicate(timeout=WAIT_S)[1]
    url = line.split()[-1]
    assert url.startswith("https://127.0.0.1:")
    with Client(url, ca_file=authority.file) as client:
        assert client.submit("smooth", "in.npy", "out.npy", size=3).wait(timeout_s=WAIT_S).state == "succeeded"
    code, _, error = run("worker", address, "--device", "cpu", "--workers", 1, cwd=folder)
    assert code == 2
    assert "no Dask scheduler answers there" in error
    serving.terminate()
    assert serving.wait(WAIT_S) == 0
