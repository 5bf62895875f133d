"""When a running system is at a certain point, seen from outside: its servers, its files, its streams.

Each function returns the moment it sees the point; it waits for as long as that takes. Nothing here changes the system.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import grpc
import httpx

from pipelinerl.bus.jetstream import connect
from pipelinerl.run_dir import RunDir
from pipelinerl.v1 import actor_pb2, actor_pb2_grpc, trainer_pb2, trainer_pb2_grpc

LOOK_S = 0.005
Answer = TypeVar("Answer")

POINTS = ("idle", "generating", "verifying", "publishing", "optimizer step", "checkpoint write", "weight update")


class Watcher:
    """Looks at one run."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir

    async def at(self, point: str) -> None:
        """Returns when the run is there; all points but the idle one come after a first step."""
        while point != "idle" and not self.step():
            await asyncio.sleep(LOOK_S * 10)
        await {
            "idle": self._idle,
            "generating": self._generating,
            "verifying": self._verifying,
            "publishing": self._publishing,
            "optimizer step": self._optimizer_step,
            "checkpoint write": self._checkpoint_write,
            "weight update": self._weight_update,
        }[point]()

    def step(self) -> int:
        """The last optimizer step in metrics.jsonl."""
        path = self.run_dir.metrics
        lines = path.read_bytes().splitlines() if path.is_file() else []
        for line in reversed(lines):
            try:
                return int(json.loads(line)["step"])
            except ValueError:  # it is being written
                continue
        return 0

    async def trainer(self) -> trainer_pb2.TrainerStatus | None:
        """None while it does not answer."""
        return await self._ask(
            "trainer",
            lambda channel: trainer_pb2_grpc.TrainerServiceStub(channel).GetStatus(
                trainer_pb2.GetStatusRequest(), timeout=2
            ),
        )

    async def actor(self, name: str = "actor-0") -> actor_pb2.ActorState | None:
        """None while it does not answer."""
        return await self._ask(
            name,
            lambda channel: actor_pb2_grpc.ActorServiceStub(channel).GetState(actor_pb2.GetStateRequest(), timeout=2),
        )

    async def serving(self, name: str) -> bool:
        """Whether that service answers and does its work."""
        if name.startswith("actor"):
            state = await self.actor(name)
            return state is not None and state.phase == actor_pb2.ACTOR_PHASE_SERVING
        if name == "trainer":
            return await self.trainer() is not None
        if name == "verifier":
            return await self._metric("verifier", "pipelinerl_verifier_workers") is not None
        return self.run_dir.address("nats").is_file()

    async def _idle(self) -> None:
        """Everything is up, and the first version has not been made: the trainer waits for the actor."""
        while (status := await self.trainer()) is None or (
            status.phase != trainer_pb2.TRAINER_PHASE_WAITING_FOR_ACTORS
        ):
            await asyncio.sleep(LOOK_S)

    async def _generating(self) -> None:
        while (state := await self.actor()) is None or state.sequences_in_progress == 0:
            await asyncio.sleep(LOOK_S)

    async def _verifying(self) -> None:
        """Items are being answered, or wait."""
        name, before = "pipelinerl_verifier_requests_total", None
        while True:
            count = await self._metric("verifier", name)
            if before is not None and count is not None and count > before:
                return
            before = count if count is not None else before
            await asyncio.sleep(LOOK_S)

    async def _publishing(self) -> None:
        """The log has just grown: others of the batch are on their way."""
        async with connect(self._nats_url(), self.run_dir.name, name="test") as bus:
            before = (await bus.sequences_info()).last_position
            while (await bus.sequences_info()).last_position == before:
                await asyncio.sleep(0)

    async def _optimizer_step(self) -> None:
        while (status := await self.trainer()) is None or status.phase != trainer_pb2.TRAINER_PHASE_TRAINING:
            await asyncio.sleep(0)

    async def _checkpoint_write(self) -> None:
        folder = self.run_dir.checkpoints
        while not any(path.name.startswith(".step-") for path in folder.glob(".step-*")):
            await asyncio.sleep(0)

    async def _weight_update(self) -> None:
        """A version was announced: its bytes are on their way."""
        url, name = self._nats_url(), self.run_dir.name
        async with connect(url, name, name="test") as bus, bus.watch_control(["announce"]) as messages:
            await anext(messages)  # the last one
            await anext(messages)

    def _nats_url(self) -> str:
        return str(json.loads(self.run_dir.address("nats").read_bytes())["url"])

    async def _ask(self, name: str, call: Callable[[grpc.aio.Channel], Awaitable[Answer]]) -> Answer | None:
        address = _address(self.run_dir.address(name), "grpc")
        if not address:
            return None
        async with grpc.aio.insecure_channel(address) as channel:
            try:
                return await call(channel)
            except grpc.aio.AioRpcError:
                return None

    async def _metric(self, name: str, metric: str) -> float | None:
        """The sum of a metric over its labels; None while the service does not answer."""
        address = _address(self.run_dir.address(name), "http")
        if not address:
            return None
        try:
            async with httpx.AsyncClient(timeout=2) as client:
                text = (await client.get(f"http://{address}/metrics")).text
        except httpx.HTTPError:
            return None
        return sum(float(value) for value in re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def _address(path: Path, kind: str) -> str:
    try:
        return str(json.loads(path.read_bytes())[kind])
    except (OSError, ValueError, KeyError):
        return ""
