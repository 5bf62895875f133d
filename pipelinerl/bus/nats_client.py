"""nats-py's client, with what it lacks: refusals that reach whoever waits, logins and certificates that are read again.

It also keeps a password from a server without TLS where TLS was asked for, and outlives the end of a connection that the
server gives a reason for (its users were changed): nats-py would close for ever. It knows nothing of streams.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from pipelinerl.bus.nats_access import NatsAccess
from pipelinerl.errors import NotPermitted

_REFUSAL = re.compile(r'permissions violation for (publish|subscription)\b[^"]*"([^"]*)"', re.IGNORECASE)
_ENDS_NOTHING = ("permissions violation", "stale connection")


class NatsClient(Client):
    """`refused` holds functions to call with a subject, in lower case, that the server does not let this user use."""

    def __init__(self, access: NatsAccess) -> None:
        super().__init__()
        self._access = access
        self.refused: set[Callable[[str], None]] = set()

    @property
    def user(self) -> str:
        return self._access.user

    @property
    def ssl_context(self) -> ssl.SSLContext:
        """Asked for at each connection."""
        return self._access.tls_context()

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        """As nats-py does; raises `NotPermitted` as soon as the server refuses the subject."""
        refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_refusal(lowered: str) -> None:
            if lowered == subject.lower() and not refused.done():
                refused.set_result(None)

        self.refused.add(on_refusal)
        asking = asyncio.ensure_future(super().request(subject, payload, timeout, old_style, headers))
        try:
            await asyncio.wait((asking, refused), return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            raise NotPermitted(self.user, subject)
        finally:
            self.refused.discard(on_refusal)
            asking.cancel()

    def tell_refusal(self, text: str) -> None:
        """Calls `refused` where `text` of an error is of one."""
        if found := _REFUSAL.search(text):
            for tell in list(self.refused):
                tell(found[2].lower())

    def _connect_command(self) -> bytes:
        if self._access.requires_tls and not self._server_info.get("tls_required"):
            raise nats.errors.Error("the server speaks plain text, and TLS was asked for: it is told no password")
        login = self._access.login()
        if login.user:
            self.options["user"], self.options["password"] = login.user, login.password
        return super()._connect_command()

    async def _process_connect_init(self) -> None:
        try:
            await super()._process_connect_init()
        except OSError:  # TLS errors are of these
            # asyncio gives a connection's end to the handshake, which keeps it when it fails: nats-py would wait for ever.
            if self._transport is not None:
                self._transport.close()
                self._transport = None
            raise

    async def _process_err(self, err_msg: str) -> None:
        if self.is_connected and not any(harmless in err_msg.lower() for harmless in _ENDS_NOTHING):
            await self._process_op_err(nats.errors.Error(f"the server ended the connection: {err_msg.strip(chr(39))}"))
        else:
            await super()._process_err(err_msg)
