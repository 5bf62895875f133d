"""A trainer of several ranks computes what one rank computes: losses, gradients, weights, metrics, scores."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pipelinerl.config.recipe import Recipe
from pipelinerl.config.settings import RankSettings
from services.trainer.learn.optimizer import OptimizerReport
from services.trainer.learn.step import Learner
from services.trainer.learn.weights import whole
from services.trainer.loading import load_learner, sharded_learner
from services.trainer.ranks.follower import follow
from services.trainer.ranks.lead import Lead
from services.trainer.ranks.world import join_ranks, leave_ranks
from tests.unit.builders import make_recipe
from tests.unit.ranks import on_ranks
from tests.unit.test_learner import group_of, model_of, sequences_of

UNEVEN = [(2, 9), (5, 3), (1, 1), (4, 47), (3, 2), (6, 8), (2, 20), (1, 5)]
SHORT = [(3, 12), (2, 5), (4, 3)]
"""Fewer sequences than four ranks."""


@dataclass(frozen=True)
class Job:
    """Two optimizer steps of a model in `folder`."""

    folder: str
    trainer: dict[str, Any] = field(default_factory=dict)
    algorithm: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[tuple[int, int], ...] = tuple(UNEVEN)
    model: dict[str, Any] = field(default_factory=dict)

    def recipe(self) -> Recipe:
        # AdamW divides by the size of the gradient: with its usual epsilon it makes steps of rounding errors of tiny ones.
        usual = {"learning_rate": 1e-2, "tokens_per_microbatch": 64, "max_grad_norm": 0.5, "epsilon": 1e-3}
        trainer = usual | self.trainer
        model = {"source": "path", "name": self.folder, "max_context": 64} | self.model
        return make_recipe(model=model, trainer=trainer, algorithm=self.algorithm)


@dataclass(frozen=True)
class Result:
    """Of rank 0."""

    outcomes: list[dict[str, Any]]
    gradients: list[dict[str, np.ndarray]]
    """Before clipping, of each step."""
    weights: dict[str, np.ndarray]
    scores: np.ndarray
    microbatches: list[int]


def train(learner: Learner, job: Job) -> Result | None:
    """None on ranks that follow."""
    gradients = keep_gradients(learner)
    if not learner.world.is_first:
        follow(learner)
        return None
    lead, outcomes, microbatches = Lead(learner), [], []
    for version in range(2):
        group = group_of(sequences_of(list(job.lengths), seed=version), seed=version)
        prepared = lead.prepare([group], version)
        microbatches.append(len(prepared.shares[0].batches))
        outcomes.append(lead.train_step(prepared).metrics)
        lead.beat()
    scores = lead.score(np.arange(11) % 23)
    weights = {name: tensor.float().cpu().numpy().copy() for name, tensor in lead.weights()}
    lead.end()
    return Result(outcomes, gradients, weights, scores, microbatches)


def keep_gradients(learner: Learner) -> list[dict[str, np.ndarray]]:
    """Where each step of the learner's optimizer will leave the gradients that it is given."""
    kept: list[dict[str, np.ndarray]] = []
    step = learner.optimizer.step

    def keeping(loss: float) -> OptimizerReport:
        named = learner.policy.model.named_parameters()
        kept.append(
            {name: whole(weight.grad).cpu().numpy().copy() for name, weight in named if weight.grad is not None}
        )
        return step(loss)

    learner.optimizer.step = keeping  # type: ignore[method-assign]
    return kept


def train_all(jobs: dict[str, Job]) -> dict[str, Result | None]:
    """On every rank of several."""
    join_ranks(torch.device("cpu"))
    results = {
        name: train(sharded_learner(job.recipe(), job.folder, torch.device("cpu")), job) for name, job in jobs.items()
    }
    leave_ranks()
    return results


