"""A certificate authority of the moment, for tests: issues folders in cert-manager's shape."""

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_PEM = serialization.Encoding.PEM


class Authority:
    """Issues certificates for both sides of a connection."""

    def __init__(self, name: str = "pipelinerl tests") -> None:
        self._key, self._name = ec.generate_private_key(ec.SECP256R1()), name
        unsigned = _begun(name, name, self._key, days=10)
        unsigned = unsigned.add_extension(x509.BasicConstraints(True, None), critical=True)
        self._certificate = unsigned.sign(self._key, hashes.SHA256())

    def issue(self, folder: Path, *names: str, days: float = 1) -> Path:
        """Writes tls.crt, tls.key and ca.crt for DNS names and addresses, valid for `days` from now (negative: expired)."""
        key = ec.generate_private_key(ec.SECP256R1())
        called = [x509.IPAddress(ipaddress.ip_address(one)) if one[0].isdigit() else x509.DNSName(one) for one in names]
        certificate = (
            _begun("a service", self._name, key, days)
            .add_extension(x509.SubjectAlternativeName(called), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.write_ca(folder)
        (folder / "tls.crt").write_bytes(certificate.public_bytes(_PEM))
        pem = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        (folder / "tls.key").write_bytes(pem)
        return folder

    def write_ca(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ca.crt").write_bytes(self._certificate.public_bytes(_PEM))
        return folder


def serial_of(certificate: Path | str) -> int:
    text = certificate.read_bytes() if isinstance(certificate, Path) else certificate.encode()
    return x509.load_pem_x509_certificate(text).serial_number


def _begun(subject: str, issuer: str, key: ec.EllipticCurvePrivateKey, days: float) -> x509.CertificateBuilder:
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in (subject, issuer)]
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder(issuer_name=names[1], subject_name=names[0])
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=20))
        .not_valid_after(now + timedelta(days=days))
    )
