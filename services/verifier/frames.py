"""What passes between the verifier and a worker process: length-prefixed frames over pipes.

The first frame each way is JSON (the worker's setup, and whether it is up); then every frame to the worker is a
`VerifyRequest` and every frame back one `VerifyResult`, in order. A request without items means: finish the item under
way and forget the rest; its answer is a result without status. Nothing is ever unpickled.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
from dataclasses import asdict, dataclass

from pipelinerl.recipe.fields import RewardConfig, TaskConfig

_LENGTH = struct.Struct(">I")

RETIRED = 75
"""Exit code of a worker that leaves of its own accord, between two items, to be replaced by a fresh one."""


def frame(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


def read_frame(pipe: int) -> bytes | None:
    """The next frame of a descriptor, and not a byte more; None at the end of the pipe."""
    header = _read_exactly(pipe, _LENGTH.size)
    return None if header is None else _read_exactly(pipe, _LENGTH.unpack(header)[0])


def write_frame(pipe: int, payload: bytes) -> None:
    rest = memoryview(frame(payload))
    while rest:
        rest = rest[os.write(pipe, rest) :]


def _read_exactly(pipe: int, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(pipe, size - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)


class FrameReader:
    """Reads frames from a stream. A read that is cancelled loses nothing: the next one goes on where it stopped."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream = stream
        self._length: int | None = None

    async def read(self) -> bytes:
        """Raises `asyncio.IncompleteReadError` at the end of the stream."""
        if self._length is None:
            self._length = _LENGTH.unpack(await self._stream.readexactly(_LENGTH.size))[0]
        payload = await self._stream.readexactly(self._length)
        self._length = None
        return payload


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker needs to know. Its limits are `reward.timeout_s` and `reward.memory_mib`."""

    reward: RewardConfig
    task: TaskConfig

    def to_json(self) -> bytes:
        return json.dumps(
            {"reward": self.reward.model_dump(mode="json"), "task": self.task.model_dump(mode="json")}
        ).encode()

    @staticmethod
    def from_json(payload: bytes) -> WorkerSetup:
        data = json.loads(payload)
        return WorkerSetup(RewardConfig.model_validate(data["reward"]), TaskConfig.model_validate(data["task"]))


@dataclass(frozen=True)
class WorkerHello:
    """A worker's first frame. `problem` is empty when it is up; `users_mistake`: it will be the same next time."""

    problem: str = ""
    users_mistake: bool = False

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_json(payload: bytes) -> WorkerHello:
        return WorkerHello(**json.loads(payload))
