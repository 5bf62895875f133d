"""A real nats-server with a run's users, and a bus on which every call goes by the user that makes it in a run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.nats_server import NatsServer, delete_streams
from pipelinerl.bus import jetstream
from pipelinerl.bus.jetstream import Bus
from pipelinerl.bus.permissions import ACTOR, ADMIN, TRAINER, authorization
from pipelinerl.bus.protocol import FROM_ACTOR, NO_HEADERS, ControlMessage, Headers, StreamLimits
from pipelinerl.errors import BusError
from tests.support.machine import free_port

T = TypeVar("T")

PASSWORDS = {TRAINER: "trainer-secret", ACTOR: "actor-secret", ADMIN: "admin-secret"}
LIMITS = StreamLimits(sequences_max_bytes=64 * 1024**2, ack_wait_s=60.0, member_ttl_s=60.0)


def guarded(folder: Path, run: str, **extra: object) -> NatsServer:
    """A server with the users of `run`, whose credentials are files in `folder`. It keeps its port when it is started again."""
    folder.mkdir(parents=True, exist_ok=True)
    for user, password in PASSWORDS.items():
        (folder / user).write_text(f"{user}:{password}\n")
    config = {"max_payload": 1024**2, "authorization": authorization(run, PASSWORDS), **extra}
    return NatsServer(folder / "nats", free_port(), config)


def reload(server: NatsServer) -> None:
    """Makes it read `extra` again: users and certificates may change while it runs."""
    server.prepare()
    os.kill(server.pid, signal.SIGHUP)


async def persistently(call: Callable[[], Awaitable[T]]) -> T:
    async with asyncio.timeout(150):
        while True:
            try:
                return await call()
            except BusError:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def connected_in_roles(url: str, run: str, folder: Path, limits: StreamLimits) -> AsyncIterator[RolesBus]:
    async with AsyncExitStack() as stack:
        users = [
            await stack.enter_async_context(jetstream.connect(url, run, limits=limits, credentials=folder / user))
            for user in (TRAINER, ACTOR, ADMIN)
        ]
        yield RolesBus(*users)


_BY_ACTOR = {"max_payload_bytes", "next_prompt", "publish_sequence", "publish_dead_letter", "put_member", "remove_member"}


class RolesBus:
    """A `Bus`: what is not the actor's is the trainer's, but for deleting all streams, which only a person may."""

    def __init__(self, trainer: Bus, actor: Bus, person: Bus) -> None:
        self._trainer, self._actor, self._person = trainer, actor, person

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor if name in _BY_ACTOR else self._trainer, name)

    async def delete_streams(self) -> None:
        await delete_streams(self._person)

    async def publish_prompt(self, payload: bytes, msg_id: str, headers: Headers = NO_HEADERS) -> int:
        issuer = self._actor if "/" in msg_id else self._trainer
        return await issuer.publish_prompt(payload, msg_id, headers)

    async def publish_control(self, kind: str, payload: bytes, actor: str = "", headers: Headers = NO_HEADERS) -> None:
        sender = self._actor if kind in FROM_ACTOR else self._trainer
        await sender.publish_control(kind, payload, actor, headers)

    def watch_control(
        self, kinds: Sequence[str], actor: str = ""
    ) -> AbstractAsyncContextManager[AsyncIterator[ControlMessage]]:
        reader = self._trainer if set(kinds) & set(FROM_ACTOR) else self._actor
        return reader.watch_control(kinds, actor)
