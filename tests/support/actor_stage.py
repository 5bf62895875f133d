"""Light actors as processes around a real nats-server, and a verifier that can be away; see `counting_actor`."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.nats_server import NatsServer
from pipelinerl.bus.jetstream import Bus, connect
from pipelinerl.bus.protocol import StreamLimits
from pipelinerl.local.die_with_parent import guarded
from pipelinerl.local.processes import kill_session
from pipelinerl.messages.sequences import SamplingParams, Sequence, decode_sequence, encode_group
from pipelinerl.service.grpc import serve_grpc
from pipelinerl.service.settings import read_address
from tests.support.exposition import metric
from tests.support.verifier import ScriptedVerifier
from tests.unit.builders import make_group

RUN = "demo"
ROOT = Path(__file__).parents[2]
SOON_S = 600.0
"""Longer than anything here takes; reached only by what waits for ever."""
PROMPT = (0, 1, 2)


@dataclass
class LightActor:
    process: Process
    address_file: Path
    log: Path

    async def exit_code(self) -> int:
        async with asyncio.timeout(SOON_S):
            return await self.process.wait()

    def metric(self, name: str, labels: str = "") -> float:
        return metric(read_address(self.address_file).http, f"pipelinerl_actor_{name}{labels}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@dataclass
class ActorStage:
    folder: Path
    server: NatsServer
    bus: Bus
    limits: StreamLimits
    stack: AsyncExitStack
    recipe: Path
    verifier_port: int

    async def issue(self, *numbers: int, num_samples: int = 4, max_tokens: int = 40) -> None:
        for number in numbers:
            sampling = SamplingParams(max_tokens=max_tokens)
            group = make_group(number, num_samples=num_samples, prompt=PROMPT, run=RUN, sampling=sampling)
            await self.bus.publish_prompt(encode_group(group), group.group_id)

    async def start(self, name: str, *, model_dir: str = "", **options: Any) -> LightActor:
        address_file, log = self.folder / f"{name}.json", self.folder / f"{name}.log"
        settings = {
            "run": RUN, "recipe": self.recipe, "instance": name, "nats_url": self.server.url, "model_dir": model_dir,
            "verifier": f"127.0.0.1:{self.verifier_port}", "address_file": address_file,
        }  # fmt: skip
        environment = {f"PIPELINERL_{key.upper()}": str(value) for key, value in settings.items()}
        chosen = json.dumps({"ack_wait_s": self.limits.ack_wait_s, **options})
        command = guarded([sys.executable, "-m", "tests.support.counting_actor", chosen])
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command, env=os.environ | environment, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
            )
        self.stack.push_async_callback(_end, process)
        return LightActor(process, address_file, log)

    async def stored(self, count: int) -> list[Sequence]:
        found = []
        async with asyncio.timeout(SOON_S), self.bus.read_sequences(1) as entries:
            async for entry in entries:
                found.append(decode_sequence(entry.payload, expected_run=RUN))
                if len(found) == count:
                    break
        return found

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(SOON_S):
            while not await condition():
                await asyncio.sleep(0.02)

    async def all_acknowledged(self) -> None:
        async def none_left() -> bool:
            return (await self.bus.prompts_info()).messages == 0

        await self.until(none_left)


async def _end(process: Process) -> None:
    """With what it started: an engine of vLLM outlives a killed actor."""
    kill_session(process.pid)
    await process.wait()


@asynccontextmanager
async def actor_stage(folder: Path, recipe: Path, limits: StreamLimits | None = None) -> AsyncIterator[ActorStage]:
    limits = limits or StreamLimits()
    async with AsyncExitStack() as stack:
        server = stack.enter_context(NatsServer(folder / "nats"))
        bus = await stack.enter_async_context(connect(server.url, RUN, limits=limits))
        await bus.create_streams()
        serving = serve_grpc(ScriptedVerifier().register, [], "127.0.0.1", 0, stop_grace_s=0.1)
        verifier_port = await stack.enter_async_context(serving)
        yield ActorStage(folder, server, bus, limits, stack, recipe, verifier_port)
