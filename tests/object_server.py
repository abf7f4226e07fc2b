"""A real S3 server for the tests, SeaweedFS from its wheel; and a proxy before it that fails as networks do."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.storage import objects

if TYPE_CHECKING:
    import pytest

WEED = Path(sys.executable).with_name("weed")
KEYS = {"writer": ("WRITER", "writers-secret"), "reader": ("READER", "readers-secret")}
_IDENTITIES = [
    {"name": "writer", "actions": ["Admin", "Read", "Write", "List", "Tagging"]},
    {"name": "reader", "actions": ["Read:open", "List:open"]},
]
_EXPIRED = b'<?xml version="1.0"?><Error><Code>ExpiredToken</Code><Message>The token has expired.</Message></Error>'
EXPIRED = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_EXPIRED), _EXPIRED)
)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class S3Server:
    """A server with the buckets `open`, which everybody may read, and `closed`. Its data are in memory."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
        for name in ("data", "log"):
            (self._folder / name).mkdir()
        identities = [
            {**each, "credentials": [dict(zip(("accessKey", "secretKey"), KEYS[each["name"]], strict=True))]}
            for each in _IDENTITIES
        ]
        config = self._folder / "s3.json"
        config.write_text(json.dumps({"identities": identities}))
        ports = _free_ports(8)
        names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
        self.port, filer = ports[6], ports[4]
        self._log = (self._folder / "log" / "out").open("wb")
        self._process = subprocess.Popen(
            [
                WEED, f"-logdir={self._folder / 'log'}", "server", f"-dir={self._folder / 'data'}", "-ip=127.0.0.1",
                "-ip.bind=127.0.0.1", "-filer", "-s3", f"-s3.port={self.port}", f"-s3.port.grpc={ports[7]}",
                f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false",
                "-s3.iam=false", "-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=100",
                *(f"-{name}={port}" for name, port in zip(names, ports, strict=False)),
            ],
            stdout=self._log, stderr=subprocess.STDOUT, cwd=self._folder,
        )  # fmt: skip
        try:
            _answers(f"http://127.0.0.1:{self.port}/status", self._process)
            for bucket in ("open", "closed"):
                asked = urllib.request.Request(f"http://127.0.0.1:{filer}/buckets/{bucket}/", method="POST")
                urllib.request.urlopen(asked, timeout=10).close()
        except BaseException:
            self.close()
            raise

    def environment(self, user: str = "writer", port: int | None = None) -> dict[str, str]:
        """What a user's environment has."""
        key, secret = KEYS[user]
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_REGION": "us-east-1",
        }

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()
        shutil.rmtree(self._folder)


def _answers(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError("the S3 server has ended")
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except urllib.error.HTTPError as error:
            error.close()
            return
        except OSError:
            time.sleep(0.02)
    raise RuntimeError("the S3 server does not answer")


class Proxy:
    """Between clients and the server. `how`, asked for each connection:

    through : passes everything on
    dropped : breaks the connection after 150,000 bytes of requests, or of answers
    silent  : takes the connection, and never answers
    bytes   : answers these, and closes
    """

    def __init__(self, port: int, how=lambda number: "through") -> None:
        self._to, self.how, self.count = port, how, 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for each in self._open:
            _closed(each)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                self._open.append(client)
                how, self.count = self.how(self.count), self.count + 1
                if how == "silent":
                    continue
                if isinstance(how, bytes):
                    threading.Thread(target=_answer, args=(client, how), daemon=True).start()
                    continue
                server = socket.create_connection(("127.0.0.1", self._to))
                self._open.append(server)
                limit = 150_000 if how == "dropped" else None
                threading.Thread(target=_pass_on, args=(client, server, limit), daemon=True).start()
                threading.Thread(target=_pass_on, args=(server, client, limit), daemon=True).start()


def _answer(client: socket.socket, answer: bytes) -> None:
    with contextlib.suppress(OSError):
        client.recv(1 << 16)
        client.sendall(answer)
    _closed(client)


def _pass_on(source: socket.socket, target: socket.socket, limit: int | None) -> None:
    with contextlib.suppress(OSError):
        while (limit is None or limit > 0) and (data := source.recv(1 << 16)):
            target.sendall(data)
            limit = None if limit is None else limit - len(data)
    _closed(source)
    _closed(target)


def _closed(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()


def use_environment(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    """Only these settings of object stores hold from now on, in this process and those that it starts."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    objects._stores.clear()
