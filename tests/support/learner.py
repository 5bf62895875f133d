"""Tiny models, sequences and gradients for tests of the learner."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from pipelinerl.messages.sequences import Branch, Sequence, Turn, VersionSpan
from pipelinerl.recipe.fields import AlgorithmConfig, TrainerConfig
from services.trainer.learn.batch import MicroBatch, TrainingGroup, sequence_weights, token_row
from services.trainer.learn.loss import compute_loss
from services.trainer.learn.meter import LAG_0_TOKENS, SAMPLED_WEIGHTS
from services.trainer.learn.optimizer import PolicyOptimizer
from services.trainer.learn.policy import Policy, TokenScores
from services.trainer.learn.step import Learner

VOCABULARY = 23
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FAMILIES = ("llama-tied", "llama-untied", "qwen2-tied", "qwen2-untied")
LOSSES = get_args(AlgorithmConfig.model_fields["loss"].annotation)
LENGTHS = [(2, 9), (5, 3), (1, 1), (4, 17), (3, 2), (6, 8)]
"""(prompt, completion) tokens."""


def model_of(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """`family`: a type of models, `-tied` or `-untied` if its embeddings are not as usual."""
    model_type, _, head = family.partition("-")
    shape = {name: size for name, size in SHAPE.items() if (family, name) != ("gpt2", "num_key_value_heads")}  # it has none
    return build(model_type, seed, **shape | ({"tie_word_embeddings": head == "tied"} if head else {}) | changes)


def build(model_type: str, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """A random model whose weights are large enough for its outputs to differ by position and token."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**fields))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return model


def sequences_of(lengths: list[tuple[int, int]], seed: int = 0) -> list[Sequence]:
    generator = np.random.default_rng(seed)
    return [
        Sequence(
            run="r",
            sequence_id=f"g.{index}",
            group_id="g",
            sample_index=index,
            group_size=len(lengths),
            task="t",
            prompt_token_ids=generator.integers(0, VOCABULARY, prompt).astype(np.int32),
            completion_token_ids=generator.integers(0, VOCABULARY, completion).astype(np.int32),
            behaviour_logprobs=(-2.0 + generator.normal(0, 0.3, completion)).astype(np.float32),
            spans=(VersionSpan(0, 0, completion),),
            reward=float(index % 2),
        )
        for index, (prompt, completion) in enumerate(lengths)
    ]


Parts = tuple[int, ...]
"""Tokens of turn, observation, turn, …, turn."""
EPISODES: list[list[tuple[int, Parts]]] = [
    [(3, (4, 2, 3))],
    [(5, (6,))],
    [(2, (1, 3, 2, 1, 5)), (9, (2,)), (2, (3, 4, 1))],
    [(4, (2, 8, 1)), (4, (7,))],
]
"""Of each episode its branches: (prompt tokens, parts). 7 + 6 + 14 + 10 = 37 tokens are sampled, 2 + 8 + 8 = 18 observed."""


def episodes_of(shapes: list[list[tuple[int, Parts]]], seed: int = 0) -> list[Sequence]:
    """The second branch of an episode with the prompt of the first has the same tokens there. Each turn is one span."""
    whole = iter(sequences_of([(prompt, sum(parts)) for shape in shapes for prompt, parts in shape], seed))
    episodes = []
    for index, shape in enumerate(shapes):
        branches = [_branch(next(whole), parts) for _, parts in shape]
        first = branches[0]
        further = tuple(
            replace(one, prompt_token_ids=first["prompt_token_ids"])
            if len(one.prompt_token_ids) == len(first["prompt_token_ids"])
            else one
            for one in (Branch(**branch) for branch in branches[1:])
        )
        like = sequences_of([(1, 1)])[0]
        named = {"sequence_id": f"g.{index}", "sample_index": index, "group_size": len(shapes), "reward": float(index % 2)}
        episodes.append(replace(like, **first, **named, branches=further))
    return episodes


def _branch(one: Sequence, parts: Parts) -> dict[str, Any]:
    ends = np.cumsum(parts).tolist()
    turns = tuple(Turn(end - part, end) for end, part in zip(ends[::2], parts[::2], strict=True))
    sampled = np.concatenate([np.arange(turn.start, turn.end) for turn in turns])
    return {
        "prompt_token_ids": one.prompt_token_ids,
        "completion_token_ids": one.completion_token_ids,
        "behaviour_logprobs": one.behaviour_logprobs[sampled],
        "spans": tuple(VersionSpan(one.spans[0].version, turn.start, turn.end) for turn in turns),
        "turns": turns,
    }


