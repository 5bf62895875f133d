"""Show the tokens of one recorded step as the loss sees them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from pipelinerl.messages.sequences import Branch
from pipelinerl.service.logs import printable
from services.trainer.data.recording import RecordedStep
from services.trainer.learn.batch import host_microbatch
from services.trainer.learn.step import Learner
from services.trainer.policy_trainer import PolicyTrainer

_TEXT_CHARACTERS = 24


def token_table(policy: PolicyTrainer, step: RecordedStep, most: int) -> Iterator[str]:
    """Yield lines for the `most` branches with the largest |log π − log μ| of a token, the largest first. π is the policy
    before the step. A single rank must hold the whole policy."""
    rows = []
    for group in step.groups:
        for sequence, advantage in zip(group.sequences, group.advantages.tolist(), strict=True):
            for branch in sequence.all_branches:
                values = token_values(policy.learner, branch, advantage, step.step - 1)
                rows.append((float(np.abs(values[0]).max(initial=0.0)), sequence, branch, advantage, values))
    rows.sort(key=lambda row: -row[0])
    yield f"step {step.step}: {len(rows)} branches; the {min(most, len(rows))} with the largest |log π − log μ| of a token"
    for _, sequence, branch, advantage, (log_weights, clipped, masked, entropy) in rows[:most]:
        yield ""
        yield f"{sequence.sequence_id}  reward {sequence.reward:g}  advantage {advantage:+.4g}  actor {sequence.actor or '-'}"
        yield f"  {'index':>5} {'π/μ':>9} {'log μ':>9} {'lag':>4} {'entropy':>8}  {'':13} token"
        places = ((span, place) for span in branch.spans for place in range(span.start, span.end))
        for at, (span, place) in enumerate(places):
            text = policy.tokenizer.decode([int(branch.completion_token_ids[place])])
            marks = " ".join(name for name, is_so in (("clipped", clipped[at]), ("masked", masked[at])) if is_so)
            figures = f"{math.exp(log_weights[at]):9.4f} {branch.behaviour_logprobs[at]:9.4f} {step.step - 1 - span.version:4}"
            shown = printable(repr(str(text))[1:-1])[:_TEXT_CHARACTERS]
            yield f"  {place:>5} {figures} {entropy[at]:8.4f}  {marks:13} {shown}"


def token_values(learner: Learner, branch: Branch, advantage: float, version: int) -> NDArray[np.float32]:
    """Return float32[4, C] for the branch's C sampled tokens: log π − log μ, clipped (0 or 1), masked (0 or 1), entropy."""
    host = host_microbatch(
        [branch], np.array([advantage]), np.ones(1), version, learner.policy.row_multiple, has_gradient=False
    )
    with torch.no_grad():
        values, _ = learner.microbatch(host.on(learner.policy.device))
    return np.asarray(values[:4].cpu())
