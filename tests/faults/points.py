"""When a running system is at a certain point, seen from outside: its servers, its files, its streams.

Each function returns the moment it sees the point; it waits for as long as that takes. Nothing here changes the system.
"""

import asyncio
import json
import re
from contextlib import AbstractAsyncContextManager, suppress

import grpc
import httpx

from pipelinerl.bus.jetstream import Bus, connect
from pipelinerl.bus.permissions import ADMIN
from pipelinerl.errors import ServiceError
from pipelinerl.run_dir import RunDir
from pipelinerl.service.grpc import open_channel
from pipelinerl.service.settings import read_address
from pipelinerl.v1 import actor_pb2, actor_pb2_grpc, trainer_pb2, trainer_pb2_grpc

LOOK_S = 0.005
NO_ANSWER = (grpc.aio.AioRpcError, httpx.HTTPError, ServiceError)
"""Also of an address that is not written yet."""

POINTS = ("idle", "generating", "verifying", "publishing", "optimizer step", "checkpoint write", "weight update")


class Watcher:
    """Looks at one run."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir

    async def at(self, point: str) -> None:
        """Returns when the run is there; all points but the idle one come after a first step."""
        while point != "idle" and not self.step():
            await asyncio.sleep(LOOK_S * 10)
        if point == "publishing":
            await self._log_grows()
        elif point == "weight update":
            await self._version_announced()
        elif point == "verifying":
            await self._more_requests()
        else:
            is_there, look_s = {
                "idle": (self._waits_for_actors, LOOK_S),
                "generating": (self._generates, LOOK_S),
                "optimizer step": (self._trains, 0.0),
                "checkpoint write": (self._writes_checkpoint, 0.0),
            }[point]
            while not await is_there():
                await asyncio.sleep(look_s)

    def step(self) -> int:
        path = self.run_dir.metrics
        lines = path.read_bytes().splitlines() if path.is_file() else []
        for line in reversed(lines):
            with suppress(ValueError):  # it is being written
                return int(json.loads(line)["step"])
        return 0

    async def serving(self, name: str) -> bool:
        if name.startswith("actor"):
            state = await self._actor(name)
            return state is not None and state.phase == actor_pb2.ACTOR_PHASE_SERVING
        if name == "trainer":
            return await self._trainer() is not None
        if name == "verifier":
            return await self._verifier("pipelinerl_verifier_workers") is not None
        return self.run_dir.address("nats").is_file()

    async def _waits_for_actors(self) -> bool:
        status = await self._trainer()
        return status is not None and status.phase == trainer_pb2.TRAINER_PHASE_WAITING_FOR_ACTORS

    async def _generates(self) -> bool:
        state = await self._actor("actor-0")
        return state is not None and state.sequences_in_progress > 0

    async def _trains(self) -> bool:
        status = await self._trainer()
        return status is not None and status.phase == trainer_pb2.TRAINER_PHASE_TRAINING

    async def _writes_checkpoint(self) -> bool:
        return any(self.run_dir.checkpoints.glob(".step-*"))

    async def _more_requests(self) -> None:
        """Items are being answered, or wait."""
        name, before = "pipelinerl_verifier_requests_total", None
        while True:
            count = await self._verifier(name)
            if before is not None and count is not None and count > before:
                return
            before = count if count is not None else before
            await asyncio.sleep(LOOK_S)

    async def _log_grows(self) -> None:
        """Others of the batch are on their way."""
        async with self._bus() as bus:
            before = (await bus.sequences_info()).last_position
            while (await bus.sequences_info()).last_position == before:
                await asyncio.sleep(0)

    async def _version_announced(self) -> None:
        async with self._bus() as bus, bus.watch_control(["announce"]) as messages:
            await anext(messages)  # the last one
            await anext(messages)

    def _bus(self) -> AbstractAsyncContextManager[Bus]:
        url = str(json.loads(self.run_dir.address("nats").read_bytes())["url"])
        own = self.run_dir.credentials
        return connect(url, self.run_dir.name, name="test", credentials=own.nats(ADMIN), tls_dir=own.tls_dir)

    def _channel(self, name: str) -> grpc.aio.Channel:
        return open_channel(read_address(self.run_dir.address(name)).grpc, self.run_dir.credentials.tls_dir)

    # None while they do not answer:

    async def _trainer(self) -> trainer_pb2.TrainerStatus | None:
        with suppress(*NO_ANSWER):
            async with self._channel("trainer") as channel:
                stub = trainer_pb2_grpc.TrainerServiceStub(channel)
                return await stub.GetStatus(trainer_pb2.GetStatusRequest(), timeout=2)
        return None

    async def _actor(self, name: str) -> actor_pb2.ActorState | None:
        with suppress(*NO_ANSWER):
            async with self._channel(name) as channel:
                stub = actor_pb2_grpc.ActorServiceStub(channel)
                return await stub.GetState(actor_pb2.GetStateRequest(), timeout=2)
        return None

    async def _verifier(self, metric: str) -> float | None:
        with suppress(*NO_ANSWER):
            address = read_address(self.run_dir.address("verifier"))
            async with httpx.AsyncClient(timeout=2) as client:
                text = (await client.get(f"http://{address.http}/metrics")).text
            return sum(float(value) for value in re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", text, re.MULTILINE))
        return None
