"""Which headers of a NATS message are the publisher's. Pure; it knows no meaning of any of them."""

from __future__ import annotations

from pipelinerl.bus.protocol import NO_HEADERS, Headers

_OF_NATS = "Nats-"


def headers_given(received: dict[str, str] | None) -> Headers:
    """Those that the publisher gave, without the server's and the bus's own."""
    if not received:
        return NO_HEADERS
    return {name: value for name, value in received.items() if not name.startswith(_OF_NATS)} or NO_HEADERS
