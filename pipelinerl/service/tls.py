"""Read and check a folder with a certificate, its key and its CA, as cert-manager writes and renews them. A gRPC server accepts
callers with any certificate of the same CA."""

from __future__ import annotations

import contextlib
import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import grpc

from pipelinerl.errors import FieldError

log = logging.getLogger(__name__)

CERTIFICATE, KEY, CA = "tls.crt", "tls.key", "ca.crt"
_HANDSHAKE_ROUNDS = 10
"""Number of calls of `do_handshake` on each side of an in-memory connection. Three are enough, and further calls do nothing."""
Role = Literal["client", "server"]


@dataclass(frozen=True)
class Certificates:
    """Contents of the files `CERTIFICATE`, `KEY` and `CA`, in PEM."""

    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    ca: bytes = field(repr=False)


def read_certificates(folder: Path, role: Role) -> Certificates:
    """Read the files in `folder` and check them for `role`. Raises `FieldError` on `tls_dir`, with the file's path, if a file
    cannot be read, or if the certificate has expired, does not match the key or is not signed by the CA in `ca.crt`."""
    found = Certificates(*(read_file(folder / name, "tls_dir") for name in (CERTIFICATE, KEY, CA)))
    try:
        _shake_hands(folder, role)
    except ssl.SSLCertVerificationError as error:
        raise FieldError("tls_dir", str(folder / CERTIFICATE), f"is not valid under {CA}: {error.verify_message}") from error
    except OSError as error:
        raise FieldError("tls_dir", str(folder / CERTIFICATE), f"cannot be used: {error}") from error
    return found


def read_file(file: Path, field: str) -> bytes:
    """Read a file. Raises `FieldError` on `field` if it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise FieldError(field, str(file), f"cannot be read: {error.strerror}") from error


def trust(context: ssl.SSLContext, folder: Path, field: str) -> None:
    """Have `context` trust ca.crt in `folder`. Raises `FieldError` on `field` if it cannot be read or has no certificate."""
    try:
        context.load_verify_locations(folder / CA)
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        raise FieldError(field, str(folder / CA), f"cannot be read, or holds no certificate in PEM: {reason}") from error


def present(context: ssl.SSLContext, folder: Path, field: str) -> None:
    """Have `context` present the folder's tls.crt. Raises `FieldError` on `field` if it or tls.key is unusable."""
    try:
        context.load_cert_chain(folder / CERTIFICATE, folder / KEY, password=_no_password)
    except (OSError, ValueError) as error:  # TLS errors are OSErrors, and so is the error for a missing file
        reason = getattr(error, "reason", None) or error
        raise FieldError(field, str(folder / CERTIFICATE), f"cannot be used with {KEY}: {reason}") from error


class RenewedCertificates:
    """The newest usable certificates of a folder."""

    def __init__(self, folder: Path, role: Role) -> None:
        """Raises `FieldError` as `read_certificates` does."""
        self.folder, self._role = folder, role
        self._seen = _stamps(folder)
        self.certificates = read_certificates(folder, role)

    def renew(self) -> bool:
        """Read the files again if they have changed, and return whether `certificates` is new. Any thread may call it."""
        stamps = _stamps(self.folder)
        if stamps == self._seen:
            return False
        try:
            found = read_certificates(self.folder, self._role)
        except FieldError as error:
            log.warning("cannot use the renewed certificates in %s; keeping the previous ones: %s", self.folder, error)
            self._seen = stamps
            return False
        self._seen, changed = stamps, found != self.certificates
        self.certificates = found
        return changed


def _stamps(folder: Path) -> tuple[tuple[int, int, int], ...]:
    """Return a fingerprint of each file. It changes with every renewal, because Kubernetes replaces the files of a Secret."""
    stamps = []
    for name in (CERTIFICATE, KEY, CA):
        with contextlib.suppress(OSError):
            status = (folder / name).stat()
            stamps.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(stamps)


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def _shake_hands(folder: Path, role: Role) -> None:
    """Perform a TLS handshake in memory. Raises `ssl.SSLCertVerificationError` if an end refuses the other's certificate."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_REQUIRED if role == "server" else ssl.CERT_NONE
    server.verify_mode = ssl.CERT_NONE if role == "server" else ssl.CERT_REQUIRED
    for context in (server, client):
        present(context, folder, "tls_dir")
        trust(context, folder, "tls_dir")
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True))
    for side in sides * _HANDSHAKE_ROUNDS:
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()


def server_credentials(tls_dir: Path | None) -> grpc.ServerCredentials | None:
    """Return a gRPC server's credentials, which require a certificate of each caller; None for plain text. New connections use
    renewed files. Raises `FieldError` as `read_certificates` does."""
    if tls_dir is None:
        return None
    files = RenewedCertificates(tls_dir, "server")

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        return _configuration(files.certificates) if files.renew() else None

    return grpc.dynamic_ssl_server_credentials(_configuration(files.certificates), renewed, require_client_authentication=True)


def _configuration(found: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(found.key, found.certificate)], root_certificates=found.ca)
