"""A trainer's end beside a real vLLM engine, and checks of what it serves against transformers, token by token."""

import asyncio
import copy
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmarks.small_models.supervised import character_tokenizer
from pipelinerl.errors import ManifestMismatch, TransferError
from pipelinerl.messages.control import Backend
from pipelinerl.messages.sequences import Completion, PolicyVersion, SamplingParams, TokenIds
from pipelinerl.recipe.fields import AlgorithmConfig, Recipe, TrainerConfig
from pipelinerl.transfer.chunks import describe
from pipelinerl.transfer.group import HOST, GroupStore, Placement, WeightGroup
from pipelinerl.transfer.manifest import GroupSpec, TransferResult, build_manifest
from services.actor.engine import GenerationRequest, OnStep
from services.actor.episodes.episode import Episode
from services.actor.metrics import ActorMetrics
from services.actor.vllm_engine import VllmEngine, start_engine
from services.actor.weight_sync.client import StagedWeights, WeightLoading, WeightUpdateClient
from services.trainer.checkpoint.checkpointer import PolicyExport
from services.trainer.learn.batch import token_row
from services.trainer.learn.model import wrap_model
from services.trainer.learn.step import Learner
from services.trainer.weight_sync.sender import WeightSender

TOLERANCE = 1e-4
"""Nats, float32."""
PROMPT = list(range(5, 45))
SOME, MOST = 20, 900
"""Tokens of a sample: at least so many under each policy, and at most so many in all."""
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.08,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    # One plain layer among the others; experts of 80 are padded to 96 on CPU.
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 80, "mlp_only_layers": [1]},
}


def random_model(kind: str, tied: bool) -> PreTrainedModel:
    torch.manual_seed(1)
    config = CONFIG_MAPPING[kind](**SIZES, **EXPERTS.get(kind, {}), tie_word_embeddings=tied)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@torch.no_grad()
