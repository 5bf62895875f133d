"""Certificates of a CA that only this test knows, in the shape that cert-manager writes them into Secrets."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


@dataclass(frozen=True)
class Pair:
    """PEM."""

    certificate: bytes
    key: bytes


@dataclass
class Authority:
    """A new CA."""

    name: str = "test CA"
    _key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    def __post_init__(self) -> None:
        self._subject = _subject(self.name)
        builder = _builder(self._subject, self._subject, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.certificate = _pem(builder.sign(self._key, hashes.SHA256()))

    def issue(self, names: Iterable[str]) -> Pair:
        """For servers and clients under `names`: host names, wildcards, addresses."""
        key, names = ec.generate_private_key(ec.SECP256R1()), list(names)
        builder = _builder(_subject(names[0]), self._subject, key.public_key())
        builder = builder.add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(usage), critical=False)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Pair(_pem(builder.sign(self._key, hashes.SHA256())), private)

    def secret(self, name: str, names: Iterable[str]) -> dict[str, object]:
        """A kubernetes.io/tls Secret with tls.crt, tls.key and ca.crt."""
        pair = self.issue(names)
        entries = {"tls.crt": pair.certificate, "tls.key": pair.key, "ca.crt": self.certificate}
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "kubernetes.io/tls",
            "metadata": {"name": name},
            "stringData": {key: value.decode() for key, value in entries.items()},
        }

    def server_context(self, folder: Path, names: Iterable[str]) -> ssl.SSLContext:
        pair, context = self.issue(names), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        (folder / "server.crt").write_bytes(pair.certificate)
        (folder / "server.key").write_bytes(pair.key)
        context.load_cert_chain(folder / "server.crt", folder / "server.key")
        return context


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