def group_of(sequences: list[Sequence], seed: int = 0) -> TrainingGroup:
    return TrainingGroup(tuple(sequences), np.random.default_rng(seed).normal(size=len(sequences)))


def micro_batch(
    behaviour_logprobs: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor, lengths: list[int]
) -> MicroBatch:
    nowhere = torch.zeros(len(advantages), dtype=torch.long)
    return MicroBatch(
        row=token_row(np.zeros(1, np.int64), np.ones(1, np.int64)),
        predictors=nowhere,
        targets=nowhere,
        behaviour_logprobs=behaviour_logprobs,
        advantages=advantages,
        weights=weights,
        branch_index=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.long)),
        num_branches=len(lengths),
    )


def plain_logprobs(model: PreTrainedModel, sequence: Branch, temperature: float = 1.0) -> torch.Tensor:
    """log π of the sampled tokens, one branch alone, without this project's code."""
    ids = torch.from_numpy(np.concatenate((sequence.prompt_token_ids, sequence.completion_token_ids))).long()[None]
    model.set_attn_implementation("eager")
    logits = model(input_ids=ids, use_cache=False).logits[0, len(sequence.prompt_token_ids) - 1 : -1] / temperature
    logprobs = torch.log_softmax(logits, -1).gather(1, ids[0, len(sequence.prompt_token_ids) :, None])[:, 0]
    return logprobs[[place for turn in sequence.turns for place in range(turn.start, turn.end)] or slice(None)]


def plain_gradients(
    model: PreTrainedModel, group: TrainingGroup, config: AlgorithmConfig, temperature: float = 1.0
) -> dict[str, torch.Tensor]:
    """Gradients of the loss, branch by branch, without packing."""
    lengths = [sum(len(branch.behaviour_logprobs) for branch in one.all_branches) for one in group.sequences]
    weights = sequence_weights(np.array(lengths), config.normalization)
    model.zero_grad()
    for sequence, advantage, weight in zip(group.sequences, group.advantages, weights, strict=True):
        for branch in sequence.all_branches:
            mu, logprobs = torch.from_numpy(branch.behaviour_logprobs), plain_logprobs(model, branch, temperature)
            advantages, factors = torch.full_like(mu, float(advantage)), torch.full_like(mu, float(weight))
            batch = micro_batch(mu, advantages, factors, [len(mu)])
            compute_loss(batch, TokenScores(logprobs, torch.zeros_like(mu)), config).loss.backward()
    return gradients_of(model)


def gradients_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


class GradientsKept(PolicyOptimizer):
    """Steps nothing, so that a test can read what a step would have used."""

    def step(self, loss: float, total_weight: float) -> dict[str, Any]:
        return {"learning_rate": 0.0, "grad_norm": 0.0, "clipped": False, "skipped": ""}


def packed_gradients(
    policy: Policy, group: TrainingGroup, config: AlgorithmConfig, budget: int = 128, pad_multiple: int = 1, **options: Any
) -> dict[str, torch.Tensor]:
    trainer = TrainerConfig(tokens_per_microbatch=budget)
    learner = Learner(policy, config, trainer, **options)
    learner.optimizer = GradientsKept(policy.model.parameters(), trainer)
    policy.model.zero_grad()
    with patch.object(Policy, "row_multiple", pad_multiple):
        learner.step(learner.prepare([group], version=0))
    return gradients_of(policy.model)


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert max(float(gradient.abs().max()) for gradient in left.values()) > 1e-3, "nothing to compare"
    for name, gradient in left.items():
        torch.testing.assert_close(right[name], gradient, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def told_anywhere(figures: Mapping[str, Any]) -> dict[str, Any]:
    """A step's figures that are the same on any machine, as JSON has them."""
    others = {SAMPLED_WEIGHTS, LAG_0_TOKENS, "memory_peak_gib", "compute_s", "tokens_per_s", "mfu"}
    return {name: figure for name, figure in figures.items() if name not in others}


def near_policy(model: PreTrainedModel, lengths: list[tuple[int, int]]) -> TrainingGroup:
    """μ about the policy, half of the sequences by a little: whatever a loss cuts or masks, it cuts and masks some."""
    generator = np.random.default_rng(5)
    sequences = []
    for index, sequence in enumerate(sequences_of(lengths)):
        with torch.no_grad():
            logprobs = plain_logprobs(model, sequence).numpy()
        noise = generator.normal(0, 0.5 if index % 2 else 1e-4, len(logprobs))
        sequences.append(replace(sequence, behaviour_logprobs=(logprobs + noise).astype(np.float32)))
    return group_of(sequences)


def fast_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False)


def letters_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate("abc")}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    return fast_tokenizer(tokenizer)
