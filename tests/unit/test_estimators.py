"""What each estimator estimates: its expectation over all that a policy can say, against exact gradients.

The policy is a tiny model that says three tokens out of two, so that its eight completions and all groups of them are
enumerated. Estimates are the packed learner's; exact gradients are those of transformers' own log-probabilities. All of it at
a temperature.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations_with_replacement, product
from math import factorial, prod, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipelinerl.messages.sequences import Branch, Sequence, Turn, VersionSpan
from pipelinerl.recipe.fields import AlgorithmConfig
from pipelinerl.rl.groups import group_advantages
from services.trainer.learn.batch import TrainingGroup
from services.trainer.learn.model import wrap_model
from services.trainer.learn.policy import Policy, add_value_head
from tests.support.learner import gradients_of, model_of, packed_gradients, plain_logprobs, sequences_of

TEMPERATURE = 0.7
REWARDS = np.array([0.0, 1.0, -0.5, 2.0, 0.25, 0.0, 1.5, 0.75])
RIGHT = np.array([0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0])
UNBOUNDED = 1e6
"""The clamp c, instead of infinity."""

Gradients = dict[str, Tensor]


def policy_of(seed: int) -> Policy:
    return wrap_model(model_of("llama-untied", seed, vocab_size=2))


def completions(num_tokens: int) -> list[Sequence]:
    one = replace(sequences_of([(3, num_tokens)])[0], prompt_token_ids=np.array([0, 1, 1], np.int32))
    return [
        replace(one, sequence_id=f"g.{index}", completion_token_ids=np.array(tokens, np.int32))
        for index, tokens in enumerate(product((0, 1), repeat=num_tokens))
    ]


Form = Callable[[Sequence], Sequence]


def answered(sequence: Sequence) -> Sequence:
    """After the first token an environment adds two, which depend on it."""
    first, *rest = sequence.completion_token_ids.tolist()
    tokens = np.array([first, 1 - first, 0, *rest], np.int32)
    spans = (VersionSpan(0, 0, 1), VersionSpan(0, 3, len(tokens)))
    return replace(sequence, completion_token_ids=tokens, spans=spans, turns=(Turn(0, 1), Turn(3, len(tokens))))


def branched(sequence: Sequence) -> Sequence:
    """The tokens after the first one follow another prompt, which depends on it."""
    first, *rest = sequence.completion_token_ids.tolist()
    branch = Branch(
        prompt_token_ids=np.array([1 - first, 0, 0], np.int32),
        completion_token_ids=np.array(rest, np.int32),
        behaviour_logprobs=sequence.behaviour_logprobs[1:],
        spans=(VersionSpan(0, 0, len(rest)),),
    )
    return replace(
        sequence,
        completion_token_ids=np.array([first], np.int32),
        behaviour_logprobs=sequence.behaviour_logprobs[:1],
        spans=(VersionSpan(0, 0, 1),),
        branches=(branch,),
    )


def logprobs_of(policy: Policy, num_tokens: int = 3, form: Form = replace) -> Tensor:
    """float32[completions, tokens] of the policy, with its gradient."""
    policy.model.zero_grad()
    logprobs = [
        torch.cat([plain_logprobs(policy.model, branch, TEMPERATURE) for branch in form(sequence).all_branches])
        for sequence in completions(num_tokens)
    ]
    policy.model.set_attn_implementation(policy.attention)
    return torch.stack(logprobs)


def gradient_of(policy: Policy, objective: Tensor) -> Gradients:
    objective.backward()
    return gradients_of(policy.model)


def true_gradient(policy: Policy, rewards: np.ndarray, num_tokens: int = 3, form: Form = replace) -> Gradients:
    """∇J, J = Σ_y π(y) R(y)."""
    return gradient_of(policy, (logprobs_of(policy, num_tokens, form).sum(1).exp() * torch.tensor(rewards)).sum())


def sampled_by(behaviour: Tensor) -> list[Sequence]:
    rows = behaviour.detach().numpy()
    return [replace(one, behaviour_logprobs=row) for one, row in zip(completions(rows.shape[1]), rows, strict=True)]


def expected_estimate(
    policy: Policy, behaviour: Tensor, rewards: np.ndarray, n: int, form: Form = replace, **algorithm: Any
) -> Gradients:
    """Minus the loss's gradient for groups of n samples of μ, in expectation: over all multisets of completions, each as often
    as it has orders. A group's chance is a factor of its advantages, in which the loss is linear."""
    config, sequences = AlgorithmConfig(**algorithm), list(map(form, sampled_by(behaviour)))
    chances = behaviour.detach().double().sum(1).exp().numpy()
    groups = list(combinations_with_replacement(range(len(sequences)), n))
    members, advantages = [], []
    for group in groups:
        orders = factorial(n) / prod(factorial(group.count(one)) for one in set(group))
        chance = orders * chances[list(group)].prod()
        members += [sequences[index] for index in group]
        of_group = group_advantages(rewards[list(group)], config.advantage, config.normalize_std)
        advantages.append(chance * len(groups) * of_group)
    everything = TrainingGroup(tuple(members), np.concatenate(advantages))
    gradients = packed_gradients(policy, everything, config, 4096, temperature=TEMPERATURE)
    return {name: -gradient for name, gradient in gradients.items()}


def difference(left: Gradients, right: Gradients, factor: float = 1.0) -> float:
    """|left − factor · right| / |right|, L2 over all weights."""
    assert left.keys() == right.keys()
    apart = sum(float((left[name] - factor * right[name]).square().sum()) for name in right)
    return sqrt(apart / sum(float(gradient.square().sum()) for gradient in right.values()))


