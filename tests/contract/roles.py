"""A bus on which every call goes by the user that makes it in a run: the trainer's, the actor's, or a person's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

from pipelinerl.bus import jetstream
from pipelinerl.bus.permissions import ACTOR, ADMIN, TRAINER, authorization
from pipelinerl.bus.protocol import (
    FROM_ACTOR,
    NO_HEADERS,
    Bus,
    ControlMessage,
    Headers,
    LogEntry,
    MemberEvent,
    PendingPrompt,
    StreamInfo,
    StreamLimits,
)
from pipelinerl.local.nats import NatsServer

PASSWORDS = {TRAINER: "trainer-secret", ACTOR: "actor-secret", ADMIN: "admin-secret"}


def guarded(folder: Path, run: str, **extra: object) -> NatsServer:
    """A server with the users of `run`, whose credentials are files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for user, password in PASSWORDS.items():
        (folder / user).write_text(f"{user}:{password}\n")
    return NatsServer(
        folder / "nats", max_payload_bytes=1024**2, extra={"authorization": authorization(run, PASSWORDS), **extra}
    )


@asynccontextmanager
async def connected_in_roles(url: str, run: str, folder: Path, limits: StreamLimits) -> AsyncIterator[RolesBus]:
    async with AsyncExitStack() as stack:
        users = [
            await stack.enter_async_context(jetstream.connect(url, run, limits=limits, credentials=folder / user))
            for user in (TRAINER, ACTOR, ADMIN)
        ]
        yield RolesBus(*users)


class RolesBus:
    """Implements `Bus`."""

    def __init__(self, trainer: Bus, actor: Bus, person: Bus) -> None:
        self._trainer, self._actor, self._person = trainer, actor, person
        self.run, self.limits = trainer.run, trainer.limits

    @property
    def max_payload_bytes(self) -> int:
        return self._actor.max_payload_bytes

    @property
    def is_connected(self) -> bool:
        return self._trainer.is_connected and self._actor.is_connected

    async def create_streams(self, *, fresh: bool = False) -> None:
        await self._trainer.create_streams(fresh=fresh)

    async def delete_streams(self) -> None:
        await self._person.delete_streams()

    async def publish_prompt(self, payload: bytes, msg_id: str, headers: Headers = NO_HEADERS) -> int:
        """A group that is handed over has a slash in its id."""
        issuer = self._actor if "/" in msg_id else self._trainer
        return await issuer.publish_prompt(payload, msg_id, headers)

    async def next_prompt(self, timeout_s: float) -> object:
        return await self._actor.next_prompt(timeout_s)

    async def publish_sequence(self, payload: bytes, msg_id: str, headers: Headers = NO_HEADERS) -> int:
        return await self._actor.publish_sequence(payload, msg_id, headers)

    def read_sequences(self, from_position: int) -> AbstractAsyncContextManager[AsyncIterator[LogEntry]]:
        return self._trainer.read_sequences(from_position)

    async def purge_sequences(self, below_position: int) -> None:
        await self._trainer.purge_sequences(below_position)

    async def publish_dead_letter(self, payload: bytes, msg_id: str) -> None:
        await self._actor.publish_dead_letter(payload, msg_id)

    async def dead_letters(self) -> list[bytes]:
        return await self._trainer.dead_letters()

    async def prompts_info(self) -> StreamInfo:
        return await self._trainer.prompts_info()

    async def pending_prompts(self) -> list[PendingPrompt]:
        return await self._trainer.pending_prompts()

    async def sequences_info(self) -> StreamInfo:
        return await self._trainer.sequences_info()

    async def publish_control(self, kind: str, payload: bytes, actor: str = "", headers: Headers = NO_HEADERS) -> None:
        sender = self._actor if kind in FROM_ACTOR else self._trainer
        await sender.publish_control(kind, payload, actor, headers)

    def watch_control(
        self, kinds: Sequence[str], actor: str = ""
    ) -> AbstractAsyncContextManager[AsyncIterator[ControlMessage]]:
        reader = self._trainer if set(kinds) & set(FROM_ACTOR) else self._actor
        return reader.watch_control(kinds, actor)

    async def put_member(self, actor: str, payload: bytes) -> None:
        await self._actor.put_member(actor, payload)

    async def remove_member(self, actor: str) -> None:
        await self._actor.remove_member(actor)

    def watch_members(self) -> AbstractAsyncContextManager[AsyncIterator[MemberEvent]]:
        return self._trainer.watch_members()