def change_strongly(model: PreTrainedModel, seed: int) -> None:
    """Another policy: of the order of the weights themselves, so that a part left stale cannot pass.

    Matrices are halved before, so that neither they nor the rounding of their products grow from change to change.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.mul_(0.5 if parameter.dim() > 1 else 1.0).add_(torch.randn(parameter.shape, generator=generator) * 0.06)


@torch.no_grad()
def reference(
    model: PreTrainedModel, tokens: Sequence[int], cache: DynamicCache | None = None, temperature: float = 1.0
) -> list[float]:
    """log π(tokens[i] | cached, tokens[:i]) for i >= 1."""
    logits = model(torch.tensor([list(tokens)]), past_key_values=cache).logits[0] / temperature
    logprobs = torch.log_softmax(logits, -1)
    return [logprobs[i, token].item() for i, token in enumerate(tokens[1:])]


@torch.no_grad()
def trainer_logprobs(model: PreTrainedModel, tokens: Sequence[int], temperature: float) -> list[float]:
    """log π(tokens[i] | tokens[:i]) for i >= 1, as the trainer computes it of a packed row."""
    policy, row = wrap_model(random_model_like(model)), token_row(np.array(tokens), np.array([len(tokens)]))
    predictors = torch.arange(len(tokens) - 1)
    return policy.scores(row, predictors, row.input_ids[0, 1:], temperature).logprobs.tolist()


@torch.no_grad()
def stale_cache(model: PreTrainedModel, tokens: Sequence[int]) -> DynamicCache:
    cache = DynamicCache()
    model(torch.tensor([list(tokens)]), past_key_values=cache, use_cache=True)
    return cache


def largest_difference(left: Sequence[float], right: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


@dataclass
class Sampled:
    tokens: list[int]
    logprobs: list[float]
    spans: list[tuple[str, int, int]]


class Running:
    """A trainer (this process) and an actor (vLLM's processes) with one transfer group between them."""

    def __init__(self, engine: VllmEngine, model: PreTrainedModel, backend: Backend, placement: Placement) -> None:
        self.engine, self.llm, self.model, self.store = engine, engine.llm, model, GroupStore("127.0.0.1")
        self.backend, self.placement = backend, placement
        self.sender = WeightSender(describe(model.named_parameters(), chunk_bytes=2**18), placement=placement)
        self.sent: Callable[[], Iterator[tuple[str, torch.Tensor]]] = lambda: self.model.named_parameters()
        self.loading: list[WeightLoading] = []
        self.client = self.new_client()
        self.group: WeightGroup | None = None
        self.epoch = 0
        self.numbers = itertools.count()

    def new_client(self, **options: Any) -> WeightUpdateClient:
        client = WeightUpdateClient(self.llm, bind_host="127.0.0.1", **options)
        self.engine.weights, client.before_swap = client, self.engine._overtake
        return client

    async def label(self, version: PolicyVersion) -> None:
        await self.llm.update_weight_version(str(version))

    async def connect(self) -> None:
        self.loading.append(await self.client.prepare(self.sender.manifest))
        self.epoch += 1
        if self.group is not None:
            self.group.close()
        spec = GroupSpec(self.store.own_address, f"epoch-{self.epoch}", 0, 2, self.backend, "127.0.0.1")
        self.group, _ = await asyncio.gather(
            asyncio.to_thread(WeightGroup.connect, spec, 120, None, self.placement),
            self.client.join_group(replace(spec, rank=1), 120),
        )

    async def transfer(self, version: PolicyVersion) -> tuple[TransferResult, StagedWeights]:
        snapshot = self.sender.snapshot(version, self.sent())
        broadcast = self.sender.broadcast(snapshot, self.group, 120)
        sent, staged = await asyncio.gather(asyncio.wrap_future(broadcast), self.client.receive(version, 120))
        assert (staged.checksum, staged.num_bytes) == (sent.checksum, sent.num_bytes)
        return sent, staged

    async def update(self, version: PolicyVersion) -> float:
        await self.transfer(version)
        return await self.client.commit(version)

    async def sample(self, num_tokens: int, begun: Any = None, switched: Any = None, temperature: float = 1.0) -> Sampled:
        """Sets `begun` once it has some tokens, and ends early with some more than it had when `switched` was set."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        told = {"logprobs": 0, "detokenize": False, "output_kind": RequestOutputKind.CUMULATIVE}
        sampling = SamplingParams(max_tokens=num_tokens, temperature=temperature, ignore_eos=True, **told)
        request_id, enough = f"sample-{next(self.numbers)}", num_tokens
        prompt = {"prompt_token_ids": PROMPT, "cache_salt": request_id}  # no other sample's cached blocks
        async for output in self.llm.generate(prompt, sampling, request_id):
            completion = output.outputs[0]
            if begun is not None and len(completion.token_ids) >= SOME:
                begun.set()
            if switched is not None and switched.is_set() and enough == num_tokens:
                enough = len(completion.token_ids) + SOME
            if enough <= len(completion.token_ids) < num_tokens and not output.finished:
                await self.llm.abort(request_id)  # the last output, which has the versions, follows
        logprobs = [entry[t].logprob for t, entry in zip(completion.token_ids, completion.logprobs, strict=True)]
        spans = [(span.version, span.start, span.end) for span in completion.weight_versions]
        return Sampled(list(completion.token_ids), logprobs, spans)

    async def score(self, tokens: Sequence[int]) -> list[float]:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        async for output in self.llm.generate({"prompt_token_ids": list(tokens)}, sampling, f"score-{torch.rand(1)}"):
            scored = output.prompt_logprobs
        return [entry[token].logprob for token, entry in zip(tokens[1:], scored[1:], strict=True)]

    async def assert_serves(self, model: PreTrainedModel) -> None:
        tokens = torch.randint(0, 256, (120,), generator=torch.Generator().manual_seed(3)).tolist()
        assert largest_difference(await self.score(tokens), reference(model, tokens)) <= TOLERANCE


def saved_model(kind: str, tied: bool, folder: Path) -> PreTrainedModel:
    """Return a random model. What `folder` has of it is a checkpoint as a trainer writes it."""
    model = random_model(kind, tied)
    export = PolicyExport(model, character_tokenizer(64), torch.float32)
    export.stage(Learner(wrap_model(copy.deepcopy(model)), AlgorithmConfig(), TrainerConfig()))
    folder.mkdir(exist_ok=True)
    export.write(folder, {})
    return model


def engine_recipe(folder: Path, max_context: int = 1024, model: Any = None, lora: Any = None, **engine: Any) -> Recipe:
    """`model`: further fields of `model`; `lora`: `trainer.lora`; `engine`: fields of `actor.engine`."""
    content: dict[str, Any] = {
        "name": "tiny",
        "model": {"source": "path", "name": str(folder), "max_context": max_context, **(model or {})},
        "task": {"name": "chain_sum"},
        "sampling": {"group_size": 4, "max_tokens": 96},
        "trainer": {"batch_size": 4, "lora": lora},
        "actor": {"sequences_in_progress": 16, "engine": {"kv_cache_gib": 0.1} | engine},
    }
    return Recipe.model_validate(content)


@asynccontextmanager
async def running(
    kind: str,
    tied: bool,
    folder: Path,
    *,
    backend: Backend = "gloo",
    placement: Placement = HOST,
    on_step: OnStep | None = None,
    **engine: Any,
) -> AsyncIterator[Running]:
    model = saved_model(kind, tied, folder)
    async with start_engine(engine_recipe(folder, **engine), str(folder), on_step=on_step) as started:
        run = Running(started, model, backend, placement)
        try:
            yield run
        finally:
            await run.client.close()
            if run.group is not None:
                run.group.close()


async def check_refusals(run: Running, tied: bool) -> None:
    """Before a byte moves: a manifest that the model cannot take is refused with a reason, decoding goes on."""
    listed = [(p.name, p.shape, p.dtype) for p in run.sender.manifest.parameters]
    without_k = [item for item in listed if "layers.2.self_attn.k_proj" not in item[0]]
    wider = [(name, (257, 128) if name == "model.embed_tokens.weight" else shape, d) for name, shape, d in listed]
    unknown = [*listed, ("model.layers.9.mlp.up_proj.weight", (256, 128), "float32")]
    wrong = [without_k, wider, unknown, listed[:-2]]
    if tied:
        wrong.append([*listed, ("lm_head.weight", (256, 128), "float32")])
    for parameters in wrong:
        with pytest.raises(ManifestMismatch):
            await run.client.prepare(build_manifest(parameters))


async def check_switch(
    run: Running, old: PolicyVersion, new: PolicyVersion, *, recompute: bool, temperature: float = 1.0
) -> None:
    """Tokens before the switch are the old model's, tokens after it the new one's, and vLLM says where it was. What needs no
    stale KV cache is what the trainer computes."""
    before = random_model_like(run.model)
    begun, switched = asyncio.Event(), asyncio.Event()
    sampling = asyncio.create_task(run.sample(MOST, begun, switched, temperature))
    await begun.wait()
    change_strongly(run.model, seed=new.number)
    await run.transfer(new)
    if sampling.done():  # before this process went on, on a busy machine: another one sees the switch
        begun.clear()
        sampling = asyncio.create_task(run.sample(MOST, begun, switched, temperature))
        await begun.wait()
    await run.client.commit(new)
    switched.set()
    sampled = await sampling

    assert [version for version, _, _ in sampled.spans] == [str(old), str(new)]
    (_, start, switch), (_, again, end) = sampled.spans
    assert (start, again, end) == (0, switch, len(sampled.tokens))
    assert SOME <= switch < MOST
    tokens, at = PROMPT + sampled.tokens, len(PROMPT) + switch
    expected_old = trainer_logprobs(before, tokens[:at], temperature)[len(PROMPT) - 1 :]
    if recompute:
        expected_new = trainer_logprobs(run.model, tokens, temperature)[at - 1 :]
    else:  # the last old token has been sampled but not yet been fed
        expected_new = reference(run.model, tokens[at - 1 :], stale_cache(before, tokens[: at - 1]), temperature)
    assert largest_difference(sampled.logprobs[:switch], expected_old) <= TOLERANCE
    assert largest_difference(sampled.logprobs[switch:], expected_new) <= TOLERANCE
    wrong = reference(before, tokens, temperature=temperature)[at - 1 :]
    assert largest_difference(sampled.logprobs[switch:], wrong) > 0.1  # the two policies can be told apart
    await run.assert_serves(run.model)


async def check_prefix_cache(run: Running, new: PolicyVersion, *, recompute: bool) -> None:
    """Requests of one salt share the cached blocks of their prompt, also after a switch; those of another one read none of
    them, nor does scoring. A switch that recomputes leaves nothing to read."""
    before, prompt = random_model_like(run.model), [*PROMPT, *PROMPT[:25]]  # two blocks of 32 tokens, and one token
    name = f"shared {new}"
    await sampled_with_salt(run, prompt, name)
    change_strongly(run.model, seed=new.number)
    await run.update(new)
    for salt, shares in ((name, not recompute), (f"another {new}", False)):
        tokens, logprobs = await sampled_with_salt(run, prompt, salt)
        stale = reference(run.model, prompt[64:] + tokens, stale_cache(before, prompt[:64]))
        fresh = reference(run.model, prompt + tokens)[64:]
        assert largest_difference(stale, fresh) > 0.05
        assert largest_difference(logprobs, stale if shares else fresh) <= TOLERANCE
    tokens = np.array(prompt, np.int32)
    assert largest_difference((await run.engine.score(tokens)).tolist(), reference(run.model, prompt)) <= TOLERANCE


async def check_waiting(run: Running, new: PolicyVersion) -> None:
    """A request that waits in vLLM while weights are swapped reads nothing that older ones have cached, and takes the salt of
    after; one that has begun goes on."""
    prompt, salts = [*PROMPT, *PROMPT[:25]], [f"before {new}", f"after {new}"]
    await sampled_with_salt(run, prompt, salts[0])
    change_strongly(run.model, seed=new.number)
    await run.transfer(new)
    has_begun, enough = asyncio.Event(), asyncio.Event()
    begun = asyncio.create_task(run.sample(MOST, has_begun, enough))
    await has_begun.wait()
    await run.llm.pause_generation(mode="keep", clear_cache=False)
    asked: list[str] = []
    request = GenerationRequest(
        f"waits {new}", np.array(prompt, np.int32), SamplingParams(max_tokens=8),
        cache_salt=lambda: asked.append(salts[len(asked)]) or asked[-1],  # type: ignore[func-returns-value]
    )  # fmt: skip
    waiting = asyncio.create_task(run.engine.generate(request))
    while request.request_id not in run.engine.progress():
        await asyncio.sleep(0)
    await run.client.commit(new)
    made = await waiting
    enough.set()
    tokens = made.completion_token_ids.tolist()
    assert largest_difference(made.behaviour_logprobs.tolist(), reference(run.model, prompt + tokens)[64:]) <= TOLERANCE
    assert (asked, {span.version for span in made.spans}) == (salts, {new.number})
    assert len((await begun).tokens) >= 2 * SOME


async def check_episode(run: Running, versions: Sequence[PolicyVersion]) -> None:
    """Turns of an episode, with switches between and within them that recompute the cache: what the actor records is token by
    token the trainer's forward of the version that sampled it."""
    temperature, models = 0.8, dict[int, PreTrainedModel]()

    async def sample(context: TokenIds, _: Completion, sampling: SamplingParams, call: int) -> Completion:
        request = GenerationRequest(f"turn {call}", context, sampling, seed=call + 1, cache_salt=lambda: "an episode")
        return await run.engine.generate(request)

    sampling = SamplingParams(temperature, max_tokens=70)
    limits: dict[str, Any] = {"max_turns": len(versions), "max_context": 1024, "turn_timeout_s": 60.0}
    metrics, decode = ActorMetrics(CollectorRegistry()), run.engine.decode
    episode = Episode(sampling, sample, metrics, decode, **limits)
    context = np.array(PROMPT, np.int32)
    for number, version in enumerate(versions):
        change_strongly(run.model, seed=version.number)
        models[version.number] = random_model_like(run.model)
        await run.transfer(version)
        is_between = number in (0, 2)  # turns; the other switches are within a turn, unless it is short
        if is_between:
            await run.client.commit(version)
        asked = asyncio.create_task(episode.turn(context))
        while not asked.done() and not any(size >= 5 for size in run.engine.progress().values()):
            await asyncio.sleep(0)
        if not is_between:
            await run.client.commit(version)
        context = np.concatenate([(await asked).token_ids, np.arange(30, 37, dtype=np.int32)])
    (branch,) = episode.result()
    sampled_by = [{span.version for span in branch.spans if turn.start <= span.start < turn.end} for turn in branch.turns]
    assert len(sampled_by) == len(versions)
    assert max(map(len, sampled_by)) == 2, "no switch within a turn"
    tokens, recorded = [*branch.prompt_token_ids, *branch.completion_token_ids], branch.behaviour_logprobs
    expected = {v: trainer_logprobs(model, tokens, temperature)[len(PROMPT) - 1 :] for v, model in models.items()}
    for span in branch.spans:
        mine, recorded = np.split(recorded, [span.end - span.start])
        assert largest_difference(mine.tolist(), expected[span.version][span.start : span.end]) <= TOLERANCE
    assert not len(recorded)


async def sampled_with_salt(run: Running, prompt: list[int], salt: str) -> tuple[list[int], list[float]]:
    """The same each time, so that a rare token does not decide whether two policies can be told apart."""
    name, tokens = f"{salt}-{time.monotonic_ns()}", np.array(prompt, np.int32)
    request = GenerationRequest(name, tokens, SamplingParams(max_tokens=8), seed=1, cache_salt=lambda: salt)
    made = await run.engine.generate(request)
    return made.completion_token_ids.tolist(), made.behaviour_logprobs.tolist()


def random_model_like(model: PreTrainedModel) -> PreTrainedModel:
    like = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=torch.float32).eval()
    like.load_state_dict(model.state_dict())
    return like


