"""Certificates towards a Dask scheduler elsewhere, and a warning where there are none."""

from __future__ import annotations

import ipaddress
import logging
import ssl
from urllib.parse import urlsplit

import dask

from pipeline.config import Settings
from pipeline.errors import ParameterError

LOG = logging.getLogger("millrace.cluster")


def use_certificates(settings: Settings) -> None:
    """Lets this process, and the workers that it starts, use the settings' certificates with every tls:// address.

    Raises ParameterError if they are incomplete, cannot be read, or the scheduler's address is not tls://. Without any,
    Dask's own configuration holds.
    """
    address = settings.scheduler or ""
    files = {"ca": settings.scheduler_ca, "cert": settings.scheduler_cert, "key": settings.scheduler_key}
    missing = [f"scheduler_{name}" for name, path in files.items() if path is None]
    if len(missing) == len(files):
        if address.startswith("tcp:") and not _is_loopback(urlsplit(address).hostname or ""):
            LOG.warning(
                "%s: anyone on that network can run code on its workers; use tls:// with scheduler_ca, scheduler_cert "
                "and scheduler_key, or a private network", address,
            )  # fmt: skip
        return
    if missing:
        raise ParameterError(f"{missing[0]}: is not set; give scheduler_ca, scheduler_cert and scheduler_key together")
    if not address.startswith("tls:"):
        raise ParameterError(f"scheduler {address}: certificates are for an address like tls://HOST:PORT")
    for name, path in files.items():
        assert path is not None, "none is missing"
        try:
            path.read_bytes()
        except OSError as error:
            raise ParameterError(
                f"scheduler_{name} {path}: {error.strerror}; choose one that this user may read"
            ) from error
    try:
        context = ssl.create_default_context(cafile=settings.scheduler_ca)
        context.load_cert_chain(str(settings.scheduler_cert), str(settings.scheduler_key), password="")
    except ssl.SSLError as error:
        raise ParameterError(
            f"scheduler_ca, scheduler_cert and scheduler_key: are no certificates and key ({error.reason or error})"
        ) from error
    dask.config.set({"distributed.comm.require-encryption": True, "distributed.comm.tls.ca-file": str(files["ca"])})
    for role in ("client", "worker", "scheduler"):
        for name in ("cert", "key"):
            dask.config.set({f"distributed.comm.tls.{role}.{name}": str(files[name])})


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
