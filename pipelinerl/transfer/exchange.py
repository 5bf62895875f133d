"""Bytes to and from several sockets at once."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import cast

_LOOK_S = 0.1
"""How often to look whether the exchange is still wanted."""


def exchange(
    out: Mapping[socket.socket, memoryview],
    into: Mapping[socket.socket, memoryview],
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Sends all of `out` and fills all of `into`, views of bytes. Sockets that are slow keep none of the others waiting.

    The sockets do not block. Raises TimeoutError, another OSError when the other end of one has left, and what `check`
    raises, which is called now and then.
    """
    deadline = time.monotonic() + timeout_s
    left = {selectors.EVENT_WRITE: {**out}, selectors.EVENT_READ: {**into}}
    with selectors.DefaultSelector() as ready:
        for peer in out.keys() | into.keys():
            _watch(ready, peer, left)
        while ready.get_map():
            check()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            for key, events in ready.select(min(left_s, _LOOK_S)):
                peer = cast(socket.socket, key.fileobj)
                if events & selectors.EVENT_WRITE:
                    rest = left[selectors.EVENT_WRITE]
                    rest[peer] = rest[peer][peer.send(rest[peer]) :]
                if events & selectors.EVENT_READ:
                    rest = left[selectors.EVENT_READ]
                    if not (received := peer.recv_into(rest[peer])):
                        raise ConnectionError("the other end has left")
                    rest[peer] = rest[peer][received:]
                _watch(ready, peer, left)


def _watch(ready: selectors.BaseSelector, peer: socket.socket, left: Mapping[int, Mapping[socket.socket, memoryview]]) -> None:
    """For what is left of either direction."""
    events = sum(event for event, rest in left.items() if rest.get(peer))
    known = ready.get_map().get(peer)
    if known and not events:
        ready.unregister(peer)
    elif known and events != known.events:
        ready.modify(peer, events)
    elif events and not known:
        ready.register(peer, events)
