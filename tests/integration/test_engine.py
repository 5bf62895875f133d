"""Real vLLM engines: how one starts and ends, and that what it serves is the trainer's policy, however its weights travel.

One engine for each model shape: every property is checked on each. Engines with CUDA graphs are in tests/gpu.
"""

import asyncio
import copy
import multiprocessing
import os
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelinerl.errors import ManifestMismatch, TransferError
from pipelinerl.messages.sequences import Completion, FinishReason, PartialSequence, PolicyVersion, SamplingParams, Sequence
from pipelinerl.recipe.fields import AlgorithmConfig, LoraConfig, ModelConfig, TrainerConfig
from pipelinerl.service.lifecycle import StartStopped
from pipelinerl.transfer.chunks import checksum, chunk_of, describe, version_checksum
from pipelinerl.transfer.manifest import build_manifest
from services.actor.engine import GenerationRequest
from services.actor.generation import Sampler
from services.actor.vllm_engine import start_engine
from services.actor.weight_sync.client import WeightLoading
from services.actor.weight_sync.updates import ServingGate
from services.trainer.learn.batch import token_row
from services.trainer.learn.lora import layer_adapters
from services.trainer.learn.model import load_policy, wrap_model
from services.trainer.learn.step import Learner
from services.trainer.weight_sync.sender import WeightSender, adapter_factors, as_in_files, whole_weights
from services.trainer.world import ADAPTER, WEIGHTS
from tests.support import parity
from tests.support.machine import until
from tests.support.parity import TOLERANCE, Running, replaced
from tests.unit.builders import make_group
from tests.unit.test_learner import LENGTHS, group_of, sequences_of

TOKENS = torch.randint(0, 256, (120,), generator=torch.Generator().manual_seed(3)).tolist()
CHUNK_BYTES = 2**14
BFLOAT16_NATS = 0.1
ATTENTION = LoraConfig(rank=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
V = [PolicyVersion(1, number) for number in range(20)]

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("qwen2", False)], ids=["llama-tied", "qwen2-untied"])
async def test_an_engine_serves_exactly_the_weights_that_the_trainer_sends(kind: str, tied: bool, tmp_path: Path) -> None:
    steps: list[tuple[float | None, float]] = []
    async with parity.running(kind, tied, tmp_path, on_step=lambda *step: steps.append(step), lora={"rank": 4}) as run:
        await check_generation(run, steps)
        await check_seeded_prompts(run)
        await check_stops(run)
        await check_adapters(run, tmp_path)
        await check_weights(run, tied, tmp_path)
    await until(lambda: not multiprocessing.active_children())


async def check_generation(run: Running, steps: list[tuple[float | None, float]]) -> None:
    assert not steps  # of its warm-up
    assert run.engine.vocab_size == 256
    assert run.llm.output_handler is not None
    config = run.llm.vllm_config
    assert (config.cache_config.enable_prefix_caching, config.model_config.trust_remote_code) == (True, False)
    assert config.cache_config.kv_cache_memory_bytes == int(0.1 * 2**30)  # the recipe's size, not whole GiB
    is_as_on_gpu = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"  # make test-runner-v2
    assert (config.use_v2_model_runner, config.scheduler_config.async_scheduling) == (is_as_on_gpu, is_as_on_gpu)
    request = GenerationRequest("r", np.array([5, 6, 7], np.int32), SamplingParams(max_tokens=4), seed=3)  # as in `check_stops`
    generation = await run.engine.generate(request)
    assert len(generation.completion_token_ids) == 4
    await run.engine.check_health()
    assert steps[0][0] is None  # nothing came before it
    assert all(decode_s is not None and decode_s > 0 for decode_s, _ in steps[1:4])
    assert all(0 <= kv_cache <= 1 for _, kv_cache in steps)


async def check_seeded_prompts(run: Running) -> None:
    """More of them at once than a step of the engine takes: none is taken in parts, which would end vLLM on a CPU."""
    prompts = [np.random.default_rng(number).integers(0, 256, 500, dtype=np.int32) for number in range(40)]
    sampling = SamplingParams(max_tokens=2)
    requests = (GenerationRequest(f"p{n}", prompt, sampling, seed=n) for n, prompt in enumerate(prompts, 1))
    made = await asyncio.gather(*map(run.engine.generate, requests))
    assert all(len(one.completion_token_ids) for one in made)
    await run.engine.check_health()


