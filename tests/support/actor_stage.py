"""Actors as processes around a real nats-server and a verifier; see `lone_actor`."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.nats_server import NatsServer
from pipelinerl.bus.jetstream import Bus, connect
from pipelinerl.local.die_with_parent import guarded
from pipelinerl.local.processes import kill_session
from pipelinerl.messages.sequences import SamplingParams, Sequence, decode_sequence, encode_group
from pipelinerl.service.grpc import serve_grpc
from tests.support.verifier import ScriptedVerifier
from tests.unit.builders import make_group

RUN = "demo"
ROOT = Path(__file__).parents[2]
SOON_S = 600.0
"""Longer than anything here takes; reached only by what waits for ever."""
PROMPT = (0, 1, 2)


@dataclass
class LoneActor:
    process: Process
    log: Path

    async def exit_code(self) -> int:
        async with asyncio.timeout(SOON_S):
            return await self.process.wait()


@dataclass
class ActorStage:
    folder: Path
    server: NatsServer
    bus: Bus
    stack: AsyncExitStack
    recipe: Path
    verifier_port: int

    async def issue(self, *numbers: int, num_samples: int = 4, max_tokens: int = 40) -> None:
        for number in numbers:
            sampling = SamplingParams(max_tokens=max_tokens)
            group = make_group(number, num_samples=num_samples, prompt=PROMPT, run=RUN, sampling=sampling)
            await self.bus.publish_prompt(encode_group(group), group.group_id)

    async def start(self, name: str, *, model_dir: str = "", **options: Any) -> LoneActor:
        log = self.folder / f"{name}.log"
        settings = {
            "run": RUN, "recipe": self.recipe, "instance": name, "nats_url": self.server.url, "model_dir": model_dir,
            "verifier": f"127.0.0.1:{self.verifier_port}",
        }  # fmt: skip
        environment = {f"PIPELINERL_{key.upper()}": str(value) for key, value in settings.items()}
        command = guarded([sys.executable, "-m", "tests.support.lone_actor", json.dumps(options)])
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command, env=os.environ | environment, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
            )
        self.stack.push_async_callback(_end, process)
        return LoneActor(process, log)

    async def stored(self, count: int) -> list[Sequence]:
        found = []
        async with asyncio.timeout(SOON_S), self.bus.read_sequences(1) as entries:
            async for entry in entries:
                found.append(decode_sequence(entry.payload, expected_run=RUN))
                if len(found) == count:
                    break
        return found

    async def all_acknowledged(self) -> None:
        async with asyncio.timeout(SOON_S):
            while (await self.bus.prompts_info()).messages:
                await asyncio.sleep(0.02)


async def _end(process: Process) -> None:
    """With what it started: an engine of vLLM outlives a killed actor."""
    kill_session(process.pid)
    await process.wait()


@asynccontextmanager
async def actor_stage(folder: Path, recipe: Path) -> AsyncIterator[ActorStage]:
    async with AsyncExitStack() as stack:
        server = stack.enter_context(NatsServer(folder / "nats"))
        bus = await stack.enter_async_context(connect(server.url, RUN))
        await bus.create_streams()
        serving = serve_grpc(ScriptedVerifier().register, [], "127.0.0.1", 0, stop_grace_s=0.1)
        verifier_port = await stack.enter_async_context(serving)
        yield ActorStage(folder, server, bus, stack, recipe, verifier_port)
