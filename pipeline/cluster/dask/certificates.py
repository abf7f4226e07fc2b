"""Certificates under which the processes of one run or service talk to each other, and nobody else to them."""

from __future__ import annotations

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

# The key alone tells whom to trust: a worker that is started again must be let in though its service has run for years,
# or the clock was set back to before its start.
_FROM = datetime.datetime(1970, 1, 1)
_UNTIL = datetime.datetime(9999, 12, 31, 23, 59, 59)


def self_signed() -> tuple[str, str]:
    """A new private key and a certificate of it that is valid whatever the clock says, both as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "millrace")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private.decode(), certificate.public_bytes(pem).decode()
