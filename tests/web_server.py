"""A small web server with objects in memory: plain HTTP with ranges and PUT, and what Google Cloud Storage adds."""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_DATE = "Thu, 26 Nov 2026 05:00:00 GMT"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WebServer

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        if self.server.is_google and "list-type" in asked.query:
            self._list(asked.path.strip("/"), {name: value[0] for name, value in parse_qs(asked.query).items()})
            return
        found = self.server.objects.get(unquote(asked.path))
        if found is None:
            self._answer(self.server.status_of_others)
            return
        generation, data = found
        headers = {"ETag": f'"{generation}"', "Last-Modified": _DATE, "x-goog-generation": str(generation)}
        self.server.parts_sent[asked.path] += "Range" in self.headers
        asked_range = self.headers.get("Range", "") if self.server.has_ranges else ""
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", asked_range)
        if span is None:
            self._answer(200, data, headers)
            return
        start, stop = int(span[1]), min(int(span[2] or len(data)) + 1, len(data))
        if start >= len(data):
            self._answer(416)
            return
        self._answer(206, data[start:stop], {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"})

    do_HEAD = do_GET  # noqa: N815

    def do_PUT(self) -> None:
        data, path = self.rfile.read(int(self.headers["Content-Length"])), unquote(urlsplit(self.path).path)
        with self.server.lock:
            generation = self.server.objects.get(path, (0, b""))[0]
            wanted = self.headers.get("x-goog-if-generation-match")
            if wanted is not None and int(wanted) != generation:
                self._answer(412)
                return
            self.server.generation += 1
            self.server.objects[path] = self.server.generation, data
            number = str(self.server.generation)
        self._answer(200, headers={"ETag": f'"{number}"', "x-goog-generation": number})

    def do_DELETE(self) -> None:
        with self.server.lock:
            found = self.server.objects.pop(unquote(urlsplit(self.path).path), None)
        self._answer(404 if found is None else 204)

    def do_PROPFIND(self) -> None:
        self._answer(405)

    def _list(self, bucket: str, asked: dict[str, str]) -> None:
        prefix, delimiter = asked.get("prefix", ""), asked.get("delimiter")
        contents, prefixes = [], set()
        for path, (generation, data) in sorted(self.server.objects.items()):
            key = path.removeprefix(f"/{bucket}/")
            if not key.startswith(prefix):
                continue
            if delimiter and delimiter in key[len(prefix) :]:
                prefixes.add(prefix + key[len(prefix) :].partition(delimiter)[0] + delimiter)
                continue
            contents.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><ETag>{generation}</ETag>"
                "<LastModified>2026-11-26T05:00:00.000Z</LastModified></Contents>"
            )
        below = "".join(
            f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in sorted(prefixes)
        )
        self._answer(200, f"<ListBucketResult>{''.join(contents)}{below}</ListBucketResult>".encode())

    def _answer(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        """Nothing is printed."""


class WebServer(ThreadingHTTPServer):
    """`objects`: their generation and bytes, by path. `is_google`: it lists, too. `has_ranges`: it sends parts;
    `parts_sent` counts them by path."""

    status_of_others = 404

    daemon_threads = True

    def __init__(self, *, is_google: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.has_ranges = True
        self.is_google, self.generation, self.lock = is_google, 0, threading.Lock()
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.parts_sent: Counter[str] = Counter()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing where a client reads only a part of an answer: tests compare all that is written."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def close(self) -> None:
        self.shutdown()
        self.server_close()