EXACT, APART = 1e-3, 0.02
"""Relative: of sums in float32, and at least of what is another gradient."""


@pytest.mark.parametrize("n", [2, 3])
def test_leave_one_out_is_unbiased_and_the_group_mean_is_short_by_one_sample(n: int) -> None:
    policy = policy_of(0)
    behaviour, exact = logprobs_of(policy), true_gradient(policy, REWARDS)
    estimate = expected_estimate(policy, behaviour, REWARDS, n, advantage="leave_one_out")
    assert difference(estimate, exact) < EXACT
    # The sample's own reward is part of its baseline: E[∇log π · r / n] is missing.
    estimate = expected_estimate(policy, behaviour, REWARDS, n, advantage="group_mean")
    assert difference(estimate, exact, (n - 1) / n) < EXACT
    assert difference(estimate, exact) > APART


@pytest.mark.parametrize("form", [answered, branched])
def test_it_is_unbiased_over_turns_and_branches_too(form: Form) -> None:
    """J is over what the policy samples; what an environment makes of it has no gradient of its own."""
    policy = policy_of(0)
    behaviour, exact = logprobs_of(policy, form=form), true_gradient(policy, REWARDS, form=form)
    assert difference(expected_estimate(policy, behaviour, REWARDS, 2, form), exact) < EXACT
    assert difference(true_gradient(policy, REWARDS), exact) > APART


@pytest.mark.parametrize("n", [2, 4])
def test_division_by_the_standard_deviation_weighs_prompts_by_their_difficulty(n: int) -> None:
    """With rewards of 0 and 1, of which a share p is 1, E[A given r = 1] − E[A given r = 0] is the factor of ∇J. Of two samples
    only unequal ones tell anything: A = ±1 / √½. Of four, a right one has A = 2 when it is alone, 2 / √3 with another right one
    and 2 / 3 with two, and a wrong one likewise. So the factor is, with q = 1 − p, 2 (p³ + q³) + 2 √3 p q + 2 p q =
    2 − (4 − 2 √3) p q: least for a prompt of which half of the answers are right."""
    policy = policy_of(0)
    behaviour, exact = logprobs_of(policy), true_gradient(policy, RIGHT)
    right = float((behaviour.detach().sum(1).exp() * torch.tensor(RIGHT)).sum())
    factor = sqrt(2) if n == 2 else 2 - (4 - 2 * sqrt(3)) * right * (1 - right)
    estimate = expected_estimate(policy, behaviour, RIGHT, n, normalize_std=True)
    assert difference(estimate, exact, factor) < EXACT


def test_any_learned_baseline_leaves_the_gradient_unbiased() -> None:
    """v is that before the token: one that knew it would not."""
    policy = policy_of(0)
    behaviour, exact = logprobs_of(policy), true_gradient(policy, REWARDS)
    add_value_head(policy)
    nn.init.normal_(policy.value_head.weight, std=1.0, generator=torch.Generator().manual_seed(0))
    config = AlgorithmConfig(advantage="value", value_coefficient=1e-9)  # the value's own loss adds next to nothing
    estimate = {name: torch.zeros_like(gradient) for name, gradient in exact.items()}
    for sequence, reward, chance in zip(sampled_by(behaviour), REWARDS, behaviour.sum(1).exp().tolist(), strict=True):
        alone = TrainingGroup((sequence,), np.array([reward]))
        for name, gradient in packed_gradients(policy, alone, config, temperature=TEMPERATURE).items():
            estimate[name] -= chance * gradient
    assert difference(estimate, exact) < EXACT


def test_unbounded_weights_of_a_lagged_policy_are_exact_for_one_token_and_of_first_order_for_more() -> None:
    """Each token has its own π / μ, and what comes before and after it stays as μ has it: the estimate is the gradient of
    Σ_t Σ_y μ(y) R(y) π(y_t) / μ(y_t), and not of J, whose weights are products over the tokens."""
    policy, lagged = policy_of(0), policy_of(1)
    one_token = expected_estimate(policy, logprobs_of(lagged, 1), REWARDS[:2], 2, clamp=UNBOUNDED)
    assert difference(one_token, true_gradient(policy, REWARDS[:2], 1)) < EXACT

    behaviour, exact = logprobs_of(lagged).detach(), true_gradient(policy, REWARDS)
    estimate = expected_estimate(policy, behaviour, REWARDS, 2, clamp=UNBOUNDED)
    logprobs = logprobs_of(policy)
    one_step_of_pi = (behaviour.sum(1, keepdim=True) - behaviour + logprobs).exp().sum(1)
    assert difference(estimate, gradient_of(policy, (one_step_of_pi * torch.tensor(REWARDS)).sum())) < EXACT
    assert difference(estimate, exact) > APART


def test_truncated_weights_take_from_the_tokens_that_became_likelier() -> None:
    """With min(c, w) the baseline counts too: the estimate is that of R − E[R], whose weights are cut."""
    policy, lagged = policy_of(0), policy_of(1)
    behaviour, clamp = logprobs_of(lagged).detach(), 1.02
    estimate = expected_estimate(policy, behaviour, REWARDS, 2, clamp=clamp)
    logprobs, chances = logprobs_of(policy), behaviour.sum(1).exp()
    weights = (logprobs.detach() - behaviour).exp()
    centred = torch.tensor(REWARDS) - (chances * torch.tensor(REWARDS)).sum()
    cut = (chances * centred * (weights.clamp(max=clamp) * logprobs).sum(1)).sum()
    assert difference(estimate, gradient_of(policy, cut)) < EXACT
    unbounded = expected_estimate(policy, behaviour, REWARDS, 2, clamp=UNBOUNDED)
    assert difference(unbounded, estimate) > APART
