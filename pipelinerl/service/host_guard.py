"""Answers a request only where its Host header names this service: no site can read it under a name of its own.

A browser lets a site read what comes from the site's own name, and that name may be made to lead to this machine (DNS
rebinding). A name that such a site cannot have is proof enough. This is no login: whoever reaches the port may say any Host.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")
HEALTH = "/healthz"
PROBED = (HEALTH, "/readyz", "/metrics")
"""What a cluster asks for by the address of a pod. None of it is of what the run trains on."""


class HostGuard:
    """`names`: hosts that are answered, with any port; an IPv6 address in brackets. Paths in `open_paths` take any Host."""

    def __init__(self, app: ASGIApp, names: Collection[str], open_paths: Collection[str]) -> None:
        self._app, self._names = app, frozenset(name.lower() for name in names)
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths or self._is_known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        names = ", ".join(sorted(self._names))
        text = f"refused: the Host of this request names another server; ask for this one as one of: {names}\n"
        await PlainTextResponse(text, 403)(scope, receive, send)

    def _is_known(self, headers: Headers) -> bool:
        hosts = headers.getlist("host")
        return len(hosts) == 1 and host_name(hosts[0]) in self._names


def host_name(host: str) -> str:
    """A Host header without its port, in small letters. Pure."""
    name, colon, port = host.strip().lower().rpartition(":")
    return name if colon and port.isdecimal() else host.strip().lower()


def bracketed(host: str) -> str:
    """A name or address as a Host header has it. Pure."""
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """Whether an interface, by name or address, is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
