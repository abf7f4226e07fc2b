"""Certificates for tests of TLS: an authority, and what it signs."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PEM = serialization.Encoding.PEM


@dataclass
class Authority:
    """`file` is its certificate; `sign` writes a certificate for 127.0.0.1 and localhost, and its key."""

    folder: Path
    name: str = "authority"

    def __post_init__(self):
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.file = self.folder / f"{self.name}.pem"
        self._subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.name)])
        own = self._built(self._subject, self._key.public_key(), x509.BasicConstraints(ca=True, path_length=None))
        self.file.write_bytes(own.public_bytes(PEM))

    def sign(self, name="server", password=None):
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName(
            [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        )
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        cert, private = self.folder / f"{name}-cert.pem", self.folder / f"{name}-key.pem"
        cert.write_bytes(self._built(subject, key.public_key(), names).public_bytes(PEM))
        locked = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        private.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, locked))
        return cert, private

    def _built(self, subject, public_key, extension):
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(extension, critical=False)
            .sign(self._key, hashes.SHA256())
        )
