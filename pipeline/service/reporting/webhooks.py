"""Notifies other services of ended jobs: signed requests, kept on disk until they are answered.

Format and signature are those of Standard Webhooks (https://www.standardwebhooks.com): the headers `webhook-id`, the
same at every try, `webhook-timestamp` and `webhook-signature`, an HMAC-SHA256 of id, timestamp and body. A receiver may
get one twice: it should remember the ids.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx2

from pipeline.errors import MillraceError, ParameterError
from pipeline.service.settings import checked_url
from pipeline.service.store import Delivery, Store

LOG = logging.getLogger("millrace.service")
# An answer has to come within this time; its body is not read.
ANSWER_S = 10.0
# The pause after a failure doubles from the first to the last; after a week the delivery is given up.
FIRST_PAUSE_S, MOST_PAUSE_S, GIVE_UP_S = 5.0, 6 * 3600.0, 7 * 86_400.0
# Deliveries under way at the same time, so that one slow receiver does not hold up the others.
AT_ONCE = 8
# How often the store is looked at without being woken.
POLL_S = 1.0
LEAST_SECRET_BYTES = 24
_PORTS = {"http": 80, "https": 443}


def check_webhook(url: str, hosts: Sequence[str]) -> None:
    """Refuses addresses at other hosts: a job must not have the service send requests into its own network.

    hosts : HOST, for the usual port, or HOST:PORT

    Raises ParameterError.
    """
    try:
        parts = urlsplit(checked_url(url))
    except ValueError as error:
        raise ParameterError(f"webhook: {error}") from error
    port = parts.port or _PORTS[parts.scheme]
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
    allowed = {each.lower() for each in hosts}
    if f"{host}:{port}" not in allowed and (host not in allowed or port != _PORTS[parts.scheme]):
        way_out = f"it may notify {', '.join(hosts)}" if hosts else "its operator sets webhook_hosts"
        raise ParameterError(f"webhook: {host}:{port} is not a host that the service may notify; {way_out}")


def read_secret(path: Path) -> bytes:
    """The key of a file: text, or `whsec_` and base64 as other programs write it. ParameterError if it is too short."""
    try:
        text = path.read_text(encoding="utf-8").strip()
        secret = base64.b64decode(text[6:], validate=True) if text.startswith("whsec_") else text.encode()
    except OSError as error:
        raise ParameterError(
            f"webhook_secret_file {path}: {error.strerror}; choose one that this user may read"
        ) from error
    except (UnicodeDecodeError, binascii.Error) as error:
        raise ParameterError(f"webhook_secret_file {path}: is not a text, or not base64 after whsec_") from error
    if len(secret) < LEAST_SECRET_BYTES:
        raise ParameterError(
            f"webhook_secret_file {path}: holds {len(secret)} bytes, and {LEAST_SECRET_BYTES} or more are needed; "
            "`openssl rand -hex 32` makes some"
        )
    return secret


def signature(secret: bytes, delivery: str, timestamp: int, body: str) -> str:
    """The value of `webhook-signature`."""
    signed = hmac.new(secret, f"{delivery}.{timestamp}.{body}".encode(), hashlib.sha256).digest()
    return f"v1,{base64.b64encode(signed).decode('ascii')}"


class Webhooks:
    """Sends what the store has to deliver, on its own threads, between `start` and `close`."""

    def __init__(
        self,
        store: Store,
        secret: bytes,
        is_allowed: Callable[[str], bool],
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        """is_allowed : whether an address may still be notified: settings may have changed since its job was submitted
        transport  : of the requests; None: the network
        """
        self._store = store
        self._secret = secret
        self._is_allowed = is_allowed
        # No proxy of the environment, no redirection: only what the operator has allowed is reached.
        self._http = httpx2.Client(timeout=ANSWER_S, follow_redirects=False, trust_env=False, transport=transport)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="webhooks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """What is not delivered stays on disk."""
        self._ending.set()
        self._thread.join(2 * ANSWER_S)
        self._http.close()

    def _work(self) -> None:
        with ThreadPoolExecutor(AT_ONCE, "webhook") as pool:
            while not self._ending.is_set():
                try:
                    self.deliver_due(pool)
                except MillraceError as error:
                    LOG.error("webhooks: %s", error)
                except Exception:
                    LOG.exception("webhooks: unexpected error, continuing")
                self._ending.wait(POLL_S)

    def deliver_due(self, pool: ThreadPoolExecutor) -> None:
        """Tries what is due once."""
        while due := self._store.due_deliveries(now=time.time(), most=AT_ONCE):
            list(pool.map(self._deliver, due))
            if self._ending.is_set():
                return

    def _deliver(self, delivery: Delivery) -> None:
        fault = self._fault(delivery) if self._is_allowed(delivery.url) else "is no longer allowed"
        now, host = time.time(), urlsplit(delivery.url).netloc
        if fault is None:
            self._store.forget_delivery(delivery.id)
        elif now - delivery.at > GIVE_UP_S or not self._is_allowed(delivery.url):
            LOG.error("webhook at %s for job %s: given up: %s", host, delivery.job, fault)
            self._store.forget_delivery(delivery.id)
            with suppress(MillraceError):
                self._store.log(delivery.job, f"the webhook at {host} was not notified: {fault}", now=now)
        else:
            pause_s = min(FIRST_PAUSE_S * 2.0**delivery.tries, MOST_PAUSE_S)
            LOG.warning("webhook at %s for job %s: %s; again in %.0f s", host, delivery.job, fault, pause_s)
            self._store.put_off_delivery(delivery.id, due=now + pause_s)

    def _fault(self, delivery: Delivery) -> str | None:
        """Sends it; returns why that failed, if so."""
        timestamp = int(time.time())
        headers = {
            "content-type": "application/json",
            "user-agent": "millrace",
            "webhook-id": delivery.id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signature(self._secret, delivery.id, timestamp, delivery.body),
        }
        try:
            with self._http.stream("POST", delivery.url, content=delivery.body.encode(), headers=headers) as answer:
                return None if answer.is_success else f"the answer was {answer.status_code}"
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
            return f"no answer ({type(error).__name__})"
