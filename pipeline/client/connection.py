"""Requests to a service, sent again if no answer comes."""

from __future__ import annotations

import os
import re
import ssl
import time
from collections.abc import Callable
from typing import Any, Self

import httpx2

from pipeline.client.answers import checked, json_of, without_password
from pipeline.errors import ServiceError, ServiceRefused

DEFAULT_URL = "http://127.0.0.1:8765"
# A request without an answer is sent again: each carries a key, so that it cannot create two jobs.
TRIES = 4
FIRST_PAUSE_S = 0.25
# The service sends at least a comment every 15 s.
MOST_SILENCE_S = 60.0
# Never reached through a proxy, which would connect to itself.
_LOOPBACKS = ("127.0.0.1", "[::1]", "localhost")
# Where httpx finds proxies and certificates.
_ENVIRONMENT = "HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE and SSL_CERT_DIR"


class Connection:
    """Where a service is, and requests to it."""

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        ca_file: str | os.PathLike[str] | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """url     : default MILLRACE_URL, or this machine's service
        token   : default MILLRACE_TOKEN; a service on loopback may need none
        ca_file : PEM file of the only authority that may vouch for an https:// service; default MILLRACE_CA_FILE, or
                  those of the system
        """
        self.url = (url or os.environ.get("MILLRACE_URL") or DEFAULT_URL).rstrip("/")
        self._address = without_password(self.url)
        token = token or os.environ.get("MILLRACE_TOKEN")
        if token is not None and not re.fullmatch("[!-~]*", token):
            raise ServiceRefused("MILLRACE_TOKEN: is not a token; `millrace token create NAME` makes one")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            if not re.fullmatch(r"(?i:https?)://[^\s/?#]+(/[^\s?#]*)?", self.url):
                raise ValueError(self.url)
            if (httpx2.URL(self.url).port or 0) > 65_535:  # a socket would take it modulo 65,536
                raise ValueError(self.url)
        except (httpx2.InvalidURL, ValueError) as error:
            raise ServiceRefused(f"{self._address}: is not a service's URL; write it like {DEFAULT_URL}") from error
        try:
            itself = dict.fromkeys(f"all://{host}" for host in _LOOPBACKS)
            self._http = httpx2.Client(
                base_url=self.url, headers=headers, timeout=timeout_s, mounts=itself,
                verify=_trusting(ca_file or os.environ.get("MILLRACE_CA_FILE")),
            )  # fmt: skip
        except (httpx2.InvalidURL, ValueError, ImportError, OSError) as error:
            raise ServiceRefused(f"the environment is wrong ({error}); correct or unset {_ENVIRONMENT}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_closed(self) -> bool:
        return bool(self._http.is_closed)

    def close(self) -> None:
        self._http.close()

    def request(self, method: str, path: str, *, done: Callable[[], Any] = lambda: None, **options: Any) -> Any:
        """The answer's JSON. A request without an answer is sent again, up to TRIES times.

        done : called if a repeated request is refused because of the job's state: returns an answer in place of the
               lost one if the service had acted on an earlier try, else None
        """
        pause = FIRST_PAUSE_S
        for left in reversed(range(TRIES)):
            try:
                response = self._http.request(method, path, **options)
            except UnicodeError as error:
                # Since Python 3.13 the idna codec raises UnicodeEncodeError too.
                if not isinstance(error, UnicodeEncodeError) or error.encoding == "idna":
                    raise ServiceRefused(f"{self._address}: is not a host name; write it like {DEFAULT_URL}") from error
                fault = error.object[max(error.start - 40, 0) : error.end + 40]
                raise ServiceRefused(f"{fault!a}: cannot be sent as text; write it otherwise") from error
            except httpx2.RequestError as error:
                if left == 0:
                    raise self.unreachable(error) from error
            else:
                if response.status_code == 409 and left < TRIES - 1 and (found := done()) is not None:
                    return found
                if response.status_code != 503 or left == 0:
                    return json_of(checked(response))
            time.sleep(pause)
            pause *= 2
        raise AssertionError("unreachable")

    def stream(self, path: str, *, silence_s: float = MOST_SILENCE_S, **headers: str) -> Any:
        """A context with the unread answer; fails if nothing arrives for `silence_s`."""
        return self._http.stream("GET", path, headers=headers, timeout=httpx2.Timeout(30.0, read=silence_s))

    def unreachable(self, error: Exception) -> ServiceError:
        """The error for a request that had no answer."""
        way_out = "start one with `millrace serve`, or set MILLRACE_URL"
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            way_out = (
                "set MILLRACE_CA_FILE to the certificate of the authority that signed its own, or correct MILLRACE_URL"
            )
        return ServiceError(f"{self._address}: no service answers ({error or type(error).__name__}); {way_out}")


def _trusting(ca_file: str | os.PathLike[str] | None) -> ssl.SSLContext | bool:
    """What vouches for a service. ServiceRefused if the file cannot be used."""
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        said = "is not a PEM certificate" if isinstance(error, ssl.SSLError | ValueError) else error.strerror
        raise ServiceRefused(
            f"MILLRACE_CA_FILE {os.fspath(ca_file)}: {said}; name the authority's certificate"
        ) from error
