"""Credentials of a local run, which keep other users of the machine out: NATS logins, a certificate and the live page's key.

Each start of a run makes new credentials in a folder that only its owner can read. Credentials never appear in arguments
or environment variables, but the live page's printed link contains its key. Processes of the same user can read all of them.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pipelinerl.bus.permissions import ACTOR, ADMIN, TRAINER, authorization

_KEY_BYTES = 16
_HANDSHAKE_S = 10
"""Time limit of a TLS handshake. NATS's default of 2 s is too short on a busy machine."""


class Credentials:
    """The files of `secrets/` in a run directory."""

    def __init__(self, folder: Path) -> None:
        self.tls_dir = folder / "tls"
        """Folder with one self-signed certificate, for NATS and all services, in the layout of `pipelinerl.service.tls`."""
        self.page_key = folder / "page-key"
        """File with the secret first part of the live page's path."""
        self._folder = folder

    def nats(self, user: str) -> Path:
        """Return the path of the file with `user:password`."""
        return self._folder / f"nats-{user}"

    def make(self, run: str) -> dict[str, Any]:
        """Replace the folder with new credentials. Return nats-server's configuration of users and TLS."""
        from pipelinerl.service.tls import CA, CERTIFICATE, KEY

        shutil.rmtree(self._folder, ignore_errors=True)
        for folder in (self._folder, self.tls_dir):
            folder.mkdir(mode=0o700, parents=True)
        passwords = {user: secrets.token_urlsafe(_KEY_BYTES) for user in (TRAINER, ACTOR, ADMIN)}
        for user, password in passwords.items():
            write_private(self.nats(user), f"{user}:{password}".encode())
        write_private(self.page_key, secrets.token_urlsafe(_KEY_BYTES).encode())
        certificate, key = _self_signed()
        for name, content in ((CERTIFICATE, certificate), (CA, certificate), (KEY, key)):
            write_private(self.tls_dir / name, content)
        files = {"cert_file": str(self.tls_dir.resolve() / CERTIFICATE), "key_file": str(self.tls_dir.resolve() / KEY)}
        return {"authorization": authorization(run, passwords), "tls": {**files, "timeout": _HANDSHAKE_S}}


def write_private(path: Path, content: bytes) -> None:
    """Replace a file. Only its owner can ever read the new one."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _self_signed() -> tuple[bytes, bytes]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "pipelinerl")])
    hosts = [x509.IPAddress(ipaddress.ip_address(address)) for address in ("127.0.0.1", "::1")]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks may be set back
        .not_valid_after(now + timedelta(days=3650))
        .add_extension(x509.SubjectAlternativeName([*hosts, x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    return certificate.public_bytes(pem), key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