async def check_stops(run: Running) -> None:
    decode = partial(run.llm.get_tokenizer().decode, skip_special_tokens=False)

    async def sampled(**changes: Any) -> Completion:
        sampling = replace(SamplingParams(max_tokens=60), **changes)
        return await run.engine.generate(GenerationRequest("s", np.array([5, 6, 7], np.int32), sampling, seed=3))

    whole = await sampled()
    tokens, text = whole.completion_token_ids.tolist(), decode(whole.completion_token_ids.tolist())
    stop = text[2:4]
    by_text = next(end for end in range(1, len(tokens) + 1) if stop in decode(tokens[:end]))
    for changes, end in (
        ({"stop": (stop, "no such text")}, by_text),
        ({"stop_token_ids": (tokens[4],)}, tokens.index(tokens[4]) + 1),
    ):
        ended = await sampled(**changes)
        assert 0 < end < len(tokens)
        assert (ended.completion_token_ids.tolist(), ended.finish_reason) == (tokens[:end], FinishReason.STOP)
        assert ended.behaviour_logprobs.tolist() == pytest.approx(whole.behaviour_logprobs[:end].tolist(), abs=1e-5)
        assert ended.spans[-1].end == end


async def check_adapters(run: Running, checkpoint: Path) -> None:
    """An engine serves the adapted policy: from its factors, and from whole weights, after which it refuses factors."""
    config = ModelConfig(source="path", name=str(checkpoint), max_context=1024)
    policy = load_policy(str(checkpoint), config, TrainerConfig(lora=LoraConfig(rank=4)))
    learner = Learner(policy, AlgorithmConfig(), TrainerConfig(learning_rate=1e-2))
    model = learner.policy.model
    await run.assert_serves(run.model)
    await run.label(V[0])
    await check_refused_adapters(run, learner)
    before = await run.score(TOKENS)
    np.testing.assert_allclose(before, learner.score(np.array(TOKENS)), atol=TOLERANCE)

    run.sender = WeightSender(adapter_factors(model, wire_dtype="", chunk_bytes=CHUNK_BYTES))
    run.sent = partial(learner.gather, ADAPTER)
    await run.connect()
    assert run.loading[-1].mode == "adapter"
    before = await check_step(run, learner, V[1], before)
    before = await check_step(run, learner, V[2], before)
    await replaced(run)
    before = await check_step(run, learner, V[3], before)

    run.sender = WeightSender(whole_weights(model, wire_dtype="", chunk_bytes=CHUNK_BYTES))
    run.sent = partial(learner.gather, WEIGHTS)
    await replaced(run)
    await check_step(run, learner, V[4], before)
    with pytest.raises(ManifestMismatch, match="restart this actor"):
        await run.client.prepare(adapter_factors(model, wire_dtype="", chunk_bytes=CHUNK_BYTES))


async def check_adapted_attention(run: Running, checkpoint: Path) -> None:
    """An engine serves a mixture of experts whose attention is adapted."""
    trainer = TrainerConfig(lora=ATTENTION, learning_rate=1e-2)
    policy = load_policy(str(checkpoint), ModelConfig(source="path", name=str(checkpoint), max_context=1024), trainer)
    learner = Learner(policy, AlgorithmConfig(), trainer)
    run.sender = WeightSender(adapter_factors(policy.model, wire_dtype="", chunk_bytes=CHUNK_BYTES))
    run.sent = partial(learner.gather, ADAPTER)
    await run.label(V[0])
    await run.connect()
    assert run.loading[-1].mode == "adapter"
    await check_step(run, learner, V[1], await run.score(TOKENS))


async def check_refused_adapters(run: Running, learner: Learner) -> None:
    manifest = adapter_factors(learner.policy.model, wire_dtype="", chunk_bytes=CHUNK_BYTES)
    parameters = [(spec.name, spec.shape, spec.dtype) for spec in manifest.parameters[-2:]]
    last = manifest.low_rank[-1]
    for name in ("model.layers.9.mlp.down_proj.weight", "model.embed_tokens.weight"):
        last.name = name
        with pytest.raises(ManifestMismatch, match=name):
            await run.client.prepare(build_manifest(parameters, low_rank=[last]))


async def check_step(run: Running, learner: Learner, version: PolicyVersion, before: list[float]) -> list[float]:
    group = group_of(sequences_of(LENGTHS, seed=version.number), seed=version.number)
    assert not learner.step(learner.prepare([group], version.number))["skipped"]
    await run.update(version)
    served = await run.score(TOKENS)
    np.testing.assert_allclose(served, learner.score(np.array(TOKENS)), atol=TOLERANCE)
    assert np.abs(np.array(served) - np.array(before)).max() > 0.05
    return served


