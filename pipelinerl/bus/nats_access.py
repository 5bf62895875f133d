"""How a process gets into NATS: user and password, or a .creds file, and certificates, read again for each connection.

What cannot be read is an error at the start; later the last that could be read is used, and a warning logged, so that a
half-renewed file costs nothing. It opens no connection and shows no password.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipelinerl.bus.permissions import inbox_prefix
from pipelinerl.certificates import CA, CERTIFICATE, KEY, check_ca, check_pair, read_file
from pipelinerl.errors import FieldError

_log = logging.getLogger(__name__)

_CREDENTIALS, _TLS_DIR = "nats_credentials", "nats_tls_dir"


@dataclass(frozen=True)
class Login:
    """`creds_file` is a NATS .creds file; else `user` and `password`, both empty for none."""

    user: str = ""
    password: str = field(default="", repr=False)
    creds_file: str = ""


class NatsAccess:
    """Login and certificates for the servers in `url`, for as long as a connection lives."""

    def __init__(self, url: str, credentials: Path | None = None, tls_dir: Path | None = None) -> None:
        """Raises `FieldError` when a file cannot be used."""
        self._credentials, self._tls_dir = credentials, tls_dir
        self._login = read_login(credentials)
        self._context = tls_context(tls_dir)
        self.user = self._login.user or _user_in(url)
        """Who this is; empty where a .creds file says it, or nobody asks."""
        self.requires_tls = tls_dir is not None or any(
            server.strip().lower().startswith("tls://") for server in url.split(",")
        )

    @property
    def ca(self) -> str:
        """Whose signature the server's certificate needs, for messages."""
        return f"{self._tls_dir / CA}" if self._tls_dir else "the machine's CAs; is nats_tls_dir missing?"

    def options(self) -> dict[str, Any]:
        """nats-py's arguments of `connect`."""
        login = {"user_credentials": self._login.creds_file} if self._login.creds_file else {}
        if self._login.user:
            login = {"user": self._login.user, "password": self._login.password}
        return {"inbox_prefix": inbox_prefix(self.user), **login}

    def login(self) -> Login:
        """The newest."""
        try:
            self._login = read_login(self._credentials)
        except FieldError as error:
            _log.warning("logging in to NATS as before: %s", error)
        return self._login

    def tls_context(self) -> ssl.SSLContext:
        """Made from the newest files."""
        try:
            self._context = tls_context(self._tls_dir)
        except FieldError as error:
            _log.warning("connecting to NATS with the certificates of before: %s", error)
        return self._context


def read_login(credentials: Path | None) -> Login:
    """From a file with `user:password` or a NATS .creds file. Raises `FieldError` on `nats_credentials`."""
    if credentials is None:
        return Login()
    text = read_file(credentials, _CREDENTIALS).decode(errors="replace").strip()
    if "BEGIN NATS USER JWT" in text:
        if importlib.util.find_spec("nkeys") is None:
            raise FieldError(_CREDENTIALS, str(credentials), "a .creds file needs nkeys: pip install nkeys")
        return Login(creds_file=str(credentials))
    user, colon, password = text.partition(":")
    if not colon or not user:
        raise FieldError(_CREDENTIALS, str(credentials), "the file must hold user:password or be a .creds file")
    return Login(user, password)


def tls_context(tls_dir: Path | None) -> ssl.SSLContext:
    """Trusts ca.crt of the folder, and shows tls.crt where it is there; without a folder, the machine's own CAs.

    Raises `FieldError` on `nats_tls_dir` naming the file.
    """
    if tls_dir is None:
        return ssl.create_default_context()
    read_file(tls_dir / CA, _TLS_DIR)
    check_ca(tls_dir, _TLS_DIR)
    context = ssl.create_default_context(cafile=tls_dir / CA)
    if (tls_dir / CERTIFICATE).exists():
        check_pair(tls_dir, _TLS_DIR)
        context.load_cert_chain(tls_dir / CERTIFICATE, tls_dir / KEY)
    return context


def _user_in(url: str) -> str:
    with contextlib.suppress(ValueError):  # a malformed one is told of when it is connected to
        return urlsplit(url.split(",")[0]).username or ""
    return ""
