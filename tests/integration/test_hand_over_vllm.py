"""Two vLLM actors, the first one stopped in the middle of its completions; what the second stores, scored by transformers.

They serve different weights, so that a token's log-probability says which of them sampled it.
"""

import asyncio
import json
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from benchmarks.nats_server import NatsServer
from benchmarks.small_models.supervised import character_tokenizer
from pipelinerl.bus.jetstream import connect
from pipelinerl.bus.protocol import group_id_of
from pipelinerl.local.die_with_parent import guarded
from pipelinerl.local.processes import kill_session
from pipelinerl.messages.sequences import SamplingParams, Sequence, decode_sequence, encode_group
from tests.support.parity import TOLERANCE, change_strongly, engine_recipe, largest_difference, random_model, reference
from tests.support.verifier import ScriptedVerifier
from tests.unit.builders import RUN, make_group

ROOT = Path(__file__).parents[2]
SOON_S = 600.0
"""Longer than anything here takes; reached only by what waits for ever."""
PROMPT = (0, 1, 2)
GROUPS, SAMPLES, MAX_TOKENS, STOP_AT = 2, 4, 220, 24
"""Long, so that the first actor, which looks every few milliseconds for one of `STOP_AT` tokens, finds one under way."""


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    character_tokenizer(64).save_pretrained(folder)
    return folder


def written_recipe(folder: Path) -> Path:
    recipe = folder / "recipe.yaml"
    recipe.write_text(engine_recipe(folder, max_context=256).model_dump_json(exclude_defaults=True))  # JSON is YAML
    return recipe


@asynccontextmanager
async def lone_actor(log: Path, settings: dict[str, object], **options: object) -> AsyncIterator[Process]:
    """The actor as a process, with `lone_actor`'s options; its engine, which would outlive it, ends with the block."""
    environment = os.environ | {f"PIPELINERL_{name.upper()}": str(value) for name, value in settings.items()}
    command = guarded([sys.executable, "-m", "tests.support.lone_actor", json.dumps(options)])
    with log.open("wb") as output:
        options = {"stdout": output, "stderr": output, "start_new_session": True}
        process = await asyncio.create_subprocess_exec(*command, env=environment, cwd=ROOT, **options)
    try:
        yield process
    finally:
        kill_session(process.pid)
        await process.wait()


def scored(model: PreTrainedModel, sequence: Sequence) -> list[float]:
    """log π of each completion token."""
    tokens = [*sequence.prompt_token_ids.tolist(), *sequence.completion_token_ids.tolist()]
    return reference(model, tokens)[len(PROMPT) - 1 :]


@pytest.mark.engine
async def test_a_sequence_begun_by_one_engine_is_finished_by_another(tmp_path: Path) -> None:
    first_model, second_model = random_model("llama", tied=True), random_model("llama", tied=True)
    change_strongly(second_model, seed=2)
    one, two = ({"instance": name, "run": RUN, "recipe": written_recipe(tmp_path)} for name in ("first", "second"))
    one["model_dir"], two["model_dir"] = saved(first_model, tmp_path / "first"), saved(second_model, tmp_path / "second")
    log, go = tmp_path / "first.log", tmp_path / "go"
    with NatsServer(tmp_path / "nats") as server:
        async with asyncio.timeout(SOON_S), connect(server.url, RUN) as bus, ScriptedVerifier().serving() as port:
            await bus.create_streams()
            for number in range(GROUPS):
                group = make_group(number, num_samples=SAMPLES, prompt=PROMPT, sampling=SamplingParams(max_tokens=MAX_TOKENS))
                await bus.publish_prompt(encode_group(group), group.group_id)
            where = {"nats_url": server.url, "verifier": f"127.0.0.1:{port}"}
            async with (
                lone_actor(log, one | where, version=1, stop_at_tokens=STOP_AT) as first,
                lone_actor(tmp_path / "second.log", two | where, version=2, serve_after=str(go)),
                bus.read_sequences(1) as entries,
            ):
                assert await first.wait() == 0, log.read_text()[-3000:]
                assert all(group_id_of(msg_id) != msg_id for msg_id in await bus.pending_prompts())
                go.touch()
                stored = [(await anext(entries)).payload for _ in range(GROUPS * SAMPLES)]
                while (await bus.prompts_info()).messages:
                    await asyncio.sleep(0.02)
    sequences = [decode_sequence(payload, expected_run=RUN) for payload in stored]
    assert len({sequence.sequence_id for sequence in sequences}) == GROUPS * SAMPLES
    continued = [sequence for sequence in sequences if len(sequence.spans) == 2]
    assert continued, [sequence.spans for sequence in sequences]
    for sequence in sequences:
        assert not sequence.failure
        by_version = {1: scored(first_model, sequence), 2: scored(second_model, sequence)}
        for span in sequence.spans:
            measured = sequence.behaviour_logprobs[span.start : span.end].tolist()
            assert largest_difference(measured, by_version[span.version][span.start : span.end]) < TOLERANCE
            other = by_version[3 - span.version][span.start : span.end]
            assert span.end - span.start < 4 or largest_difference(measured, other) > 100 * TOLERANCE
    assert max(sequence.spans[0].end for sequence in continued) >= STOP_AT // 2
    for sequence in continued:
        begun, rest = sequence.spans
        assert (begun.version, rest.version, sequence.actor) == (1, 2, "second")
        assert len(sequence.completion_token_ids) <= MAX_TOKENS
        assert np.isfinite(sequence.behaviour_logprobs).all()
