"""The service's certificate: checked before it listens, and read again when it is renewed."""

from __future__ import annotations

import logging
import ssl
import time
from pathlib import Path

from pipeline.errors import ParameterError
from pipeline.service.settings import ServiceSettings

LOG = logging.getLogger("millrace.service")
# How often renewed files are looked for.
POLL_S = 60.0


def check_certificate(settings: ServiceSettings) -> None:
    """ParameterError if the certificate or its key cannot be used."""
    if settings.tls_cert is not None and settings.tls_key is not None:
        _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), settings.tls_cert, settings.tls_key)


def warn_if_plain(settings: ServiceSettings) -> None:
    """Logs a warning if tokens and data cross a network unencrypted."""
    if settings.tls_cert is None and not settings.on_loopback and not settings.trusted_proxies:
        LOG.warning(
            "host %s: tokens and data cross the network unencrypted; set tls_cert and tls_key, or listen on 127.0.0.1 "
            "behind a proxy with TLS", settings.host,
        )  # fmt: skip


class Renewal:
    """Lets new connections use a renewed certificate, as of Let's Encrypt every 60 days, without a restart."""

    def __init__(self, cert: Path, key: Path) -> None:
        self._files = cert, key
        self._read_from = self._version()
        self._looked = time.monotonic()

    def look(self, context: ssl.SSLContext) -> None:
        """Call this often. A renewed pair that does not fit together stays unused, and the log says so."""
        if time.monotonic() - self._looked < POLL_S:
            return
        self._looked, version = time.monotonic(), self._version()
        if version == self._read_from:
            return
        self._read_from = version
        try:
            _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), *self._files)  # a fault would spoil the one in use
            _load(context, *self._files)
            LOG.info("the renewed certificate %s is in use", self._files[0])
        except ParameterError as error:
            LOG.error("%s; the one read before stays in use", error)

    def _version(self) -> list[tuple[int, int, int] | None]:
        found: list[tuple[int, int, int] | None] = []
        for path in self._files:
            try:
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, status.st_ino))
            except OSError:
                found.append(None)
        return found


def _load(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    for name, path in (("tls_cert", cert), ("tls_key", key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise ParameterError(f"{name} {path}: {error.strerror}; choose one that this user may read") from error
    try:
        context.load_cert_chain(cert, key, password="")  # an encrypted key would be asked for on the terminal
    except ssl.SSLError as error:
        what = (
            "do not belong together"
            if error.reason == "KEY_VALUES_MISMATCH"
            else "are not a certificate and key in PEM"
        )
        raise ParameterError(f"tls_cert {cert} and tls_key {key}: {what} ({error.reason or error})") from error
