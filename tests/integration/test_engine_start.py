"""A real vLLM engine built beside a running event loop: the loop goes on, the engine works, a stop ends the start."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

from pipelinerl.messages.sequences import SamplingParams
from pipelinerl.recipe.fields import Recipe
from pipelinerl.service.lifecycle import StartStopped
from services.actor.engine import GenerationRequest
from services.actor.vllm_engine import start_engine
from services.trainer.warmstart.supervised import character_tokenizer
from tests.integration.test_weight_parity import random_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    random_model("llama", tied=True).save_pretrained(folder)
    character_tokenizer(64).save_pretrained(folder)
    return folder


def recipe(folder: Path) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "tiny",
            "model": {"source": "path", "name": str(folder), "max_context": 64},
            "task": {"name": "chain_sum"},
            "sampling": {"group_size": 2, "max_tokens": 16},
            "trainer": {"batch_size": 4},
            "actor": {"sequences_in_progress": 4, "engine": {"kv_cache_gib": 0.1}},
        }
    )


async def no_process_is_left() -> None:
    async with asyncio.timeout(10):
        while multiprocessing.active_children():
            await asyncio.sleep(0.05)


@pytest.mark.timeout(200)
async def test_the_loop_goes_on_while_vllm_starts_and_the_engine_works(model_dir: Path) -> None:
    gaps: list[float] = []

    async def beat() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.02)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    beating, started = asyncio.create_task(beat()), time.monotonic()
    async with start_engine(recipe(model_dir), str(model_dir)) as engine:
        start_s = time.monotonic() - started
        beating.cancel()
        assert max(gaps) < max(1.0, start_s / 3), f"{start_s:.1f} s to start"
        assert engine.vocab_size == 256
        request = GenerationRequest("r", np.array([5, 6, 7], np.int32), SamplingParams(max_tokens=4))
        generation = await engine.generate(request)
        assert 1 <= len(generation.token_ids) <= 4
        assert engine.llm.output_handler is not None
        await engine.check_health()
    await no_process_is_left()


@pytest.mark.timeout(120)
async def test_a_stop_while_vllm_starts_leaves_no_process(model_dir: Path) -> None:
    stop = asyncio.Event()
    await no_process_is_left()

    async def stop_when_begun() -> None:
        while not multiprocessing.active_children():
            await asyncio.sleep(0.05)
        stop.set()

    stopping = asyncio.create_task(stop_when_begun())
    with pytest.raises(StartStopped):
        async with start_engine(recipe(model_dir), str(model_dir), stop):
            pass
    await stopping
    await no_process_is_left()
