"""Weight updates into a vLLM engine that decodes a full batch, in flight or with the whole receive inside the pause.

Drives the product's `WeightUpdateClient` directly: no control channel, so that what is measured is receive, staging and
swap. The trainer's end is a process of its own (`transfer_peers.py`). Decoding is watched by `decode_trace.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.decode_trace import DecodeTrace, Window
from benchmarks.transfer_peers import HOST, Moved, RemotePeer
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.manifest import GroupSpec, Manifest
from services.actor.weight_sync.client import WeightUpdateClient

Way = Literal["in flight", "paused", "log"]
"""Received beside decoding and swapped; or paused for the whole of it: receive, load, resume; or read beside decoding from the
file that a reader of the weight log makes, and swapped."""
WAYS: tuple[Way, ...] = ("in flight", "paused")
TIMEOUT_S = 300.0
STEPS_AFTER = 3
"""Decode steps under the new version before an update counts as over."""


@dataclass(frozen=True)
class Update:
    """One update. `moving`: first byte sent to staged. `stall_s`: the client's own figure; for a paused receive, the pause."""

    version: PolicyVersion
    whole: Window
    moving: Window
    stall_s: float
    receive_s: float
    prepare_s: float
    snapshot_s: float


@dataclass
class Block:
    """Updates of one way in a row, and the windows between them in which nothing moved."""

    way: Way
    mode: str = ""
    updates: list[Update] = field(default_factory=list)
    quiet: list[Window] = field(default_factory=list)


class EngineRounds:
    """Updates of one running engine. Versions only grow. `file`: where versions of the weight log are put."""

    def __init__(self, llm: Any, manifest: Manifest, trainer: RemotePeer, store: str, file: Path = Path("stream")) -> None:
        self._llm, self._manifest, self._trainer = llm, manifest, trainer
        self._store, self._file = store, file
        self._versions, self._groups = count(1), count(1)
        self.trace = DecodeTrace()
        self.trace.watch(llm.engine_core)

    async def block(self, way: Way, updates: int, quiet_s: float) -> Block:
        """The engine must be decoding."""
        client = WeightUpdateClient(self._llm, bind_host=HOST, force_paused=way == "paused")
        done = Block(way)
        try:
            done.mode = (await client.prepare(self._manifest)).mode
            if way != "log":
                await self._join(client)
            for number in range(-1, updates):  # number -1 warms up
                update = await self._update(client, way)
                began_s = time.monotonic()
                await asyncio.sleep(quiet_s)
                if number >= 0:
                    done.updates.append(update)
                    done.quiet.append((began_s, time.monotonic()))
        finally:
            await client.close()
        return done

    async def _join(self, client: WeightUpdateClient) -> None:
        number = next(self._groups)
        group = GroupSpec(self._store, f"epoch-{number}", 1, 2)
        await asyncio.gather(self._trainer("join", group.name), client.join_group(group, TIMEOUT_S))

    async def _update(self, client: WeightUpdateClient, way: Way) -> Update:
        version = PolicyVersion(1, next(self._versions))
        if way == "paused":
            await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        began_s = time.monotonic()
        command = ("write", version, self._file) if way == "log" else ("send", version)
        sending = asyncio.create_task(self._trainer(*command))
        if way == "log":
            await sending
        staged = await client.receive(version, TIMEOUT_S, self._file if way == "log" else None)
        staged_s = time.monotonic()
        sent: Moved = await sending
        assert staged.checksum == sent.checksum
        stall_s = await client.commit(version)
        if way == "paused":
            stall_s = time.monotonic() - began_s - sent.snapshot_s
        await self.trace.until_version(str(version), STEPS_AFTER, TIMEOUT_S)
        return Update(
            version,
            (began_s, self.trace.steps[-1].ended_s),
            (sent.began_s, staged_s),
            stall_s,
            staged.receive_s,
            staged.prepare_s,
            sent.snapshot_s,
        )


@asynccontextmanager
async def decoding(llm: Any, in_progress: int, max_tokens: int, vocab_size: int) -> AsyncIterator[None]:
    """Keeps `in_progress` sequences decoding: one that ends is followed by another, lengths drawn from a seeded generator."""
    lengths = np.random.default_rng(0)

    async def one_after_another(slot: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        for number in count():
            sampling = SamplingParams(
                max_tokens=int(lengths.integers(max_tokens // 4, max_tokens + 1)),
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt = [(slot + number + i) % vocab_size for i in range(8)]
            async for _ in llm.generate({"prompt_token_ids": prompt}, sampling, f"load-{slot}-{number}"):
                pass

    tasks = [asyncio.create_task(one_after_another(slot)) for slot in range(in_progress)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