async def check_uncommitted(run: Running, serving: PolicyVersion, staged: PolicyVersion) -> None:
    before = random_model_like(run.model)
    change_strongly(run.model, seed=100)
    await run.transfer(staged)
    await run.assert_serves(before)
    with pytest.raises(TransferError):
        await run.client.commit(PolicyVersion(staged.incarnation, staged.number + 1))
    await run.client.discard()
    with pytest.raises(TransferError):
        await run.client.commit(staged)
    await run.assert_serves(before)
    assert (await run.sample(5)).spans == [(str(serving), 0, 5)]


async def check_abandoned_transfer(run: Running, version: PolicyVersion) -> None:
    """A trainer that leaves, and one that falls silent: the receive ends, decoding goes on, the next epoch works."""
    receiving = asyncio.create_task(run.client.receive(version, 120))
    run.group.close()
    with pytest.raises(TransferError):
        await receiving
    assert len((await run.sample(5)).tokens) == 5

    await run.connect()
    receiving = asyncio.create_task(run.client.receive(version, 120))
    await asyncio.sleep(0)  # the order is on its way
    receiving.cancel()
    async with asyncio.timeout(70):  # a worker notices a stalled transfer after 10 s
        await run.client.discard()
    await run.connect()


async def replaced(run: Running, **options: Any) -> None:
    await run.client.close()
    run.client = run.new_client(**options)
    await run.connect()