async def check_weights(run: Running, tied: bool, tmp_path: Path) -> None:
    run.sender = WeightSender(describe(run.model.named_parameters(), chunk_bytes=2**18))
    run.sent = run.model.named_parameters
    await parity.check_refusals(run, tied)
    await replaced(run)
    assert run.loading[-1] == WeightLoading("shadow")
    await run.update(V[5])
    await run.assert_serves(run.model)
    await parity.check_switch(run, V[5], V[6], recompute=False)
    await parity.check_prefix_cache(run, V[7], recompute=False)
    await parity.check_waiting(run, V[8])
    await parity.check_uncommitted(run, V[8], V[9])
    await parity.check_abandoned_transfer(run, V[8])

    await replaced(run, recompute_kv=True)
    await run.update(V[9])  # the trainer's weights have moved on
    await parity.check_switch(run, V[9], V[10], recompute=True, temperature=0.7)
    await parity.check_prefix_cache(run, V[11], recompute=True)
    await parity.check_episode(run, V[14:20])

    await replaced(run, force_paused=True)
    assert run.loading[-1].mode == "paused"
    await parity.check_switch(run, V[19], V[12], recompute=False, temperature=1.5)

    await replaced(run, staging_buffers=1)
    assert run.loading[-1].mode == "shadow"
    await parity.check_switch(run, V[12], V[13], recompute=False)
    await check_hand_over(run, V[13], V[14])
    await check_weight_log(run, tmp_path)


async def check_hand_over(run: Running, old: PolicyVersion, new: PolicyVersion) -> None:
    """What an actor that stops has begun is finished by the next one, which serves other weights."""
    models, kept = {old.number: parity.random_model_like(run.model)}, list[PartialSequence]()
    group = make_group(num_samples=8, prompt=tuple(parity.PROMPT), sampling=SamplingParams(max_tokens=220), seed=1)

    async def sampled(samples: Iterable[PartialSequence], version: PolicyVersion, stop_at: int) -> list[Sequence | None]:
        sampler = Sampler(
            run.engine, ServingGate(None), instance="a", max_context=1024, places=8, keep=lambda _, sample: kept.append(sample)
        )
        sampler.gate.serve(version)
        sampling = asyncio.gather(*(sampler.sample(group, sample, None) for sample in samples))
        while not sampling.done() and not any(size >= stop_at for size in run.engine.progress().values()):
            await asyncio.sleep(0)
        await sampler.interrupt(60.0)
        return await sampling

    await sampled((PartialSequence(sample_index=index) for index in range(8)), old, stop_at=12)
    begun = [sample for sample in kept if sample.finish_reason is None and sample.spans]  # a slow machine begins fewer
    parity.change_strongly(run.model, seed=new.number)
    models[new.number] = parity.random_model_like(run.model)
    await run.update(new)
    finished = await sampled(begun, new, stop_at=1000)
    assert max(len(sample.completion_token_ids) for sample in begun) >= 12
    for sample, sequence in zip(begun, finished, strict=True):
        assert sequence is not None
        assert not sequence.failure
        assert [(span.version, span.start) for span in sequence.spans] == [(old.number, 0), (new.number, sample.spans[0].end)]
        tokens = [*parity.PROMPT, *sequence.completion_token_ids.tolist()]
        for span in sequence.spans:
            expected = parity.reference(models[span.version], tokens)[len(parity.PROMPT) - 1 :][span.start : span.end]
            measured = sequence.behaviour_logprobs[span.start : span.end].tolist()
            assert parity.largest_difference(measured, expected) <= TOLERANCE


async def check_weight_log(run: Running, folder: Path) -> None:
    """A version that the actor has put together from the weight log is a file, which the workers load like a transfer."""
    version, file = PolicyVersion(1, 99), folder / "stream"
    parity.change_strongly(run.model, seed=99)
    stream = run.sender.snapshot(version, run.sent()).stream
    file.write_bytes(stream.numpy().tobytes()[:-1])
    with pytest.raises(TransferError, match="does not hold"):
        await run.client.receive(version, 120, file)
    file.write_bytes(stream.numpy().tobytes())
    chunks = run.sender.manifest.chunks
    expected = version_checksum(run.sender.manifest.manifest_id, [checksum(chunk_of(stream, chunk)) for chunk in chunks])
    assert (await run.client.receive(version, 120, file)).checksum == expected
    await run.client.commit(version)
    await run.assert_serves(run.model)
    assert {span[0] for span in (await run.sample(4)).spans} == {str(version)}