def same(one: Result, many: Result, atol: float = 1e-5) -> None:
    """`many` is `one` to `atol`, in everything but the number of micro-batches."""
    for left, right in zip([one.weights, *one.gradients], [many.weights, *many.gradients], strict=True):
        assert left.keys() == right.keys()
        for name, values in left.items():
            np.testing.assert_allclose(right[name], values, rtol=1e-5, atol=atol, err_msg=name)
    np.testing.assert_allclose(many.scores, one.scores, atol=10 * atol)
    for left, right in zip(one.outcomes, many.outcomes, strict=True):
        for key in ("loss", "grad_norm", "entropy", "ess", "reference_kl", "policy_loss"):
            assert right[key] == pytest.approx(left[key], rel=1e-4, abs=1e-5), key
        for key in ("sequences", "completion_tokens", "tokens", "lag_histogram", "learning_rate", "skipped"):
            assert right[key] == left[key], key


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama-tied", {}),
    "untied": ("qwen2-untied", {"algorithm": {"normalization": "token"}}),
    "fewer sequences than ranks": ("llama-tied", {"lengths": tuple(SHORT)}),
    "one micro-batch": ("qwen2-untied", {"trainer": {"tokens_per_microbatch": 512}}),
    "sequence normalisation": ("llama-tied", {"algorithm": {"loss": "grpo"}}),
    "entropy and reference": (
        "qwen2-untied",
        {"algorithm": {"kl_coefficient": 0.1, "entropy_coefficient": 0.05}},
    ),
    "ratios of sequences, masked": (
        "llama-tied",
        {
            "algorithm": {"loss": "gspo", "clip_low": 0.9, "clip_high": 9.0, "mask": "icepop", "mask_low": 0.01},
            "trainer": {"context_parallel": 2},
        },
    ),
    "activations recomputed": ("llama-tied", {"trainer": {"gradient_checkpointing": True}}),
    "weights kept": ("llama-tied", {"trainer": {"reshard_after_forward": False}}),
    "rows shared by two": ("llama-tied", {"trainer": {"context_parallel": 2}}),
    "rows shared, recomputed, short": (
        "qwen2-untied",
        {
            "trainer": {"context_parallel": 2, "gradient_checkpointing": True},
            "algorithm": {"loss": "grpo", "kl_coefficient": 0.1},
            "lengths": tuple(SHORT),
        },
    ),
}
ON_FOUR: dict[str, tuple[str, dict[str, Any]]] = {
    "rows shared by four": ("llama-tied", {"trainer": {"context_parallel": 4}}),
    "hybrid": ("qwen2-untied", {"trainer": {"shard_ranks": 2}}),
    "hybrid, rows shared": ("llama-tied", {"trainer": {"shard_ranks": 2, "context_parallel": 2}}),
}
SIZES = {2: CASES, 4: CASES | ON_FOUR}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    folders = {}
    for family in ("llama-tied", "qwen2-untied"):
        folder = tmp_path_factory.mktemp(family)
        model_of(family, max_position_embeddings=64).save_pretrained(folder)
        folders[family] = str(folder)
    return {name: Job(folders[family], **changes) for name, (family, changes) in (CASES | ON_FOUR).items()}


@pytest.fixture(scope="module")
def alone(jobs: dict[str, Job]) -> dict[str, Result]:
    """What one rank gives."""
    results = {}
    for name, job in jobs.items():
        single = replace(job, trainer={**job.trainer, "context_parallel": 1, "shard_ranks": 0})
        results[name] = train(load_learner(single.recipe(), job.folder, RankSettings()), single)
    return results


@pytest.fixture(scope="module")
def together(jobs: dict[str, Job]) -> dict[int, dict[str, Result]]:
    """What 2 and 4 ranks give, by their number."""
    return {size: on_ranks(size, train_all, {name: jobs[name] for name in cases})[0] for size, cases in SIZES.items()}


def moved(job: Job, result: Result) -> float:
    """The largest change of a weight: equal results say nothing where nothing happened."""
    before = load_file(Path(job.folder) / "model.safetensors")
    return max(float((torch.from_numpy(result.weights[name]) - before[name]).abs().max()) for name in before)


@pytest.mark.parametrize(("size", "case"), [(size, case) for size, cases in SIZES.items() for case in cases])
def test_ranks_train_as_one(
    jobs: dict[str, Job], alone: dict[str, Result], together: dict[int, dict[str, Result]], size: int, case: str
) -> None:
    assert moved(jobs[case], alone[case]) > 1e-3
    same(alone[case], together[size][case])
