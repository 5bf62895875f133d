"""Whether a service of a local run could listen on a port of this machine now. Keeps none for it."""

from __future__ import annotations

import socket

HOST = "127.0.0.1"


def why_taken(port: int) -> str:
    """Why nobody can listen on `port` (0 to 65535) now; empty when somebody can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""
