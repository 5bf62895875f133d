"""Channels to the gRPC services of a run, plain or with mutual TLS, and what their failures mean.

A channel keeps the certificate it was opened with; `RenewedChannel` is for callers that live longer than certificates do.
It calls nothing and waits for nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from pipelinerl.certificates import CA, CERTIFICATE, Certificates, RenewedCertificates, read_certificates
from pipelinerl.service.grpc_server import CHANNEL_OPTIONS

Options = Sequence[tuple[str, Any]]
LOOK_EVERY_S = 5.0
"""Between two looks at the certificate files; a Secret takes a minute to reach a pod anyway."""
_ENDED_WITHIN_S = 3600.0
"""For calls under way on a channel that was replaced."""


def open_channel(target: str, tls_dir: Path | None, name_override: str = "", options: Options = ()) -> aio.Channel:
    """A channel to `target` (host:port, or dns:///name:port), with the certificates in `tls_dir`; None = plain text.

    `name_override`: the name that the server's certificate must hold, where `target` is an address.
    Raises `FieldError` on `tls_dir` when its files cannot be used.
    """
    certificates = read_certificates(tls_dir, "client") if tls_dir is not None else None
    return _open(target, certificates, name_override, options)


def explained(error: aio.AioRpcError, tls_dir: Path | None) -> str:
    """Status and details of a failed call, with what to look at where TLS is the reason or may be."""
    return f"{error.code().name}: {error.details()}{_hint(error.details() or '', tls_dir)}"


class RenewedChannel:
    """A channel that is replaced when the files in `tls_dir` are. Calls under way end on the one they began on."""

    def __init__(
        self,
        target: str,
        tls_dir: Path | None,
        name_override: str = "",
        options: Options = (),
        *,
        look_every_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`look_every_s`: default LOOK_EVERY_S. Raises `FieldError` on `tls_dir` when its files cannot be used."""
        self._target, self._name, self._options = target, name_override, options
        self._files = RenewedCertificates(tls_dir, "client") if tls_dir is not None else None
        self._look_every_s = LOOK_EVERY_S if look_every_s is None else look_every_s
        self._clock = clock
        self._looked_at = clock()
        self._channel = self._opened()
        self._replaced: set[asyncio.Task[None]] = set()

    def current(self) -> aio.Channel:
        """The channel for the next call."""
        if self._files is not None and self._clock() - self._looked_at >= self._look_every_s:
            self._looked_at = self._clock()
            if self._files.renew():
                ending = asyncio.ensure_future(self._channel.close(_ENDED_WITHIN_S))
                self._replaced.add(ending)
                ending.add_done_callback(self._replaced.discard)
                self._channel = self._opened()
        return self._channel

    async def close(self) -> None:
        for ending in list(self._replaced):
            ending.cancel()
        await asyncio.gather(*self._replaced, return_exceptions=True)
        await self._channel.close()

    def _opened(self) -> aio.Channel:
        certificates = self._files.certificates if self._files is not None else None
        return _open(self._target, certificates, self._name, self._options)


def _open(target: str, certificates: Certificates | None, name_override: str, options: Options) -> aio.Channel:
    every = [*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0), *options]
    if certificates is None:
        return aio.insecure_channel(target, options=every)
    if name_override:
        every.append(("grpc.ssl_target_name_override", name_override))
    credentials = grpc.ssl_channel_credentials(certificates.ca, certificates.key, certificates.certificate)
    return aio.secure_channel(target, credentials, options=every)


def _hint(details: str, tls_dir: Path | None) -> str:
    closed_at_once = "failed to connect" in details and "Socket closed" in details
    if tls_dir is None:
        return " (does it ask for TLS? then set tls_dir)" if closed_at_once else ""
    if "WRONG_VERSION_NUMBER" in details:
        return " (it speaks no TLS, and tls_dir is set here: set it there too)"
    if "Hostname Verification" in details:
        return " (its certificate is for other names)"
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return f" (its certificate is not valid under {tls_dir / CA})"
    return f" (it may refuse {tls_dir / CERTIFICATE}: expired, or of another CA)" if closed_at_once else ""