@pytest.mark.parametrize(("kind", "tied"), [("qwen3_moe", False), ("mixtral", True)])
async def test_each_loader_serves_a_mixture_of_experts_over_several_updates(kind: str, tied: bool, tmp_path: Path) -> None:
    adapted = {"lora": ATTENTION.model_dump()} if kind == "qwen3_moe" else {}
    async with parity.running(kind, tied, tmp_path, **adapted) as run:
        await run.assert_serves(run.model)
        if adapted:
            await check_adapted_attention(run, tmp_path)
        run.sender = WeightSender(whole_weights(run.model, wire_dtype="", chunk_bytes=2**18))
        run.sent = lambda: as_in_files(run.model, run.model.named_parameters())
        await run.label(V[0])
        listed = [(p.name, p.shape, p.dtype) for p in run.sender.manifest.parameters]
        without_one = [item for item in listed if "layers.2." not in item[0] or "experts.3." not in item[0]]
        with pytest.raises(ManifestMismatch, match="number of elements"):
            await run.client.prepare(build_manifest(without_one))
        for mode, first in (("shadow", 1), ("paused", 5), ("shadow", 9)):
            await replaced(run, force_paused=mode == "paused")
            assert run.loading[-1].mode == mode, run.loading[-1].reason
            await run.update(V[first])  # in the first round: of what the engine has loaded itself
            await run.assert_serves(run.model)
            await parity.check_switch(run, V[first], V[first + 1], recompute=False)
            parity.change_strongly(run.model, seed=first)
            await run.update(V[first + 2])
            await run.assert_serves(run.model)


async def test_in_sixteen_bits_engine_and_trainer_stay_close_and_small_adapters_are_served(tmp_path: Path) -> None:
    recipe = parity.engine_recipe(tmp_path, model={"dtype": "bfloat16"}, lora={"rank": 8})
    async with parity.running("qwen2", True, tmp_path, model={"dtype": "bfloat16"}, lora={"rank": 8}) as run:
        policy = load_policy(str(tmp_path), recipe.model, recipe.trainer)
        served, trained = np.array(await run.score(TOKENS)), policy.sequence_logprobs(np.array(TOKENS))
        exact = np.array(parity.reference(run.model.bfloat16().float(), TOKENS))
        assert np.abs(served - trained).max() < BFLOAT16_NATS
        assert np.abs(served - exact).max() < BFLOAT16_NATS
        assert np.abs(trained - exact).max() < BFLOAT16_NATS
        await check_small_updates(run, Learner(policy, recipe.algorithm, recipe.trainer))


async def check_small_updates(run: Running, learner: Learner) -> None:
    """Updates that merging into 16-bit weights would mostly lose change what is served as they change the trained policy.

    They follow the gradient of the tokens' log-probabilities, so that small changes of many weights add up to an effect that
    stands out from the noise of 16-bit activations. A float32 copy of the policy gives the direction and size of the effect.
    """
    tokens = np.random.default_rng(3).integers(0, 256, 1000, dtype=np.int32).astype(np.int64)
    policy, exact = learner.policy, wrap_model(copy.deepcopy(learner.policy.model).float())
    adapters, exact_adapters = layer_adapters(policy.model), layer_adapters(exact.model)
    for adapter in exact_adapters.values():
        adapter.weight.requires_grad_(True)
    row = token_row(tokens, np.array([len(tokens)]))
    exact.scores(row, torch.arange(len(tokens) - 1), row.input_ids[0, 1:]).logprobs.sum().backward()
    run.sender = WeightSender(adapter_factors(policy.model, wire_dtype="", chunk_bytes=CHUNK_BYTES))
    run.sent = partial(learner.gather, ADAPTER)
    await run.label(V[0])
    await run.connect()

    async def scored() -> list[np.ndarray]:
        return [np.array(await run.score(tokens.tolist())), policy.sequence_logprobs(tokens), exact.sequence_logprobs(tokens)]

    before = await scored()
    for version, std in ((V[1], 2e-5), (V[2], 1.2e-4)):
        for name, adapter in adapters.items():
            gradient = exact_adapters[name].weight.grad
            assert gradient is not None
            left, values, right = torch.linalg.svd(gradient, full_matrices=False)
            left, right = left[:, :8] * values[:8].sqrt(), right[:8] * values[:8, None].sqrt()
            with torch.no_grad():
                adapter.a.copy_(right)
                adapter.b.copy_(left * std / (left @ right).std() / adapter.scaling)
                exact_adapters[name].a.copy_(adapter.a)
                exact_adapters[name].b.copy_(adapter.b)
        await run.update(version)
        after = await scored()
        served, trained, full = (now - old for now, old in zip(after, before, strict=True))
        assert served @ full >= 0.95 * (trained @ full)
        assert trained @ full >= 0.95 * (served @ full)
        assert served @ full >= 0.95 * (full @ full)
        assert np.sqrt(np.mean(full**2)) > 0.01


async def test_a_stop_while_vllm_starts_leaves_no_process(tmp_path: Path) -> None:
    parity.saved_model("llama", True, tmp_path)
    stop = asyncio.Event()
    await until(lambda: not multiprocessing.active_children())
    begun = asyncio.create_task(until(multiprocessing.active_children))
    begun.add_done_callback(lambda _: stop.set())
    with pytest.raises(StartStopped):
        async with start_engine(parity.engine_recipe(tmp_path), str(tmp_path), stop):
            pass
    await begun
    await until(lambda: not multiprocessing.active_children())
