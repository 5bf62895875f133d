"""What a gRPC server of a run shows, and asks of its callers: certificates of one CA on both sides.

Who may call whom beyond that is not decided here: every certificate of the CA is let in.
"""

from __future__ import annotations

from pathlib import Path

import grpc

from pipelinerl.certificates import Certificates, RenewedCertificates


def server_credentials(tls_dir: Path | None) -> grpc.ServerCredentials | None:
    """What a gRPC server shows, and asks of its callers; None for plain text. Renewed files count for new connections.

    Raises `FieldError` as `read_certificates` does; of later files that cannot be used it warns and keeps the last ones.
    """
    if tls_dir is None:
        return None
    files = RenewedCertificates(tls_dir, "server")

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        return _configuration(files.certificates) if files.renew() else None

    return grpc.dynamic_ssl_server_credentials(
        _configuration(files.certificates), renewed, require_client_authentication=True
    )


def _configuration(found: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(found.key, found.certificate)], root_certificates=found.ca)
