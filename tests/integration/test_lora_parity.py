"""A trainer's adapters in a real vLLM engine: what it serves is what the trainer scores, however they travel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from pipelinerl.errors import ManifestMismatch
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.recipe.fields import (
    AlgorithmConfig,
    LoraConfig,
    ModelConfig,
    TrainerConfig,
)
from pipelinerl.transfer.manifest import build_manifest
from services.trainer.learn.model import load_policy
from services.trainer.learn.step import Learner
from services.trainer.weight_sync.sender import WeightSender, adapter_factors, whole_weights
from tests.integration.test_weight_parity import TOLERANCE, Running, replaced, running
from tests.support.learner import LENGTHS, group_of, sequences_of

TOKENS = torch.randint(0, 256, (120,), generator=torch.Generator().manual_seed(3)).tolist()
CHUNK_BYTES = 2**14


async def check_step(run: Running, learner: Learner, version: PolicyVersion, before: list[float]) -> list[float]:
    """One optimizer step, sent: another policy, and the trainer's."""
    group = group_of(sequences_of(LENGTHS, seed=version.number), seed=version.number)
    assert learner.train_step([group], version.number).applied
    await run.update(version)
    served = await run.score(TOKENS)
    np.testing.assert_allclose(served, learner.score(np.array(TOKENS)), atol=TOLERANCE)
    assert np.abs(np.array(served) - np.array(before)).max() > 0.05
    return served


async def check_refusal(run: Running, learner: Learner) -> None:
    """An adapter for another model is refused before a byte moves."""
    manifest = adapter_factors(learner.policy.model, wire_dtype="", chunk_bytes=CHUNK_BYTES)
    parameters = [(spec.name, spec.shape, spec.dtype) for spec in manifest.parameters[-2:]]
    last = manifest.low_rank[-1]
    for change in ({"name": "model.layers.9.mlp.down_proj.weight"}, {"name": "model.embed_tokens.weight"}):
        with pytest.raises(ManifestMismatch, match=change["name"]):
            await run.client.prepare(build_manifest(parameters, low_rank=[type(last)(**(vars(last) | change))]))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("qwen2", False)])
async def test_an_engine_serves_the_adapted_policy(kind: str, tied: bool, tmp_path: Path) -> None:
    v = [PolicyVersion(1, number) for number in range(6)]
    async with running(kind, tied, tmp_path) as run:
        lora = LoraConfig(rank=4)
        config = ModelConfig(source="path", name=str(tmp_path), max_context=1024)
        learner = Learner(
            load_policy(str(tmp_path), config, lora=lora), AlgorithmConfig(), TrainerConfig(learning_rate=1e-2)
        )
        model = learner.policy.model
        await run.label(v[0])
        await check_refusal(run, learner)
        before = await run.score(TOKENS)
        np.testing.assert_allclose(before, learner.score(np.array(TOKENS)), atol=TOLERANCE)

        run.sender = WeightSender(adapter_factors(model, wire_dtype="", chunk_bytes=CHUNK_BYTES))
        run.sent = learner.adapter
        await run.connect()
        assert run.loading[-1].mode == "shadow"
        before = await check_step(run, learner, v[1], before)
        before = await check_step(run, learner, v[2], before)
        run.client = await replaced(run, force_paused=True)
        before = await check_step(run, learner, v[3], before)

        run.sender = WeightSender(whole_weights(model, wire_dtype="", chunk_bytes=CHUNK_BYTES))
        run.sent = learner.weights
        run.client = await replaced(run)
        await check_step(run, learner, v[4], before)
